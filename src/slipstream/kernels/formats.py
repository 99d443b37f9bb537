"""The formats that matrices of linear layers may have, and coding float values in them. Needs PyTorch alone.

    format     codes                     scales (n, k / group)     bits a weight
    plain      the values                -                         16
    fp8        e4m3                      float32, group 128        8.25
    int4       0..15                     float16 step and least    5, or 4.25 in groups of 128
    mxfp4      e2m1                      e8m0, group 32            4.25

Codes lie as the tensor cores' lanes take them: a tile of 16 features and `tile` columns after the other, in it for
each lane (g, c) of the warp that sums a part of the columns: of features g and g + 8 the columns 4c..4c+3 of each 16.
Of 4-bit codes eight make a word: bits 4j.. hold code 2j and bits 16 + 4j.. code 2j + 1, so that each shift and mask
brings a pair to where two float16 have them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

PLAIN, FP8, INT4, MXFP4 = range(4)
FORMATS = {"fp8": (FP8, 128), "int4": (INT4, 32), "int4-128": (INT4, 128), "mxfp4": (MXFP4, 32)}
"""Name: format and columns that share a scale."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def tiling(format: int, k: int) -> tuple[int, int]:
    """(columns of a tile of a matrix with rows of `k`, parts they are cut in, each in one group and for one warp)."""
    power = 1 << (k - 1).bit_length()
    if format == PLAIN:
        columns = power if k <= 1024 else 512
        return columns, max(1, min(8, columns // 16))
    columns = max(32, min(512, power))
    return columns, min(8, columns // 16) if format == FP8 else columns // 32


@dataclass(frozen=True)
class Quantised:
    """A matrix (n, k). codes (n / 16, k / tile, ..): uint8, or int32 of eight codes; scales (n, groups), of int4
    (n, groups, 2). n is a multiple of 16, or the last tile is filled with zeros.

    dtype: what activations are rounded to before they meet it.
    """

    format: int
    group: int
    shape: tuple[int, int]
    codes: torch.Tensor
    scales: torch.Tensor
    dtype: torch.dtype = torch.float16

    @property
    def nbytes(self) -> int:
        """Of the codes and scales that a pass reads."""
        n, k = self.shape
        return n * k * (2 if self.format == FP8 else 1) // 2 + self.scales.nbytes

    def __getitem__(self, rows: slice) -> Quantised:
        """Whole tiles of rows."""
        first, end, _ = rows.indices(self.shape[0])
        assert first % 16 == 0
        assert end % 16 == 0 or end == self.shape[0]
        codes = self.codes[first // 16 : -(-end // 16)]
        return replace(self, shape=(end - first, self.shape[1]), codes=codes, scales=self.scales[first:end])

    def chunk(self, parts: int) -> list[Quantised]:
        n = self.shape[0] // parts
        return [self[i * n : (i + 1) * n] for i in range(parts)]

    def double(self) -> torch.Tensor:
        """The values, exactly, in float64."""
        n, k = self.shape
        if self.format == FP8:
            values = in_rows(self.codes, self.format, k).view(torch.float8_e4m3fn).double()
        else:
            shifts = torch.tensor([0, 16, 4, 20, 8, 24, 12, 28], device=self.codes.device)
            codes = in_rows((self.codes[..., None] >> shifts & 15).flatten(2), self.format, k)
            table = torch.tensor((*E2M1, *(-x for x in E2M1)), dtype=torch.float64, device=codes.device)
            values = codes.double() if self.format == INT4 else table[codes]
        values = values[:n]

        def spread(x: torch.Tensor) -> torch.Tensor:
            return x.double().repeat_interleave(self.group, 1)[:, :k]

        if self.format == INT4:
            return values * spread(self.scales[..., 0]) + spread(self.scales[..., 1])
        return values * spread(torch.exp2(self.scales.double() - 127) if self.format == MXFP4 else self.scales)


def _axes(format: int, k: int) -> tuple[list[int], tuple[int, ...]]:
    """The axes of a row-major matrix of whole tiles, but its first, and their order in lanes' order."""
    tile, parts = tiling(format, k)
    low = min(8, parts)  # of the parts that eight warps take at a time
    # half of the features, g, tile, high part, low part, 16 columns, c, column
    return [2, 8, -(-k // tile), parts // low, low, tile // parts // 16, 4, 4], (0, 3, 5, 2, 7, 4, 1, 6, 8)


def in_lanes(codes: torch.Tensor, format: int) -> torch.Tensor:
    """Codes (n, k) in the order of lanes: (n / 16, k / tile, ..), filled up with zeros."""
    n, k = codes.shape
    tile, _ = tiling(format, k)
    sizes, order = _axes(format, k)
    whole = torch.nn.functional.pad(codes, (0, -k % tile, 0, -n % 16))
    return whole.view(-1, *sizes).permute(order).reshape(whole.shape[0] // 16, whole.shape[1] // tile, -1)


def in_rows(codes: torch.Tensor, format: int, k: int) -> torch.Tensor:
    """What `in_lanes` did undone, but for the rows that it added."""
    sizes, order = _axes(format, k)
    whole = codes.view(-1, *(sizes[i - 1] for i in order[1:])).permute([order.index(i) for i in range(9)])
    return whole.reshape(codes.shape[0] * 16, -1)[:, :k]


Matrix = torch.Tensor | Quantised


def stacked(matrices: Sequence[Matrix]) -> Matrix:
    """Matrices of one format and width, one under the other."""
    first = matrices[0]
    if len(matrices) == 1:
        return first
    if isinstance(first, torch.Tensor):
        return torch.cat([m for m in matrices if isinstance(m, torch.Tensor)])
    parts = [m for m in matrices if isinstance(m, Quantised)]
    assert not any(m.shape[0] % 16 for m in parts[:-1])
    shape = (sum(m.shape[0] for m in parts), first.shape[1])
    codes, scales = torch.cat([m.codes for m in parts]), torch.cat([m.scales for m in parts])
    return replace(first, shape=shape, codes=codes, scales=scales)


def coded(codes: torch.Tensor, scales: torch.Tensor, format: int, group: int, dtype: torch.dtype) -> Quantised:
    """The matrix of codes (n, k): bytes of e4m3, or 0..15."""
    lanes = in_lanes(codes, format)
    if format != FP8:
        c = lanes.view(*lanes.shape[:2], -1, 4, 2)
        word = torch.zeros(c.shape[:3], dtype=torch.int64, device=c.device)
        for j in range(4):
            word |= c[..., j, 0].long() << 4 * j | c[..., j, 1].long() << 16 + 4 * j
        lanes = word.to(torch.int32)  # keeps the low bits
    return Quantised(format, group, (codes.shape[0], codes.shape[1]), lanes, scales, dtype)


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
        return coded(codes.flatten(1)[:, :k], scales, format, group, dtype)
    if format == INT4:
        low, high = g.amin(2), g.amax(2)
        step = ((high - low) / 15).half()
        scales = torch.stack([step, low.half()], 2)
        codes = (g - scales[:, :, 1:].float()) / step.float().clamp_min(2.0**-24)[:, :, None]
        return coded(codes.round().clamp(0, 15).to(torch.uint8).flatten(1)[:, :k], scales, format, group, dtype)
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
    scales = (chosen + 127).clamp(0, 254).to(torch.uint8)
    return coded(codes.to(torch.uint8).flatten(1), scales, format, group, dtype)


def quantised(x: torch.Tensor, name: str, dtype: torch.dtype) -> Matrix:
    """Float values (n, k) in a format by name: one of FORMATS, or "plain", which is `dtype`."""
    return x.to(dtype) if name == "plain" else quantise(x, name, dtype)
