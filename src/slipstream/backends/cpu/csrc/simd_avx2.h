// The 16-lane vector vocabulary on AVX2 + FMA + F16C: two 8-lane halves. simd_portable.h says what each word means.
#pragma once
#include <immintrin.h>
#include <stdint.h>

#define SLIP_ISA_NAME "avx2"

namespace SLIP_ISA {

struct F { __m256 a, b; };
struct I { __m256i a, b; };
struct W { __m256i a, b; };
struct Mask { __m256 a, b; };

static inline F f_set(float x) { __m256 v = _mm256_set1_ps(x); return {v, v}; }
static inline F f_zero() { return f_set(0.f); }
static inline F f_load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void f_store(float* p, F x) { _mm256_storeu_ps(p, x.a); _mm256_storeu_ps(p + 8, x.b); }
static inline F f_add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
static inline F f_sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
static inline F f_mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
static inline F f_div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
static inline F f_fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
static inline F f_max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
static inline F f_min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
static inline F f_abs(F x) {
    __m256 sign = _mm256_set1_ps(-0.f);
    return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
static inline F f_round(F x) { return {_mm256_round_ps(x.a, 0), _mm256_round_ps(x.b, 0)}; }
static inline F f_from_i(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
static inline float f_sum(F x) {
    __m256 s = _mm256_add_ps(x.a, x.b);
    __m128 h = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    h = _mm_add_ps(h, _mm_movehl_ps(h, h));
    return _mm_cvtss_f32(_mm_add_ss(h, _mm_movehdup_ps(h)));
}
static inline float f_top(F x) {
    __m256 s = _mm256_max_ps(x.a, x.b);
    __m128 h = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    h = _mm_max_ps(h, _mm_movehl_ps(h, h));
    return _mm_cvtss_f32(_mm_max_ss(h, _mm_movehdup_ps(h)));
}
static inline __m256 pow2_half(__m256 n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
static inline F f_pow2(F n) { return {pow2_half(n.a), pow2_half(n.b)}; }
static inline F f_load_f16(const uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
static inline __m256 bf16_half(const uint16_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
static inline F f_load_bf16(const uint16_t* p) { return {bf16_half(p), bf16_half(p + 8)}; }
static inline void f_store_f16(uint16_t* p, F x) {
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x.a, 0));
    _mm_storeu_si128((__m128i*)(p + 8), _mm256_cvtps_ph(x.b, 0));
}
static inline F f_load_e4m3(const uint8_t* p) {
    const __m256i b = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p));
    const __m256i h = _mm256_or_si256(_mm256_slli_epi16(_mm256_and_si256(b, _mm256_set1_epi16(128)), 8),
                                      _mm256_slli_epi16(_mm256_and_si256(b, _mm256_set1_epi16(127)), 7));
    return {_mm256_cvtph_ps(_mm256_castsi256_si128(h)), _mm256_cvtph_ps(_mm256_extracti128_si256(h, 1))};
}
static inline F f_load_u8(const uint8_t* p) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p))),
            _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8))))};
}
static inline F f_load_s8(const uint8_t* p) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p))),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8))))};
}
static inline void f_store_s8(int8_t* p, F x) {
    __m256i pair = _mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b));  // a0-3 b0-3 | a4-7 b4-7
    pair = _mm256_permute4x64_epi64(pair, 0xd8);
    _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(_mm256_castsi256_si128(pair), _mm256_extracti128_si256(pair, 1)));
}

static inline Mask m_between(int lo, int hi) {
    __m256i first = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), last = _mm256_add_epi32(first, _mm256_set1_epi32(8));
    __m256i low = _mm256_set1_epi32(lo - 1), high = _mm256_set1_epi32(hi);
    return {_mm256_castsi256_ps(_mm256_and_si256(_mm256_cmpgt_epi32(first, low), _mm256_cmpgt_epi32(high, first))),
            _mm256_castsi256_ps(_mm256_and_si256(_mm256_cmpgt_epi32(last, low), _mm256_cmpgt_epi32(high, last)))};
}
static inline F f_select(Mask m, F yes, F no) { return {_mm256_blendv_ps(no.a, yes.a, m.a), _mm256_blendv_ps(no.b, yes.b, m.b)}; }

static inline W w_load(const uint8_t* p) { return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 32))}; }
static inline W w_low(W x) {
    __m256i m = _mm256_set1_epi8(15);
    return {_mm256_and_si256(x.a, m), _mm256_and_si256(x.b, m)};
}
static inline W w_high(W x) { return w_low({_mm256_srli_epi16(x.a, 4), _mm256_srli_epi16(x.b, 4)}); }
static inline W w_lookup(W x, const uint8_t* table) {
    const __m256i t = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table));
    return {_mm256_shuffle_epi8(t, x.a), _mm256_shuffle_epi8(t, x.b)};
}
static inline __m256i bit_half(__m256i x, uint32_t bits, int bit) {
    // Byte j of the result tests bit j of `bits`: spread its four bytes over eight lanes each, keep one bit a lane.
    __m256i spread = _mm256_shuffle_epi8(_mm256_set1_epi32((int)bits),
        _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303));
    __m256i lane = _mm256_set1_epi64x((long long)0x8040201008040201ull);
    __m256i on = _mm256_cmpeq_epi8(_mm256_and_si256(spread, lane), lane);
    return _mm256_or_si256(x, _mm256_and_si256(on, _mm256_set1_epi8((char)(1 << bit))));
}
static inline W w_or_bit(W x, const uint8_t* plane, int bit) {
    uint32_t low, high;
    __builtin_memcpy(&low, plane, 4);
    __builtin_memcpy(&high, plane + 4, 4);
    return {bit_half(x.a, low, bit), bit_half(x.b, high, bit)};
}

static inline I i_zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
static inline I i_add(I a, I b) { return {_mm256_add_epi32(a.a, b.a), _mm256_add_epi32(a.b, b.b)}; }
static inline I i_shift(I a, int bits) { return {_mm256_slli_epi32(a.a, bits), _mm256_slli_epi32(a.b, bits)}; }
static inline I i_offset(int32_t negative_sum, int shift) { __m256i v = _mm256_set1_epi32(negative_sum << shift); return {v, v}; }
static inline __m256i dot_half(__m256i acc, __m256i w, __m256i a) {
    return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(w, a), _mm256_set1_epi16(1)));
}
static inline I i_dot(I acc, W w, const int8_t* a) {
    int32_t four;
    __builtin_memcpy(&four, a, 4);
    __m256i v = _mm256_set1_epi32(four);
    return {dot_half(acc.a, w.a, v), dot_half(acc.b, w.b, v)};
}
// maddubs saturates on full unsigned bytes, so the sign moves from the weight to the activation; |a| <= 127 keeps it exact.
static inline I i_start_s8(int32_t) { return i_zero(); }
static inline I i_dot_s8(I acc, W w, const int8_t* a) {
    int32_t four;
    __builtin_memcpy(&four, a, 4);
    __m256i v = _mm256_set1_epi32(four), flip = _mm256_set1_epi8((char)0x80);
    __m256i x = _mm256_xor_si256(w.a, flip), y = _mm256_xor_si256(w.b, flip);
    return {dot_half(acc.a, _mm256_abs_epi8(x), _mm256_sign_epi8(v, x)), dot_half(acc.b, _mm256_abs_epi8(y), _mm256_sign_epi8(v, y))};
}

static inline void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T1); }

}  // namespace SLIP_ISA
