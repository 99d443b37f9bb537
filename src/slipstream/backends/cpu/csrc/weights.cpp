#include "weights.h"

#include <math.h>
#include <string.h>

#include "halffloat.h"

Matrix matrix_shape(Format format, int rows, int cols) {
    const FormatInfo& f = FORMAT[format];
    Matrix m{format, rows, cols, (rows + 15) / 16, (cols + f.record_k - 1) / f.record_k};
    return m;
}

namespace {

constexpr int BYTES_AT = 64 + 256;  // K-quants: d and dmin, then sixteen 16-byte scale rows, then the bytes

// Four columns of one lane start at this byte of a 32-column step; low nibbles hold steps 0-3, high nibbles 4-7.
inline int spot(int step, int lane) { return (step & 3) * 64 + lane * 4; }

void pack_words(uint8_t* to, const uint8_t* from, int words, int lane, uint8_t flip) {
    for (int w = 0; w < words; w++)
        for (int b = 0; b < 4; b++) to[w * 64 + lane * 4 + b] = from[w * 4 + b] ^ flip;
}

// Q4_0 / Q4_1 / MXFP4 nibble order (low: columns 0-15, high: 16-31) is already that of a step pair.
void pack_block(Format format, uint8_t* rec, int half, const uint8_t* block, int lane) {
    if (format == MXFP4) {
        rec[half * 16 + lane] = block[0];
        return pack_words(rec + 64 + half * 256, block + 1, 4, lane, 0);
    }
    uint8_t* scales = rec + half * 32 + lane * 2;
    memcpy(scales, block, 2);
    switch (format) {
        case Q8_0: pack_words(rec + 64 + half * 512, block + 2, 8, lane, 0x80); break;
        case Q4_0: pack_words(rec + 64 + half * 256, block + 2, 4, lane, 0); break;
        default:
            memcpy(scales + 64, block + 2, 2);
            pack_words(rec + 128 + half * 256, block + 4, 4, lane, 0);
    }
}

void put(uint8_t* bytes, int k, int lane, int value, int planes) {  // column k of a 256-column record
    int block = k / 32, within = k % 32, step = within / 4, byte = within % 4;
    uint8_t* at = bytes + block * 256 + spot(step, lane) + byte;
    *at |= (uint8_t)((value & 15) << (step >= 4 ? 4 : 0));
    for (int p = 0; p < planes; p++)
        if (value >> (4 + p) & 1) {
            int bit = lane * 4 + byte;
            bytes[2048 + p * 512 + (block * 8 + step) * 8 + bit / 8] |= (uint8_t)(1 << (bit % 8));
        }
}

int get(const uint8_t* bytes, int k, int lane, int planes) {
    int block = k / 32, within = k % 32, step = within / 4, byte = within % 4;
    int value = bytes[block * 256 + spot(step, lane) + byte] >> (step >= 4 ? 4 : 0) & 15;
    for (int p = 0; p < planes; p++) {
        int bit = lane * 4 + byte;
        value |= (bytes[2048 + p * 512 + (block * 8 + step) * 8 + bit / 8] >> (bit % 8) & 1) << (4 + p);
    }
    return value;
}

// The 6-bit scales and minimums of Q4_K and Q5_K: eight of each in twelve bytes (ggml's block layout).
void k_scale(const uint8_t* packed, int j, int& scale, int& minimum) {
    if (j < 4) {
        scale = packed[j] & 63;
        minimum = packed[j + 4] & 63;
    } else {
        scale = (packed[j + 4] & 15) | (packed[j - 4] >> 6) << 4;
        minimum = (packed[j + 4] >> 4) | (packed[j] >> 6) << 4;
    }
}

void pack_k(Format format, uint8_t* rec, const uint8_t* block, int lane) {
    uint8_t *scales = rec + 64, *bytes = rec + BYTES_AT;
    if (format == Q6_K) {
        memcpy(rec + lane * 2, block + 208, 2);
        for (int j = 0; j < 16; j++) scales[j * 16 + lane] = block[192 + j];
        for (int k = 0; k < 256; k++) {
            int half = k / 128, within = k % 128, column = within % 32, quarter = within / 32;
            int low = block[half * 64 + (quarter & 1) * 32 + column] >> (quarter >= 2 ? 4 : 0) & 15;
            int high = block[128 + half * 32 + column] >> (2 * quarter) & 3;
            put(bytes, k, lane, low | high << 4, 2);
        }
        return;
    }
    memcpy(rec + lane * 2, block, 2);
    memcpy(rec + 32 + lane * 2, block + 2, 2);
    for (int j = 0; j < 8; j++) {
        int scale, minimum;
        k_scale(block + 4, j, scale, minimum);
        scales[j * 16 + lane] = (uint8_t)scale;
        scales[128 + j * 16 + lane] = (uint8_t)minimum;
    }
    const uint8_t* nibbles = block + (format == Q4_K ? 16 : 48);
    for (int k = 0; k < 256; k++) {
        int value = nibbles[k / 64 * 32 + k % 32] >> (k % 64 >= 32 ? 4 : 0) & 15;
        if (format == Q5_K) value |= (block[16 + k % 32] >> (k / 32) & 1) << 4;
        put(bytes, k, lane, value, format == Q5_K ? 1 : 0);
    }
}

}  // namespace

void matrix_pack(Matrix& m, int row0, int n, const uint8_t* raw) {
    const FormatInfo& f = m.info();
    const int blocks = (m.cols + f.block_k - 1) / f.block_k;
    for (int row = row0; row < row0 + n; row++) {
        uint8_t* group = m.data + (row / 16) * m.group_bytes();
        const int lane = row % 16;
        for (int b = 0; b < blocks; b++, raw += f.block_bytes) {
            if (m.format == F8_E4M3) {
                uint8_t* rec = group + (size_t)b * f.record_bytes;
                memcpy(rec + lane * 4, raw, 4);
                for (int k = 0; k < f.record_k; k++) rec[64 + k * 16 + lane] = raw[4 + k];
            } else if (!f.quantised) {
                memcpy(group + ((size_t)b * 16 + lane) * f.block_bytes, raw, f.block_bytes);
            } else if (f.block_k == 32) {
                pack_block(m.format, group + (size_t)(b / 2) * f.record_bytes, b % 2, raw, lane);
            } else {
                pack_k(m.format, group + (size_t)b * f.record_bytes, raw, lane);
            }
        }
    }
}

void matrix_take(Matrix& to, const Matrix& from, const int32_t* rows) {
    const FormatInfo& f = from.info();
    for (int row = 0; row < to.rows; row++) {
        const uint8_t* source = from.group(rows[row] / 16);
        uint8_t* target = to.data + (row / 16) * to.group_bytes();
        const int a = rows[row] % 16, b = row % 16;
        // Whatever a record holds, it holds for sixteen lanes in a row: `n` bytes each, `times` over.
        auto copy = [&](int n, int times) {
            for (int i = 0; i < times; i++, source += 16 * n, target += 16 * n) memcpy(target + b * n, source + a * n, n);
        };
        for (int i = 0; i < from.records; i++) {
            if (from.format == F8_E4M3) copy(4, 1), copy(1, f.record_k);
            else if (from.format == MXFP4) copy(1, 2), source += 32, target += 32, copy(4, 8);
            else if (!f.quantised) copy(f.block_bytes, f.record_k);
            else if (f.block_k == 32) {
                const int scales = f.record_k / f.block_k * (from.format == Q4_1 ? 2 : 1);
                copy(2, scales);
                copy(4, (f.record_bytes - scales * 32) / 64);
            } else {
                copy(2, 2);
                copy(1, 16);
                copy(4, 32);
                for (int left = f.record_bytes - BYTES_AT - 2048; left > 0; left -= 8, source += 8, target += 8) {  // planes: a lane is four bits
                    const int bits = source[a / 2] >> (a % 2 * 4) & 15;
                    target[b / 2] |= (uint8_t)(bits << (b % 2 * 4));
                }
            }
        }
    }
}

static float f16_at(const uint8_t* p) {
    uint16_t h;
    memcpy(&h, p, 2);
    return half_to_float(h);
}

// The most common embedding, and a drafter reads one for every guess: without the divisions of the general case.
static void q8_row(const Matrix& m, const uint8_t* rec, int lane, float* out) {
    for (int k = 0; k < m.cols; k += 64, rec += FORMAT[Q8_0].record_bytes)
        for (int half = 0; half < 2 && k + half * 32 < m.cols; half++) {
            const float d = f16_at(rec + half * 32 + lane * 2);
            for (int step = 0; step < 8; step++)
                for (int byte = 0; byte < 4; byte++)
                    out[k + half * 32 + step * 4 + byte] = d * (int8_t)(rec[64 + half * 512 + step * 64 + lane * 4 + byte] ^ 0x80);
        }
}

static float e4m3_value(uint8_t b) { return half_to_float((uint16_t)((b & 128) << 8 | (b & 127) << 7)) * 256; }

void matrix_row(const Matrix& m, int row, float* out) {
    const FormatInfo& f = m.info();
    const uint8_t* group = m.group(row / 16);
    const int lane = row % 16;
    if (m.format == Q8_0) return q8_row(m, group, lane, out);
    for (int k = 0; k < m.cols; k++) {
        if (m.format == F32) memcpy(out + k, group + ((size_t)k * 16 + lane) * 4, 4);
        else if (m.format == F16) out[k] = f16_at(group + ((size_t)k * 16 + lane) * 2);
        else if (m.format == BF16) {
            out[k] = 0.f;
            memcpy((uint8_t*)(out + k) + 2, group + ((size_t)k * 16 + lane) * 2, 2);
        } else {
            const uint8_t* rec = group + (size_t)(k / f.record_k) * f.record_bytes;
            const int at = k % f.record_k, half = at / 32, within = at % 32, step = within / 4, byte = within % 4;
            if (m.format == F8_E4M3) {
                memcpy(out + k, rec + lane * 4, 4);
                out[k] *= e4m3_value(rec[64 + at * 16 + lane]);
                continue;
            }
            if (m.format == MXFP4) {
                const int code = rec[64 + half * 256 + spot(step, lane) + byte] >> (step >= 4 ? 4 : 0) & 15;
                out[k] = ldexpf((float)(E2M1[code] - E2M1_ZERO), rec[half * 16 + lane] - 128);
                continue;
            }
            const float d = f16_at(rec + (f.record_k == 64 ? half * 32 : 0) + lane * 2);
            switch (m.format) {
                case Q4_0:
                case Q4_1: {
                    const uint8_t* bytes = rec + (m.format == Q4_0 ? 64 : 128) + half * 256;
                    const int q = bytes[spot(step, lane) + byte] >> (step >= 4 ? 4 : 0) & 15;
                    out[k] = m.format == Q4_0 ? d * (q - 8) : d * q + f16_at(rec + 64 + half * 32 + lane * 2);
                    break;
                }
                case Q6_K: out[k] = d * (int8_t)rec[64 + at / 16 * 16 + lane] * (get(rec + BYTES_AT, at, lane, 2) - 32); break;
                default: {
                    const float low = f16_at(rec + 32 + lane * 2) * rec[64 + 128 + at / 32 * 16 + lane];
                    out[k] = d * rec[64 + at / 32 * 16 + lane] * get(rec + BYTES_AT, at, lane, m.format == Q5_K) - low;
                }
            }
        }
    }
}
