"""The pass over a sparse model: six kernels a layer (sparse.cu), the embedding before and the head after.

    qkv -> attention -> output -> router -> expert gate and up -> expert down -> (next layer)

A dense feed-forward is a mixture of one expert that every row takes. Layers whose selection is longer than the cache
attend to everything; selecting, and latent attention, are not here yet.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from slipstream.backends.cuda.cache import CudaCache
from slipstream.backends.cuda.nvrtc import Kernel
from slipstream.backends.cuda.sparse_weights import (
    BF16,
    FP8,
    MXFP4,
    STEP,
    Packed,
    format_of,
    gate_up,
    natural,
    pack,
    sizes,
)
from slipstream.backends.cuda.weights import rotary_table
from slipstream.errors import BackendError
from slipstream.kernels.launch import ROWS, STATE_SIZE
from slipstream.models.spec import Attention, FeedForward, ModelSpec, Rope, WeightTensor

QUEUE_BYTES = 100 * 1024
"""Shared memory of a block's queues: two blocks fit a multiprocessor."""
MAX_SPLITS = 8
Pointer, Size = ctypes.c_void_p, ctypes.c_uint64


def _struct(name: str, **fields: type) -> type[ctypes.Structure]:
    return type(name, (ctypes.Structure,), {"_fields_": list(fields.items())})


_Stream = _struct("_Stream", h=Pointer, x=Pointer, squares=Pointer, norm=Pointer)
_Embed = _struct("_Embed", tokens=Pointer, table=Pointer, state=Pointer, to=_Stream, hidden=Size)
_Dense = _struct(
    "_Dense", w=Pointer, scales=Pointer, bias=Pointer, x=Pointer, squares=Pointer, out=Pointer, state=Pointer,
    to=_Stream, features=Size, columns=Size, tiles=Size, eps=ctypes.c_float,
)  # fmt: skip
_Route = _struct(
    "_Route", logits=Pointer, correction=Pointer, scale=ctypes.c_float,
    **dict.fromkeys(("experts", "top_k", "always", "sigmoid", "normalise", "groups", "top_groups"), ctypes.c_int),
)  # fmt: skip
_Experts = _struct(
    "_Experts", w=Pointer, scales=Pointer, bias=Pointer, x=Pointer, squares=Pointer, out=Pointer, state=Pointer,
    to=_Stream, route=_Route, columns=Size, tiles=Size, eps=ctypes.c_float, alpha=ctypes.c_float,
    limit=ctypes.c_float, clamped=ctypes.c_int,
)  # fmt: skip
_Attention = _struct(
    "_Attention", **dict.fromkeys(("qkv", "keys", "values", "out", "parts", "q_norm", "k_norm", "cos_sin", "sinks",
                                   "state"), Pointer),
    **dict.fromkeys(("slots", "kv_heads", "half", "window"), Size), scale=ctypes.c_float, value_scale=ctypes.c_float,
    eps=ctypes.c_float,
)  # fmt: skip


def check(spec: ModelSpec, device: torch.device) -> None:
    """Raises BackendError where this pass cannot run the model here, naming the reason."""
    reason = why_not(spec)
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] < 9:
        reason = "needs a Hopper GPU (compute capability 9.0)"
    if reason:
        raise BackendError(f"the GPU engine for sparse models {reason}; use --backend reference")


def why_not(spec: ModelSpec) -> str | None:
    """Why this pass cannot run the model, or None."""
    for layer in spec.layers:
        a, f = layer.attention, layer.feed_forward
        if a.latent:
            return "has no latent attention yet"
        if a.head_dim % 32 or a.value_dim % 64:
            return f"needs heads in multiples of 32 and values of 64, got {a.head_dim} and {a.value_dim}"
        widths = (spec.hidden, f.inner, a.heads * a.value_dim)
        if any(width % 64 for width in widths):
            return f"needs sizes in multiples of 64, got {widths}"
        e = f.experts
        if e and (e.count > 512 or e.groups > 32 or e.top_k + _always(f) > 16 or ROWS * e.top_k + _always(f) > 160):
            return f"routes to at most 10 of 512 experts, got {e.top_k} of {e.count}"
        if e and e.shared_inner % f.inner:
            return "needs a shared expert as wide as a whole number of others"
    return None


def _always(f: FeedForward) -> int:
    """Experts that every row takes: a shared one counts as several of the others' width, a dense layer is one."""
    return f.experts.shared_inner // f.inner if f.experts else 1


@dataclass(frozen=True)
class SparseLayer:
    """up and down hold the routed experts, then those of every row. Vectors are float32."""

    attention_norm: torch.Tensor
    qkv: Packed
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    sinks: torch.Tensor | None
    o: Packed
    o_bias: torch.Tensor | None
    ffn_norm: torch.Tensor
    router: Packed | None
    router_bias: torch.Tensor | None
    correction: torch.Tensor | None
    up: Packed
    up_bias: torch.Tensor | None
    down: Packed
    down_bias: torch.Tensor | None
    cos_sin: torch.Tensor


@dataclass(frozen=True)
class SparseWeights:
    embed: torch.Tensor
    layers: list[SparseLayer]
    final_norm: torch.Tensor
    head: Packed

    def pass_bytes(self) -> int:
        """Bytes of all weights, of which a pass reads the experts that its rows choose."""
        packed = [p for w in self.layers for p in (w.qkv, w.o, w.router, w.up, w.down) if p]
        return self.head.nbytes() + sum(p.nbytes() for p in packed)


def load(spec: ModelSpec, tensors: Mapping[str, WeightTensor], device: torch.device, positions: int) -> SparseWeights:
    """Weights of a checkpoint: experts stay FP8 or MXFP4, all else becomes bf16. positions: rows of rotary tables."""
    tables: dict[Rope, torch.Tensor] = {}

    def vector(*names: str) -> torch.Tensor | None:
        if names[0] not in tensors:
            return None
        return torch.cat([torch.from_numpy(tensors[name].float32()).float().to(device) for name in names])

    def needed(name: str) -> torch.Tensor:
        found = vector(name)
        assert found is not None  # the checkpoint was checked against the spec
        return found

    def matrix(*names: str) -> Packed:
        x = torch.cat([torch.from_numpy(tensors[name].float32()) for name in names])
        w, _ = pack([_Bf16(x)], natural(len(x)), device)
        return Packed(BF16, len(x), x.shape[1], w, None)

    def experts(at: str, f: FeedForward, up: bool) -> tuple[Packed, torch.Tensor | None]:
        count, inner = f.experts.count if f.experts else 0, f.inner
        features, columns = (2 * inner, spec.hidden) if up else (spec.hidden, inner)
        rows = gate_up(inner) if up else natural(spec.hidden)
        sets = [[f"{at}experts.{e}.{n}" for n in (("gate", "up") if up else ("down",))] for e in range(count)]
        parts = [pack([tensors[n] for n in names], rows, device) for names in sets]
        format = format_of(tensors[sets[0][0]]) if sets else BF16
        shared = "shared_" if count else ""
        for k in range(_always(f)):
            part = slice(k * inner, (k + 1) * inner)
            if up:
                x = torch.cat([torch.from_numpy(tensors[f"{at}{shared}{n}"].float32())[part] for n in ("gate", "up")])
            else:
                x = torch.from_numpy(tensors[f"{at}{shared}down"].float32())[:, part]
            parts.append(requantised(x, format, rows, device))
        w, scales = (torch.cat(x) if x[0] is not None else None for x in zip(*parts, strict=True))
        assert w is not None
        bias = None
        if f.experts and f.experts.bias:
            bias = torch.cat(
                [torch.cat([needed(f"{n}_bias") for n in names])[rows.to(device).flatten()] for names in sets]
            )
        return Packed(format, features, columns, w, scales), bias

    layers = []
    for i, layer in enumerate(spec.layers):
        a, f, at = layer.attention, layer.feed_forward, f"layers.{i}."
        if a.rope not in tables:
            tables[a.rope] = rotary_table(a.rope, positions, device)
        up, up_bias = experts(at, f, True)
        down, down_bias = experts(at, f, False)
        layers.append(SparseLayer(
            needed(at + "attention_norm"), matrix(*(at + n for n in "qkv")),
            vector(*(at + n + "_bias" for n in "qkv")), vector(at + "q_norm"), vector(at + "k_norm"),
            vector(at + "sinks"), matrix(at + "o"), vector(at + "o_bias"), needed(at + "ffn_norm"),
            matrix(at + "router") if f.experts else None, vector(at + "router_bias"), vector(at + "correction"),
            up, up_bias, down, down_bias, tables[a.rope],
        ))  # fmt: skip
    embed = torch.from_numpy(tensors["embed"].float32()).to(device).bfloat16()
    return SparseWeights(embed, layers, needed("final_norm"), matrix("embed" if spec.tied_embeddings else "head"))


class _Bf16(WeightTensor):
    format = "BF16"

    def __init__(self, x: torch.Tensor) -> None:
        self.x, self.shape = x, tuple(x.shape)

    def float32(self) -> npt.NDArray[np.float32]:
        return np.asarray(self.x.numpy())


def requantised(x: torch.Tensor, format: int, rows: torch.Tensor,
                device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """A shared expert beside routed ones of another format."""
    if format != BF16:
        raise ValueError("a shared expert beside packed experts is not supported yet")
    return pack([_Bf16(x)], rows, device)


def random_weights(spec: ModelSpec, experts: int, device: torch.device, positions: int) -> SparseWeights:
    """Weights of the true sizes with random bits and plausible scales, filled on the device. experts: their format."""
    tables: dict[Rope, torch.Tensor] = {}
    pool = torch.randint(0, 255, (1 << 26,), dtype=torch.uint8, device=device)

    def filled(format: int, features: int, columns: int, count: int = 1) -> Packed:
        n, s = (count * x for x in sizes(format, features, columns))
        scales = None
        if format == BF16:
            x = torch.empty(n // 2, dtype=torch.bfloat16, device=device)
            w = x.normal_(std=columns**-0.5).view(torch.uint8)
        else:
            w = torch.empty(n, dtype=torch.uint8, device=device)
            for i in range(0, n, len(pool)):  # shifted, so that no two experts are alike
                part = w[i : i + len(pool)]
                part.copy_(pool.roll(i // len(pool) * 4097)[: len(part)])
            e4m3_std, e2m1_std = 110.0, 2.9
            if format == FP8:
                scales = torch.full((s // 4,), columns**-0.5 / e4m3_std, device=device)
            else:
                exponent = round(float(torch.tensor(columns**-0.5 / e2m1_std).log2()))
                scales = torch.full((s,), 127 + 62 + exponent, dtype=torch.uint8, device=device)
        return Packed(format, features, columns, w, scales)

    def vector(n: int, mean: float = 0.0) -> torch.Tensor:
        return torch.randn(n, device=device) * 0.02 + mean

    layers = []
    for layer in spec.layers:
        a, f, hidden = layer.attention, layer.feed_forward, spec.hidden
        e = f.experts
        if a.rope not in tables:
            tables[a.rope] = rotary_table(a.rope, positions, device)
        features = a.heads * a.head_dim + a.kv_heads * (a.head_dim + a.value_dim)
        count = (e.count if e else 0) + _always(f)
        layers.append(SparseLayer(
            vector(hidden, 1), filled(BF16, features, hidden), vector(features) if a.qkv_bias else None,
            vector(a.head_dim, 1) if a.qk_norm else None, vector(a.head_dim, 1) if a.qk_norm else None,
            vector(a.heads) if a.sinks else None, filled(BF16, hidden, a.heads * a.value_dim),
            vector(hidden) if a.o_bias else None, vector(hidden, 1),
            filled(BF16, e.count, hidden) if e else None, vector(e.count) if e and e.bias else None,
            vector(e.count) if e and e.correction else None,
            filled(experts, 2 * f.inner, hidden, count), vector(count * 2 * f.inner) if e and e.bias else None,
            filled(experts, hidden, f.inner, count), vector(count * hidden) if e and e.bias else None, tables[a.rope],
        ))  # fmt: skip
    embed = torch.randn(spec.vocab, spec.hidden, device=device).bfloat16()
    return SparseWeights(embed, layers, vector(spec.hidden, 1), filled(BF16, spec.vocab, spec.hidden))


class SparseCache(CudaCache):
    """A stream's keys (kv_heads, slots, d) and values (kv_heads, slots, value d), a tensor a layer.

    A sliding layer is a ring: whole blocks of 32 slots that hold the window, the rows of a round and a block begun.
    """

    def __init__(self, spec: ModelSpec, capacity: int, device: torch.device, dtype: torch.dtype,
                 closed: list[CudaCache]) -> None:  # fmt: skip
        selected = min((x.attention.indexer.top_k for x in spec.layers if x.attention.indexer), default=capacity)
        if capacity > selected:
            raise BackendError(
                f"the GPU engine selects no keys yet: ask for at most {selected} positions, not {capacity}"
            )
        self.positions = -(-capacity // 64) * 64
        self.layer_keys, self.layer_values = [], []
        for a in (layer.attention for layer in spec.layers):
            slots = ring_slots(a, self.positions)
            self.layer_keys.append(torch.zeros(a.kv_heads, slots, a.head_dim, dtype=dtype, device=device))
            self.layer_values.append(torch.zeros(a.kv_heads, slots, a.value_dim, dtype=dtype, device=device))
        self.rewindable = min((ring_slots(x.attention, self.positions) for x in spec.layers), default=0)
        self.windows = any(x.attention.window for x in spec.layers)
        self.tokens = torch.zeros(self.positions + 1 + ROWS, dtype=torch.int32, device=device)
        self.control = torch.zeros(STATE_SIZE + ROWS, dtype=torch.int32, device=device)
        self.state, self.row_tokens = self.control[:STATE_SIZE], self.control[STATE_SIZE:]
        self.programs, self.workspace = {}, None
        self._closed = closed
        self.reopen(capacity)

    def can_rewind(self, length: int) -> bool:
        """A ring forgets: only what a rejected draft added can be taken back."""
        return 0 <= length <= self.length and (not self.windows or self.length - length < ROWS or length == 0)


def ring_slots(a: Attention, positions: int) -> int:
    return min(positions, (a.window + 2 * ROWS + 31 + 31) // 32 * 32) if a.window else positions


class SparsePass:
    """Buffers, compiled kernels and their order; same protocol as `Chain`. Raises BackendError as `nvrtc.Kernel`."""

    def __init__(self, spec: ModelSpec, weights: SparseWeights, logits: torch.Tensor, pdl: bool = True) -> None:
        self.spec, self.weights, self.logits, self.pdl = spec, weights, logits, pdl
        device = logits.device
        self.blocks = torch.cuda.get_device_properties(device).multi_processor_count

        def most(size: Callable[[Attention, FeedForward], int]) -> int:
            return max(size(x.attention, x.feed_forward) for x in spec.layers)

        self.h = torch.zeros(ROWS, spec.hidden, device=device)
        self.x = torch.zeros(ROWS, spec.hidden, dtype=torch.bfloat16, device=device)
        self.squares = torch.zeros(ROWS, spec.hidden // 16, device=device)
        self.qkv = torch.zeros(ROWS * most(lambda a, f: a.heads * a.head_dim + a.kv_heads * (a.head_dim + a.value_dim)),
                               device=device)  # fmt: skip
        self.attended = torch.zeros(
            ROWS * most(lambda a, f: a.heads * a.value_dim), dtype=torch.bfloat16, device=device
        )
        self.router = torch.zeros(ROWS * most(lambda a, f: f.experts.count if f.experts else 1), device=device)
        slots = most(lambda a, f: f.inner * ((f.experts.top_k if f.experts else 0) + _always(f)))
        self.inner = torch.zeros(ROWS * slots,
                                 dtype=torch.bfloat16, device=device)  # fmt: skip
        self.parts = torch.zeros(MAX_SPLITS * ROWS * most(lambda a, f: a.heads * (a.value_dim + 2)), device=device)
        self._kernels: dict[tuple[Any, ...], Kernel] = {}
        self._wanted: set[tuple[Any, ...]] = set()
        self._compile()

    def _compile(self) -> None:
        """Every kernel the model needs for 8 and for 16 rows, at once: a run that only asks for them, then threads."""
        for nt in (1, 2):
            self._launches(None, True, nt, lambda key, grid, args: self._wanted.add(key))
        source = Path(__file__).with_name("sparse.cu")

        def build(key: tuple[Any, ...]) -> Kernel:
            name, shared, *macros = key
            return Kernel(source, name, dict(macros), shared)

        torch.cuda.current_stream().synchronize()
        keys = sorted(self._wanted - set(self._kernels), key=str)
        with ThreadPoolExecutor(8) as pool:
            self._kernels |= dict(zip(keys, pool.map(build, keys), strict=True))

    def buffers(self, cache: CudaCache) -> Sequence[torch.Tensor]:
        return ()

    def run(self, cache: CudaCache, buffers: Sequence[torch.Tensor], logits: bool, rows: int = ROWS) -> None:
        """Enqueue the pass over the rows in `cache.control`, at most `rows` (8 or 16) of them."""

        def launch(key: tuple[Any, ...], grid: int, args: ctypes.Structure) -> None:
            self._kernels[key].launch(grid, threads(key), args, self.pdl)

        assert isinstance(cache, SparseCache)
        self._launches(cache, logits, rows // 8, launch)

    def _launches(self, cache: SparseCache | None, logits: bool, nt: int,
                  launch: Callable[[tuple[Any, ...], int, ctypes.Structure], None]) -> None:  # fmt: skip
        """Name every kernel of a pass with its grid and arguments, in order. cache: None only asks for kernels."""
        spec, w, eps = self.spec, self.weights, self.spec.norm_eps
        state, tokens = (_at(cache.state), _at(cache.row_tokens)) if cache else (None, None)

        def stream(norm: torch.Tensor | None) -> ctypes.Structure:
            return _Stream(*map(_at, (self.h, self.x, self.squares, norm)))

        def dense(p: Packed, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None,
                  norm: torch.Tensor | None = None) -> None:  # fmt: skip
            splits = next((s for s in (8, 4, 2) if p.tiles * s // 8 <= 2 * self.blocks), 1)
            key, _ = _key("dense", 1, nt, p.format, SPLITS=splits)
            args = _Dense(_at(p.w), _at(p.scales), _at(bias), _at(x), None if x is not self.x else _at(self.squares),
                          _at(out), state, stream(norm), p.features, p.columns, p.tiles, eps)  # fmt: skip
            launch(key, -(-p.tiles * splits // 8), args)

        norms = [layer.attention_norm for layer in w.layers[1:]] + [w.final_norm]
        launch(_key("embed", 0, 1, BF16)[0], spec.hidden // 16,
               _Embed(tokens, _at(w.embed), state, stream(w.layers[0].attention_norm), spec.hidden))  # fmt: skip
        for i, (layer, lw, next_norm) in enumerate(zip(spec.layers, w.layers, norms, strict=True)):
            a, f = layer.attention, layer.feed_forward
            dense(lw.qkv, self.x, lw.qkv_bias, self.qkv)
            self._attention(i, a, lw, cache, nt, state, launch)
            dense(lw.o, self.attended, lw.o_bias, None, lw.ffn_norm)
            if lw.router:
                dense(lw.router, self.x, lw.router_bias, self.router)
            e = f.experts
            always, slots = _always(f), (e.top_k if e else 0) + _always(f)
            route = _Route(_at(self.router), _at(lw.correction), e.scale if e else 1, e.count if e else 0,
                           e.top_k if e else 0, always, int(bool(e and e.scoring == "sigmoid")),
                           int(bool(e and e.normalise)), e.groups if e else 1, e.top_groups if e else 1)  # fmt: skip
            macros = {"EXPERTS": e.count if e else 0, "GROUPS": e.groups if e else 1}
            units = lw.up.tiles * min(slots * 8 * nt, (e.count if e else 0) + always)
            args = _Experts(_at(lw.up.w), _at(lw.up.scales), _at(lw.up_bias), _at(self.x), _at(self.squares),
                            _at(self.inner), state, stream(None), route, lw.up.columns, lw.up.tiles, eps, f.alpha,
                            f.limit, f.activation == "clamped")  # fmt: skip
            key, _ = _key("expert_up", 2, nt, lw.up.format, 8 * nt * (spec.hidden * 2 + 64), **macros)
            launch(key, min(self.blocks, -(-units * 64 // threads(key))), args)
            stages = lw.down.columns // STEP[lw.down.format]
            splits = next(s for s in (16, 8, 4, 2, 1) if s == 1 or (s * slots <= 16 and stages // s >= 8))
            extra = splits * 8 * nt * slots * 64
            launch(_key("expert_down", 3, nt, lw.down.format, extra, SPLITS=splits, **macros)[0], lw.down.tiles,
                   _Experts(_at(lw.down.w), _at(lw.down.scales), _at(lw.down_bias), _at(self.inner), None, None, state,
                            stream(next_norm), route, lw.down.columns, lw.down.tiles, eps))  # fmt: skip
        if logits:
            dense(w.head, self.x, None, self.logits)

    def _attention(self, i: int, a: Attention, lw: SparseLayer, cache: SparseCache | None, nt: int, state: int | None,
                   launch: Callable[[tuple[Any, ...], int, ctypes.Structure], None]) -> None:  # fmt: skip
        splits = 1 if a.window and a.window <= 256 else MAX_SPLITS
        group = a.heads // a.kv_heads
        pitch = a.head_dim * 2 + (0 if a.head_dim * 2 % 128 else 64)
        tiles = -(-8 * nt * group // 16)
        shared = 16 * pitch + 8 * 64 * max(a.head_dim, a.value_dim + 8) + 8 * 32 * 4
        key = ("attention", shared, ("KIND", 4), ("NT", nt), ("DEPTH", 1), ("D", a.head_dim), ("DV", a.value_dim),
               ("GROUP", group), ("SPLITS", splits))  # fmt: skip
        keys, values = (cache.layer_keys[i], cache.layer_values[i]) if cache else (None, None)
        slots = keys.shape[1] if keys is not None else 0
        args = _Attention(*map(_at, (self.qkv, keys, values, self.attended, self.parts, lw.q_norm, lw.k_norm,
                                     lw.cos_sin, lw.sinks)), state, slots,
                          a.kv_heads, len(a.rope.inv_freq), a.window or 1 << 30,
                          a.softmax_scale, a.value_scale, self.spec.norm_eps)  # fmt: skip
        launch(key, a.kv_heads * splits * tiles, args)


def _at(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def threads(key: tuple[Any, ...]) -> int:
    """Of a block."""
    name: str = key[0]
    macros: dict[str, int] = dict(key[2:])
    if name == "expert_up":
        return (512 if macros["FORMAT"] == BF16 else 1024) // macros["NT"]
    return 512 // macros["NT"] if name == "expert_down" else 256


def _key(name: str, kind: int, nt: int, format: int, extra: int = 0, **macros: int) -> tuple[tuple[Any, ...], int]:
    """What a kernel is compiled from: its name, shared memory and macros. extra: bytes beside the queues."""
    stage = {BF16: 1024, FP8: 768, MXFP4: 640}[format]
    if name == "expert_up":  # one block fills a multiprocessor, or with bf16 leaves room for one of `expert_down`
        warps, room = (
            (16, QUEUE_BYTES + 16 * 1024 - extra) if format == BF16 else (32, 2 * QUEUE_BYTES + 8 * 1024 - extra)
        )
        warps //= nt
    else:
        stage, warps = stage + (1024 if format == MXFP4 else 512) * nt, 16 // nt if name == "expert_down" else 8
        room = QUEUE_BYTES - extra
    depth = min(16, room // (warps * stage))
    depth -= depth % 4 if format == FP8 else 0  # as stages share scales
    shared = max(warps * depth * stage, 8 * nt * 512) + extra
    return (name, shared, ("KIND", kind), ("NT", nt), ("FORMAT", format), ("DEPTH", depth), *macros.items()), depth
