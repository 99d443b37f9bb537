"""A kernel that only reads: the rate that memory gives, with which the others are compared."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 8192
PER = 8
"""Blocks a program reads."""


@triton.jit
def kernel(x, out, PER: tl.constexpr, BLOCK: tl.constexpr):
    acc = tl.zeros((BLOCK,), tl.int32)
    first = tl.program_id(0).to(tl.int64) * PER * BLOCK
    for i in range(PER):
        acc ^= tl.load(x + first + i * BLOCK + tl.arange(0, BLOCK))
    tl.store(out + tl.program_id(0), tl.sum(acc, 0))


def read_rate(device: torch.device, words: int = 1 << 30) -> float:
    """Bytes a second at which a plain kernel reads `words` int32, far more than any cache holds."""
    x = torch.randint(1 << 30, (words,), dtype=torch.int32, device=device)
    programs = words // (PER * BLOCK)
    out = torch.zeros(programs, dtype=torch.int32, device=device)
    ms: float = triton.testing.do_bench(lambda: kernel[(programs,)](x, out, PER=PER, BLOCK=BLOCK, num_warps=8),
                                        warmup=20, rep=100, return_mode="median")  # fmt: skip
    return words * 4 / ms * 1e3
