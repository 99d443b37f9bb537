// A weight matrix in memory: the file's own bits, reordered so that a vector lane is an output channel.
//
// Sixteen rows form a group. A group is a sequence of records, each `record_k` columns of all sixteen rows: first their
// scales, then the quantised bytes, ordered so that one 64-byte load holds four consecutive columns of every row - the
// operand of one dot-product instruction. Nothing is requantised; bytes a weight stay those of the file (rounded to lines).
#pragma once
#include <stddef.h>
#include <stdint.h>

enum Format : int32_t { F32 = 0, F16, BF16, Q8_0, Q4_0, Q4_1, Q4_K, Q5_K, Q6_K, MXFP4, F8_E4M3, FORMATS };

struct FormatInfo {
    const char* name;
    int block_k, block_bytes;    // in the file
    int record_k, record_bytes;  // in memory, for sixteen rows
    bool quantised;              // whether activations are quantised to meet it
};

// record_bytes = scales + bytes. Q8_0, Q4_x and MXFP4 records pair two blocks so that records stay whole cache lines.
constexpr FormatInfo FORMAT[FORMATS] = {
    {"F32", 1, 4, 1, 64, false},
    {"F16", 1, 2, 2, 64, false},
    {"BF16", 1, 2, 2, 64, false},
    {"Q8_0", 32, 34, 64, 64 + 1024, true},
    {"Q4_0", 32, 18, 64, 64 + 512, true},
    {"Q4_1", 32, 20, 64, 128 + 512, true},
    {"Q4_K", 256, 144, 256, 64 + 256 + 2048, true},
    {"Q5_K", 256, 176, 256, 64 + 256 + 2048 + 512, true},
    {"Q6_K", 256, 210, 256, 64 + 256 + 2048 + 1024, true},
    {"MXFP4", 32, 17, 64, 64 + 512, true},
    {"F8_E4M3", 128, 132, 128, 64 + 2048, false},  // given as a float and 128 bytes for every 128 columns
};

// e2m1 (OCP Microscaling 1.0) by its code: twice the value, and E2M1_ZERO more, so that it is an unsigned byte.
constexpr int E2M1_ZERO = 16;
constexpr uint8_t E2M1[16] = {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4};

struct Matrix {
    Format format;
    int rows, cols;          // logical
    int groups, records;     // rows / 16 rounded up; cols / record_k rounded up; the rest is zero
    uint8_t* data = nullptr; // 64-byte aligned

    const FormatInfo& info() const { return FORMAT[format]; }
    size_t group_bytes() const { return (size_t)records * info().record_bytes; }
    size_t bytes() const { return groups * group_bytes(); }
    const uint8_t* group(int g) const { return data + g * group_bytes(); }
};

// A matrix of this shape without data.
Matrix matrix_shape(Format format, int rows, int cols);

// Reorders rows [row0, row0 + n) given in the file's format into an allocated matrix; row0 is a multiple of 16.
void matrix_pack(Matrix& m, int row0, int n, const uint8_t* raw);

// The given rows of a matrix as a matrix of its own; `to` has its shape and memory. Bits stay as they are.
void matrix_take(Matrix& to, const Matrix& from, const int32_t* rows);

// One row as floats, out[cols].
void matrix_row(const Matrix& m, int row, float* out);
