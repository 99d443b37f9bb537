// The 16-lane vector vocabulary every kernel is written in, in plain C++; the other simd_*.h say the same words with
// intrinsics. F is 16 floats, I 16 int32, W 64 bytes as 16 lanes of 4, Mask 16 booleans.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "halffloat.h"

#define SLIP_ISA_NAME "portable"

namespace SLIP_ISA {

struct F { float v[16]; };
struct I { int32_t v[16]; };
struct W { uint8_t v[64]; };
struct Mask { bool v[16]; };

#define EACH for (int i = 0; i < 16; i++)

static inline F f_set(float x) { F r; EACH r.v[i] = x; return r; }
static inline F f_zero() { return f_set(0.f); }
static inline F f_load(const float* p) { F r; memcpy(r.v, p, 64); return r; }
static inline void f_store(float* p, F x) { memcpy(p, x.v, 64); }
static inline F f_add(F a, F b) { EACH a.v[i] += b.v[i]; return a; }
static inline F f_sub(F a, F b) { EACH a.v[i] -= b.v[i]; return a; }
static inline F f_mul(F a, F b) { EACH a.v[i] *= b.v[i]; return a; }
static inline F f_div(F a, F b) { EACH a.v[i] /= b.v[i]; return a; }
static inline F f_fma(F a, F b, F c) { EACH c.v[i] = a.v[i] * b.v[i] + c.v[i]; return c; }
static inline F f_max(F a, F b) { EACH a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return a; }
static inline F f_min(F a, F b) { EACH a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i]; return a; }
static inline F f_abs(F a) { EACH a.v[i] = fabsf(a.v[i]); return a; }
static inline F f_round(F a) { EACH a.v[i] = nearbyintf(a.v[i]); return a; }
static inline F f_from_i(I a) { F r; EACH r.v[i] = (float)a.v[i]; return r; }
static inline float f_sum(F a) {  // a tree, so that the order is fixed
    for (int n = 8; n; n /= 2) for (int i = 0; i < n; i++) a.v[i] += a.v[i + n];
    return a.v[0];
}
static inline float f_top(F a) { float m = a.v[0]; EACH m = a.v[i] > m ? a.v[i] : m; return m; }
static inline F f_pow2(F n) { EACH { uint32_t bits = (uint32_t)((int32_t)n.v[i] + 127) << 23; memcpy(&n.v[i], &bits, 4); } return n; }
static inline F f_load_f16(const uint16_t* p) { F r; EACH r.v[i] = half_to_float(p[i]); return r; }
static inline F f_load_bf16(const uint16_t* p) { F r; EACH { uint32_t b = (uint32_t)p[i] << 16; memcpy(&r.v[i], &b, 4); } return r; }
static inline void f_store_f16(uint16_t* p, F x) { EACH p[i] = float_to_half(x.v[i]); }
// e4m3 as half precision with its own exponent bias: the values times 2^-8.
static inline F f_load_e4m3(const uint8_t* p) { F r; EACH r.v[i] = half_to_float((uint16_t)((p[i] & 128) << 8 | (p[i] & 127) << 7)); return r; }
static inline F f_load_u8(const uint8_t* p) { F r; EACH r.v[i] = p[i]; return r; }
static inline F f_load_s8(const uint8_t* p) { F r; EACH r.v[i] = (int8_t)p[i]; return r; }
static inline void f_store_s8(int8_t* p, F x) { EACH p[i] = (int8_t)lrintf(x.v[i]); }

static inline Mask m_between(int lo, int hi) { Mask m; EACH m.v[i] = lo <= i && i < hi; return m; }
static inline F f_select(Mask m, F yes, F no) { EACH no.v[i] = m.v[i] ? yes.v[i] : no.v[i]; return no; }

static inline W w_load(const uint8_t* p) { W r; memcpy(r.v, p, 64); return r; }
static inline W w_low(W x) { for (int i = 0; i < 64; i++) x.v[i] &= 15; return x; }
static inline W w_high(W x) { for (int i = 0; i < 64; i++) x.v[i] >>= 4; return x; }
static inline W w_lookup(W x, const uint8_t* table) { for (int i = 0; i < 64; i++) x.v[i] = table[x.v[i]]; return x; }  // bytes below 16
static inline W w_or_bit(W x, const uint8_t* plane, int bit) {  // bit i of the plane becomes `bit` of byte i
    for (int i = 0; i < 64; i++) x.v[i] |= (uint8_t)(((plane[i / 8] >> (i % 8)) & 1) << bit);
    return x;
}

static inline I i_zero() { I r; memset(r.v, 0, 64); return r; }
static inline I i_add(I a, I b) { EACH a.v[i] += b.v[i]; return a; }
static inline I i_shift(I a, int bits) { EACH a.v[i] *= 1 << bits; return a; }
static inline I i_offset(int32_t negative_sum, int shift) { I r; EACH r.v[i] = negative_sum * (1 << shift); return r; }
// acc[lane] += sum of w[4 * lane + j] * a[j], w unsigned and below 128, a signed.
static inline I i_dot(I acc, W w, const int8_t* a) {
    EACH for (int j = 0; j < 4; j++) acc.v[i] += (int)w.v[4 * i + j] * a[j];
    return acc;
}
// The same for signed weights, stored as weight + 128; i_start_s8 is where such a sum begins.
static inline I i_start_s8(int32_t) { return i_zero(); }
static inline I i_dot_s8(I acc, W w, const int8_t* a) {
    EACH for (int j = 0; j < 4; j++) acc.v[i] += ((int)w.v[4 * i + j] - 128) * a[j];
    return acc;
}

static inline void prefetch(const void* p) { __builtin_prefetch(p); }

#undef EACH

}  // namespace SLIP_ISA
