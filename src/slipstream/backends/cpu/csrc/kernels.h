// The arithmetic of a pass, written once in the 16-lane vocabulary and compiled for each instruction set.
//
// Every output element is one thread's sum over ascending columns in fixed steps, whatever the number of rows or threads:
// this is what makes rows invariant. Multiply-adds are explicit; the compiler may not fuse others.
#pragma once
#include "model.h"

namespace SLIP_ISA {

constexpr int TILE = 8;  // rows that share one load of the weights

// Activations of one stage: float rows, and where a quantised matrix reads them 8-bit rows with a scale per 32 columns.
struct Rows {
    const float* f;        // (rows, stride)
    const int8_t* q;       // (rows, stride)
    const float* scale;    // (rows, stride / 32)
    const float* sum;      // (rows, stride / 32): scale * sum of the 32 bytes
    const int32_t* minus;  // (rows, stride / 16): -(sum of 16 bytes)
    int stride;            // columns, padded to 256
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

// Symmetric 8-bit quantisation, a scale per 32 columns, as in ggml's Q8 activations.
static inline void quantise(const float* in, int n, int8_t* q, float* scale, float* sum, int32_t* minus) {
    for (int i = 0; i < n; i += 32) {
        const F a = f_load(in + i), b = f_load(in + i + 16);
        const float top = f_top(f_max(f_abs(a), f_abs(b)));
        const float d = top / 127.f;
        const F inv = f_set(top > 0.f ? 127.f / top : 0.f);
        const F qa = f_round(f_mul(a, inv)), qb = f_round(f_mul(b, inv));
        f_store_s8(q + i, qa);
        f_store_s8(q + i + 16, qb);
        const float sa = f_sum(qa), sb = f_sum(qb);  // exact: small integers
        scale[i / 32] = d;
        sum[i / 32] = d * (sa + sb);
        minus[i / 16] = (int32_t)-sa;
        minus[i / 16 + 1] = (int32_t)-sb;
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

// acc[r] = one group of sixteen outputs for rows r0 .. r0 + R - 1.
template <Format T, int R> static inline void dot_quantised(const Matrix& m, int group, const Rows& a, int r0, F* acc) {
    using B = Block<T>;
    constexpr FormatInfo f = FORMAT[T];
    const uint8_t* rec = m.group(group);
    for (int r = 0; r < R; r++) acc[r] = f_zero();
    for (int i = 0; i < m.records; i++, rec += f.record_bytes) {
        prefetch(rec + 4096);
        for (int j = 0; j < f.record_k / 32; j++) {
            const int k = i * f.record_k + j * 32;
            W w[8];
            B::load(rec, j, w);
            if constexpr (B::half_scales) {
                const F d0 = B::scale(rec, 2 * j), d1 = B::scale(rec, 2 * j + 1);
                for (int r = 0; r < R; r++) {
                    const size_t at = (size_t)(r0 + r) * a.stride + k;
                    I s0 = i_offset(a.minus[at / 16], B::zero_shift), s1 = i_offset(a.minus[at / 16 + 1], B::zero_shift);
                    for (int t = 0; t < 4; t++) s0 = i_dot(s0, w[t], a.q + at + 4 * t);
                    for (int t = 4; t < 8; t++) s1 = i_dot(s1, w[t], a.q + at + 4 * t);
                    const F d = f_set(a.scale[at / 32]);
                    acc[r] = f_fma(f_from_i(s0), f_mul(d0, d), acc[r]);
                    acc[r] = f_fma(f_from_i(s1), f_mul(d1, d), acc[r]);
                }
            } else {
                const F d = B::scale(rec, j);
                F low = f_zero();
                if constexpr (B::has_min) low = B::min(rec, j);
                for (int r = 0; r < R; r++) {
                    const size_t at = (size_t)(r0 + r) * a.stride + k;
                    const int8_t* q = a.q + at;
                    I s = i_zero();
                    if constexpr (B::is_signed) {
                        s = i_start_s8(a.minus[at / 16] + a.minus[at / 16 + 1]);
                        for (int t = 0; t < 8; t++) s = i_dot_s8(s, w[t], q + 4 * t);
                    } else {
                        if constexpr (B::zero_shift >= 0) s = i_offset(a.minus[at / 16] + a.minus[at / 16 + 1], B::zero_shift);
                        for (int t = 0; t < 8; t++) s = i_dot(s, w[t], q + 4 * t);
                    }
                    acc[r] = f_fma(f_from_i(s), f_mul(d, f_set(a.scale[at / 32])), acc[r]);
                    if constexpr (B::has_min) acc[r] = f_fma(low, f_set(a.sum[at / 32]), acc[r]);
                }
            }
        }
    }
}

template <Format T> static inline F load_column(const uint8_t* p) {
    if constexpr (T == F32) return f_load((const float*)p);
    else if constexpr (T == F16) return f_load_f16((const uint16_t*)p);
    else return f_load_bf16((const uint16_t*)p);
}

template <Format T, int R> static inline void dot_float(const Matrix& m, int group, const Rows& a, int r0, F* acc) {
    constexpr int step = T == F32 ? 64 : 32;
    const uint8_t* p = m.group(group);
    F odd[R];
    for (int r = 0; r < R; r++) acc[r] = odd[r] = f_zero();
    for (int k = 0; k + 1 < m.cols; k += 2, p += 2 * step) {  // two chains hide the latency of one
        prefetch(p + 4096);
        const F w0 = load_column<T>(p), w1 = load_column<T>(p + step);
        for (int r = 0; r < R; r++) {
            const float* x = a.f + (size_t)(r0 + r) * a.stride + k;
            acc[r] = f_fma(w0, f_set(x[0]), acc[r]);
            odd[r] = f_fma(w1, f_set(x[1]), odd[r]);
        }
    }
    for (int r = 0; r < R; r++) acc[r] = f_add(acc[r], odd[r]);
}

template <int R> static inline void dot_tile(const Matrix& m, int group, const Rows& a, int r0, F* acc) {
    switch (m.format) {
        case F32: return dot_float<F32, R>(m, group, a, r0, acc);
        case F16: return dot_float<F16, R>(m, group, a, r0, acc);
        case BF16: return dot_float<BF16, R>(m, group, a, r0, acc);
        case Q8_0: return dot_quantised<Q8_0, R>(m, group, a, r0, acc);
        case Q4_0: return dot_quantised<Q4_0, R>(m, group, a, r0, acc);
        case Q4_1: return dot_quantised<Q4_1, R>(m, group, a, r0, acc);
        case Q4_K: return dot_quantised<Q4_K, R>(m, group, a, r0, acc);
        case Q5_K: return dot_quantised<Q5_K, R>(m, group, a, r0, acc);
        default: return dot_quantised<Q6_K, R>(m, group, a, r0, acc);
    }
}

// acc[0 .. n): n rows of one group, n <= TILE.
static inline void dot(const Matrix& m, int group, const Rows& a, int r0, int n, F* acc) {
    switch (n) {
        case 1: return dot_tile<1>(m, group, a, r0, acc);
        case 2: return dot_tile<2>(m, group, a, r0, acc);
        case 3: return dot_tile<3>(m, group, a, r0, acc);
        case 4: return dot_tile<4>(m, group, a, r0, acc);
        case 5: return dot_tile<5>(m, group, a, r0, acc);
        case 6: return dot_tile<6>(m, group, a, r0, acc);
        case 7: return dot_tile<7>(m, group, a, r0, acc);
        default: return dot_tile<8>(m, group, a, r0, acc);
    }
}

}  // namespace SLIP_ISA
