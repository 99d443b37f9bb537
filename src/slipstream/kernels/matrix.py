"""The tile of a matrix that a kernel multiplies, whatever the matrix's format.

A tile holds codes, which are exact in 16 bits; a group's scale multiplies its sum in float32, so that nothing is
rounded but the activations. Codes of int4 become float16 subnormals, and those of mxfp4 lack exponent bias: what both
miss is a power of two in the scale.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from slipstream.kernels.formats import FP8, INT4, PLAIN, Matrix, Quantised, tiling
from slipstream.kernels.launch import columns, dot, launch

PLAIN_: tl.constexpr = tl.constexpr(PLAIN)
FP8_: tl.constexpr = tl.constexpr(FP8)
INT4_: tl.constexpr = tl.constexpr(INT4)
TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def tile(matrix: Matrix) -> dict[str, Any]:
    """How kernels take a matrix, as their constants: columns of a tile, the parts that warps sum, format, group."""
    format, group = (matrix.format, matrix.group) if isinstance(matrix, Quantised) else (PLAIN, 1)
    columns, parts = tiling(format, matrix.shape[1])
    return {"K": matrix.shape[1], "BK": columns, "PARTS": parts, "FORMAT": format, "GROUP": group,
            "TYPE": TYPES[matrix.dtype]}  # fmt: skip


def operands(matrix: Matrix) -> tuple[torch.Tensor, torch.Tensor]:
    """What kernels take as a matrix: values or codes, and scales, of which a plain one has none."""
    return (matrix.codes, matrix.scales) if isinstance(matrix, Quantised) else (matrix, matrix)


@triton.jit
def halves(pair):
    """Two float16 that lie in a word of 32 bits, along a new last axis."""
    low = (pair & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    return tl.join(low, (pair >> 16).to(tl.uint16).to(tl.float16, bitcast=True))


@triton.jit
def pairs(word, J: tl.constexpr, FORMAT: tl.constexpr):
    """Columns 2 J and 2 J + 1 of words, as `halves`."""
    if FORMAT == INT4_:
        bits = (word >> 4 * J) & 0x000F000F
    else:
        bits = word << (12 - 4 * J)
        bits = (bits & 0x80008000) | ((bits >> 3) & 0x0E000E00)
    return halves(bits)


@triton.jit
def weight_tile(w, scales, first, N, k0, K: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr,
                TYPE: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr, F: tl.constexpr):  # fmt: skip
    """F features of a matrix (N, K) from `first`, columns k0.., as (PARTS, BK / PARTS, F) of TYPE, with the factor and
    the addend (PARTS, 1, F) of the codes; a plain one's are 1 and 0. Features past N repeat the last."""
    PART: tl.constexpr = BK // PARTS
    features = tl.minimum(first + tl.arange(0, F), N - 1).to(tl.int64)
    if FORMAT == PLAIN_:
        k = columns(k0, BK, PARTS)
        x = tl.load(w + features[None, None, :] * K + k[:, :, None], mask=(k < K)[:, :, None], other=0.0)
    else:
        LOW: tl.constexpr = 8 if PARTS > 8 else PARTS
        HIGH: tl.constexpr = PARTS // LOW
        SIZE: tl.constexpr = BK * (16 if FORMAT == FP8_ else 2)  # bytes or words of 16 features
        tiles = tl.minimum(first // 16 + tl.arange(0, F // 16), (N - 1) // 16).to(tl.int64)
        i = tl.arange(0, SIZE)
        at = w + (tiles[:, None] * tl.cdiv(K, BK) + k0 // BK) * SIZE + i[None, :]
        whole: tl.constexpr = K % BK == 0
        there = None if whole else (k0 + i // (SIZE // LOW) * PART < K)[None, :]
        x = tl.load(at, mask=there, other=None if whole else 0)
        if FORMAT == FP8_:
            x = x.to(tl.float8e4nv, bitcast=True).to(tl.float16)
            x = tl.reshape(x, (F // 16, LOW, 8, 4, HIGH, 2, PART // 16, 4))
            x = tl.permute(x, (4, 1, 6, 3, 7, 0, 5, 2))
        else:
            x = x.to(tl.uint32, bitcast=True)
            x = tl.join(
                tl.join(pairs(x, 0, FORMAT), pairs(x, 2, FORMAT)), tl.join(pairs(x, 1, FORMAT), pairs(x, 3, FORMAT))
            )  # (tiles, SIZE, half, j / 2, j % 2)
            x = tl.reshape(x, (F // 16, LOW, 8, 4, HIGH, 2, 2, 2, 2))
            x = tl.permute(x, (4, 1, 7, 3, 8, 6, 0, 5, 2))
        x = tl.reshape(x, (PARTS, PART, F))
    factor, addend = 1.0, 0.0
    if FORMAT != PLAIN_:
        start = k0 + tl.arange(0, PARTS) * PART
        at = features[None, None, :] * tl.cdiv(K, GROUP) + (start // GROUP)[:, None, None]
        there = (start < K)[:, None, None]
        if FORMAT == FP8_:
            factor = tl.load(scales + at, mask=there, other=0.0)
        elif FORMAT == INT4_:
            factor = tl.load(scales + at * 2, mask=there, other=0.0).to(tl.float32) * 16777216.0  # 2^24
            addend = tl.load(scales + at * 2 + 1, mask=there, other=0.0).to(tl.float32)
        else:  # e8m0 is an exponent of float32, but for 2^14
            exponent = tl.load(scales + at, mask=there, other=0).to(tl.uint32)
            factor = (exponent << 23).to(tl.float32, bitcast=True) * 16384.0
    return x.to(TYPE), factor, addend


@triton.jit
def ones(x, FORMAT: tl.constexpr, N: tl.constexpr):
    """Sums of x (PARTS, rows, columns) over columns, as many times as there are features; only int4 asks."""
    if FORMAT == INT4_:
        half = tl.full((x.shape[0], x.shape[2] // 2, N), 1.0, x.dtype)
        one = tl.permute(tl.join(half, half), (0, 1, 3, 2))  # joined, as codes are, so that x takes one form for both
        return dot(x, tl.reshape(one, (x.shape[0], x.shape[2], N)))
    else:
        return 0.0


@triton.jit
def multiply(x, tile, sums, acc, FORMAT: tl.constexpr):
    """acc + x times a tile of `weight_tile`. sums: x's `ones`."""
    w, factor, addend = tile
    if FORMAT == PLAIN_:
        acc = dot(x, w, acc)
    else:
        acc += dot(x, w) * factor
    if FORMAT == INT4_:
        acc += sums * addend
    return acc


@triton.jit
def dense_kernel(w, scales, out, N, K: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr, FORMAT: tl.constexpr,
                 GROUP: tl.constexpr, TYPE: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    first, k0 = tl.program_id(0) * 16, tl.program_id(1) * BK
    x, factor, addend = weight_tile(w, scales, first, N, k0, K, FORMAT, GROUP, TYPE, BK, PARTS, 16)
    k, features = columns(k0, BK, PARTS), first + tl.arange(0, 16)
    at = out + features[None, None, :].to(tl.int64) * K + k[:, :, None]
    y = x.to(tl.float32) * factor + addend
    tl.store(at, y.to(out.dtype.element_ty), mask=(k < K)[:, :, None] & (features < N)[None, None, :])


def dense(matrix: Matrix) -> torch.Tensor:
    """The values as a tensor, codes rounded to the matrix's `dtype`."""
    if isinstance(matrix, torch.Tensor):
        return matrix
    n, k = matrix.shape
    out = torch.empty(n, k, dtype=matrix.dtype, device=matrix.codes.device)
    constants = tile(matrix)
    grid = (triton.cdiv(n, 16), triton.cdiv(k, constants["BK"]))
    launch(dense_kernel, grid, *operands(matrix), out, n, pdl=False, **constants)
    return out
