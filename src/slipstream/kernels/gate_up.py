"""RMSNorm, gate and up projections, SiLU(gate) * up: the feed-forward's inner activations."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream.kernels.launch import ROWS, Case, Cost, dot, launch, nbytes, poisoned, row_tile, tile, weight_tile


def reference(h: torch.Tensor, norm: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, eps: float) -> torch.Tensor:
    """h (rows, hidden), gate and up (inner, hidden) -> (rows, inner) float64."""
    h = h.double()
    x = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps) * norm.double()
    return torch.nn.functional.silu(x @ gate.double().T) * (x @ up.double().T)


@triton.jit
def kernel(h, norm, gate, up, out, N, eps, K: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr, R: tl.constexpr,
           PDL: tl.constexpr):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    features = tl.program_id(0) * 16 + tl.arange(0, 16)
    rows = tl.arange(0, R)
    g, u = weight_tile(gate, features, 0, K, BK, PARTS), weight_tile(up, features, 0, K, BK, PARTS)
    scale = row_tile(norm, rows * 0, 0, K, BK, PARTS)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = row_tile(h, rows, 0, K, BK, PARTS)
    square = tl.sum(tl.sum(x * x, 2), 0)
    x = (x * scale).to(gate.dtype.element_ty)
    acc_g, acc_u = dot(x, g), dot(x, u)
    for k0 in tl.range(BK, K, BK, num_stages=2):
        g, u = weight_tile(gate, features, k0, K, BK, PARTS), weight_tile(up, features, k0, K, BK, PARTS)
        x = row_tile(h, rows, k0, K, BK, PARTS)
        square += tl.sum(tl.sum(x * x, 2), 0)
        x = (x * row_tile(norm, rows * 0, k0, K, BK, PARTS)).to(gate.dtype.element_ty)
        acc_g = dot(x, g, acc_g)
        acc_u = dot(x, u, acc_u)
    rms = tl.rsqrt(square / K + eps)[:, None]
    a, b = tl.sum(acc_g, 0) * rms, tl.sum(acc_u, 0) * rms
    y = a / (1 + tl.exp(-a)) * b
    tl.store(out + rows[:, None] * N + features[None, :], y.to(out.dtype.element_ty))


def gate_up(
    h: torch.Tensor, norm: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, out: torch.Tensor, eps: float,
    pdl: bool = False,
) -> None:  # fmt: skip
    """h (ROWS, hidden) float32, gate and up (inner, hidden) -> out (ROWS, inner)."""
    n, k = gate.shape
    bk, parts = tile(k)
    launch(kernel, (n // 16,), h, norm, gate, up, out, n, eps, pdl=pdl, num_warps=8, K=k, BK=bk, PARTS=parts, R=ROWS)


def case(hidden: int, inner: int, dtype: torch.dtype, device: torch.device) -> Case:
    h, norm = torch.randn(ROWS, hidden, device=device), torch.randn(hidden, device=device)
    gate, up = ((torch.randn(inner, hidden, device=device) / hidden**0.5).to(dtype) for _ in range(2))
    out = poisoned(ROWS, inner, dtype=dtype, device=device)
    return Case(
        lambda: gate_up(h, norm, gate, up, out, 1e-5),
        {"out": out},
        lambda: {"out": reference(h, norm, gate, up, 1e-5)},
        Cost(nbytes(h, norm, gate, up, out), 4 * ROWS * hidden * inner),
    )
