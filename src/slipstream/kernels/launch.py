"""What the kernels share: launching with or without PDL, tiles of rows, cost and bench cases."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

ROWS = 16
"""Rows of every pass: the tensor cores' tile."""

KV_SPLIT = 256
"""Positions one attention program reads. A size, not a count, so that nothing depends on the context's length."""

START, RUN_ROWS, LEFT, ROUND, DRAFTS, STOPS, TOP_K, CAPACITY, MATCHED, TRUST, FIRST_STOP = range(11)
"""Slots of `state` (int32): position of row 0; rows of this pass, 0 once done; tokens still allowed; rounds so far;
most drafts a round; how many stop tokens; top-k; positions of the cache; how long a match the suffix drafter found and
the least that it is preferred with to the block drafter; then the stop tokens themselves."""
MAX_STOPS = 16
STATE_SIZE = FIRST_STOP + MAX_STOPS

START_: tl.constexpr = tl.constexpr(START)
RUN_ROWS_: tl.constexpr = tl.constexpr(RUN_ROWS)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
UPCAST_: tl.constexpr = tl.constexpr(INTERPRETED)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, pdl: bool, num_warps: int = 4, **constants: Any) -> None:
    """Run a Triton kernel whose last constant is PDL."""
    options = {} if INTERPRETED else {"launch_pdl": pdl, "num_warps": num_warps}
    kernel[grid](*args, **constants, PDL=pdl and not INTERPRETED, **options)


@dataclass(frozen=True)
class Cost:
    """Bytes an operation must move through memory (each input read once, each output written once) and its FLOPs."""

    bytes: int
    flops: int


@dataclass(frozen=True)
class Case:
    """One operation on random inputs: the hook by which tests check a kernel and the bench times it.

    outputs: what `run` writes, poisoned with NaN before; expected: the same in float64 by the reference.
    timed: the kernel alone, where `run` does more.
    """

    run: Callable[[], None]
    outputs: dict[str, torch.Tensor]
    expected: Callable[[], dict[str, torch.Tensor]]
    cost: Cost
    timed: Callable[[], None] | None = None


def nbytes(*tensors: Any) -> int:
    return sum(t.nbytes for t in tensors)


def poisoned(*shape: int, dtype: torch.dtype, device: Any) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


@triton.jit
def columns(k0, BK: tl.constexpr, PARTS: tl.constexpr):
    """The tile's column numbers (PARTS, BK / PARTS): every part is one warp's share of the sum."""
    part: tl.constexpr = BK // PARTS
    return k0 + tl.arange(0, PARTS)[:, None] * part + tl.arange(0, part)[None, :]


@triton.jit
def row_tile(x, rows, k0, K, BK: tl.constexpr, PARTS: tl.constexpr):
    """Rows `rows` of x (.., K), columns k0.. as (PARTS, rows, BK / PARTS)."""
    k = columns(k0, BK, PARTS)
    at = x + rows[None, :, None] * K + k[:, None, :]
    return tl.load(at, mask=(k < K)[:, None, :], other=0.0)


@triton.jit
def dot(a, b, acc=None):
    """a b, onto acc where given, summed in float32. The interpreter cannot multiply bfloat16: it widens first."""
    if UPCAST_:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")
