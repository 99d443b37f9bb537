"""RMSNorm, query/key/value projection with bias and per-head norm, rotary embedding, write to the KV cache.

One program makes HALF pairs of elements of one head: j and j + head_dim / 2, which rotary embedding turns together.
The norm's reciprocal root mean square is one factor a row, so it is applied to the product: the dot product starts
before the sum of squares is known.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream.kernels.formats import Matrix, quantised
from slipstream.kernels.launch import (
    ROWS,
    RUN_ROWS,
    RUN_ROWS_,
    START,
    START_,
    STATE_SIZE,
    Case,
    Cost,
    launch,
    nbytes,
    poisoned,
    row_tile,
)
from slipstream.kernels.matrix import multiply, ones, operands, tile, weight_tile


def reference(
    h: torch.Tensor,
    norm: torch.Tensor,
    w: Matrix,
    bias: torch.Tensor | None,
    head_norm: tuple[torch.Tensor, torch.Tensor] | None,
    cos_sin: torch.Tensor,
    start: int,
    heads: int,
    kv_heads: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """h (rows, hidden), w (qkv, hidden) -> q (rows, heads, d), k and v (rows, kv_heads, d), all float64."""
    h = h.double()
    x = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps) * norm.double()
    y = x @ w.double().T + (0 if bias is None else bias.double())
    q, k, v = y.view(len(h), heads + 2 * kv_heads, -1).split([heads, kv_heads, kv_heads], 1)
    if head_norm is not None:
        q, k = (
            t * torch.rsqrt(t.pow(2).mean(-1, keepdim=True) + eps) * n.double()
            for t, n in zip((q, k), head_norm, strict=True)
        )
    cos, sin = cos_sin.double()[start : start + len(h), None].unbind(2)

    def rotate(t: torch.Tensor) -> torch.Tensor:
        low, high = t.chunk(2, -1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)

    return rotate(q), rotate(k), v


@triton.jit
def norm_qkv_kernel(h, norm, w, scales, bias, q_norm, k_norm, cos_sin, q, keys, values, state, capacity, eps,
                    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
                    BIAS: tl.constexpr, HEAD_NORM: tl.constexpr, K: tl.constexpr, BK: tl.constexpr,
                    PARTS: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr, TYPE: tl.constexpr,
                    R: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    programs: tl.constexpr = D // 2 // HALF
    head = tl.program_id(0) // programs
    first = head * D + tl.program_id(0) % programs * HALF
    j = tl.program_id(0) % programs * HALF + tl.arange(0, HALF)
    low, high = head * D + j, head * D + D // 2 + j
    N: tl.constexpr = (HEADS + 2 * KV_HEADS) * D
    rows = tl.arange(0, R)

    w_low = weight_tile(w, scales, first, N, 0, K, FORMAT, GROUP, TYPE, BK, PARTS, HALF)
    w_high = weight_tile(w, scales, first + D // 2, N, 0, K, FORMAT, GROUP, TYPE, BK, PARTS, HALF)
    scale = row_tile(norm, rows * 0, 0, K, BK, PARTS)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = row_tile(h, rows, 0, K, BK, PARTS)
    square = tl.sum(tl.sum(x * x, 2), 0)
    x = (x * scale).to(TYPE)
    sums, zero = ones(x, FORMAT, HALF), tl.zeros((PARTS, R, HALF), tl.float32)
    acc_low, acc_high = multiply(x, w_low, sums, zero, FORMAT), multiply(x, w_high, sums, zero, FORMAT)
    for k0 in tl.range(BK, K, BK, num_stages=2):
        w_low = weight_tile(w, scales, first, N, k0, K, FORMAT, GROUP, TYPE, BK, PARTS, HALF)
        w_high = weight_tile(w, scales, first + D // 2, N, k0, K, FORMAT, GROUP, TYPE, BK, PARTS, HALF)
        x = row_tile(h, rows, k0, K, BK, PARTS)
        square += tl.sum(tl.sum(x * x, 2), 0)
        x = (x * row_tile(norm, rows * 0, k0, K, BK, PARTS)).to(TYPE)
        sums = ones(x, FORMAT, HALF)
        acc_low = multiply(x, w_low, sums, acc_low, FORMAT)
        acc_high = multiply(x, w_high, sums, acc_high, FORMAT)
    rms = tl.rsqrt(square / K + eps)[:, None]
    a, b = tl.sum(acc_low, 0) * rms, tl.sum(acc_high, 0) * rms  # (rows, HALF)
    if BIAS:
        a += tl.load(bias + low).to(tl.float32)[None, :]
        b += tl.load(bias + high).to(tl.float32)[None, :]

    start = tl.load(state + START_)
    run = (rows < tl.load(state + RUN_ROWS_))[:, None]
    position = start + rows
    if head < HEADS + KV_HEADS:
        if HEAD_NORM:
            head_scale = q_norm if head < HEADS else k_norm
            rms = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D + eps)[:, None]
            a *= rms * tl.load(head_scale + j)[None, :]
            b *= rms * tl.load(head_scale + D // 2 + j)[None, :]
        angle = cos_sin + position[:, None] * D + j[None, :]
        cos, sin = tl.load(angle, mask=run), tl.load(angle + D // 2, mask=run)
        a, b = a * cos - b * sin, b * cos + a * sin
    if head < HEADS:
        at = q + rows[:, None] * (HEADS * D) + low[None, :]
        tl.store(at, a.to(q.dtype.element_ty))
        tl.store(at + D // 2, b.to(q.dtype.element_ty))
    elif head < HEADS + KV_HEADS:
        at = keys + ((head - HEADS) * capacity.to(tl.int64) + position[:, None]) * D + j[None, :]
        tl.store(at, a.to(keys.dtype.element_ty), mask=run)
        tl.store(at + D // 2, b.to(keys.dtype.element_ty), mask=run)
    else:
        at = values + ((head - HEADS - KV_HEADS) * D + j[None, :]) * capacity.to(tl.int64) + position[:, None]
        tl.store(at, a.to(values.dtype.element_ty), mask=run)
        tl.store(at + D // 2 * capacity, b.to(values.dtype.element_ty), mask=run)


def norm_qkv(
    h: torch.Tensor,
    norm: torch.Tensor,
    w: Matrix,
    bias: torch.Tensor | None,
    head_norm: tuple[torch.Tensor, torch.Tensor] | None,
    cos_sin: torch.Tensor,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    state: torch.Tensor,
    eps: float,
    pdl: bool = False,
) -> None:
    """h (ROWS, hidden) float32 -> q (ROWS, heads * d), keys (kv_heads, capacity, d), values (kv_heads, d, capacity).

    cos_sin: (positions, 2, d / 2) float32. Row i stands at position state[START] + i; rows from state[RUN_ROWS] on
    leave the cache alone.
    """
    kv_heads, capacity, d = keys.shape
    heads = q.shape[1] // d
    half = d // 2 if head_norm is not None else 16
    programs = (heads + 2 * kv_heads) * (d // 2 // half)
    launch(norm_qkv_kernel, (programs,), h, norm, *operands(w), h if bias is None else bias,
           *((h, h) if head_norm is None else head_norm), cos_sin, q, keys, values, state, capacity, eps, pdl=pdl,
           num_warps=8, HEADS=heads, KV_HEADS=kv_heads, D=d, HALF=half, BIAS=bias is not None,
           HEAD_NORM=head_norm is not None, **tile(w), R=ROWS)  # fmt: skip


def case(
    hidden: int,
    heads: int,
    kv_heads: int,
    d: int,
    dtype: torch.dtype,
    device: torch.device,
    rows: int = ROWS,
    start: int = 5,
    bias: bool = False,
    head_norm: bool = False,
    format: str = "plain",
) -> Case:
    def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, device=device).to(dtype)

    n, capacity, eps = (heads + 2 * kv_heads) * d, start + ROWS, 1e-5
    h, norm, w = randn(ROWS, hidden), randn(hidden), quantised(randn(n, hidden) / hidden**0.5, format, dtype)
    b = randn(n, dtype=dtype) if bias else None
    scales = (randn(d), randn(d)) if head_norm else None
    cos_sin = randn(capacity, 2, d // 2)
    state = torch.zeros(STATE_SIZE, dtype=torch.int32, device=device)
    state[START], state[RUN_ROWS] = start, rows
    q = poisoned(ROWS, heads * d, dtype=dtype, device=device)
    keys = poisoned(kv_heads, capacity, d, dtype=dtype, device=device)
    values = poisoned(kv_heads, d, capacity, dtype=dtype, device=device)
    window = slice(start, start + rows)

    def expected() -> dict[str, torch.Tensor]:
        eq, ek, ev = reference(h[:rows], norm, w, b, scales, cos_sin, start, heads, kv_heads, eps)
        return {"q": eq.flatten(1), "keys": ek.transpose(0, 1), "values": ev.permute(1, 2, 0)}

    return Case(
        lambda: norm_qkv(h, norm, w, b, scales, cos_sin, q, keys, values, state, eps),
        {"q": q[:rows], "keys": keys[:, window], "values": values[:, :, window]},
        expected,
        Cost(nbytes(h, norm, w) + 2 * ROWS * n, 2 * ROWS * n * hidden),
    )
