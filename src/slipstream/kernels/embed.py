"""Token embedding: the residual stream of every row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream.kernels.launch import ROWS, Case, Cost, launch, nbytes, poisoned


def reference(tokens: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """(rows,) ids -> (rows, hidden) float64."""
    return table.double()[tokens.long()]


@triton.jit
def embed_kernel(tokens, table, out, hidden, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    token = tl.load(tokens + row).to(tl.int64)
    for i in range(0, hidden, BLOCK):
        at = i + tl.arange(0, BLOCK)
        x = tl.load(table + token * hidden + at, mask=at < hidden)
        tl.store(out + row * hidden + at, x.to(tl.float32), mask=at < hidden)


def embed(tokens: torch.Tensor, table: torch.Tensor, out: torch.Tensor, pdl: bool = False) -> None:
    """tokens (ROWS,) int32, table (vocab, hidden) -> out (ROWS, hidden) float32."""
    launch(embed_kernel, (ROWS,), tokens, table, out, table.shape[1], pdl=pdl, BLOCK=1024)


def case(hidden: int, vocab: int, dtype: torch.dtype, device: torch.device) -> Case:
    tokens = torch.randint(vocab, (ROWS,), dtype=torch.int32, device=device)
    table = torch.randn(vocab, hidden, dtype=dtype, device=device)
    out = poisoned(ROWS, hidden, dtype=torch.float32, device=device)
    return Case(
        lambda: embed(tokens, table, out),
        {"out": out},
        lambda: {"out": reference(tokens, table)},
        Cost(ROWS * hidden * table.element_size() + nbytes(out), 0),
    )
