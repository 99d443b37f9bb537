"""Weight tensors as they lie in a file, and the block formats a row may be stored in.

Nothing here keeps tensor bytes: every read opens the file, copies the range and lets it go.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from slipstream.errors import CheckpointError
from slipstream.models.spec import WeightTensor


class Format(NamedTuple):
    """A row is a whole number of blocks of `values` numbers in `bytes` bytes each; `ggml_type` is its id in GGUF."""

    values: int
    bytes: int
    ggml_type: int


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
}


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
    """One tensor at `offset` bytes into `path`.

    heads: where set, each head's rows are stored with rotary pairs interleaved (0, h/2, 1, h/2 + 1, ...) and are
    put back into rotate-half order as they are read. Blocks lie along rows, so any format can be reordered.
    """

    path: Path
    offset: int
    shape: tuple[int, ...]
    format: str
    heads: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape[:-1]) * row_bytes(self.shape, self.format)

    def raw(self) -> npt.NDArray[np.uint8]:
        width = row_bytes(self.shape, self.format)
        try:
            stored = np.fromfile(self.path, np.uint8, self.nbytes, offset=self.offset)
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read ({error.strerror}); load the model again") from error
        if stored.size != self.nbytes:
            raise CheckpointError(f"{self.path}: shrank while in use; download it again")
        rows = stored.reshape(-1, width)
        if self.heads:
            pairs = rows.reshape(self.heads, -1, 2, width)  # (heads, head_dim / 2, 2, bytes)
            rows = np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(-1, width)
        return rows

    def float32(self) -> npt.NDArray[np.float32]:
        return dequantise(self.raw(), self.format).reshape(self.shape)
