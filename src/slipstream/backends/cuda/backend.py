"""The backend: weights, caches and programs of one model on one GPU, and the protocol the engine drives.

A pass runs as one persistent kernel where that supports the model, else as a chain of Triton kernels; both are
row-invariant. Programs are captured graphs over one cache's buffers: `verify` (pass with logits), `exact` (pass that
only fills the cache) and rounds (pass, sampling, acceptance, UNROLLED times).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import numpy as np
import torch

from slipstream.backends.base import FloatArray, IntArray, KVCache, Round
from slipstream.backends.cuda import rounds
from slipstream.backends.cuda.cache import CudaCache
from slipstream.backends.cuda.chain import Chain
from slipstream.backends.cuda.drafter import DeviceDrafter
from slipstream.backends.cuda.persistent import Persistent, why_not
from slipstream.backends.cuda.prefill import prefill
from slipstream.backends.cuda.weights import Weights, check, load, numbers
from slipstream.errors import BackendError, RequestError
from slipstream.kernels.advance import begin
from slipstream.kernels.launch import (
    CAPACITY,
    DRAFTS,
    FIRST_STOP,
    INTERPRETED,
    LEFT,
    MAX_STOPS,
    ROUND,
    ROWS,
    RUN_ROWS,
    START,
    STATE_SIZE,
    STOPS,
    TOP_K,
    TRUST,
)
from slipstream.models.block_drafter import BlockDrafterWeights
from slipstream.models.spec import ModelSpec, WeightTensor

SHORT = 512
"""Prompts up to here go through the round's kernels in either mode: a library prefill launches for longer."""
TRUSTED_MATCH = 6
"""Of `auto`: from this match length on the suffix drafter's guesses are taken instead of the block drafter's."""
NEVER = 1 << 30


class CudaBackend:
    """Implements Backend, DeviceRounds and BlockDrafting.

    Raises BackendError without a fitting GPU or for a model it cannot run.

    tensors: the checkpoint's, or None for random weights. prefill_mode: "exact" keeps a token's numbers the same in any
    chunking; "fast" uses library kernels for long prompts. engine: "persistent", "chain" or "auto".
    format: of the linear layers: "auto", which is `dtype`; "bf16"; or one of `kernels.formats.FORMATS`, which runs as a
    chain. dtype: of weights, caches and the tensor cores' operands; float16 is eight times finer than bfloat16.
    pdl: programmatic dependent launch between the chain's kernels. device "cpu" is Triton's interpreter, for tests.
    """

    name = "cuda"

    def __init__(
        self,
        spec: ModelSpec,
        tensors: Mapping[str, WeightTensor] | None = None,
        *,
        weights: Weights | None = None,
        device: str = "cuda",
        prefill_mode: Literal["fast", "exact"] = "fast",
        engine: Literal["auto", "persistent", "chain"] = "auto",
        pdl: bool = True,
        dtype: torch.dtype = torch.float16,
        format: str = "auto",
    ) -> None:
        self.spec, self.device = spec, _open(device)
        check(spec)
        format, dtype = numbers(format, dtype)
        try:
            self.weights = weights or load(spec, tensors, self.device, dtype, format=format)
        except torch.OutOfMemoryError as error:
            raise BackendError(f"the weights do not fit in GPU memory ({_memory()}); use a smaller model") from error
        self.row_invariant = prefill_mode == "exact"  # decoding is in either mode
        self.prefill_mode = prefill_mode
        self.pdl = self.draft_pdl = pdl and self.device.type == "cuda"
        self.buffers = rounds.RoundBuffers(spec.vocab, self.device)
        self.pass_ = self._engine(engine)
        self.drafter: DeviceDrafter | None = None
        self._closed: list[CudaCache] = []

    def _engine(self, engine: str) -> Chain | Persistent:
        reason = "runs no quantised weights" if self.weights.quantised else why_not(self.spec, self.device)
        if engine == "persistent" and reason:
            raise BackendError(f"the persistent kernel {reason}; use the chain")
        if engine == "chain" or reason:
            return Chain(self.spec, self.weights, self.buffers.logits, self.pdl)
        self.pdl = False  # measured: the small kernels only get in the way of a kernel that fills the GPU
        return Persistent(self.spec, self.weights, self.buffers.logits, pdl=False)

    def load_drafter(self, drafter: BlockDrafterWeights) -> None:
        """Make `draft` work, and rounds with `block` or `auto`. Before any cache is made."""
        taps = self.pass_.tap(drafter.config.taps)
        self.drafter = DeviceDrafter(drafter, self.weights, taps, self.draft_pdl)

    def new_cache(self, capacity: int) -> CudaCache:
        """A cache that fits; a closed one with room is taken up again, for its captured programs."""
        for i, cache in enumerate(self._closed):
            if capacity <= cache.positions <= 2 * capacity + 1024:
                return self._closed.pop(i).reopen(capacity)
        try:
            cache = CudaCache(self.spec, capacity, self.device, self.weights.embed.dtype, self._closed)
            cache.drafts = self.drafter.memory(cache.positions) if self.drafter else None
            return cache
        except torch.OutOfMemoryError as error:
            raise BackendError(f"a cache of {capacity} positions does not fit ({_memory()}); ask for fewer") from error

    def memory_bytes(self) -> int:
        return self.weights.pass_bytes()

    def prefill(self, cache: KVCache, tokens: IntArray) -> None:
        c = _own(cache, len(tokens))
        ids = np.ascontiguousarray(tokens, np.int32)
        if self.prefill_mode == "fast" and len(ids) > SHORT:
            with torch.inference_mode():
                on_device = torch.from_numpy(ids).to(self.device)
                taps = prefill(self.spec, self.weights, c, on_device, self.drafter.config.taps if self.drafter else ())
                if self.drafter and c.drafts:
                    c.drafts.follow(c.length, len(ids))
                    self.drafter.remember(c.drafts, taps, c.length)
            c.length += len(ids)
            return
        for i in range(0, len(ids), ROWS):
            rows = ids[i : i + ROWS]
            self._upload(c, {START: c.length, RUN_ROWS: len(rows)}, rows)
            self._follow(c, len(rows))
            self._program(c, "exact", len(rows))()
            c.length += len(rows)

    def verify(self, cache: KVCache, tokens: IntArray) -> FloatArray:
        c = _own(cache, len(tokens))
        self._upload(c, {START: c.length, RUN_ROWS: len(tokens)}, np.asarray(tokens, np.int32))
        self._follow(c, len(tokens))
        self._program(c, "verify", len(tokens))()
        c.length += len(tokens)
        logits: FloatArray = self.buffers.logits[: len(tokens)].cpu().numpy()
        return logits

    def rounds(self, cache: KVCache, tokens: IntArray, *, temperature: float, top_k: int, top_p: float, min_p: float,
               seed: int, drafts: int, limit: int, stop_token_ids: tuple[int, ...],
               drafter: str = "suffix") -> Iterator[Round]:  # fmt: skip
        """As `DeviceRounds.rounds`. `auto` is `suffix` where no block drafter is loaded."""
        c = _own(cache, 1)
        start, b = len(tokens) - 1, self.buffers
        if start != c.length:
            raise ValueError(f"{start} tokens precede the anchor, but the cache holds {c.length} positions")
        if len(stop_token_ids) > MAX_STOPS:
            raise RequestError(f"at most {MAX_STOPS} stop tokens run on the device, got {len(stop_token_ids)}")
        limit = min(limit, c.capacity - start)
        if drafter == "block" and self.drafter is None:
            raise RequestError("no block drafter is loaded; use --drafter suffix")
        block = self.drafter if drafts and drafter in ("block", "auto") else None
        slots = {START: start, RUN_ROWS: 1, LEFT: limit, ROUND: b.next_round, DRAFTS: min(drafts, ROWS - 1),
                 STOPS: len(stop_token_ids), TOP_K: top_k, CAPACITY: c.capacity,
                 TRUST: NEVER if drafter == "block" else TRUSTED_MATCH}  # fmt: skip
        slots |= {FIRST_STOP + i: s for i, s in enumerate(stop_token_ids)}
        self._upload(c, slots, np.zeros(0, np.int32))
        c.tokens[: start + 1].copy_(torch.from_numpy(np.ascontiguousarray(tokens, np.int32)))
        b.knobs.copy_(torch.tensor([temperature, top_p, min_p], dtype=torch.float64))
        b.seed.copy_(torch.from_numpy(np.array([seed], np.uint64).view(np.int64)))
        b.cancel.zero_()
        filtered = temperature > 0 and (0 < top_k < self.spec.vocab or top_p < 1 or min_p > 0)
        kind = ("filtered " if filtered else "") + ("drafted " if block else "") + "rounds"
        program = self._program(c, kind, 1 + drafts)
        if block:
            self._follow(c, 0)
            first = self._program(c, "draft", 1)
        begin(c.tokens, c.row_tokens, c.state)
        if block:
            first()
        for done in rounds.stream(b, program, limit, self._alive):
            if block:
                self._follow(c, len(done.tokens))
            c.length += len(done.tokens)
            yield done

    def draft(self, cache: KVCache, anchor: int, *, temperature: float, seed: int,
              limit: int) -> tuple[IntArray, FloatArray]:  # fmt: skip
        c = _own(cache, 0)
        if self.drafter is None:
            raise BackendError("no block drafter is loaded; use --drafter suffix")
        self._follow(c, 0)
        program = self._program(c, "draft", 1)
        self._upload(c, {START: c.length, CAPACITY: c.capacity, TRUST: NEVER}, np.zeros(0, np.int32))
        c.tokens[c.length] = anchor
        self.buffers.knobs[0] = temperature
        self.buffers.seed.copy_(torch.from_numpy(np.array([seed], np.uint64).view(np.int64)))
        program()
        limit = min(limit, c.capacity - c.length - 1)
        return self.drafter.guesses[:limit].cpu().numpy(), self.drafter.chances[:limit].cpu().numpy()

    def _follow(self, cache: CudaCache, rows: int) -> None:
        if cache.drafts:
            cache.drafts.follow(cache.length, rows)

    def _upload(self, cache: CudaCache, slots: dict[int, int], rows: IntArray) -> None:
        control = np.zeros(STATE_SIZE + ROWS, np.int32)
        control[list(slots)] = list(slots.values())
        control[STATE_SIZE : STATE_SIZE + len(rows)] = rows
        cache.control.copy_(torch.from_numpy(control))

    def _program(self, cache: CudaCache, kind: str, rows: int) -> Callable[[], None]:
        """The graph of a kind for up to 8 or 16 rows over this cache, captured on first use."""
        rows = 8 if rows <= 8 else 16
        if (kind, rows) not in cache.programs:
            if cache.workspace is None:
                cache.workspace = self.pass_.buffers(cache)
            workspace = cache.workspace

            drafter, b = self.drafter, self.buffers

            def enqueue() -> None:
                if kind == "draft" and drafter:
                    drafter.draft(cache, b.knobs, b.seed)
                    return
                if kind in ("exact", "verify"):
                    self.pass_.run(cache, workspace, kind == "verify", rows)
                    if drafter:
                        drafter.remember_rows(cache)
                    return
                for _ in range(rounds.UNROLLED):
                    self.pass_.run(cache, workspace, True, rows)
                    if drafter and "drafted" in kind:
                        drafter.remember_rows(cache)
                    b.finish_round(cache, "filtered" in kind, self.pdl)
                    if drafter and "drafted" in kind:
                        drafter.draft(cache, b.knobs, b.seed)

            cache.programs[kind, rows] = self._capture(cache, enqueue)
        return cache.programs[kind, rows]

    def _capture(self, cache: CudaCache, enqueue: Callable[[], None]) -> Callable[[], None]:
        if self.device.type == "cpu":
            return enqueue
        control = cache.control.clone()
        cache.control.zero_()
        enqueue()  # on no rows: compiles what is new, which a capture could not
        cache.control.copy_(control)
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            enqueue()
            graph.capture_end()
        return graph.replay

    def _alive(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream().query()


def _open(device: str) -> torch.device:
    if device == "cpu" and INTERPRETED:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise BackendError("no NVIDIA GPU that PyTorch can use; install a CUDA build of torch, or use --backend cpu")
    found = torch.device(device)
    major, minor = torch.cuda.get_device_capability(found)
    if major < 8:
        raise BackendError(f"the GPU has compute capability {major}.{minor}; the cuda backend needs 8.0 (Ampere)")
    return found


def _memory() -> str:
    free, total = torch.cuda.mem_get_info()
    return f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"


def _own(cache: KVCache, more: int) -> CudaCache:
    if not isinstance(cache, CudaCache) or cache.closed:
        raise ValueError("this cache is closed or belongs to another backend")
    if cache.length + more > cache.capacity:
        raise ValueError(f"{cache.length} + {more} positions do not fit a cache of {cache.capacity}")
    return cache
