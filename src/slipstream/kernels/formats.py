"""The formats that matrices of linear layers may have, and coding float values in them. Needs PyTorch alone.

    format     codes (n, ..)                            scales (n, k / group)     bits a weight
    plain      the values                               -                         16
    fp8        e4m3, a byte a value                     float32, group 128        8.25
    int4       0..15 in words of eight                  float16 step and least    5, or 4.25 in groups of 128
    mxfp4      e2m1 in words of eight                   e8m0, group 32            4.25

In a word, bits 4j.. hold column 2j of eight and bits 16 + 4j.. column 2j + 1, so that each shift and mask brings a pair
to where two float16 have them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

PLAIN, FP8, INT4, MXFP4 = range(4)
FORMATS = {"fp8": (FP8, 128), "int4": (INT4, 32), "int4-128": (INT4, 128), "mxfp4": (MXFP4, 32)}
"""Name: format and columns that share a scale."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Quantised:
    """A matrix (n, k). codes: uint8 (n, k) or int32 (n, k / 8); scales (n, groups), of int4 (n, groups, 2).

    dtype: what activations are rounded to before they meet it.
    """

    format: int
    group: int
    codes: torch.Tensor
    scales: torch.Tensor
    dtype: torch.dtype = torch.float16

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1] * (1 if self.format == FP8 else 8)

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def __getitem__(self, rows: Any) -> Quantised:
        return replace(self, codes=self.codes[rows], scales=self.scales[rows])

    def chunk(self, parts: int) -> list[Quantised]:
        pairs = zip(self.codes.chunk(parts), self.scales.chunk(parts), strict=True)
        return [replace(self, codes=c, scales=s) for c, s in pairs]

    def double(self) -> torch.Tensor:
        """The values, exactly, in float64."""
        if self.format == FP8:
            values = self.codes.view(torch.float8_e4m3fn).double()
        else:
            shifts = torch.tensor([0, 16, 4, 20, 8, 24, 12, 28], device=self.codes.device)
            codes = (self.codes[:, :, None] >> shifts & 15).flatten(1)
            table = torch.tensor((*E2M1, *(-x for x in E2M1)), dtype=torch.float64, device=codes.device)
            values = codes.double() if self.format == INT4 else table[codes]
        k = values.shape[1]

        def spread(x: torch.Tensor) -> torch.Tensor:
            return x.double().repeat_interleave(self.group, 1)[:, :k]

        if self.format == INT4:
            return values * spread(self.scales[..., 0]) + spread(self.scales[..., 1])
        return values * spread(torch.exp2(self.scales.double() - 127) if self.format == MXFP4 else self.scales)


Matrix = torch.Tensor | Quantised


def stacked(matrices: Sequence[Matrix]) -> Matrix:
    """Matrices of one format and width, one under the other."""
    first = matrices[0]
    if len(matrices) == 1:
        return first
    if isinstance(first, torch.Tensor):
        return torch.cat([m for m in matrices if isinstance(m, torch.Tensor)])
    parts = [m for m in matrices if isinstance(m, Quantised)]
    return replace(first, codes=torch.cat([m.codes for m in parts]), scales=torch.cat([m.scales for m in parts]))


def words(codes: torch.Tensor) -> torch.Tensor:
    """Codes 0..15 (n, k) -> int32 (n, k / 8)."""
    c = codes.to(torch.int64).unflatten(1, (-1, 4, 2))
    word = sum(c[:, :, j, 0] << 4 * j | c[:, :, j, 1] << 16 + 4 * j for j in range(4))
    assert isinstance(word, torch.Tensor)
    return word.to(torch.int32)  # keeps the low bits


def quantise(x: torch.Tensor, name: str, dtype: torch.dtype = torch.float16) -> Quantised:
    """Codes near float values (n, k): the nearest for the scales that their groups' extremes set.

    Raises ValueError where 4-bit words do not fill the rows.
    """
    format, group = FORMATS[name]
    n, k = x.shape
    if format != FP8 and k % 32:
        raise ValueError(f"{name} needs rows of a multiple of 32 values, got {k}")
    pad = torch.nn.functional.pad(x.float(), (0, -k % group), mode="replicate")
    g = pad.view(n, -1, group)
    if format == FP8:
        scales = (g.abs().amax(2) / 448).clamp_min(2.0**-100)
        codes = (g / scales[:, :, None]).to(torch.float8_e4m3fn).view(torch.uint8)
        return Quantised(format, group, codes.flatten(1)[:, :k].contiguous(), scales, dtype)
    if format == INT4:
        low, high = g.amin(2), g.amax(2)
        step = ((high - low) / 15).half()
        scales = torch.stack([step, low.half()], 2)
        codes = (g - scales[:, :, 1:].float()) / step.float().clamp_min(2.0**-24)[:, :, None]
        return Quantised(format, group, words(codes.round().clamp(0, 15).flatten(1)[:, :k]), scales, dtype)
    table = torch.tensor(E2M1, device=x.device)
    middles = (table[1:] + table[:-1]) / 2
    exponent = torch.frexp(g.abs().amax(2))[1] - 3  # 6 * 2^exponent is below twice the largest
    tried = []
    for e in (exponent, exponent + 1):
        unit = g / torch.exp2(e.float())[:, :, None]
        index = torch.bucketize(unit.abs(), middles)
        off = (table[index] - unit.abs()).square().sum(2) * torch.exp2(2.0 * e)
        tried.append((index | torch.signbit(unit).to(torch.int64) << 3, e, off))
    (low, e, a), (high, f, b) = tried
    codes, chosen = torch.where((b < a)[:, :, None], high, low), torch.where(b < a, f, e)
    return Quantised(format, group, words(codes.flatten(1)), (chosen + 127).clamp(0, 254).to(torch.uint8), dtype)


def quantised(x: torch.Tensor, name: str, dtype: torch.dtype) -> Matrix:
    """Float values (n, k) in a format by name: one of FORMATS, or "plain", which is `dtype`."""
    return x.to(dtype) if name == "plain" else quantise(x, name, dtype)
