// A draft, in two passes over the drafter's layers (drafter.h says what it is for; models/block_drafter.py defines it):
//
//     taps that wait -> norm, fuse, norm -> k v of every layer          once a position, any number at a time
//     anchor, masks -> layers -> candidates -> one guess after another  once a draft; the block sees its text and itself
#pragma once
#include "pass.h"
#include "sample.h"

namespace SLIP_ISA {

class ContextPass : Pass {
public:
    // All that waits.
    static void run(Drafter& d, DraftState& s) {
        for (int from = 0, rows; from < s.pending; from += rows) {
            rows = s.pending - from < MAX_BLOCK ? s.pending - from : MAX_BLOCK;
            ContextPass pass(d, s, from, rows);
            d.pool.run([](void* pass, int thread) { static_cast<ContextPass*>(pass)->work(thread); }, &pass);
            s.cache.advanced(s.cache.length + rows);
        }
        s.pending = 0;
    }

private:
    ContextPass(Drafter& d, DraftState& s, int from, int rows) : Pass(d, s.cache, nullptr, rows, nullptr), d_(d), s_(s), from_(from) {}

    void work(int t) {
        const Share mine = share(rows_, t, threads_);
        const int target_hidden = (int)d_.tap_norm.size() / d_.shape.taps;
        for (int r = mine.from; r < mine.to; r++) {
            float* f = d_.fused.f.data() + (size_t)r * d_.fused.stride;
            for (int at = 0; at < (int)d_.tap_norm.size(); at += target_hidden)
                rms_norm(s_.taps.data() + (size_t)(from_ + r) * s_.width + at, d_.tap_norm.data() + at, m_.eps, target_hidden, f + at);
            quantise(f, (int)d_.tap_norm.size(), d_.fused.tiles.data() + (size_t)(r / TILE) * (d_.fused.stride / 32), r % TILE);
            angles(r);
            memset(x(r), 0, m_.hidden * sizeof(float));
        }
        meet();
        add_product(t, d_.fuse, {d_.fused.f.data(), d_.fused.tiles.data(), d_.fused.stride});
        meet();
        bool to_blocks = false;
        for (const Layer& layer : m_.layers) to_blocks |= quantised(layer.k) || quantised(layer.v);
        const Rows in = normalise(t, d_.context_norm.data(), to_blocks);
        for (size_t i = 0; i < m_.layers.size(); i++) project_heads(t, i, in, true);
    }

    Drafter& d_;
    DraftState& s_;
    const int from_;
};

class BlockPass : Pass {
public:
    BlockPass(Model& target, Drafter& d, DraftState& s, const Draft& to)
        : Pass(d, s.cache, nullptr, d.shape.rows, d.logits.data(), s.first, d.shape.coarse), target_(target), d_(d), to_(to) {}

    void run() {
        m_.scratch.reserve_partials(m_, base_, rows_);
        m_.pool.run([](void* pass, int thread) { static_cast<BlockPass*>(pass)->work(thread); }, this);
    }

private:
    void work(int t) {
        const Share mine = share(rows_, t, threads_);
        for (int r = mine.from; r < mine.to; r++) {
            if (r == 0) matrix_row(target_.embed, to_.anchor, x(0));
            else memcpy(x(r), d_.mask.data(), m_.hidden * sizeof(float));
            angles(r);
        }
        meet();
        layers(t);
        const Rows in = normalise(t, m_.final_norm.data(), quantised(m_.head) || quantised(d_.state));
        head(t, in);
        row_states(t, in);
        meet();
        for (int r = mine.from; r < mine.to; r++) choose_candidates(r);
        meet();
        if (t == 0) guess();
    }

    void row_states(int t, const Rows& in) {
        products(t, d_.state, in, [&](int r, int g, F y) { f_store(d_.states.data() + (size_t)r * d_.shape.rank + g * 16, y); });
    }

    // The largest logits of a row in order; of equal ones the lower id.
    void choose_candidates(int row) {
        const int n = d_.shape.draft_vocab, m = d_.shape.candidates;
        const float* z = d_.logits.data() + (size_t)row * n;
        Drafter::Candidate* best = d_.best.data() + (size_t)row * m;
        int kept = 0;
        auto offer = [&](int id) {
            if (kept == m && !(z[id] > best[m - 1].score)) return;
            int at = kept < m ? kept++ : m - 1;
            for (; at > 0 && z[id] > best[at - 1].score; at--) best[at] = best[at - 1];
            best[at] = {z[id], id};
        };
        int i = 0;
        for (; i < m; i++) offer(i);
        for (; i < n && i % 64; i++) offer(i);
        for (; i + 64 <= n; i += 64) {
            const F top = f_max(f_max(f_load(z + i), f_load(z + i + 16)), f_max(f_load(z + i + 32), f_load(z + i + 48)));
            if (f_top(top) > best[m - 1].score)
                for (int j = i; j < i + 64; j++) offer(j);
        }
        for (; i < n; i++) offer(i);
    }

    // One token after another: what stands before a row moves the logits of its candidates.
    void guess() {
        const int m = d_.shape.candidates, rank = d_.shape.rank;
        int32_t before = to_.anchor;
        for (int r = 0; r < rows_; r++) {
            Drafter::Candidate* best = d_.best.data() + (size_t)r * m;
            alignas(64) float state[MAX_RANK];
            markov(before, r, state);
            double top = -INFINITY, total = 0, chosen_score = -INFINITY;
            int chosen = 0;
            for (int c = 0; c < m; c++) {
                const uint16_t* bias = d_.bias.data() + (size_t)best[c].id * rank;
                F sum = f_zero();
                for (int j = 0; j < rank; j += 16) sum = f_fma(f_load(state + j), f_load_f16(bias + j), sum);
                best[c].score += f_sum(sum);
                top = best[c].score > top ? best[c].score : top;
                const int32_t token = d_.tokens[best[c].id];
                const double score = to_.temperature > 0 ? best[c].score / to_.temperature + gumbel_noise(to_.seed, (uint64_t)base_ + r + 1, token)
                                                         : best[c].score;
                if (score > chosen_score || (score == chosen_score && token < d_.tokens[best[chosen].id])) chosen = c, chosen_score = score;
                if (to_.scores) to_.scores[r * m + c] = best[c].score, to_.candidates[r * m + c] = token;
            }
            for (int c = 0; c < m; c++) total += exp(best[c].score - top);
            const float* y = buffers(0).hidden.f.data() + (size_t)r * buffers(0).hidden.stride;
            const double evidence = inner(y, d_.confidence_y.data(), m_.hidden) + inner(state, d_.confidence_m.data(), rank) +
                                    d_.confidence_p[0] * (best[chosen].score - top - log(total)) + d_.confidence_b[0];
            to_.tokens[r] = before = d_.tokens[best[chosen].id];
            to_.confidence[r] = (float)(1 / (1 + exp(-evidence)));
        }
    }

    void markov(int32_t before, int row, float* state) {
        Stage& s = d_.fused;
        matrix_row(target_.embed, before, s.f.data());
        if (quantised(d_.prev)) quantise(s.f.data(), target_.hidden, s.tiles.data(), 0);
        for (int g = 0; g < d_.prev.groups; g++) {
            F sum;
            dot(d_.prev, g, {s.f.data(), s.tiles.data(), s.stride}, 0, 1, &sum);
            f_store(state + g * 16, silu(f_add(sum, f_load(d_.states.data() + (size_t)row * d_.shape.rank + g * 16))));
        }
    }

    static float inner(const float* a, const float* b, int n) {
        F sum = f_zero();
        for (int i = 0; i < n; i += 16) sum = f_fma(f_load(a + i), f_load(b + i), sum);
        return f_sum(sum);
    }

    Model& target_;
    Drafter& d_;
    const Draft& to_;
};

inline void Pass::make_room() {
    if (c_.draft && c_.draft->pending + rows_ > CHUNK) ContextPass::run(*m_.drafter, *c_.draft);
}

static void catch_up(Model& target, Cache& cache) { ContextPass::run(*target.drafter, *cache.draft); }

static void draft(Model& target, Cache& cache, const Draft& to) {
    catch_up(target, cache);
    BlockPass(target, *target.drafter, *cache.draft, to).run();
}

// The rows of the target's head that the drafter guesses among, and what the Markov head adds to each a unit of its state.
static void take_head(Drafter& d, const Model& target) {
    const Matrix& from = target.lm_head();
    d.head = matrix_shape(from.format, d.shape.draft_vocab, from.cols);
    d.head.data = d.place(d.head.bytes());
    matrix_take(d.head, from, d.tokens.data());
    Stage& s = d.fused;
    for (int r0 = 0; r0 < d.shape.rank; r0 += TILE) {
        for (int r = 0; r < TILE; r++) {
            float* f = s.f.data() + (size_t)r * s.stride;
            matrix_row(d.out, r0 + r, f);
            quantise(f, d.hidden, s.tiles.data(), r);
        }
        for (int g = 0; g < d.head.groups; g++) {
            F acc[TILE];
            dot(d.head, g, {s.f.data(), s.tiles.data(), s.stride}, 0, TILE, acc);
            for (int r = 0; r < TILE; r++) {
                uint16_t half[16];
                f_store_f16(half, acc[r]);
                for (int lane = 0; lane < 16 && g * 16 + lane < d.shape.draft_vocab; lane++)
                    d.bias[(size_t)(g * 16 + lane) * d.shape.rank + r0 + r] = half[lane];
            }
        }
    }
}

static const Kernels kernels = {SLIP_ISA_NAME, pass, argmax, exp_sum, contenders, take_head, catch_up, draft};

}  // namespace SLIP_ISA
