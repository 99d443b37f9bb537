"""The native CPU backend: packed weights, KV caches and passes live in C++; one call from here runs a whole pass.

It knows nothing about text, drafters or requests. Row-invariant by construction: see csrc/kernels.h.
"""

from __future__ import annotations

import ctypes as c
import os
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager

import numpy as np

from slipstream.backends.base import MAX_DRAFTS, FloatArray, IntArray, KVCache, available_bytes
from slipstream.backends.cpu.drafter import Guesses, native_names, shapes
from slipstream.backends.cpu.drafter import unsupported as unsupported_drafter
from slipstream.backends.cpu.library import LayerShape, instruction_sets, library
from slipstream.backends.cpu.loading import MAX_CAPACITY, address, load, shape_of, unsupported, weight_bytes
from slipstream.errors import BackendError, RequestError
from slipstream.models.block_drafter import BlockDrafterWeights
from slipstream.models.spec import ModelSpec, WeightTensor

PREFILL_CALL = 256
"""Tokens a native prefill call: between calls Python can be interrupted. Any number gives the same bits."""

_MAX_THREADS = 1024


def default_threads() -> int:
    """One thread a core that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class CpuCache:
    """Keys and values of one stream, half precision; pages are committed as the text grows."""

    def __init__(self, backend: CpuBackend, capacity: int) -> None:
        self.handle = None
        self.backend = backend  # keeps the model alive as long as its caches
        self.capacity = capacity
        self.drafts = backend.drafter is not None  # its taps are kept from the first position on
        with backend.turn():
            if capacity <= MAX_CAPACITY:
                self.handle = library().slip_cache_new(backend.open_handle(), capacity)
        if not self.handle:
            raise BackendError(f"no memory for a KV cache of {capacity} tokens: ask for a smaller context")

    @property
    def length(self) -> int:
        with self.backend.turn():
            return int(library().slip_cache_length(self.open_handle()))

    def can_rewind(self, length: int) -> bool:
        with self.backend.turn():
            return bool(library().slip_cache_can_rewind(self.open_handle(), length))

    def rewind(self, length: int) -> None:
        with self.backend.turn():
            if not self.can_rewind(length):
                raise ValueError(f"cannot rewind a cache of {self.length} positions to {length}")
            library().slip_cache_rewind(self.handle, length)

    def export_state(self) -> bytes:
        """All that is needed to go on from here, in this or another process, with a cache of the same model."""
        with self.backend.turn():
            handle, model = self.open_handle(), self.backend.open_handle()
            out = np.empty(library().slip_cache_state_bytes(model, handle), np.uint8)
            library().slip_cache_export(model, handle, out.ctypes.data)
            return out.tobytes()

    def import_state(self, data: bytes) -> None:
        """Become the exported cache, bit for bit. Raises ValueError where `data` is no such state, or does not fit."""
        given = np.frombuffer(data, np.uint8)
        with self.backend.turn():
            handle, model = self.open_handle(), self.backend.open_handle()
            if library().slip_cache_import(model, handle, given.ctypes.data, len(given)):
                raise ValueError("not the state of a cache of this model that fits this capacity")

    def close(self) -> None:
        if self.backend.forked:
            return  # a lock held in the parent process is never released here
        with self.backend.turn():
            if self.handle:
                library().slip_cache_free(self.handle)
                self.handle = None

    def open_handle(self) -> int:
        if not self.handle:
            raise RequestError("the KV cache is closed; ask for a new session")
        return int(self.handle)

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self.close()


class CpuBackend:
    """Runs a model with the best instruction set of this machine.

    threads: None is one a core this process may use. isa: None is the best of `instruction_sets()`.
    Raises BackendError where the library is missing, the shapes do not fit it, or memory runs out. Calls of several
    threads take turns. Native threads do not survive a fork: a child process needs a backend of its own.
    """

    name = "cpu"
    row_invariant = True

    def __init__(
        self, spec: ModelSpec, tensors: Mapping[str, WeightTensor], threads: int | None = None, isa: str | None = None
    ) -> None:
        self.handle = None
        self._lock = threading.RLock()  # reentrant, since a finaliser that frees a cache may run within a turn
        self._process = os.getpid()
        reason = unsupported(spec, tensors)
        if reason:
            raise BackendError(f"the native CPU backend cannot run this model: {reason}; use --backend reference")
        needed, free = weight_bytes(tensors), available_bytes()
        if free is not None and needed > free:
            raise BackendError(
                f"the weights need {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB of memory are free; "
                "choose a model, or a format of it, whose files are smaller than that"
            )
        isas = instruction_sets()
        if isa is not None and isa not in isas:
            raise BackendError(f"instruction set {isa!r} is not one of this machine's: {', '.join(isas)}")
        self.isa = isa or isas[0]
        self.threads = default_threads() if threads is None else threads
        if not 1 <= self.threads <= _MAX_THREADS:
            raise BackendError(f"threads must be in [1, {_MAX_THREADS}], got {threads}")
        self.spec = spec
        shapes = (LayerShape * len(spec.layers))(*(shape_of(layer) for layer in spec.layers))
        freqs = [
            (c.c_float * len(layer.attention.rope.inv_freq))(*layer.attention.rope.inv_freq) for layer in spec.layers
        ]
        pointers = (c.POINTER(c.c_float) * len(freqs))(*(c.cast(f, c.POINTER(c.c_float)) for f in freqs))
        self.handle = library().slip_model_new(
            spec.vocab,
            spec.hidden,
            spec.norm_eps,
            spec.tied_embeddings,
            len(shapes),
            shapes,
            pointers,
            self.threads,
            isas.index(self.isa),
        )
        if not self.handle:
            raise BackendError(f"no memory for the working buffers of {self.threads} threads; ask for fewer")
        self._pass_bytes = 0
        self.drafter: BlockDrafterWeights | None = None
        for name, shape in spec.tensor_shapes().items():
            read = load(self.handle, *address(name), tensors[name], is_matrix=len(shape) > 1)
            if name != "embed" or spec.tied_embeddings:
                self._pass_bytes += round(read * spec.share_read(name))
        self._logits = np.empty((1 + MAX_DRAFTS, spec.vocab), np.float32)

    def new_cache(self, capacity: int) -> CpuCache:
        return CpuCache(self, capacity)

    def prefill(self, cache: KVCache, tokens: IntArray) -> None:
        tokens = np.ascontiguousarray(tokens, np.int32)
        for at in range(0, len(tokens), PREFILL_CALL):
            with self.turn():
                handle = self._checked(cache, tokens[at:])
                part = tokens[at : at + PREFILL_CALL]
                if library().slip_prefill(self.handle, handle, part.ctypes.data, len(part)):
                    raise BackendError("no memory to attend over this many positions")

    def verify(self, cache: KVCache, tokens: IntArray) -> FloatArray:
        tokens = np.ascontiguousarray(tokens, np.int32)
        rows = len(tokens)
        if not 1 <= rows <= 1 + MAX_DRAFTS:
            raise ValueError(f"a round has 1 to {1 + MAX_DRAFTS} rows, got {rows}")
        with self.turn():
            handle = self._checked(cache, tokens)
            if library().slip_verify(self.handle, handle, tokens.ctypes.data, rows, self._logits.ctypes.data):
                raise BackendError("no memory to attend over this many positions")
            return self._logits[:rows]

    def sample(
        self, logits: FloatArray, temperature: float, top_k: int, top_p: float, min_p: float, seed: int, position: int
    ) -> int:
        with self.turn():
            return int(
                library().slip_sample(
                    self.open_handle(),
                    logits.ctypes.data,
                    len(logits),
                    temperature,
                    top_k,
                    top_p,
                    min_p,
                    seed,
                    position,
                )
            )

    def load_drafter(self, drafter: BlockDrafterWeights, *, coarse: bool = True) -> None:
        """coarse: activations of eight bits, a quarter faster; a draft need not be exact, only likely.

        Raises BackendError where the kernels cannot run it, or memory runs out.
        """
        if reason := unsupported_drafter(drafter.config):
            raise BackendError(f"the native CPU backend cannot run the drafter {drafter.path}: {reason}")
        shape, layers, inv_freq = shapes(drafter, coarse)
        taps = np.array(drafter.config.taps, np.int32)
        out_of_memory = BackendError("no memory for the drafter; use --drafter suffix")
        with self.turn():
            self.drafter, lib, target = None, library(), self.open_handle()
            tokens = np.ascontiguousarray(drafter.tokens, np.int32)
            handle = lib.slip_drafter_new(
                target, c.byref(shape), taps.ctypes.data, tokens.ctypes.data, len(layers), layers, inv_freq
            )
            if not handle:
                raise out_of_memory
            try:
                for name, layer, short, is_matrix in native_names(drafter):
                    load(handle, layer, short.encode(), drafter.tensors[name], is_matrix)
                if lib.slip_drafter_ready(target):
                    raise out_of_memory
            except BackendError:
                lib.slip_drafter_free(target)
                raise
            self.drafter = drafter

    def draft(
        self, cache: KVCache, anchor: int, *, temperature: float, seed: int, limit: int
    ) -> tuple[IntArray, FloatArray]:
        guesses = self.guess(cache, anchor, temperature, seed)
        return guesses.tokens[:limit], guesses.confidence[:limit]

    def guess(self, cache: KVCache, anchor: int, temperature: float, seed: int) -> Guesses:
        """A whole draft, with what its rows chose among."""
        with self.turn():
            handle = self._checked(cache, np.array([anchor], np.int32))
            if self.drafter is None or not cache.drafts:  # type: ignore[attr-defined]
                raise ValueError("no drafter was loaded before this cache was made")
            rows, candidates = self.drafter.config.drafts, self.drafter.config.candidates
            guesses = Guesses(
                np.empty(rows, np.int32),
                np.empty(rows, np.float32),
                np.empty((rows, candidates), np.float32),
                np.empty((rows, candidates), np.int32),
            )
            pointers = [array.ctypes.data for array in guesses]
            if library().slip_draft(self.handle, handle, anchor, temperature, seed, *pointers):
                raise BackendError("no memory to attend over this many positions")
            return guesses

    def memory_bytes(self) -> int:
        return self._pass_bytes

    def row(self, name: str, row: int) -> FloatArray:
        """One row of a packed matrix, dequantised."""
        layer, short = address(name)
        out = np.empty(self.spec.tensor_shapes()[name][1], np.float32)
        if library().slip_matrix_row(self.handle, layer, short, row, out.ctypes.data):
            raise ValueError(f"no row {row} of {name}")
        return out

    def close(self) -> None:
        """Free the weights. Whoever runs on afterwards gets a BackendError."""
        if self.forked:
            return  # the threads to end are those of the parent process
        with self.turn():
            if self.handle:
                library().slip_model_free(self.handle)
                self.handle = None

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self.close()

    @property
    def forked(self) -> bool:
        return self._process != os.getpid()

    def turn(self) -> AbstractContextManager[object]:
        """To be held for one native call, so that nothing is freed under it."""
        if self.forked:
            raise BackendError("this process was forked after the model was opened; open it in each process")
        return self._lock

    def open_handle(self) -> int:
        if not self.handle:
            raise BackendError("the model is closed; open it again")
        return int(self.handle)

    def _checked(self, cache: KVCache, tokens: IntArray) -> int:
        """The handle of a cache that `tokens` fit."""
        if not isinstance(cache, CpuCache) or cache.backend is not self:
            raise TypeError("a cache of another backend")
        self.open_handle()
        if cache.length + len(tokens) > cache.capacity:
            raise ValueError(
                f"{len(tokens)} more tokens do not fit a cache of {cache.capacity} that holds {cache.length}"
            )
        if len(tokens) and not (int(tokens.min()) >= 0 and int(tokens.max()) < self.spec.vocab):
            raise ValueError(f"token ids must be in [0, {self.spec.vocab})")
        return cache.open_handle()
