"""Weights as sparse.cu streams them: tiles of 16 output features cut into operand fragments, bf16, FP8 or MXFP4.

A lane (g, c) of a warp holds rows g and g + 8 of a tile and columns 8c..8c+7 of each 32; of these the first four feed
one product of 16 columns and the rest the next. It knows nothing about layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from slipstream.models.spec import WeightTensor
from slipstream.models.tensors import BlockScaled

BF16, FP8, MXFP4 = range(3)
STEP = (32, 32, 64)
"""Columns a stage of each format, of which a matrix must have a whole number; FP8 scales want 128."""


@dataclass(frozen=True)
class Packed:
    """A matrix, or those of all experts one after the other. w: uint8; scales: uint8 (MXFP4) or float32 (FP8)."""

    format: int
    features: int
    columns: int
    w: torch.Tensor
    scales: torch.Tensor | None

    @property
    def tiles(self) -> int:
        """Of one matrix."""
        return -(-self.features // 16)

    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.w, self.scales) if t is not None)


def sizes(format: int, features: int, columns: int) -> tuple[int, int]:
    """Bytes of one packed matrix and of its scales."""
    rows = -(-features // 16) * 16
    if format == BF16:
        return rows * columns * 2, 0
    return (
        (rows * columns, rows // 16 * columns // 128 * 8)
        if format == FP8
        else (rows * columns // 2, rows * columns // 32)
    )


def fragments(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """x (n, k) and rows (tiles, 16) of it -> (tiles, upper, g, k / 32, c, product, half, element)."""
    return x[rows.flatten()].view(len(rows), 2, 8, x.shape[1] // 32, 4, 2, 2, 2)


def pack_bf16(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """x (n, k) bfloat16 -> uint8."""
    return fragments(x, rows).permute(0, 3, 5, 2, 4, 6, 1, 7).contiguous().view(torch.uint8).flatten()


def pack_fp8(x: torch.Tensor, scales: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x (n, k) the bytes of e4m3, scales (n / 128, k / 128). In a word, row g + 8's bytes come before row g's."""
    w = fragments(x, rows).flip(1).permute(0, 3, 2, 4, 5, 6, 7, 1).contiguous().flatten()
    blocks = rows[:, ::8] // 128  # (tiles, 2): of rows g and of rows g + 8
    return w, scales.float()[blocks].transpose(1, 2).contiguous().flatten()


def pack_mxfp4(codes: torch.Tensor, exponents: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """codes (n, k) e2m1 in 0..15, exponents (n, k / 32) e8m0, both uint8.

    A 16-bit half of a word holds four values whose bits a shift and a mask each bring to where bf16 has them. Exponents
    are stored + 62: what activations times 2^64 and weights times 2^-126 leave.
    """
    x = fragments(codes, rows).to(torch.int32)  # (tiles, upper, g, k / 32, c, product, half, e)
    a, c, b, d = (x[:, upper, ..., half, :] for upper in (0, 1) for half in (0, 1))
    words = (a >> 3) << 15 | (a & 7) << 6 | (b >> 3) << 12 | (b & 7) << 3 | (c >> 3) << 9 | (c & 7)
    words |= (d >> 3) << 14 | (d & 4) << 11 | (d & 3) << 10  # (tiles, g, k / 32, c, product, e)
    words = words[..., 0] | words[..., 1] << 16
    tiles, _, groups = words.shape[:3]
    words = words.view(tiles, 8, groups // 2, 2, 4, 2).permute(0, 2, 1, 4, 3, 5).contiguous()
    e = (exponents.int() + 62).clamp(max=254).to(torch.uint8)[rows.flatten()]
    e = e.view(tiles, 2, 8, groups // 2, 2).permute(0, 3, 2, 1, 4).contiguous()
    return words.view(torch.uint8).flatten(), e.flatten()


def format_of(tensor: WeightTensor) -> int:
    if isinstance(tensor, BlockScaled) and tensor.block == 128 and not any(n % 128 for n in tensor.shape):
        return FP8
    return MXFP4 if tensor.format == "MXFP4" and tensor.shape[1] % 64 == 0 else BF16


def pack(
    tensors: list[WeightTensor], rows: torch.Tensor, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The matrices stacked by features, those of `rows` (tiles, 16) in order, in the format of the first."""
    format = format_of(tensors[0])
    rows = rows.to(device)
    if format == BF16:
        x = torch.cat([torch.from_numpy(t.float32()).to(device).bfloat16() for t in tensors])
        return pack_bf16(x, rows.clamp(max=len(x) - 1)), None
    raw = torch.cat([torch.from_numpy(t.raw()) for t in tensors]).to(device)
    if format == FP8:
        scales = [torch.from_numpy(t.scales.float32()) for t in tensors if isinstance(t, BlockScaled)]
        return pack_fp8(raw, torch.cat(scales).to(device), rows)
    groups = raw.view(len(raw), -1, 17)
    values = groups[..., 1:]
    codes = torch.cat([values & 15, values >> 4], -1).flatten(1)
    return pack_mxfp4(codes, groups[..., 0], rows)


def natural(features: int) -> torch.Tensor:
    """Rows of the tiles of a matrix in its own order."""
    return torch.arange(-(-features // 16) * 16).view(-1, 16)


def gate_up(inner: int) -> torch.Tensor:
    """Tiles of eight of gate's rows, then the same of up's; gate's rows are stacked on up's."""
    low = torch.arange(inner).view(-1, 8)
    return torch.cat([low, low + inner], 1)
