// What every part of a pass works with: its rows, its threads, and the stages they hand to each other.
#pragma once
#include "attention.h"
#include "drafter.h"

namespace SLIP_ISA {

struct Share { int from, to; };  // a thread's part of n items

static inline Share share(int n, int thread, int threads) {
    return {(int)((int64_t)n * thread / threads), (int)((int64_t)n * (thread + 1) / threads)};
}

class PassBase {
protected:
    PassBase(Model& m, Cache& c, int rows, bool coarse)
        : m_(m), c_(c), rows_(rows), base_(c.length), threads_(m.pool.size()), shared_(threads_ > 1 && rows >= SHARE_ROWS), coarse_(coarse) {}

    void meet() { m_.pool.meet(); }
    void product(const Matrix& w, int group, const Rows& in, int r0, int n, F* out) {
        coarse_ ? dot_coarse(w, group, in, r0, n, out) : dot(w, group, in, r0, n, out);
    }
    static bool quantised(const Matrix& m) { return m.info().quantised; }
    float* x(int row) { return m_.scratch.x.data() + (size_t)row * m_.hidden; }
    Share rows_of(int t) { return shared_ ? share(rows_, t, threads_) : Share{0, rows_}; }
    Scratch::PerThread& buffers(int t) { return m_.scratch.threads[shared_ ? 0 : t]; }

    Rows finish(const float* f, Stage& s, const Share& mine, int cols, bool to_blocks) {
        if (to_blocks)
            for (int r = mine.from; r < mine.to; r++)
                quantise(f + (size_t)r * s.stride, cols, s.tiles.data() + (size_t)(r / TILE) * (s.stride / 32), r % TILE, coarse_);
        if (shared_) meet();
        return {f, s.tiles.data(), s.stride};
    }

    Rows normalise(int t, const float* weight, bool to_blocks) {
        Stage& s = buffers(t).hidden;
        const Share mine = rows_of(t);
        for (int r = mine.from; r < mine.to; r++) rms_norm(x(r), weight, m_.eps, m_.hidden, s.f.data() + (size_t)r * s.stride);
        return finish(s.f.data(), s, mine, m_.hidden, to_blocks);
    }

    // Sixteen outputs, and their biases where there are any.
    static F biased(F y, const std::vector<float>& bias, int group) {
        return bias.empty() ? y : f_add(y, f_load(bias.data() + group * 16));
    }

    // w in, this thread's share: take(row, group, sixteen outputs).
    template <class Take> void products(int t, const Matrix& w, const Rows& in, Take take) {
        const Share s = share(w.groups, t, threads_);
        for (int g = s.from; g < s.to; g++)
            for (int r0 = 0; r0 < rows_; r0 += TILE) {
                const int n = rows_ - r0 < TILE ? rows_ - r0 : TILE;
                F acc[TILE];
                product(w, g, in, r0, n, acc);
                for (int r = 0; r < n; r++) take(r0 + r, g, acc[r]);
            }
    }

    void add_product(int t, const Matrix& w, const Rows& in, const std::vector<float>& bias = {}) {  // x += w in + bias
        products(t, w, in, [&](int r, int g, F y) { f_store(x(r) + g * 16, f_add(f_load(x(r) + g * 16), biased(y, bias, g))); });
    }

    Model& m_;
    Cache& c_;
    const int rows_, base_;
    const int threads_;
    const bool shared_;
    const bool coarse_;
};

}  // namespace SLIP_ISA
