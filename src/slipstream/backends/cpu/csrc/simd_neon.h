// The 16-lane vector vocabulary on Arm NEON with the dot-product extension. simd_portable.h says what each word means.
#pragma once
#include <arm_neon.h>
#include <stdint.h>

#define SLIP_ISA_NAME "neon-dotprod"

namespace SLIP_ISA {

struct F { float32x4_t v[4]; };
struct I { int32x4_t v[4]; };
struct W { uint8x16_t v[4]; };
struct Mask { uint32x4_t v[4]; };

#define EACH for (int i = 0; i < 4; i++)

static inline F f_set(float x) { F r; EACH r.v[i] = vdupq_n_f32(x); return r; }
static inline F f_zero() { return f_set(0.f); }
static inline F f_load(const float* p) { F r; EACH r.v[i] = vld1q_f32(p + 4 * i); return r; }
static inline void f_store(float* p, F x) { EACH vst1q_f32(p + 4 * i, x.v[i]); }
static inline F f_add(F a, F b) { EACH a.v[i] = vaddq_f32(a.v[i], b.v[i]); return a; }
static inline F f_sub(F a, F b) { EACH a.v[i] = vsubq_f32(a.v[i], b.v[i]); return a; }
static inline F f_mul(F a, F b) { EACH a.v[i] = vmulq_f32(a.v[i], b.v[i]); return a; }
static inline F f_div(F a, F b) { EACH a.v[i] = vdivq_f32(a.v[i], b.v[i]); return a; }
static inline F f_fma(F a, F b, F c) { EACH c.v[i] = vfmaq_f32(c.v[i], a.v[i], b.v[i]); return c; }
static inline F f_max(F a, F b) { EACH a.v[i] = vmaxq_f32(a.v[i], b.v[i]); return a; }
static inline F f_min(F a, F b) { EACH a.v[i] = vminq_f32(a.v[i], b.v[i]); return a; }
static inline F f_abs(F a) { EACH a.v[i] = vabsq_f32(a.v[i]); return a; }
static inline F f_round(F a) { EACH a.v[i] = vrndnq_f32(a.v[i]); return a; }
static inline F f_from_i(I a) { F r; EACH r.v[i] = vcvtq_f32_s32(a.v[i]); return r; }
static inline float f_sum(F a) { return vaddvq_f32(vaddq_f32(vaddq_f32(a.v[0], a.v[2]), vaddq_f32(a.v[1], a.v[3]))); }
static inline float f_top(F a) { return vmaxvq_f32(vmaxq_f32(vmaxq_f32(a.v[0], a.v[2]), vmaxq_f32(a.v[1], a.v[3]))); }
static inline F f_pow2(F n) {
    EACH n.v[i] = vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(n.v[i]), vdupq_n_s32(127)), 23));
    return n;
}
static inline F f_load_f16(const uint16_t* p) {
    F r;
    EACH r.v[i] = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i)));
    return r;
}
static inline F f_load_bf16(const uint16_t* p) { F r; EACH r.v[i] = vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16)); return r; }
static inline void f_store_f16(uint16_t* p, F x) { EACH vst1_u16(p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(x.v[i]))); }
static inline float32x4_t e4m3_quarter(uint16x4_t b) {
    const uint16x4_t h = vorr_u16(vshl_n_u16(vand_u16(b, vdup_n_u16(128)), 8), vshl_n_u16(vand_u16(b, vdup_n_u16(127)), 7));
    return vcvt_f32_f16(vreinterpret_f16_u16(h));
}
static inline F f_load_e4m3(const uint8_t* p) {
    const uint8x16_t b = vld1q_u8(p);
    const uint16x8_t lo = vmovl_u8(vget_low_u8(b)), hi = vmovl_u8(vget_high_u8(b));
    return {{e4m3_quarter(vget_low_u16(lo)), e4m3_quarter(vget_high_u16(lo)), e4m3_quarter(vget_low_u16(hi)), e4m3_quarter(vget_high_u16(hi))}};
}
static inline F f_load_u8(const uint8_t* p) {
    uint8x16_t b = vld1q_u8(p);
    uint16x8_t lo = vmovl_u8(vget_low_u8(b)), hi = vmovl_u8(vget_high_u8(b));
    return {{vcvtq_f32_u32(vmovl_u16(vget_low_u16(lo))), vcvtq_f32_u32(vmovl_u16(vget_high_u16(lo))),
             vcvtq_f32_u32(vmovl_u16(vget_low_u16(hi))), vcvtq_f32_u32(vmovl_u16(vget_high_u16(hi)))}};
}
static inline F f_load_s8(const uint8_t* p) {
    int8x16_t b = vreinterpretq_s8_u8(vld1q_u8(p));
    int16x8_t lo = vmovl_s8(vget_low_s8(b)), hi = vmovl_s8(vget_high_s8(b));
    return {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(lo))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(lo))),
             vcvtq_f32_s32(vmovl_s16(vget_low_s16(hi))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(hi)))}};
}
static inline void f_store_s8(int8_t* p, F x) {
    int16x8_t lo = vcombine_s16(vmovn_s32(vcvtnq_s32_f32(x.v[0])), vmovn_s32(vcvtnq_s32_f32(x.v[1])));
    int16x8_t hi = vcombine_s16(vmovn_s32(vcvtnq_s32_f32(x.v[2])), vmovn_s32(vcvtnq_s32_f32(x.v[3])));
    vst1q_s8(p, vcombine_s8(vmovn_s16(lo), vmovn_s16(hi)));
}

static inline Mask m_between(int lo, int hi) {
    static const int32_t first[4] = {0, 1, 2, 3};
    Mask m;
    EACH {
        int32x4_t lane = vaddq_s32(vld1q_s32(first), vdupq_n_s32(4 * i));
        m.v[i] = vandq_u32(vcgeq_s32(lane, vdupq_n_s32(lo)), vcltq_s32(lane, vdupq_n_s32(hi)));
    }
    return m;
}
static inline F f_select(Mask m, F yes, F no) { EACH no.v[i] = vbslq_f32(m.v[i], yes.v[i], no.v[i]); return no; }

static inline W w_load(const uint8_t* p) { W r; EACH r.v[i] = vld1q_u8(p + 16 * i); return r; }
static inline W w_low(W x) { EACH x.v[i] = vandq_u8(x.v[i], vdupq_n_u8(15)); return x; }
static inline W w_high(W x) { EACH x.v[i] = vshrq_n_u8(x.v[i], 4); return x; }
static inline W w_lookup(W x, const uint8_t* table) { const uint8x16_t t = vld1q_u8(table); EACH x.v[i] = vqtbl1q_u8(t, x.v[i]); return x; }
static inline W w_or_bit(W x, const uint8_t* plane, int bit) {
    static const uint8_t lanes[16] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    EACH {
        uint8x16_t spread = vcombine_u8(vdup_n_u8(plane[2 * i]), vdup_n_u8(plane[2 * i + 1]));
        uint8x16_t on = vtstq_u8(spread, vld1q_u8(lanes));
        x.v[i] = vorrq_u8(x.v[i], vandq_u8(on, vdupq_n_u8((uint8_t)(1 << bit))));
    }
    return x;
}

static inline I i_zero() { I r; EACH r.v[i] = vdupq_n_s32(0); return r; }
static inline I i_add(I a, I b) { EACH a.v[i] = vaddq_s32(a.v[i], b.v[i]); return a; }
static inline I i_shift(I a, int bits) { EACH a.v[i] = vshlq_s32(a.v[i], vdupq_n_s32(bits)); return a; }
static inline I i_offset(int32_t negative_sum, int shift) { I r; EACH r.v[i] = vdupq_n_s32(negative_sum * (1 << shift)); return r; }
static inline int8x16_t four_times(const int8_t* a) {
    int32_t four;
    __builtin_memcpy(&four, a, 4);
    return vreinterpretq_s8_s32(vdupq_n_s32(four));
}
static inline I i_dot(I acc, W w, const int8_t* a) {
    int8x16_t v = four_times(a);
    EACH acc.v[i] = vdotq_s32(acc.v[i], vreinterpretq_s8_u8(w.v[i]), v);
    return acc;
}
static inline I i_start_s8(int32_t) { return i_zero(); }
static inline I i_dot_s8(I acc, W w, const int8_t* a) {
    int8x16_t v = four_times(a);
    EACH acc.v[i] = vdotq_s32(acc.v[i], vreinterpretq_s8_u8(veorq_u8(w.v[i], vdupq_n_u8(0x80))), v);
    return acc;
}

static inline void prefetch(const void* p) { __builtin_prefetch(p); }

#undef EACH

}  // namespace SLIP_ISA
