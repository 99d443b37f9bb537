"""Projection back into the residual stream: of attention, whose parts it merges first, and of the feed-forward.

One program owns 16 features of the stream for every row and sums over all of K, so no partial sums leave it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream.kernels import attention
from slipstream.kernels.formats import Matrix, quantised
from slipstream.kernels.launch import (
    KV_SPLIT,
    ROWS,
    RUN_ROWS,
    RUN_ROWS_,
    START,
    START_,
    STATE_SIZE,
    Case,
    Cost,
    columns,
    launch,
    nbytes,
    row_tile,
)
from slipstream.kernels.matrix import multiply, ones, operands, tile, weight_tile


def reference(x: torch.Tensor, w: Matrix, h: torch.Tensor) -> torch.Tensor:
    """x (rows, k), w (hidden, k), h (rows, hidden) -> h + x w^T in float64."""
    return h.double() + x.double() @ w.double().T


@triton.jit
def merged_tile(x, lse, rows, k0, K, first, last, D: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr,
                R: tl.constexpr):  # fmt: skip
    """Attention output as (PARTS, rows, BK / PARTS): parts first..last weighted by their share of the softmax sum."""
    k = columns(k0, BK, PARTS)
    there = (k < K)[:, None, :]
    head_at = rows[None, :, None] * (K // D) + (k // D)[:, None, :]
    at = rows[None, :, None] * K + k[:, None, :]
    top = tl.full((PARTS, R, BK // PARTS), -1e30, tl.float32)
    for s in range(first, last):
        top = tl.maximum(top, tl.load(lse + s * R * (K // D) + head_at, mask=there, other=-1e30))
    total = tl.zeros((PARTS, R, BK // PARTS), tl.float32)
    acc = tl.zeros((PARTS, R, BK // PARTS), tl.float32)
    for s in range(first, last):
        share = tl.exp(tl.load(lse + s * R * (K // D) + head_at, mask=there, other=-1e30) - top)
        total += share
        acc += share * tl.load(x + s * R * K + at, mask=there, other=0.0)
    return acc / total


@triton.jit
def projection_kernel(x, lse, w, scales, h, state, N, window, MERGE: tl.constexpr, D: tl.constexpr,
                      SPLIT: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr,
                      FORMAT: tl.constexpr, GROUP: tl.constexpr, TYPE: tl.constexpr, R: tl.constexpr,
                      PDL: tl.constexpr):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    first = tl.program_id(0) * 16
    rows = tl.arange(0, R)
    w_tile = weight_tile(w, scales, first, N, 0, K, FORMAT, GROUP, TYPE, BK, PARTS, 16)
    if PDL:
        tl.extra.cuda.gdc_wait()
    run = tl.load(state + RUN_ROWS_)
    live = tl.minimum(rows, tl.maximum(run - 1, 0))  # rows that do not run repeat one that does
    start = tl.load(state + START_)
    begin, end = tl.maximum(start - window + 1, 0) // SPLIT, tl.cdiv(start + tl.maximum(run, 1), SPLIT)
    if MERGE:
        x_tile = merged_tile(x, lse, live, 0, K, begin, end, D, BK, PARTS, R)
    else:
        x_tile = row_tile(x, live, 0, K, BK, PARTS)
    x_tile = x_tile.to(TYPE)
    acc = multiply(x_tile, w_tile, ones(x_tile, FORMAT, 16), tl.zeros((PARTS, R, 16), tl.float32), FORMAT)
    for k0 in tl.range(BK, K, BK, num_stages=2):
        w_tile = weight_tile(w, scales, first, N, k0, K, FORMAT, GROUP, TYPE, BK, PARTS, 16)
        if MERGE:
            x_tile = merged_tile(x, lse, live, k0, K, begin, end, D, BK, PARTS, R)
        else:
            x_tile = row_tile(x, live, k0, K, BK, PARTS)
        x_tile = x_tile.to(TYPE)
        acc = multiply(x_tile, w_tile, ones(x_tile, FORMAT, 16), acc, FORMAT)
    at = h + rows[:, None] * N + first + tl.arange(0, 16)[None, :]
    mask = (rows < run)[:, None]
    tl.store(at, tl.load(at, mask=mask) + tl.sum(acc, 0), mask=mask)


def attention_projection(
    parts: torch.Tensor, lse: torch.Tensor, w: Matrix, h: torch.Tensor, state: torch.Tensor,
    window: int | None, pdl: bool = False,
) -> None:  # fmt: skip
    """Attention's parts (splits, ROWS, heads, d) and lse, w (hidden, heads * d): h (ROWS, hidden) += merged w^T."""
    n = w.shape[0]
    launch(projection_kernel, (n // 16,), parts, lse, *operands(w), h, state, n, window or 1 << 30, pdl=pdl,
           num_warps=8, MERGE=True, D=parts.shape[3], SPLIT=KV_SPLIT, **tile(w), R=ROWS)  # fmt: skip


def projection(x: torch.Tensor, w: Matrix, h: torch.Tensor, state: torch.Tensor, pdl: bool = False) -> None:
    """x (ROWS, k), w (hidden, k): h (ROWS, hidden) += x w^T, for the rows that run."""
    n = w.shape[0]
    launch(projection_kernel, (n // 16,), x, x, *operands(w), h, state, n, 1 << 30, pdl=pdl, num_warps=8, MERGE=False,
           D=1, SPLIT=KV_SPLIT, **tile(w), R=ROWS)  # fmt: skip


def case(
    hidden: int, k: int, dtype: torch.dtype, device: torch.device, rows: int = ROWS, splits: int = 0, d: int = 16,
    format: str = "plain",
) -> Case:  # fmt: skip
    """splits: parts of attention to merge first; 0 is the feed-forward's projection."""
    w = quantised(torch.randn(hidden, k, device=device) / k**0.5, format, dtype)
    before = torch.randn(ROWS, hidden, device=device)
    h = before.clone()
    state = torch.zeros(STATE_SIZE, dtype=torch.int32, device=device)
    state[START], state[RUN_ROWS] = max(0, splits * KV_SPLIT - rows), rows
    x = torch.randn(ROWS, k, device=device).to(dtype)
    parts = torch.randn(splits, ROWS, k // d, d, device=device)
    lse = torch.randn(splits, ROWS, k // d, device=device)

    def timed() -> None:
        if splits:
            attention_projection(parts, lse, w, h, state, None)
        else:
            projection(x, w, h, state)

    def run() -> None:
        h.copy_(before)
        timed()

    def expected() -> dict[str, torch.Tensor]:
        inputs = attention.merge(parts, lse).flatten(1) if splits else x
        return {"h": reference(inputs[:rows], w, before[:rows])}

    return Case(run, {"h": h[:rows]}, expected, Cost(nbytes(w, x, h, h), 2 * ROWS * hidden * k), timed)
