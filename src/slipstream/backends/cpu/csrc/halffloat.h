// IEEE half precision <-> float in plain integer arithmetic, round to nearest even. Every F16 lane conversion without
// hardware support, and every scalar one, goes through these.
#pragma once
#include <stdint.h>
#include <string.h>

static inline float half_to_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, magnitude = h & 0x7fff, bits;
    if (magnitude >= 0x7c00) bits = sign | 0x7f800000u | ((magnitude & 0x3ff) << 13);
    else if (magnitude >= 0x400) bits = sign | ((magnitude << 13) + 0x38000000u);
    else {  // subnormal: exact in float
        float f = (float)magnitude * 5.9604644775390625e-08f;
        memcpy(&bits, &f, 4);
        bits |= sign;
    }
    float out;
    memcpy(&out, &bits, 4);
    return out;
}

static inline uint16_t float_to_half(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    uint32_t sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000u) return (uint16_t)(sign | 0x7e00);
    if (magnitude >= 0x47800000u) return (uint16_t)(sign | 0x7c00);
    if (magnitude < 0x38800000u) {  // subnormal half: let the float adder round at 2^-24
        float scaled, magic = 0.5f;
        memcpy(&scaled, &magnitude, 4);
        scaled += magic;
        memcpy(&bits, &scaled, 4);
        return (uint16_t)(sign | (bits - 0x3f000000u));
    }
    uint32_t rounded = magnitude + 0xfff + ((magnitude >> 13) & 1) - 0x38000000u;
    return (uint16_t)(sign | (rounded >> 13));
}
