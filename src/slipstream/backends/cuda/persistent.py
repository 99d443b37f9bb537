"""The pass as one persistent kernel (persistent.cu): which block owns which tiles, weights packed into its streams."""

from __future__ import annotations

import ctypes
import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from slipstream.backends.cuda.cache import CudaCache
from slipstream.backends.cuda.nvrtc import Kernel
from slipstream.backends.cuda.weights import Weights
from slipstream.kernels.launch import KV_SPLIT, ROWS
from slipstream.kernels.matrix import dense
from slipstream.models.spec import ModelSpec

Ints = npt.NDArray[np.int64]
FRAGMENT = 256
"""Values of one 16 x 16 operand fragment."""
SHARED_BYTES = 227 * 1024
"""All a block may have: the ring takes what activations leave."""
V_SLOTS = 24
PAIR = 2
"""Tiles a block multiplies side by side: they share one reading of the activations."""
TAP = 4
"""Of the words of a layer's pointers, the one of its tap."""


class _Args(ctypes.Structure):
    _fields_ = [(n, ctypes.c_void_p) for n in (
        "stream", "stream_begin", "tasks", "stage_begin", "owned", "layers", "embed", "final_norm",
        "row_tokens", "state", "keys", "values", "logits", "arena", "epoch", "profile")] + [
        (n, ctypes.c_uint64) for n in ("positions", "layer_bytes", "want_logits")]  # fmt: skip


def why_not(spec: ModelSpec, device: torch.device) -> str | None:
    """Why this kernel cannot run the model here, or None."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] < 9:
        return "needs bulk copies to shared memory (Hopper, compute capability 9.0)"
    kinds = {(x.attention.heads, x.attention.kv_heads, x.attention.head_dim, x.attention.qkv_bias,
              x.attention.softmax_scale, x.feed_forward.inner) for x in spec.layers}  # fmt: skip
    a = spec.layers[0].attention
    if len(kinds) > 1:
        return "needs layers of one shape"
    if any(x.attention.qk_norm for x in spec.layers):
        return "has no per-head norm"
    if a.head_dim not in (32, 64, 128) or spec.vocab % 16:
        return "needs heads of 32, 64 or 128 and a vocabulary in multiples of 16"
    if max(spec.hidden, a.heads * a.head_dim) > 4096:
        return "holds activations of at most 4096 values in shared memory"
    return None


def piece(k: int) -> int:
    """Columns of a tile that are copied at once, as in persistent.cu."""
    return max(c for c in range(16, 577, 16) if k % c == 0)


def largest_chunk(inner: int) -> int:
    """The most columns of the down projection whose input is held at once: whole pieces, up to 2048."""
    return max(c for c in range(piece(inner), 2049, piece(inner)) if inner % c == 0)


@dataclass(frozen=True)
class Plan:
    """tiles[stage]: for each block the tiles it computes there, in order; stages are qkv and gate/up of each layer,
    then the head. owned: each block's tiles of the residual stream, for the output and down projections."""

    tiles: list[list[list[int]]]
    owned: list[list[int]]


def plan(spec: ModelSpec, blocks: int) -> Plan:
    """Spread every stage's tiles so that all blocks have read about as much at any time."""
    a, inner, hidden = spec.layers[0].attention, spec.layers[0].feed_forward.inner, spec.hidden
    owned: list[list[int]] = [list(range(b, hidden // 16, blocks)) for b in range(blocks)]
    load = [0] * blocks

    def spread(tiles: int, k: int) -> list[list[int]]:
        queue = [(x, b) for b, x in enumerate(load)]
        heapq.heapify(queue)
        most = -(-tiles // blocks)  # a stage lasts as long as its busiest block
        taken: list[list[int]] = [[] for _ in range(blocks)]
        for tile in range(tiles):
            x, b = heapq.heappop(queue)
            taken[b].append(tile)
            load[b] = x + k
            if len(taken[b]) < most:
                heapq.heappush(queue, (load[b], b))
        return taken

    stages = []
    for _ in spec.layers:
        for b, tiles in enumerate(owned):
            load[b] += len(tiles) * (a.heads * a.head_dim + inner)
        stages.append(spread((a.heads + 2 * a.kv_heads) * a.head_dim // 16, hidden))
        stages.append(spread(inner // 8, hidden))
    stages.append(spread(spec.vocab // 16, hidden))
    return Plan(stages, owned)


def fragments(w: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """w (n, k), rows (tiles, 16) -> (tiles, k / 16, FRAGMENT): operand A of mma.m16n8k16, a thread's 8 values together.

    Thread (g, c) holds columns 4c..4c+3 of rows g and g + 8; the kernel reads activations with the same relabelling.
    """
    tiles, k = rows.shape[0], w.shape[1]
    x = w[rows.flatten()].view(tiles, 2, 8, k // 16, 4, 2, 2)  # (tile, upper, g, step, c, half, element)
    return x.permute(0, 3, 2, 4, 5, 1, 6).reshape(tiles, k // 16, FRAGMENT)


def tile_rows(kind: str, spec: ModelSpec) -> torch.Tensor:
    """(tiles, 16) output features: a thread gets features g and g + 8 of a tile, so those are the pairs that an
    epilogue combines: rotary partners, gate and up, or neighbours stored in one word."""
    a, inner, g = spec.layers[0].attention, spec.layers[0].feed_forward.inner, torch.arange(8)
    if kind == "qkv":
        d = a.head_dim
        heads, j = torch.arange(a.heads + 2 * a.kv_heads) * d, torch.arange(0, d // 2, 8)
        low = (heads[:, None] + j).flatten()[:, None] + g
        return torch.cat([low, low + d // 2], 1)
    if kind == "gate_up":
        low = torch.arange(0, inner, 8)[:, None] + g
        return torch.cat([low, low + inner], 1)
    n = spec.vocab if kind == "head" else spec.hidden
    low = torch.arange(0, n, 16)[:, None] + 2 * g
    return torch.cat([low, low + 1], 1)


def places(stage: list[list[int]], at: Ints, k: int, chunk: int, group: int) -> tuple[Ints, Ints, Ints]:
    """Where each fragment of a stage lies in its block's stream; at (blocks,) is moved past the stage.

    Returns the stage's tiles in stream order (tiles,), their blocks (tiles,) and positions (tiles, k / 16). A block
    takes `group` tiles at once, goes with them through K chunk by chunk and in each tile by tile.
    """
    step, within = np.divmod(np.arange(k // 16), chunk // 16)
    where = []
    for b, tiles in enumerate(stage):
        i = np.arange(len(tiles))[:, None]
        first = i // group * group
        width = np.minimum(group, len(tiles) - first)
        where.append(at[b] + first * (k // 16) + (step * width + i - first) * (chunk // 16) + within)
        at[b] += len(tiles) * k // 16
    order = np.array([t for tiles in stage for t in tiles])
    return order, np.repeat(np.arange(len(stage)), [len(t) for t in stage]), np.concatenate(where)


def invertible(norm: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A norm's weights (k,) and the matrix (n, k) behind it, as the kernel takes them: (2, k) float32, the weights and
    their inverses, from which it finds the stream's sum of squares, and the matrix, into whose columns the part of a
    weight goes that is too near zero to invert."""
    least = (norm.abs().max() * 2**-10).clamp_min(1e-6)
    kept = torch.where(norm.abs() < least, least, norm)
    both = torch.stack([kept, 1 / kept]).contiguous()
    return both, w if torch.equal(kept, norm) else (w.float() * (norm / kept)).to(w.dtype)


def pack(spec: ModelSpec, w: Weights, p: Plan, chunk: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """All weights in the blocks' streams, in the order `run` in persistent.cu consumes them.

    Returns the streams (fragments, FRAGMENT) and the byte at which each block's begins (blocks,) int64.
    """
    a = spec.layers[0].attention
    attention, inner, hidden = a.heads * a.head_dim, spec.layers[0].feed_forward.inner, spec.hidden
    end = np.zeros(len(p.owned), np.int64)
    parts = []
    for i, layer in enumerate(w.layers):
        parts += [
            (layer.qkv, "qkv", places(p.tiles[2 * i], end, hidden, piece(hidden), PAIR)),
            (layer.o, "stream", places(p.owned, end, attention, piece(attention), PAIR)),
            (layer.gate_up, "gate_up", places(p.tiles[2 * i + 1], end, hidden, piece(hidden), PAIR)),
            (layer.down, "stream", places(p.owned, end, inner, chunk, len(p.owned[0]))),
        ]
    parts.append((w.head, "head", places(p.tiles[-1], end, hidden, piece(hidden), PAIR)))
    first = np.concatenate([[0], np.cumsum(end)[:-1]])
    stream = torch.zeros(int(end.sum()), FRAGMENT, dtype=w.head.dtype, device=device)
    rows = {kind: tile_rows(kind, spec).to(device) for kind in ("qkv", "stream", "gate_up", "head")}
    for matrix, kind, (order, block, where) in parts:
        at = torch.from_numpy(where + first[block][:, None]).to(device).flatten()
        stream[at] = fragments(dense(matrix), rows[kind][torch.from_numpy(order).to(device)]).view(-1, FRAGMENT)
    return stream, torch.from_numpy(first * FRAGMENT * 2).to(device)


class Persistent:
    """Packed weights, tables and the kernel compiled for 8 and for 16 rows."""

    def __init__(self, spec: ModelSpec, weights: Weights, logits: torch.Tensor, pdl: bool = True) -> None:
        self.spec, self.weights, self.logits, self.pdl = spec, weights, logits, pdl
        device = logits.device
        self.blocks = torch.cuda.get_device_properties(device).multi_processor_count
        a, inner = spec.layers[0].attention, spec.layers[0].feed_forward.inner
        self.chunk = largest_chunk(inner)
        p = plan(spec, self.blocks)
        layers, self._norms = [], []
        for layer in weights.layers:
            first, qkv = invertible(layer.attention_norm, dense(layer.qkv))
            second, gate_up = invertible(layer.ffn_norm, dense(layer.gate_up))
            self._norms += [first, second]
            layers.append(replace(layer, qkv=qkv, gate_up=gate_up))
        final, head = invertible(weights.final_norm, dense(weights.head))
        self._norms.append(final)
        packed = replace(weights, layers=layers, head=head)
        self.stream, self._begin = pack(spec, packed, p, self.chunk, device)
        owned_most = max(len(t) for t in p.owned)
        owned = np.zeros((self.blocks, owned_most + 1), np.int32)
        for b, tiles in enumerate(p.owned):
            owned[b, : len(tiles) + 1] = [len(tiles), *tiles]
        begin = np.zeros((self.blocks, len(p.tiles) + 1), np.int32)
        tasks: list[int] = []
        for b in range(self.blocks):
            for s, stage in enumerate(p.tiles):
                begin[b, s] = len(tasks)
                tasks += stage[b]
            begin[b, -1] = len(tasks)
        pointers = [[self._norms[2 * i].data_ptr(), self._norms[2 * i + 1].data_ptr(),
                     0 if w.qkv_bias is None else w.qkv_bias.data_ptr(), w.cos_sin.data_ptr(), 0,
                     layer.attention.window or 1 << 30]
                    for i, (layer, w) in enumerate(zip(spec.layers, weights.layers, strict=True))]  # fmt: skip
        self._tables = [torch.from_numpy(x).to(device) for x in
                        (np.array(tasks, np.int32), begin, owned, np.array(pointers, np.int64))]  # fmt: skip
        macros = {"GRID": self.blocks, "LAYERS": len(spec.layers), "HIDDEN": spec.hidden, "HEADS": a.heads,
                  "KV_HEADS": a.kv_heads, "HD": a.head_dim, "INNER": inner, "VOCAB": spec.vocab, "OWNED": owned_most,
                  "CHUNK": self.chunk, "SMEM": SHARED_BYTES, "EPS": f"{spec.norm_eps!r}f",
                  "SCALE": f"{a.softmax_scale!r}f", "BIAS": int(a.qkv_bias),
                  "HALF": int(weights.embed.dtype == torch.float16)}  # fmt: skip
        self.profile: torch.Tensor | None = None
        self.tap_layers: tuple[int, ...] = ()
        self.taps: torch.Tensor | None = None
        source = Path(__file__).with_name("persistent.cu")
        self._kernels = {n * 8: Kernel(source, "model_pass", macros | {"NT": n}, SHARED_BYTES) for n in (1, 2)}

    def tap(self, layers: Sequence[int]) -> torch.Tensor:
        """From now on every pass leaves the residual stream after these layers in `taps` (layers, ROWS, hidden)
        float32, for the rows that run. Programs captured before know nothing of it."""
        device, self.tap_layers = self.stream.device, tuple(layers)
        self.taps = torch.zeros(len(layers), ROWS, self.spec.hidden, device=device)
        column = self._tables[3][:, TAP]
        column.zero_()
        for i, tap in zip(layers, self.taps, strict=True):
            column[i] = tap.data_ptr()
        return self.taps

    def buffers(self, cache: CudaCache) -> Sequence[torch.Tensor]:
        """The arenas of a cache, all sentinel, and their pass count."""
        spec, a = self.spec, self.spec.layers[0].attention
        splits = -(-cache.keys.shape[2] // KV_SPLIT)
        attention, inner = a.heads * a.head_dim, spec.layers[0].feed_forward.inner
        qkv = attention + 2 * a.kv_heads * a.head_dim
        layer = 2 * ROWS * (qkv + 2 * spec.hidden + inner) + 2 * a.kv_heads * a.head_dim * V_SLOTS
        layer += splits * ROWS * (2 * attention + -(-4 * a.heads // 16) * 16)
        arena = torch.full((2, len(spec.layers), layer), 0xFF, dtype=torch.uint8, device=self.stream.device)
        return arena, torch.zeros(6, dtype=torch.int32, device=self.stream.device)

    def run(self, cache: CudaCache, buffers: Sequence[torch.Tensor], logits: bool, rows: int = ROWS) -> None:
        """Enqueue the pass over the rows in `cache.control`, at most `rows` (8 or 16) of them."""
        arena, epoch = buffers
        tasks, begin, owned, layers = self._tables
        w = self.weights
        tensors = (self.stream, self._begin, tasks, begin, owned, layers, w.embed, self._norms[-1],
                   cache.row_tokens, cache.state, cache.keys, cache.values, self.logits, arena, epoch)  # fmt: skip
        positions = cache.keys.shape[2]
        profile = 0 if self.profile is None else self.profile.data_ptr()
        arguments = _Args(*(t.data_ptr() for t in tensors), profile, positions, arena.shape[2], logits)
        self._kernels[rows].launch(self.blocks, 384, arguments, self.pdl)
