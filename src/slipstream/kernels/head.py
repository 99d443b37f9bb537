"""Final RMSNorm and language-model head: the logits of every row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream.kernels.formats import Matrix, quantised
from slipstream.kernels.launch import ROWS, Case, Cost, launch, nbytes, poisoned, row_tile
from slipstream.kernels.matrix import multiply, ones, operands, tile, weight_tile


def reference(h: torch.Tensor, norm: torch.Tensor, w: Matrix, eps: float) -> torch.Tensor:
    """h (rows, hidden), w (vocab, hidden) -> (rows, vocab) float64."""
    h = h.double()
    return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps) * norm.double()) @ w.double().T


@triton.jit
def head_kernel(h, norm, w, scales, out, N, eps, BN: tl.constexpr, K: tl.constexpr, BK: tl.constexpr,
                PARTS: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr, TYPE: tl.constexpr, R: tl.constexpr,
                PDL: tl.constexpr):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    first = tl.program_id(0) * BN
    rows = tl.arange(0, R)
    w_tile = weight_tile(w, scales, first, N, 0, K, FORMAT, GROUP, TYPE, BK, PARTS, BN)
    scale = row_tile(norm, rows * 0, 0, K, BK, PARTS)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = row_tile(h, rows, 0, K, BK, PARTS)
    square = tl.sum(tl.sum(x * x, 2), 0)
    x = (x * scale).to(TYPE)
    acc = multiply(x, w_tile, ones(x, FORMAT, BN), tl.zeros((PARTS, R, BN), tl.float32), FORMAT)
    for k0 in tl.range(BK, K, BK, num_stages=2):
        w_tile = weight_tile(w, scales, first, N, k0, K, FORMAT, GROUP, TYPE, BK, PARTS, BN)
        x = row_tile(h, rows, k0, K, BK, PARTS)
        square += tl.sum(tl.sum(x * x, 2), 0)
        x = (x * row_tile(norm, rows * 0, k0, K, BK, PARTS)).to(TYPE)
        acc = multiply(x, w_tile, ones(x, FORMAT, BN), acc, FORMAT)
    y = tl.sum(acc, 0) * tl.rsqrt(square / K + eps)[:, None]
    features = first + tl.arange(0, BN)
    tl.store(out + rows[:, None] * N + features[None, :], y, mask=(features < N)[None, :])


def head(h: torch.Tensor, norm: torch.Tensor, w: Matrix, out: torch.Tensor, eps: float, pdl: bool = False) -> None:
    """h (ROWS, hidden) float32, w (vocab, hidden) -> out (ROWS, vocab) float32."""
    n = w.shape[0]
    launch(head_kernel, (triton.cdiv(n, 32),), h, norm, *operands(w), out, n, eps, pdl=pdl, num_warps=8, BN=32,
           **tile(w), R=ROWS)  # fmt: skip


def case(hidden: int, vocab: int, dtype: torch.dtype, device: torch.device, format: str = "plain") -> Case:
    h, norm = torch.randn(ROWS, hidden, device=device), torch.randn(hidden, device=device)
    w = quantised(torch.randn(vocab, hidden, device=device) / hidden**0.5, format, dtype)
    out = poisoned(ROWS, vocab, dtype=torch.float32, device=device)
    return Case(
        lambda: head(h, norm, w, out, 1e-5),
        {"out": out},
        lambda: {"out": reference(h, norm, w, 1e-5)},
        Cost(nbytes(h, norm, w, out), 2 * ROWS * hidden * vocab),
    )
