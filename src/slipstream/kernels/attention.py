"""Split-KV attention: each program reads KV_SPLIT positions of one KV head for all rows and query heads on it.

The query heads of a KV head and the rows are folded into one tile, so keys and values are read once. A program
leaves its part's normalised output and the log of its softmax sum; `projection` merges the parts in order
(Flash-Decoding, Dao et al. 2023).

WHOLE is for the rows of a block draft: each sees all of them, and the text from state[SEEN_FROM] on.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

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
    dot,
    launch,
    nbytes,
    poisoned,
)

BLOCK = 64
"""Positions of a tile."""
SEEN_FROM = 2
"""Of a block draft's own state, behind START and RUN_ROWS."""
BLOCK_: tl.constexpr = tl.constexpr(BLOCK)
SEEN_FROM_: tl.constexpr = tl.constexpr(SEEN_FROM)


def reference(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int, scale: float, window: int | None,
    seen_from: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """q (rows, heads, d), keys (kv_heads, n, d), values (kv_heads, d, n) -> (rows, heads, d) float64."""
    rows, heads, _ = q.shape
    group = heads // keys.shape[0]
    k, v = (t.double().repeat_interleave(group, 0) for t in (keys, values))
    scores = torch.einsum("rhd,hnd->rhn", q.double(), k) * scale
    at = start + torch.arange(rows, device=q.device)[:, None] - torch.arange(keys.shape[1], device=q.device)
    seen = (at >= 0) & (at < (window or 1 << 30))
    if seen_from is not None:
        seen[:], seen[:, :seen_from] = True, False
    return torch.einsum("rhn,hdn->rhd", scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1), v)


@triton.jit
def origin(state, WHOLE: tl.constexpr):
    """The position at which the first part begins: a whole number of tiles from 0, so that loads are aligned."""
    if WHOLE:
        return tl.load(state + SEEN_FROM_) // BLOCK_ * BLOCK_
    return 0


@triton.jit
def attention_kernel(q, keys, values, out, lse, state, capacity, scale, window, HEADS: tl.constexpr,
                     GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, D: tl.constexpr, SPLIT: tl.constexpr,
                     BLOCK: tl.constexpr, R: tl.constexpr, WHOLE: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    kv_head, split = tl.program_id(0), tl.program_id(1)
    start, rows = tl.load(state + START_), tl.load(state + RUN_ROWS_)
    begin = origin(state, WHOLE) + split * SPLIT
    end = tl.minimum(start + rows, begin + SPLIT)
    if (begin < end) & (begin + SPLIT > start - window + 1):
        m = tl.arange(0, R * GROUP_PAD)  # a tile row is (row, query head of the group)
        row, member = m // GROUP_PAD, m % GROUP_PAD
        head = kv_head * GROUP + member
        real = (member < GROUP) & (row < rows)
        d = tl.arange(0, D)
        q_tile = tl.load(q + (row * HEADS + head)[:, None] * D + d[None, :], mask=real[:, None], other=0.0)
        at = (start + row)[:, None]
        top = tl.full((R * GROUP_PAD,), -1e30, tl.float32)  # finite, so that a part without keys subtracts cleanly
        total = tl.zeros((R * GROUP_PAD,), tl.float32)
        acc = tl.zeros((R * GROUP_PAD, D), tl.float32)
        key_base = keys + kv_head * capacity.to(tl.int64) * D
        value_base = values + kv_head * D * capacity.to(tl.int64)
        for n0 in range(begin, end, BLOCK):
            n = n0 + tl.arange(0, BLOCK)
            there = (n < start + rows)[None, :]
            k = tl.load(key_base + n[None, :] * D + d[:, None], mask=there, other=0.0)  # (D, BLOCK)
            v = tl.load(value_base + d[:, None] * capacity.to(tl.int64) + n[None, :], mask=there, other=0.0)
            s = dot(q_tile, k) * scale
            if WHOLE:
                seen = there & (n >= tl.load(state + SEEN_FROM_))[None, :]
            else:
                seen = (n[None, :] <= at) & (n[None, :] > at - window)
            s = tl.where(seen, s, -1e30)
            new_top = tl.maximum(top, tl.max(s, 1))
            p = tl.where(seen, tl.exp(s - new_top[:, None]), 0.0)
            fade = tl.exp(top - new_top)
            total = total * fade + tl.sum(p, 1)
            acc = acc * fade[:, None]
            acc = dot(p.to(v.dtype), tl.trans(v), acc)
            top = new_top
        part = split * R * HEADS + row * HEADS + head
        safe = tl.where(total > 0, total, 1.0)
        tl.store(out + part.to(tl.int64)[:, None] * D + d[None, :], acc / safe[:, None], mask=real[:, None])
        tl.store(lse + part, tl.where(total > 0, top + tl.log(safe), -1e30), mask=real)


def attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    state: torch.Tensor,
    scale: float,
    window: int | None,
    pdl: bool = False,
    whole: bool = False,
) -> None:
    """q (ROWS, heads * d), caches as in `norm_qkv` -> out (splits, ROWS, heads, d) and lse (splits, ROWS, heads),
    float32, written for the splits that hold positions some row sees. The rows' own keys are in the cache."""
    kv_heads, capacity, d = keys.shape
    heads = out.shape[2]
    group = heads // kv_heads
    launch(attention_kernel, (kv_heads, out.shape[0]), q, keys, values, out, lse, state, capacity, scale,
           window or 1 << 30, pdl=pdl, num_warps=4, HEADS=heads, GROUP=group, GROUP_PAD=triton.next_power_of_2(group),
           D=d, SPLIT=KV_SPLIT, BLOCK=BLOCK, R=ROWS, WHOLE=whole)  # fmt: skip


def merge(out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """Reference of what `projection` does with the parts: (splits, rows, heads, d) -> (rows, heads, d)."""
    return (out.double() * lse.double().softmax(0)[..., None]).sum(0)


def case(
    heads: int,
    kv_heads: int,
    d: int,
    dtype: torch.dtype,
    device: torch.device,
    rows: int = ROWS,
    start: int = 300,
    window: int | None = None,
    seen_from: int | None = None,
) -> Case:
    n = start + rows
    splits, scale = -(-n // KV_SPLIT), d**-0.5
    q = torch.randn(ROWS, heads * d, device=device).to(dtype)
    keys = torch.randn(kv_heads, n, d, device=device).to(dtype)
    values = torch.randn(kv_heads, d, n, device=device).to(dtype)
    state = torch.zeros(STATE_SIZE, dtype=torch.int32, device=device)
    state[START], state[RUN_ROWS] = start, rows
    if seen_from is not None:
        state[SEEN_FROM] = seen_from
    out = poisoned(splits, ROWS, heads, d, dtype=torch.float32, device=device)
    lse = poisoned(splits, ROWS, heads, dtype=torch.float32, device=device)
    merged = poisoned(rows, heads, d, dtype=torch.float64, device=device)

    def timed() -> None:
        attention(q, keys, values, out, lse, state, scale, window, whole=seen_from is not None)

    def run() -> None:
        timed()
        first = 0 if window is None else max(0, start - window + 1) // KV_SPLIT
        last = splits if seen_from is None else -(-(n - seen_from // BLOCK * BLOCK) // KV_SPLIT)
        merged.copy_(merge(out[first:last, :rows], lse[first:last, :rows]))

    def expected() -> dict[str, torch.Tensor]:
        return {"out": reference(q[:rows].view(rows, heads, d), keys, values, start, scale, window, seen_from)}

    return Case(run, {"out": merged}, expected, Cost(nbytes(q, keys, values, out), 4 * rows * heads * n * d), timed)
