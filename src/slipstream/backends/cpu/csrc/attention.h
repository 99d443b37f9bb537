// Softmax attention of a few query rows over one split of the cache, and the merge of splits (flash-decoding's
// log-sum-exp merge, Dao et al. 2023). A partial covers SPLIT positions counted from zero, so its sums do not depend on
// which rows ride along or how long the text has grown since.
#pragma once
#include "kernels.h"

namespace SLIP_ISA {

constexpr int QUERIES = 8;  // query vectors that share one load of a key vector

// scores[i][...] = q[i] . keys of the 16-key block at `block`, for N queries.
template <int N> static inline void scores_of_block(const float* const* q, const uint16_t* block, int dim, float* scores, int at) {
    F acc[N];
    for (int i = 0; i < N; i++) acc[i] = f_zero();
    for (int d = 0; d < dim; d++) {
        const F k = f_load_f16(block + d * 16);
        for (int i = 0; i < N; i++) acc[i] = f_fma(f_set(q[i][d]), k, acc[i]);
    }
    for (int i = 0; i < N; i++) f_store(scores + i * SPLIT + at, acc[i]);
}

static inline void scores_of(int n, const float* const* q, const uint16_t* block, int dim, float* scores, int at) {
    switch (n) {
        case 1: return scores_of_block<1>(q, block, dim, scores, at);
        case 2: return scores_of_block<2>(q, block, dim, scores, at);
        case 3: return scores_of_block<3>(q, block, dim, scores, at);
        case 4: return scores_of_block<4>(q, block, dim, scores, at);
        case 5: return scores_of_block<5>(q, block, dim, scores, at);
        case 6: return scores_of_block<6>(q, block, dim, scores, at);
        case 7: return scores_of_block<7>(q, block, dim, scores, at);
        default: return scores_of_block<8>(q, block, dim, scores, at);
    }
}

// out[i][...] = sum over keys of p[i][key] * value[key], N queries by C vectors of sixteen dimensions.
template <int N, int C>
static inline void mix_values(const float* p, const uint16_t* values, int dim, int from, int to, float* const* out, int d0) {
    F acc[N][C];
    for (int i = 0; i < N; i++)
        for (int c = 0; c < C; c++) acc[i][c] = f_zero();
    for (int key = from; key < to; key++) {
        const uint16_t* v = values + (size_t)key * dim + d0;
        F x[C];
        for (int c = 0; c < C; c++) x[c] = f_load_f16(v + 16 * c);
        for (int i = 0; i < N; i++) {
            const F w = f_set(p[i * SPLIT + key]);
            for (int c = 0; c < C; c++) acc[i][c] = f_fma(w, x[c], acc[i][c]);
        }
    }
    for (int i = 0; i < N; i++)
        for (int c = 0; c < C; c++) f_store(out[i] + d0 + 16 * c, acc[i][c]);
}

template <int N, int C> static inline void mix(const float* p, const uint16_t* values, int dim, int from, int to, float* const* out) {
    int d = 0;
    for (; d + 16 * C <= dim; d += 16 * C) mix_values<N, C>(p, values, dim, from, to, out, d);
    for (; d < dim; d += 16) mix_values<N, 1>(p, values, dim, from, to, out, d);
}

// One partial: n <= QUERIES queries of one KV head over the split that starts at position `start`.
// q, out: their vectors; spans: what each sees; top, total: each one's largest score and sum of exponentials.
static void attend_split(int n, const float* const* q, const Span* spans, const uint16_t* keys, const uint16_t* values, int dim,
                         int value_dim, int start, float* scores, float* const* out, float* const* top, float* const* total) {
    const int lo = spans[0].lo, hi = spans[n - 1].hi;  // queries come in the order of their positions
    const int from = lo > start ? (lo - start) / 16 * 16 : 0;
    const int to = hi - start < SPLIT ? hi - start : SPLIT;
    for (int at = from; at < to; at += 16) scores_of(n, q, keys + (size_t)at * dim, dim, scores, at);
    for (int i = 0; i < n; i++) {
        float* s = scores + i * SPLIT;
        const int first = spans[i].lo - start, last = spans[i].hi - start;
        F best = f_set(-INFINITY);
        for (int at = from; at < to; at += 16) best = f_max(best, f_select(m_between(first - at, last - at), f_load(s + at), f_set(-INFINITY)));
        const float peak = f_top(best);
        *top[i] = peak;
        if (peak == -INFINITY) {  // sees nothing here
            *total[i] = 0.f;
            for (int at = from; at < to; at += 16) f_store(s + at, f_zero());
            continue;
        }
        F sum = f_zero();
        for (int at = from; at < to; at += 16) {
            const F e = f_select(m_between(first - at, last - at), exp_f(f_sub(f_load(s + at), f_set(peak))), f_zero());
            f_store(s + at, e);
            sum = f_add(sum, e);
        }
        *total[i] = f_sum(sum);
    }
    // Sixteen sums a time keep a multiplier busy: eight queries by two vectors, or fewer by more.
    if (n == QUERIES) return mix<8, 2>(scores, values, value_dim, from, to, out);
    int i = 0;
    if (n & 4) mix<4, 4>(scores, values, value_dim, from, to, out), i += 4;
    if (n & 2) mix<2, 4>(scores + i * SPLIT, values, value_dim, from, to, out + i), i += 2;
    if (n & 1) mix<1, 4>(scores + i * SPLIT, values, value_dim, from, to, out + i);
}

// Merges `splits` partials of one query into out[dim]. sink: a score that carries no value, or -inf.
static inline void merge_splits(const float* partial, const float* top, const float* total, int splits, int dim, float sink, float* out) {
    float peak = sink, sum = 0.f;
    for (int s = 0; s < splits; s++) peak = top[s] > peak ? top[s] : peak;
    if (sink > -INFINITY) sum = expf(sink - peak);
    for (int d = 0; d < dim; d += 16) f_store(out + d, f_zero());
    for (int s = 0; s < splits; s++) {
        if (total[s] == 0.f) continue;
        const float weight = expf(top[s] - peak);
        sum += weight * total[s];
        for (int d = 0; d < dim; d += 16) f_store(out + d, f_fma(f_set(weight), f_load(partial + (size_t)s * dim + d), f_load(out + d)));
    }
    const F inv = f_set(1.f / sum);
    for (int d = 0; d < dim; d += 16) f_store(out + d, f_mul(f_load(out + d), inv));
}

}  // namespace SLIP_ISA
