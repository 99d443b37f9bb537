"""What a block drafter reads of its target: RMSNorm of each tap, then one matrix over all of them.

One program owns 16 features for every row and sums over the taps in order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream.kernels.launch import (
    ROWS,
    RUN_ROWS,
    RUN_ROWS_,
    STATE_SIZE,
    Case,
    Cost,
    columns,
    dot,
    launch,
    nbytes,
    poisoned,
    row_tile,
)


def reference(taps: torch.Tensor, norm: torch.Tensor, w: torch.Tensor, eps: float) -> torch.Tensor:
    """taps (taps, rows, k), norm (taps, k), w (hidden, taps * k) -> (rows, hidden) float64."""
    x = taps.double()
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * norm.double()[:, None]
    return x.transpose(0, 1).flatten(1) @ w.double().T


@triton.jit
def fuse_tile(w, features, step, T, K: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr):
    """Columns of step `step`, or of the last, as (PARTS, BK / PARTS, features)."""
    steps: tl.constexpr = (K + BK - 1) // BK
    step = tl.minimum(step, T * steps - 1)
    k = columns(step % steps * BK, BK, PARTS)
    at = w + (features[None, None, :].to(tl.int64) * T + step // steps) * K + k[:, :, None]
    return tl.load(at, mask=(k < K)[:, :, None], other=0.0)


@triton.jit
def kernel(taps, norm, w, out, state, N, T, eps, K: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr,
           R: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    features = tl.program_id(0) * 16 + tl.arange(0, 16)
    rows = tl.arange(0, R)
    following = fuse_tile(w, features, 0, T, K, BK, PARTS)
    if PDL:
        tl.extra.cuda.gdc_wait()
    live = tl.minimum(rows, tl.maximum(tl.load(state + RUN_ROWS_) - 1, 0))  # the others repeat one that runs
    steps: tl.constexpr = (K + BK - 1) // BK  # of a tap
    acc = tl.zeros((PARTS, R, 16), tl.float32)
    rms = tl.zeros((R,), tl.float32)
    for i in tl.range(0, T * steps, num_stages=1):
        w_tile = following
        following = fuse_tile(w, features, i + 1, T, K, BK, PARTS)
        tap, k0 = taps + i // steps * R * K, i % steps * BK
        if k0 == 0:
            square = tl.zeros((R,), tl.float32)
            for k1 in tl.static_range(0, K, BK):
                x = row_tile(tap, live, k1, K, BK, PARTS)
                square += tl.sum(tl.sum(x * x, 2), 0)
            rms = tl.rsqrt(square / K + eps)
        x = row_tile(tap, live, k0, K, BK, PARTS) * row_tile(norm + i // steps * K, rows * 0, k0, K, BK, PARTS)
        acc = dot((x * rms[None, :, None]).to(w.dtype.element_ty), w_tile, acc)
    tl.store(out + rows[:, None] * N + features[None, :], tl.sum(acc, 0))


def fuse(
    taps: torch.Tensor, norm: torch.Tensor, w: torch.Tensor, out: torch.Tensor, state: torch.Tensor, eps: float,
    pdl: bool = False,
) -> None:  # fmt: skip
    """taps (taps, ROWS, k) and norm (taps, k) float32, w (hidden, taps * k) -> out (ROWS, hidden) float32, of the
    rows that run."""
    count, _, k = taps.shape
    bk = min(1024, max(16, triton.next_power_of_2(k)))
    launch(kernel, (w.shape[0] // 16,), taps, norm, w, out, state, w.shape[0], count, eps, pdl=pdl, num_warps=8, K=k,
           BK=bk, PARTS=min(8, bk // 16), R=ROWS)  # fmt: skip


def case(taps: int, k: int, hidden: int, dtype: torch.dtype, device: torch.device, rows: int = ROWS) -> Case:
    x, norm = torch.randn(taps, ROWS, k, device=device) * 30, torch.randn(taps, k, device=device)
    x[:, rows:] = float("nan")
    w = (torch.randn(hidden, taps * k, device=device) / (taps * k) ** 0.5).to(dtype)
    state = torch.zeros(STATE_SIZE, dtype=torch.int32, device=device)
    state[RUN_ROWS] = rows
    out = poisoned(ROWS, hidden, dtype=torch.float32, device=device)
    return Case(
        lambda: fuse(x, norm, w, out, state, 1e-5),
        {"out": out[:rows]},
        lambda: {"out": reference(x[:, :rows], norm, w, 1e-5)},
        Cost(nbytes(x, norm, w, out), 2 * ROWS * w.numel()),
    )
