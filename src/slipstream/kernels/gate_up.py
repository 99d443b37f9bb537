"""RMSNorm, gate and up projections, SiLU(gate) * up: the feed-forward's inner activations."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream.kernels.formats import Matrix, quantised
from slipstream.kernels.launch import ROWS, Case, Cost, launch, nbytes, poisoned, row_tile
from slipstream.kernels.matrix import multiply, ones, operands, tile, weight_tile


def reference(h: torch.Tensor, norm: torch.Tensor, gate: Matrix, up: Matrix, eps: float) -> torch.Tensor:
    """h (rows, hidden), gate and up (inner, hidden) -> (rows, inner) float64."""
    h = h.double()
    x = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps) * norm.double()
    return torch.nn.functional.silu(x @ gate.double().T) * (x @ up.double().T)


@triton.jit
def gate_up_kernel(h, norm, gate, gate_scales, up, up_scales, out, N, eps, K: tl.constexpr, BK: tl.constexpr,
                   PARTS: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr, TYPE: tl.constexpr, R: tl.constexpr,
                   PDL: tl.constexpr):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    first = tl.program_id(0) * 16
    rows = tl.arange(0, R)
    g = weight_tile(gate, gate_scales, first, N, 0, K, FORMAT, GROUP, TYPE, BK, PARTS, 16)
    u = weight_tile(up, up_scales, first, N, 0, K, FORMAT, GROUP, TYPE, BK, PARTS, 16)
    scale = row_tile(norm, rows * 0, 0, K, BK, PARTS)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = row_tile(h, rows, 0, K, BK, PARTS)
    square = tl.sum(tl.sum(x * x, 2), 0)
    x = (x * scale).to(TYPE)
    sums, zero = ones(x, FORMAT, 16), tl.zeros((PARTS, R, 16), tl.float32)
    acc_g, acc_u = multiply(x, g, sums, zero, FORMAT), multiply(x, u, sums, zero, FORMAT)
    for k0 in tl.range(BK, K, BK, num_stages=2):
        g = weight_tile(gate, gate_scales, first, N, k0, K, FORMAT, GROUP, TYPE, BK, PARTS, 16)
        u = weight_tile(up, up_scales, first, N, k0, K, FORMAT, GROUP, TYPE, BK, PARTS, 16)
        x = row_tile(h, rows, k0, K, BK, PARTS)
        square += tl.sum(tl.sum(x * x, 2), 0)
        x = (x * row_tile(norm, rows * 0, k0, K, BK, PARTS)).to(TYPE)
        sums = ones(x, FORMAT, 16)
        acc_g = multiply(x, g, sums, acc_g, FORMAT)
        acc_u = multiply(x, u, sums, acc_u, FORMAT)
    rms = tl.rsqrt(square / K + eps)[:, None]
    a, b = tl.sum(acc_g, 0) * rms, tl.sum(acc_u, 0) * rms
    y = a / (1 + tl.exp(-a)) * b
    features = first + tl.arange(0, 16)
    tl.store(out + rows[:, None] * N + features[None, :], y.to(out.dtype.element_ty))


def gate_up(
    h: torch.Tensor, norm: torch.Tensor, gate: Matrix, up: Matrix, out: torch.Tensor, eps: float,
    pdl: bool = False,
) -> None:  # fmt: skip
    """h (ROWS, hidden) float32, gate and up (inner, hidden) -> out (ROWS, inner)."""
    n = gate.shape[0]
    launch(gate_up_kernel, (n // 16,), h, norm, *operands(gate), *operands(up), out, n, eps, pdl=pdl, num_warps=8,
           **tile(gate), R=ROWS)  # fmt: skip


def case(hidden: int, inner: int, dtype: torch.dtype, device: torch.device, format: str = "plain") -> Case:
    h, norm = torch.randn(ROWS, hidden, device=device), torch.randn(hidden, device=device)
    gate, up = (quantised(torch.randn(inner, hidden, device=device) / hidden**0.5, format, dtype) for _ in range(2))
    out = poisoned(ROWS, inner, dtype=dtype, device=device)
    return Case(
        lambda: gate_up(h, norm, gate, up, out, 1e-5),
        {"out": out},
        lambda: {"out": reference(h, norm, gate, up, 1e-5)},
        Cost(nbytes(h, norm, gate, up, out), 4 * ROWS * hidden * inner),
    )
