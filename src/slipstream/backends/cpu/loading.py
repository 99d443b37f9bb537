"""From a spec and its tensors to the native library: what it can run, a layer's shape, how weights get there."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from slipstream.backends.cpu.library import FORMATS, LayerShape, library
from slipstream.errors import BackendError, CheckpointError
from slipstream.models.spec import Attention, FeedForward, Layer, ModelSpec, WeightTensor
from slipstream.models.tensors import FORMATS as FILE_FORMATS
from slipstream.models.tensors import BlockScaled

MAX_CAPACITY = 1 << 30
"""Positions are 32-bit in the library."""

_MAX_HEAD_DIM = 256  # csrc/model.h
_FP8_COLUMNS = 128  # csrc/weights.h: the columns that share a scale


def unsupported(spec: ModelSpec, tensors: Mapping[str, WeightTensor]) -> str | None:
    """Why the native kernels cannot run this model, or None. They work on whole vectors of 16 and blocks of 32."""
    for i, layer in enumerate(spec.layers):
        a, f = layer.attention, layer.feed_forward
        if a.latent or a.indexer:
            return f"layer {i} attends to {'latents' if a.latent else 'selected keys'}, which native kernels do not"
        for what, dim in (("heads", a.head_dim), ("values", a.value_dim)):
            if dim % 16 or dim > _MAX_HEAD_DIM:
                return f"layer {i} has {what} of {dim}; native {what} are multiples of 16 up to {_MAX_HEAD_DIM}"
        for name, n in (
            ("hidden size", spec.hidden),
            ("attention width", a.heads * a.value_dim),
            ("inner size", f.inner),
            ("shared inner size", f.experts.shared_inner if f.experts else 0),
        ):
            if n % 32:
                return f"layer {i} has {name} {n}, not a multiple of 32"
    for name, tensor in tensors.items():
        if tensor.format not in FORMATS:
            return f"tensor {name} is {tensor.format}; native formats are {', '.join(FORMATS)}"
        if isinstance(tensor, BlockScaled) and tensor.block % _FP8_COLUMNS:
            return f"tensor {name} has FP8 scales for blocks of {tensor.block}; native are multiples of {_FP8_COLUMNS}"
    return None


def shape_of(layer: Layer) -> LayerShape:
    return LayerShape(**_attention(layer.attention), **_feed_forward(layer.feed_forward))


def _attention(a: Attention) -> dict[str, float]:
    return {
        "heads": a.heads,
        "kv_heads": a.kv_heads,
        "head_dim": a.head_dim,
        "value_dim": a.value_dim,
        "window": a.window if a.window and a.window <= MAX_CAPACITY else 0,  # 0, the whole history, is no less
        "rotary_pairs": len(a.rope.inv_freq),
        "softmax_scale": a.softmax_scale,
        "rope_scale": a.rope.scale,
        "value_scale": a.value_scale,
    }


def _feed_forward(f: FeedForward) -> dict[str, float]:
    clamped: dict[str, float] = {"clamped": f.activation == "clamped", "alpha": f.alpha, "limit": f.limit}
    if not (e := f.experts):
        return {"inner": f.inner} | clamped
    routing = {"experts": e.count, "expert_inner": f.inner, "top_k": e.top_k, "sigmoid": e.scoring == "sigmoid"}
    groups = {"groups": e.groups, "top_groups": e.top_groups, "normalise": e.normalise, "routed_scale": e.scale}
    return {"inner": e.shared_inner} | clamped | routing | groups


def weight_bytes(tensors: Mapping[str, WeightTensor]) -> int:
    """Bytes of weights as their files have them, which the library keeps but for filling."""
    formats = [(FILE_FORMATS[tensor.format], math.prod(tensor.shape)) for tensor in tensors.values()]
    return sum(numbers // format.values * format.bytes for format, numbers in formats)


def load(handle: int, layer: int, name: bytes, tensor: WeightTensor, is_matrix: bool) -> int:
    """Copy one tensor into the library; returns the bytes a pass reads of it, 0 for a vector."""
    lib, out_of_memory = library(), BackendError(f"no memory for the weights (at tensor {name.decode()})")
    if not is_matrix:
        values = np.ascontiguousarray(tensor.float32(), np.float32)
        if lib.slip_vector(handle, layer, name, values.ctypes.data, values.size):
            raise out_of_memory
        return 0
    raw = np.ascontiguousarray(_checked_rows(tensor, f"{name.decode()} of layer {layer}"))
    if lib.slip_matrix(handle, layer, name, FORMATS.index(tensor.format), *tensor.shape):
        raise out_of_memory
    if lib.slip_matrix_rows(handle, layer, name, 0, len(raw), raw.ctypes.data):
        raise BackendError(f"tensor {name.decode()} could not be packed")
    return raw.nbytes


def address(name: str) -> tuple[int, bytes]:
    """A canonical tensor name as (layer or -1, name inside it)."""
    if name.startswith("layers."):
        _, layer, short = name.split(".", 2)
        return int(layer), short.encode()
    return -1, name.encode()


def _checked_rows(tensor: WeightTensor, name: str) -> npt.NDArray[np.uint8]:
    """Rows as the library takes them. Raises CheckpointError where a scale or an FP8 value is not a number."""
    raw = tensor.raw()
    if tensor.format == "MXFP4" and (raw.reshape(len(raw), -1, 17)[..., 0] == 255).any():
        raise CheckpointError(f"tensor {name} has an MXFP4 scale that is not a number; download the checkpoint again")
    if not isinstance(tensor, BlockScaled):
        return raw
    scales = tensor.scales.float32()
    if not np.isfinite(scales).all():
        raise CheckpointError(f"tensor {name} has an FP8 scale that is not a finite number; download it again")
    if (raw & 127 == 127).any():
        raise CheckpointError(f"tensor {name} has an FP8 value that is not a number; download it again")
    rows, columns = tensor.shape
    records = -(-columns // _FP8_COLUMNS)
    scales = scales.repeat(tensor.block, 0)[:rows].repeat(tensor.block // _FP8_COLUMNS, 1)[:, :records]
    bytes_ = np.zeros((rows, records * _FP8_COLUMNS), np.uint8)
    bytes_[:, :columns] = raw
    parts = (np.ascontiguousarray(scales, np.float32).view(np.uint8), bytes_)
    parts_by_record = [part.reshape(rows, records, -1) for part in parts]
    return np.concatenate(parts_by_record, axis=-1).reshape(rows, -1)
