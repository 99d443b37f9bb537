"""Weight tensors as they lie in a file, and the block formats a row may be stored in.

Nothing here keeps tensor bytes: every read opens the file, copies the range and lets it go.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from slipstream.errors import CheckpointError
from slipstream.models.spec import WeightTensor


class Format(NamedTuple):
    """A row is a whole number of blocks of `values` numbers in `bytes` bytes each; `ggml_type` is its id in GGUF."""

    values: int
    bytes: int
    ggml_type: int | None


FORMATS = {
    "F32": Format(1, 4, 0),
    "F16": Format(1, 2, 1),
    "BF16": Format(1, 2, 30),
    "Q4_0": Format(32, 18, 2),
    "Q4_1": Format(32, 20, 3),
    "Q8_0": Format(32, 34, 8),
    "Q4_K": Format(256, 144, 12),
    "Q5_K": Format(256, 176, 13),
    "Q6_K": Format(256, 210, 14),
    "MXFP4": Format(32, 17, 39),
    "F8_E4M3": Format(1, 1, None),  # a value only with the scale of its block: `BlockScaled`
    "U8": Format(1, 1, None),  # no value by itself: half of `PackedMXFP4`
    "I8": Format(1, 1, None),  # half of `block_drafter.Int8Blocks`
    "I32": Format(1, 4, None),  # token ids
}
PARTS = ("F8_E4M3", "U8", "I8", "I32")
"""Formats that are no weights by themselves."""


def row_bytes(shape: tuple[int, ...], format: str) -> int:
    """Bytes of one row. Raises ValueError where the last axis is not a whole number of blocks."""
    block = FORMATS[format]
    if shape[-1] % block.values:
        raise ValueError(f"rows of {shape[-1]} values do not divide into {format} blocks of {block.values}")
    return shape[-1] // block.values * block.bytes


def dequantise(raw: npt.NDArray[np.uint8], format: str) -> npt.NDArray[np.float32]:
    """Stored rows (rows, bytes) as float32 (rows, values), exactly as the format defines them."""
    if format == "F32":
        return raw.view(np.float32)
    if format == "F16":
        return raw.view(np.float16).astype(np.float32)
    if format == "BF16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    from gguf import GGMLQuantizationType, quants  # imported late: 0.15 s that native backends never need

    with np.errstate(all="ignore"):  # damaged scales are inf or NaN, as the format says
        values = quants.dequantize(raw, GGMLQuantizationType[format])
    return np.asarray(values, np.float32)


@dataclass(frozen=True)
class FileTensor(WeightTensor):
    """One tensor at `offset` bytes into `path`."""

    path: Path
    offset: int
    shape: tuple[int, ...]
    format: str

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape[:-1]) * row_bytes(self.shape, self.format)

    def __getitem__(self, index: int) -> FileTensor:
        """One of the tensors stacked along the first axis, without reading the others."""
        shape = self.shape[1:]
        offset = self.offset + index * (self.nbytes // self.shape[0])
        return FileTensor(self.path, offset, shape, self.format)

    def raw(self) -> npt.NDArray[np.uint8]:
        try:
            stored = np.fromfile(self.path, np.uint8, self.nbytes, offset=self.offset)
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read ({error.strerror}); load the model again") from error
        if stored.size != self.nbytes:
            raise CheckpointError(f"{self.path}: shrank while in use; download it again")
        return stored.reshape(-1, row_bytes(self.shape, self.format))

    def float32(self) -> npt.NDArray[np.float32]:
        return dequantise(self.raw(), self.format).reshape(self.shape)


@dataclass(frozen=True)
class Interleaved(WeightTensor):
    """A tensor stored with rotary pairs side by side (0, w/2, 1, w/2 + 1, ...), read in rotate-half order.

    In each of `heads` equal groups of rows (of elements, in a vector), only those of [start, start + width) are so.
    """

    tensor: WeightTensor
    heads: int
    start: int
    width: int

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.tensor.shape

    @property
    def format(self) -> str:  # type: ignore[override]
        return self.tensor.format

    def raw(self) -> npt.NDArray[np.uint8]:
        stored = self.tensor.raw()
        return self._in_order(stored.reshape(self.shape[0], -1)).reshape(stored.shape)

    def float32(self) -> npt.NDArray[np.float32]:
        return np.asarray(self._in_order(self.tensor.float32()))

    def _in_order(self, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        order = np.arange(self.shape[0]).reshape(self.heads, -1)
        pairs = order[:, self.start : self.start + self.width]
        order[:, self.start : self.start + self.width] = np.concatenate((pairs[:, ::2], pairs[:, 1::2]), axis=1)
        return rows[order.reshape(-1)]


@dataclass(frozen=True)
class Strided(WeightTensor):
    """Every `step`-th row (element, of a vector) of a tensor, from `start`; of its transpose where `transposed`.

    This is how fused matrices are taken apart. Only floats can be transposed.
    """

    tensor: WeightTensor
    start: int = 0
    step: int = 1
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        shape = self.tensor.shape[::-1] if self.transposed else self.tensor.shape
        return (len(range(self.start, shape[0], self.step)), *shape[1:])

    @property
    def format(self) -> str:  # type: ignore[override]
        return self.tensor.format

    def raw(self) -> npt.NDArray[np.uint8]:
        rows = self.tensor.raw().reshape(self.tensor.shape[0], -1)
        if self.transposed:
            rows = rows.reshape(*self.tensor.shape, FORMATS[self.format].bytes)  # (rows, columns, bytes a value)
            rows = rows.swapaxes(0, 1)
        rows = np.ascontiguousarray(rows[self.start :: self.step])
        return rows.reshape(1 if len(self.shape) == 1 else len(rows), -1)

    def float32(self) -> npt.NDArray[np.float32]:
        return dequantise(self.raw(), self.format).reshape(self.shape)


@dataclass(frozen=True)
class BlockScaled(WeightTensor):
    """FP8 e4m3 with one scale for every `block` x `block` values (DeepSeek-V3, arXiv:2412.19437 section 3.3).

    value = e4m3(weight) * scale of its block. raw() is the e4m3 bytes; `scales` is (rows / block, columns / block).
    """

    weight: WeightTensor
    scales: WeightTensor
    block: int = 128

    format = "F8_E4M3"

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.weight.shape

    def raw(self) -> npt.NDArray[np.uint8]:
        return self.weight.raw()

    def float32(self) -> npt.NDArray[np.float32]:
        rows, columns = self.shape
        scales = self.scales.float32().repeat(self.block, 0)[:rows].repeat(self.block, 1)[:, :columns]
        with np.errstate(all="ignore"):
            return e4m3_values()[self.raw()] * scales


@dataclass(frozen=True)
class PackedMXFP4(WeightTensor):
    """MXFP4 (OCP Microscaling 1.0) as gpt-oss stores it: nibbles and scales in two tensors.

    blocks: (rows, groups, 16) U8, a group's 32 values of e2m1 in order, the even ones in low nibbles.
    scales: (rows, groups) U8, e8m0. raw() is what GGUF calls MXFP4, the same numbers: each group is its scale, then
    16 bytes whose low nibbles are its first half.
    """

    blocks: WeightTensor
    scales: WeightTensor

    format = "MXFP4"

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return (self.blocks.shape[0], 32 * self.blocks.shape[1])

    def raw(self) -> npt.NDArray[np.uint8]:
        packed = self.blocks.raw().reshape(self.blocks.shape)
        values = np.stack((packed & 15, packed >> 4), axis=-1).reshape(*packed.shape[:2], 32)
        halves = values[..., :16] | values[..., 16:] << 4
        scales = self.scales.raw().reshape(*packed.shape[:2], 1)
        return np.concatenate((scales, halves), axis=-1).reshape(len(packed), -1)

    def float32(self) -> npt.NDArray[np.float32]:
        return dequantise(self.raw(), self.format).reshape(self.shape)


@cache
def e4m3_values() -> npt.NDArray[np.float32]:
    """The value of every e4m3 byte (256,): a sign, 4 exponent bits with bias 7, 3 of mantissa; no infinities."""
    byte = np.arange(256)
    exponent, mantissa = byte >> 3 & 15, byte & 7
    values = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    values[byte & 127 == 127] = np.nan
    return np.where(byte < 128, values, -values).astype(np.float32)


def interleaved(tensor: WeightTensor, heads: int, start: int, width: int) -> WeightTensor:
    """`tensor` read as `Interleaved` says. Raises CheckpointError where rows would leave their FP8 block."""
    if not isinstance(tensor, BlockScaled):
        return Interleaved(tensor, heads, start, width)
    starts = range(start, tensor.shape[0], tensor.shape[0] // heads)
    if any(first // tensor.block != (first + width - 1) // tensor.block for first in starts):
        raise CheckpointError(
            f"rotary rows of {width} straddle the {tensor.block}-row blocks of their scales; choose weights in BF16"
        )
    return replace(tensor, weight=Interleaved(tensor.weight, heads, start, width))
