"""Reads the heads of safetensors files, where each tensor of a directory lies; writes one. It knows no model family.

The format (https://github.com/huggingface/safetensors#format) is an 8-byte little-endian length, a JSON object
{name: {dtype, shape, data_offsets}} of that length, and the data. Several files are joined by
`model.safetensors.index.json`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.errors import CheckpointError
from slipstream.models.tensors import FORMATS, PARTS, FileTensor

INDEX = "model.safetensors.index.json"
_DTYPES = {"float32": "F32", "float16": "F16", "int8": "I8", "int32": "I32"}
_HEADER_LIMIT = 100_000_000  # the format's own limit


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises CheckpointError where the file is missing or something else."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); complete the download") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON; download it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: not a JSON object; download it again")
    return value


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint directory. Raises CheckpointError where there is none or one is missing."""
    single = directory / "model.safetensors"
    if single.is_file():
        return [single]
    if (directory / INDEX).is_file():
        shards = read_json(directory / INDEX).get("weight_map")
        names = set(shards.values()) if isinstance(shards, dict) and all_text(shards.values()) else set()
        if not names or any(Path(name).name != name or not name.endswith(".safetensors") for name in names):
            raise CheckpointError(f"{directory / INDEX}: no usable 'weight_map'; download it again")
        files = [directory / name for name in sorted(names)]
    else:
        files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{directory}: no *.safetensors in it; download the weights too")
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{file}: missing, though the index names it; complete the download")
    return files


def all_text(values: Any) -> bool:
    return all(isinstance(value, str) for value in values)


def read_safetensors(path: Path) -> dict[str, FileTensor]:
    """Every tensor of one file, validated. Raises CheckpointError: no header, truncated, unsupported dtype."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 2 <= length <= min(size - 8, _HEADER_LIMIT):
                raise CheckpointError(
                    f"{path}: not a safetensors file, or truncated: its header is {length} bytes, "
                    f"the file {size}; download it again"
                )
            header = json.loads(file.read(length))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); check path and permissions") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not a safetensors file (its header is not JSON); download it again") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: not a safetensors file (its header is not an object); download it again")
    header.pop("__metadata__", None)
    return {name: _tensor(path, name, entry, 8 + length, size) for name, entry in header.items()}


def _tensor(path: Path, name: str, entry: Any, base: int, size: int) -> FileTensor:
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(start), int(end)]} if len(
            shape
        ) <= 8 and all(type(number) is int and 0 <= number < 2**48 for number in (*shape, start, end)):
            pass
        case _:
            raise CheckpointError(f"{path}: damaged safetensors: entry {name[:80]!r} is malformed; download it again")
    if dtype not in ("F32", "F16", "BF16", *PARTS):
        raise CheckpointError(
            f"{path}: tensor {name[:80]!r} is stored as {dtype[:20]!r}, which is not supported; "
            "choose weights in F32, F16 or BF16, FP8 or MXFP4 of a supported family, or a GGUF file"
        )
    nbytes = math.prod(shape) * FORMATS[dtype].bytes
    if not nbytes or end - start != nbytes:
        raise CheckpointError(
            f"{path}: damaged safetensors: tensor {name[:80]!r} of shape {tuple(shape)} takes {nbytes} bytes, "
            f"its entry gives {end - start}; download it again"
        )
    if base + end > size:
        raise CheckpointError(
            f"{path}: truncated safetensors: tensor {name[:80]!r} ends at byte {base + end}, the file has {size}; "
            "download it again"
        )
    return FileTensor(path, base + start, tuple(shape) or (1,), dtype)


def write_safetensors(path: Path, tensors: Mapping[str, npt.NDArray[np.generic]]) -> None:
    """One file of arrays in float32, float16, int8 or int32."""
    header, at = {}, 0
    for name, array in tensors.items():
        end = at + array.nbytes
        header[name] = {"dtype": _DTYPES[array.dtype.name], "shape": array.shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in tensors.values():
            file.write(np.ascontiguousarray(array).tobytes())
