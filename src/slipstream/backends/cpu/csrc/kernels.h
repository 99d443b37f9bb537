// The arithmetic of a pass, written once in the 16-lane vocabulary and compiled for each instruction set.
//
// Every output element is one thread's sum over ascending columns in fixed steps, whatever the number of rows or threads:
// this is what makes rows invariant. Multiply-adds are explicit; the compiler may not fuse others.
#pragma once
#include "model.h"

namespace SLIP_ISA {

// The input rows of one stage: as floats, and where a quantised matrix reads them as tiles of blocks.
struct Rows {
    const float* f;       // (rows, stride)
    const QBlock* tiles;  // (rows / TILE, stride / 32)
    int stride;           // columns, padded to 256
};

static inline F exp_f(F x) {
    // exp(x) = 2^n * exp(r), |r| <= ln2 / 2, r by a degree-6 polynomial (Taylor, error below 2e-7 relative).
    x = f_max(f_min(x, f_set(88.f)), f_set(-87.f));
    F n = f_round(f_mul(x, f_set(1.44269504f)));
    F r = f_fma(n, f_set(-0.693145752f), x);
    r = f_fma(n, f_set(-1.42860677e-6f), r);
    F p = f_fma(r, f_set(1.f / 720), f_set(1.f / 120));
    p = f_fma(p, r, f_set(1.f / 24));
    p = f_fma(p, r, f_set(1.f / 6));
    p = f_fma(p, r, f_set(.5f));
    p = f_fma(p, r, f_set(1.f));
    p = f_fma(p, r, f_set(1.f));
    return f_mul(p, f_pow2(n));
}

static inline F silu(F x) { return f_div(x, f_add(f_set(1.f), exp_f(f_sub(f_zero(), x)))); }

// out = in / rms(in) * weight over n columns, a multiple of 16.
static inline void rms_norm(const float* in, const float* weight, float eps, int n, float* out) {
    F squares = f_zero();
    for (int i = 0; i < n; i += 16) squares = f_fma(f_load(in + i), f_load(in + i), squares);
    const F inv = f_set(1.f / sqrtf(f_sum(squares) / (float)n + eps));
    for (int i = 0; i < n; i += 16) f_store(out + i, f_mul(f_mul(f_load(in + i), inv), f_load(weight + i)));
}

// Writes row `r` of a tile from n columns. One plane alone, as in ggml's Q8, costs 3.5e-3 nats of KL on SmolLM2; two cost
// 6e-7, and a single-row pass has the arithmetic to spare: weights are what memory moves, and they stay those of the file.
// coarse: the high plane alone.
static inline void quantise(const float* in, int n, QBlock* block, int r, bool coarse = false) {
    constexpr float UNIT = 1 << LOW_BITS;
    const F limit = f_set(127.f), minus_limit = f_set(-127.f);
    for (int i = 0; i < n; i += 32, block++) {
        const F a = f_load(in + i), b = f_load(in + i + 16);
        const float top = f_top(f_max(f_abs(a), f_abs(b)));
        const F inv = f_set(top > 1e-36f ? 127.f / top : 0.f);  // below, 127 / top overflows
        const F ya = f_mul(a, inv), yb = f_mul(b, inv), ha = f_round(ya), hb = f_round(yb);
        const F unit = f_set(coarse ? 0.f : UNIT);
        const F la = f_max(f_min(f_round(f_mul(f_sub(ya, ha), unit)), limit), minus_limit);
        const F lb = f_max(f_min(f_round(f_mul(f_sub(yb, hb), unit)), limit), minus_limit);
        f_store_s8(block->high[r], ha);
        f_store_s8(block->high[r] + 16, hb);
        f_store_s8(block->low[r], la);
        f_store_s8(block->low[r] + 16, lb);
        const float sa = f_sum(f_fma(ha, f_set(UNIT), la)), sb = f_sum(f_fma(hb, f_set(UNIT), lb));  // exact: integers below 2^24
        block->scale[r] = top / (127.f * UNIT);
        block->sum[r] = block->scale[r] * (sa + sb);
        block->minus[r] = (int32_t)-(sa + sb);
        block->minus_half[r][0] = (int32_t)-sa;
        block->minus_half[r][1] = (int32_t)-sb;
    }
}

template <Format T> struct Block;  // how one 32-column step of a record is read: eight byte vectors and its scales

struct Nibbles {
    static void bytes(const uint8_t* p, W* w) {
        for (int t = 0; t < 4; t++) {
            const W x = w_load(p + t * 64);
            w[t] = w_low(x);
            w[t + 4] = w_high(x);
        }
    }
};

template <> struct Block<Q8_0> {
    static constexpr bool has_min = false, is_signed = true, half_scales = false;
    static constexpr int zero_shift = -1;
    static void load(const uint8_t* rec, int j, W* w) { for (int t = 0; t < 8; t++) w[t] = w_load(rec + 64 + j * 512 + t * 64); }
    static F scale(const uint8_t* rec, int j) { return f_load_f16((const uint16_t*)(rec + j * 32)); }
};
template <> struct Block<Q4_0> {
    static constexpr bool has_min = false, is_signed = false, half_scales = false;
    static constexpr int zero_shift = 3;  // stored as weight + 8
    static void load(const uint8_t* rec, int j, W* w) { Nibbles::bytes(rec + 64 + j * 256, w); }
    static F scale(const uint8_t* rec, int j) { return f_load_f16((const uint16_t*)(rec + j * 32)); }
};
template <> struct Block<Q4_1> {
    static constexpr bool has_min = true, is_signed = false, half_scales = false;
    static constexpr int zero_shift = -1;
    static void load(const uint8_t* rec, int j, W* w) { Nibbles::bytes(rec + 128 + j * 256, w); }
    static F scale(const uint8_t* rec, int j) { return f_load_f16((const uint16_t*)(rec + j * 32)); }
    static F min(const uint8_t* rec, int j) { return f_load_f16((const uint16_t*)(rec + 64 + j * 32)); }
};
template <int PLANES> struct KBlock {
    static void load(const uint8_t* rec, int j, W* w) {
        Nibbles::bytes(rec + 320 + j * 256, w);
        for (int p = 0; p < PLANES; p++)
            for (int t = 0; t < 8; t++) w[t] = w_or_bit(w[t], rec + 320 + 2048 + p * 512 + (j * 8 + t) * 8, 4 + p);
    }
    static F scale(const uint8_t* rec, int j) { return f_mul(f_load_f16((const uint16_t*)rec), f_load_u8(rec + 64 + j * 16)); }
    static F min(const uint8_t* rec, int j) {
        return f_sub(f_zero(), f_mul(f_load_f16((const uint16_t*)(rec + 32)), f_load_u8(rec + 192 + j * 16)));
    }
};
template <> struct Block<Q4_K> : KBlock<0> {
    static constexpr bool has_min = true, is_signed = false, half_scales = false;
    static constexpr int zero_shift = -1;
};
template <> struct Block<Q5_K> : KBlock<1> {
    static constexpr bool has_min = true, is_signed = false, half_scales = false;
    static constexpr int zero_shift = -1;
};
template <> struct Block<Q6_K> : KBlock<2> {
    static constexpr bool has_min = false, is_signed = false, half_scales = true;
    static constexpr int zero_shift = 5;  // stored as weight + 32
    static F scale(const uint8_t* rec, int j) { return f_mul(f_load_f16((const uint16_t*)rec), f_load_s8(rec + 64 + j * 16)); }
};

template <> struct Block<MXFP4> {
    static constexpr bool has_min = false, is_signed = false, half_scales = false;
    static constexpr int zero_shift = 4;  // looked up as twice the weight, plus E2M1_ZERO
    static void load(const uint8_t* rec, int j, W* w) {
        Nibbles::bytes(rec + 64 + j * 256, w);
        for (int t = 0; t < 8; t++) w[t] = w_lookup(w[t], E2M1);
    }
    // 2^(e8m0 - 127), halved; the smallest, 2^-127, becomes 0.
    static F scale(const uint8_t* rec, int j) { return f_mul(f_pow2(f_sub(f_load_u8(rec + j * 16), f_set(127.f))), f_set(.5f)); }
};

#ifdef SLIP_COMPACT
#define UNROLL
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

// One 32-column step of one row: the integer sum of weight * activation over both planes of the activation, exact.
// T's half_scales: two sums, of 16 columns each.
// LOW: whether there is a low plane to read.
template <Format T, bool LOW> static inline I step_sum(const W* w, const int8_t* high, const int8_t* low, int32_t minus, int from, int to) {
    using B = Block<T>;
    I s = i_zero();
    if constexpr (B::is_signed) {
        UNROLL for (int t = from; t < to; t++) s = i_dot_s8(s, w[t], high + 4 * t);
        s = i_add(i_shift(s, LOW_BITS), i_start_s8(minus));
        if constexpr (LOW) UNROLL for (int t = from; t < to; t++) s = i_dot_s8(s, w[t], low + 4 * t);
    } else {
        UNROLL for (int t = from; t < to; t++) s = i_dot(s, w[t], high + 4 * t);
        s = i_shift(s, LOW_BITS);
        if constexpr (B::zero_shift >= 0) s = i_add(s, i_offset(minus, B::zero_shift));
        if constexpr (LOW) UNROLL for (int t = from; t < to; t++) s = i_dot(s, w[t], low + 4 * t);
    }
    return s;
}

// out[r] = one group of sixteen outputs for rows r0 .. r0 + R - 1, which lie in one tile. From four rows on arithmetic sets
// the pace and the hardware prefetcher comes late, so every line is asked for; with fewer, memory does, and asking only costs.
template <Format T, int R, bool LOW = true> static void dot_quantised(const Matrix& m, int group, const Rows& a, int r0, F* out) {
    using B = Block<T>;
    constexpr FormatInfo f = FORMAT[T];
    const uint8_t* rec = m.group(group);
    const int records = m.records, first = r0 % TILE;
    // One pointer walks the tile; every operand is a constant away from it.
    const QBlock* x = a.tiles + (size_t)(r0 / TILE) * (a.stride / 32);
    F acc[R];
    UNROLL for (int r = 0; r < R; r++) acc[r] = f_zero();
    for (int i = 0; i < records; i++, rec += f.record_bytes) {
        if constexpr (R < 4) prefetch(rec + 4096);
        for (int j = 0; j < f.record_k / 32; j++, x++) {
            constexpr int bytes = f.record_bytes / (f.record_k / 32);
            if constexpr (R >= 4) UNROLL for (int line = 0; line < bytes; line += 64) prefetch(rec + 8192 + j * bytes + line);
            W w[8];
            B::load(rec, j, w);
            const int8_t(*high)[32] = x->high + first, (*low)[32] = x->low + first;
            const float *scale = x->scale + first, *sum = x->sum + first;
            if constexpr (B::half_scales) {
                const F d0 = B::scale(rec, 2 * j), d1 = B::scale(rec, 2 * j + 1);
                const int32_t(*minus)[2] = x->minus_half + first;
                UNROLL for (int r = 0; r < R; r++) {
                    const F d = f_set(scale[r]);
                    acc[r] = f_fma(f_from_i(step_sum<T, LOW>(w, high[r], low[r], minus[r][0], 0, 4)), f_mul(d0, d), acc[r]);
                    acc[r] = f_fma(f_from_i(step_sum<T, LOW>(w, high[r], low[r], minus[r][1], 4, 8)), f_mul(d1, d), acc[r]);
                }
            } else {
                const F d = B::scale(rec, j);
                F offset = f_zero();
                if constexpr (B::has_min) offset = B::min(rec, j);
                const int32_t* minus = x->minus + first;
                UNROLL for (int r = 0; r < R; r++) {
                    acc[r] = f_fma(f_from_i(step_sum<T, LOW>(w, high[r], low[r], minus[r], 0, 8)), f_mul(d, f_set(scale[r])), acc[r]);
                    if constexpr (B::has_min) acc[r] = f_fma(offset, f_set(sum[r]), acc[r]);
                }
            }
        }
    }
    UNROLL for (int r = 0; r < R; r++) out[r] = acc[r];
}

template <Format T> static inline F load_column(const uint8_t* p) {
    if constexpr (T == F32) return f_load((const float*)p);
    else if constexpr (T == F16) return f_load_f16((const uint16_t*)p);
    else return f_load_bf16((const uint16_t*)p);
}

template <Format T, int R> static void dot_float(const Matrix& m, int group, const Rows& a, int r0, F* out) {
    constexpr int step = T == F32 ? 64 : 32;
    const uint8_t* p = m.group(group);
    const float* x = a.f + (size_t)r0 * a.stride;
    const int stride = a.stride, cols = m.cols;
    F even[R], odd[R];  // two chains hide the latency of one
    UNROLL for (int r = 0; r < R; r++) even[r] = odd[r] = f_zero();
    for (int k = 0; k < cols; k += 2, p += 2 * step, x += 2) {
        prefetch(p + 4096);
        const F w0 = load_column<T>(p), w1 = load_column<T>(p + step);
        UNROLL for (int r = 0; r < R; r++) {
            even[r] = f_fma(w0, f_set(x[r * stride]), even[r]);
            odd[r] = f_fma(w1, f_set(x[r * stride + 1]), odd[r]);
        }
    }
    UNROLL for (int r = 0; r < R; r++) out[r] = f_add(even[r], odd[r]);
}

template <int R> static void dot_fp8(const Matrix& m, int group, const Rows& a, int r0, F* out) {
    constexpr FormatInfo f = FORMAT[F8_E4M3];
    const uint8_t* rec = m.group(group);
    const float* x = a.f + (size_t)r0 * a.stride;
    const int stride = a.stride;
    F acc[R];
    UNROLL for (int r = 0; r < R; r++) acc[r] = f_zero();
    for (int i = 0; i < m.records; i++, rec += f.record_bytes) {
        F even[R], odd[R];
        UNROLL for (int r = 0; r < R; r++) even[r] = odd[r] = f_zero();
        const uint8_t* p = rec + 64;
        for (int k = 0; k < f.record_k; k += 2, p += 32, x += 2) {
            prefetch(p + 4096);
            const F w0 = f_load_e4m3(p), w1 = f_load_e4m3(p + 16);
            UNROLL for (int r = 0; r < R; r++) {
                even[r] = f_fma(w0, f_set(x[r * stride]), even[r]);
                odd[r] = f_fma(w1, f_set(x[r * stride + 1]), odd[r]);
            }
        }
        const F scale = f_mul(f_load((const float*)rec), f_set(256.f));  // f_load_e4m3 left 2^8 out
        UNROLL for (int r = 0; r < R; r++) acc[r] = f_fma(f_add(even[r], odd[r]), scale, acc[r]);
    }
    UNROLL for (int r = 0; r < R; r++) out[r] = acc[r];
}

template <int R> static void dot_tile(const Matrix& m, int group, const Rows& a, int r0, F* acc) {
    switch (m.format) {
        case F32: return dot_float<F32, R>(m, group, a, r0, acc);
        case F16: return dot_float<F16, R>(m, group, a, r0, acc);
        case BF16: return dot_float<BF16, R>(m, group, a, r0, acc);
        case Q8_0: return dot_quantised<Q8_0, R>(m, group, a, r0, acc);
        case Q4_0: return dot_quantised<Q4_0, R>(m, group, a, r0, acc);
        case Q4_1: return dot_quantised<Q4_1, R>(m, group, a, r0, acc);
        case Q4_K: return dot_quantised<Q4_K, R>(m, group, a, r0, acc);
        case Q5_K: return dot_quantised<Q5_K, R>(m, group, a, r0, acc);
        case Q6_K: return dot_quantised<Q6_K, R>(m, group, a, r0, acc);
        case MXFP4: return dot_quantised<MXFP4, R>(m, group, a, r0, acc);
        default: return dot_fp8<R>(m, group, a, r0, acc);
    }
}

// out[0 .. n): n rows of one group, n <= TILE, in powers of two: a tile size more would be another copy of every kernel.
// Three rows take a tile of four, whose last row means nothing: cheaper than two tiles.
static inline void dot(const Matrix& m, int group, const Rows& a, int r0, int n, F* out) {
    if (n == TILE) return dot_tile<TILE>(m, group, a, r0, out);
    if (n == 3) return dot_tile<4>(m, group, a, r0, out);
    if (n & 4) dot_tile<4>(m, group, a, r0, out), r0 += 4, out += 4;
    if (n & 2) dot_tile<2>(m, group, a, r0, out), r0 += 2, out += 2;
    if (n & 1) dot_tile<1>(m, group, a, r0, out);
}

// The same where no row has a low plane, for the format of drafters: a draft need not be exact, only likely.
static inline void dot_coarse(const Matrix& m, int group, const Rows& a, int r0, int n, F* out) {
    if (m.format != Q8_0) return dot(m, group, a, r0, n, out);
    if (n == TILE) return dot_quantised<Q8_0, TILE, false>(m, group, a, r0, out);
    if (n & 4) dot_quantised<Q8_0, 4, false>(m, group, a, r0, out), r0 += 4, out += 4;
    if (n & 2) dot_quantised<Q8_0, 2, false>(m, group, a, r0, out), r0 += 2, out += 2;
    if (n & 1) dot_quantised<Q8_0, 1, false>(m, group, a, r0, out);
}

}  // namespace SLIP_ISA
