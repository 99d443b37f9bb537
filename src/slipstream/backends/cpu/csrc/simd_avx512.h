// The 16-lane vector vocabulary on AVX-512 with VNNI. simd_portable.h says what each word means.
#pragma once
#include <immintrin.h>
#include <stdint.h>

#define SLIP_ISA_NAME "avx512-vnni"

namespace SLIP_ISA {

using F = __m512;
using I = __m512i;
using W = __m512i;
using Mask = __mmask16;

static inline F f_zero() { return _mm512_setzero_ps(); }
static inline F f_set(float x) { return _mm512_set1_ps(x); }
static inline F f_load(const float* p) { return _mm512_loadu_ps(p); }
static inline void f_store(float* p, F x) { _mm512_storeu_ps(p, x); }
static inline F f_add(F a, F b) { return _mm512_add_ps(a, b); }
static inline F f_sub(F a, F b) { return _mm512_sub_ps(a, b); }
static inline F f_mul(F a, F b) { return _mm512_mul_ps(a, b); }
static inline F f_div(F a, F b) { return _mm512_div_ps(a, b); }
static inline F f_fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
static inline F f_max(F a, F b) { return _mm512_max_ps(a, b); }
static inline F f_min(F a, F b) { return _mm512_min_ps(a, b); }
static inline F f_abs(F a) { return _mm512_abs_ps(a); }
static inline F f_round(F a) { return _mm512_roundscale_ps(a, 0); }
static inline F f_from_i(I a) { return _mm512_cvtepi32_ps(a); }
static inline float f_sum(F a) { return _mm512_reduce_add_ps(a); }
static inline float f_top(F a) { return _mm512_reduce_max_ps(a); }
static inline F f_pow2(F n) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23)); }
static inline F f_load_f16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
static inline F f_load_bf16(const uint16_t* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
static inline void f_store_f16(uint16_t* p, F x) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(x, 0)); }
static inline F f_load_e4m3(const uint8_t* p) {
    const __m256i b = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p));
    return _mm512_cvtph_ps(_mm256_or_si256(_mm256_slli_epi16(_mm256_and_si256(b, _mm256_set1_epi16(128)), 8),
                                           _mm256_slli_epi16(_mm256_and_si256(b, _mm256_set1_epi16(127)), 7)));
}
static inline F f_load_u8(const uint8_t* p) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p))); }
static inline F f_load_s8(const uint8_t* p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p))); }
static inline void f_store_s8(int8_t* p, F x) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x))); }

static inline Mask m_between(int lo, int hi) {  // lanes lo <= lane < hi
    uint32_t below_hi = hi >= 16 ? 0xffffu : hi <= 0 ? 0u : (1u << hi) - 1;
    uint32_t below_lo = lo >= 16 ? 0xffffu : lo <= 0 ? 0u : (1u << lo) - 1;
    return (Mask)(below_hi & ~below_lo);
}
static inline F f_select(Mask m, F yes, F no) { return _mm512_mask_blend_ps(m, no, yes); }

static inline W w_load(const uint8_t* p) { return _mm512_loadu_si512(p); }
static inline W w_low(W x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
static inline W w_high(W x) { return _mm512_and_si512(_mm512_srli_epi16(x, 4), _mm512_set1_epi8(15)); }
static inline W w_lookup(W x, const uint8_t* table) { return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table)), x); }
static inline W w_or_bit(W x, const uint8_t* plane, int bit) {
    uint64_t mask;
    __builtin_memcpy(&mask, plane, 8);
    return _mm512_mask_add_epi8(x, mask, x, _mm512_set1_epi8((char)(1 << bit)));
}

static inline I i_zero() { return _mm512_setzero_si512(); }
static inline I i_add(I a, I b) { return _mm512_add_epi32(a, b); }
static inline I i_shift(I a, int bits) { return _mm512_slli_epi32(a, bits); }
static inline I i_offset(int32_t negative_sum, int shift) { return _mm512_slli_epi32(_mm512_set1_epi32(negative_sum), shift); }
static inline I i_dot(I acc, W w, const int8_t* a) {
    // In assembly, since compilers load the broadcast by an instruction of its own, which is half of the inner loop.
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(w), "m"(*(const int32_t(*)[1])a));
    return acc;
}
// VNNI multiplies unsigned by signed: stored bytes are weight + 128, and the start takes 128 * sum(a) back.
static inline I i_start_s8(int32_t negative_sum) { return i_offset(negative_sum, 7); }
static inline I i_dot_s8(I acc, W w, const int8_t* a) { return i_dot(acc, w, a); }

static inline void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T1); }

}  // namespace SLIP_ISA
