"""The reference backend: `models.reference` behind the backend protocol, for machines without native kernels.

Correct everywhere and fast nowhere. Not row-invariant: library matrix products change their bits with the shape.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from slipstream.backends.base import MAX_DRAFTS, FloatArray, IntArray, KVCache, available_bytes
from slipstream.errors import BackendError

if TYPE_CHECKING:
    from slipstream.models.checkpoint import Checkpoint
    from slipstream.models.reference import Memory
    from slipstream.models.spec import ModelSpec

_CHUNK = 256  # rows a pass in prefill, which bounds the attention scores


class ReferenceCache:
    """Every key and value of one stream, so that any rewind is exact."""

    def __init__(self, memory: Memory, capacity: int) -> None:
        self._memory: Memory | None = memory
        self._capacity = capacity

    @property
    def memory(self) -> Memory:
        if self._memory is None:
            raise ValueError("the KV cache is closed")
        return self._memory

    @property
    def length(self) -> int:
        return self.memory.length

    @property
    def capacity(self) -> int:
        return self._capacity

    def can_rewind(self, length: int) -> bool:
        return 0 <= length <= self.length

    def rewind(self, length: int) -> None:
        if not self.can_rewind(length):
            raise ValueError(f"cannot rewind a cache of {self.length} positions to {length}")
        self.memory.length = length

    def close(self) -> None:
        self._memory = None


class ReferenceBackend:
    """Plain PyTorch on the CPU.

    threads: None leaves PyTorch's own choice, which is process-wide. dtype: "float32" or "float64".
    Raises BackendError where PyTorch is not installed, or memory cannot hold the weights.
    """

    name = "reference"
    row_invariant = False

    def __init__(self, checkpoint: Checkpoint, *, threads: int | None = None, dtype: str = "float32") -> None:
        try:
            import torch
        except ImportError as error:
            raise BackendError(
                "the reference backend needs PyTorch; run: pip install 'slipstream-llm[torch]'"
            ) from error
        from slipstream.models.reference import Reference

        if dtype not in ("float32", "float64"):
            raise BackendError(f"the reference backend computes in float32 or float64, not {dtype!r}")
        if threads is not None:
            if threads < 1:
                raise BackendError(f"threads must be at least 1, got {threads}")
            torch.set_num_threads(threads)
        self.spec = checkpoint.spec
        needed, free = weight_bytes(self.spec, 4 if dtype == "float32" else 8), available_bytes()
        if free is not None and needed > free:
            raise BackendError(
                f"the weights need {needed / 1e9:.1f} GB in {dtype} and {free / 1e9:.1f} GB of memory are free; "
                f"choose a model of up to {free / (4 if dtype == 'float32' else 8) / 1e9:.1f} billion parameters"
            )
        self._model = Reference(checkpoint.spec, checkpoint.tensors, getattr(torch, dtype))

    def new_cache(self, capacity: int) -> ReferenceCache:
        try:
            return ReferenceCache(self._model.memory(capacity), capacity)
        except RuntimeError as error:
            raise BackendError(f"no memory for a KV cache of {capacity} tokens: ask for a smaller context") from error

    def prefill(self, cache: KVCache, tokens: IntArray) -> None:
        memory, tokens = self._checked(cache, tokens)
        for start in range(0, len(tokens), _CHUNK):
            self._model.hidden(tokens[start : start + _CHUNK].tolist(), memory)

    def verify(self, cache: KVCache, tokens: IntArray) -> FloatArray:
        memory, tokens = self._checked(cache, tokens)
        if not 1 <= len(tokens) <= 1 + MAX_DRAFTS:
            raise ValueError(f"a round has 1 to {1 + MAX_DRAFTS} rows, got {len(tokens)}")
        return np.asarray(self._model.logits(tokens.tolist(), memory).numpy(), np.float32)

    def memory_bytes(self) -> int:
        total = 0.0
        for name, weight in self._model.weights.items():
            if name == "embed":  # a tied embedding is read as the head
                continue
            experts = ".experts." in name and self.spec.layers[int(name.split(".")[1])].feed_forward.experts
            share = experts.top_k / experts.count if experts else 1  # what one row reads
            total += weight.numel() * weight.element_size() * share
        return round(total)

    def _checked(self, cache: KVCache, tokens: IntArray) -> tuple[Memory, IntArray]:
        if not isinstance(cache, ReferenceCache):
            raise TypeError(f"a cache of another backend: {type(cache).__name__}")
        tokens = np.asarray(tokens, np.int32)
        if cache.length + len(tokens) > cache.capacity:
            raise ValueError(f"{len(tokens)} tokens do not fit a cache of {cache.capacity} that holds {cache.length}")
        if len(tokens) and (tokens.min() < 0 or tokens.max() >= self.spec.vocab):
            raise ValueError(f"token ids must be in [0, {self.spec.vocab})")
        return cache.memory, tokens


def weight_bytes(spec: ModelSpec, element: int) -> int:
    """Bytes of all weights at `element` bytes a number."""
    return element * sum(math.prod(shape) for shape in spec.tensor_shapes().values())
