"""The block drafter on the device: what it remembers of a text, and a draft as part of the round's graph.

    taps of the rows that ran -> `fuse` -> `norm_qkv`: keys and values of every layer, at the rows' positions
    anchor, masks -> layers over the window and the block -> base logits -> `candidates` -> `markov`

The kernels are those of the pass, launched with PDL even where the pass does without. Nothing returns to the host, so
all of it can be captured. Rows that are rejected later, and the rows of a draft, leave keys behind that no draft sees
before the next round has written over them. `train.drafter` defines what is computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from slipstream.backends.cuda.cache import CudaCache
from slipstream.backends.cuda.weights import Weights, rotary_table, rotate
from slipstream.errors import BackendError
from slipstream.kernels.attention import BLOCK, attention
from slipstream.kernels.block_rows import block_rows
from slipstream.kernels.candidates import candidates
from slipstream.kernels.fuse import fuse
from slipstream.kernels.gate_up import gate_up
from slipstream.kernels.head import head
from slipstream.kernels.launch import KV_SPLIT, ROWS
from slipstream.kernels.markov import markov
from slipstream.kernels.matrix import dense
from slipstream.kernels.norm_qkv import norm_qkv
from slipstream.kernels.projection import attention_projection, projection
from slipstream.models.block_drafter import BlockDrafterConfig, BlockDrafterWeights
from slipstream.models.spec import Rope

LEAST_SURVIVAL = 0.12
"""A draft is verified while it and all before it hold with this chance: about what its row costs (docs/performance.md),
5% of a round, times the tokens such a round brings."""


class DraftMemory:
    """The drafter's keys (layers, kv_heads, positions, d) and values (layers, kv_heads, d, positions) of one text, from
    position `first` to `length`; parts: of attention, merged at once.

    Positions of rounds that ran without the drafter are missing; it then sees the text from where it came back.
    """

    def __init__(self, positions: int, config: BlockDrafterConfig, dtype: torch.dtype, device: torch.device):
        c = config
        room = positions + ROWS
        self.keys = torch.zeros(c.layers, c.kv_heads, room, c.head_dim, dtype=dtype, device=device)
        self.values = torch.zeros(c.layers, c.kv_heads, c.head_dim, room, dtype=dtype, device=device)
        splits = -(-(min(c.window or positions, positions) + BLOCK + ROWS) // KV_SPLIT)
        self.parts = torch.zeros(splits, ROWS, c.heads, c.head_dim, device=device)
        self.lse = torch.zeros(splits, ROWS, c.heads, device=device)
        self.seen_from = torch.zeros((), dtype=torch.int32, device=device)
        self.first = self.length = 0

    def follow(self, start: int, rows: int) -> None:
        """Positions from `start` on are being written; tells the device where an unbroken text begins."""
        first = start if start > self.length else min(self.first, start)
        self.length = start + rows
        if first != self.first:
            self.first = first
            self.seen_from.fill_(first)


@dataclass(frozen=True)
class DraftLayer:
    input_norm: torch.Tensor
    qkv: torch.Tensor
    o: torch.Tensor
    post_norm: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor


class DeviceDrafter:
    """Weights in the target's number format, and the drafter's two steps. `taps` is what the target's pass leaves."""

    def __init__(self, drafter: BlockDrafterWeights, target: Weights, taps: torch.Tensor, pdl: bool = False) -> None:
        c = self.config = drafter.config
        if c.drafts >= ROWS:
            raise BackendError(f"a block of {c.block} rows exceeds the {ROWS} of a pass on the device")
        if c.head_dim & (c.head_dim - 1) or c.head_dim < 32 or c.hidden % 16 or c.inner % 16:
            raise BackendError(
                f"the cuda backend needs drafters with sizes in multiples of 16 and head sizes that are powers of two "
                f"from 32, got {c.hidden}, {c.inner} and {c.head_dim}"
            )
        device, dtype = target.embed.device, target.embed.dtype
        w = {name: torch.from_numpy(t.float32().copy()).to(device) for name, t in drafter.tensors.items()}

        def matrix(*names: str) -> torch.Tensor:
            return torch.cat([w[f"{name}.weight"] for name in names]).to(dtype)

        self.dtype, self.device, self.pdl, self.embed, self.taps = dtype, device, pdl, target.embed, taps
        self.tap_norm, self.fuse = w["tap_norm.weight"], matrix("fuse")
        self.context_norm, self.norm, self.mask = w["context_norm.weight"], w["norm.weight"], w["mask_embedding"]
        at = [f"layers.{i}." for i in range(c.layers)]
        self.kv = matrix(*(a + n for n in "kv" for a in at))  # of the context: all layers at once
        self.layers = [
            DraftLayer(w[a + "input_norm.weight"], matrix(*(a + n for n in "qkv")), matrix(a + "o"),
                       w[a + "post_norm.weight"], *(matrix(a + n) for n in ("gate", "up", "down")))
            for a in at
        ]  # fmt: skip
        frequencies = tuple(c.rope_theta ** (-2 * i / c.head_dim) for i in range(c.head_dim // 2))
        self.cos_sin = rotary_table(Rope(frequencies), len(target.layers[0].cos_sin), device)
        self.vocab = torch.from_numpy(drafter.tokens.copy()).to(device)
        base = dense(target.head)[self.vocab.long()]
        evidence = w["confidence.y"][None].to(dtype)
        self.head = torch.cat([base, matrix("markov.state"), evidence])  # all that is read off the final norm
        prev = w["markov.prev.weight"].T
        self.before = torch.cat([(e.float() @ prev).to(dtype) for e in torch.split(target.embed, 8192)])
        self.bias = (base.float() @ w["markov.out.weight"].T).to(dtype)
        self.confidence, self.confidence_m = torch.cat([w["confidence.p"], w["confidence.b"]]), w["confidence.m"]

        self.context, self.h = (torch.zeros(ROWS, c.hidden, device=device) for _ in range(2))
        self.q = torch.zeros(ROWS, c.heads * c.head_dim, dtype=dtype, device=device)
        self.inner = torch.zeros(ROWS, c.inner, dtype=dtype, device=device)
        self.out = torch.zeros(ROWS, len(self.head), device=device)
        self.block, self.span = (torch.zeros(3, dtype=torch.int32, device=device) for _ in range(2))
        self.ids = torch.zeros(c.drafts, c.candidates, dtype=torch.int32, device=device)
        self.base = torch.zeros(c.drafts, c.candidates, device=device)
        self.guesses = torch.zeros(c.drafts, dtype=torch.int32, device=device)
        self.chances = torch.zeros(c.drafts, device=device)

    def memory(self, positions: int) -> DraftMemory:
        return DraftMemory(positions, self.config, self.dtype, self.device)

    def remember(self, memory: DraftMemory, taps: torch.Tensor, start: int) -> None:
        """Write the keys and values of positions from `start` on, of any number of taps (taps, n, target hidden)
        float32, by library kernels."""
        c, at = self.config, slice(start, start + taps.shape[1])
        x = (F.rms_norm(taps, taps.shape[2:], None, c.norm_eps) * self.tap_norm[:, None]).to(self.dtype)
        x = F.linear(x.transpose(0, 1).flatten(1), self.fuse)  # (n, hidden)
        x = F.rms_norm(x.float(), x.shape[1:], self.context_norm, c.norm_eps).to(self.dtype)
        k, v = F.linear(x, self.kv).view(len(x), 2, c.layers, c.kv_heads, c.head_dim).unbind(1)
        cos, sin = self.cos_sin[at, None, None].unbind(3)
        memory.keys[:, :, at] = rotate(k, cos, sin).permute(1, 2, 0, 3).to(self.dtype)
        memory.values[..., at] = v.permute(1, 2, 3, 0)

    def remember_rows(self, cache: CudaCache) -> None:
        """Write the keys and values of the rows that the pass just ran."""
        m, eps = cache.drafts, self.config.norm_eps
        assert m is not None
        fuse(self.taps, self.tap_norm, self.fuse, self.context, cache.state, eps, self.pdl)
        no_queries, keys, values = self.q[:, :0], m.keys.flatten(0, 1), m.values.flatten(0, 1)
        norm_qkv(self.context, self.context_norm, self.kv, None, None, self.cos_sin, no_queries, keys, values,
                 cache.state, eps, self.pdl)  # fmt: skip

    def draft(self, cache: CudaCache, knobs: torch.Tensor, seed: torch.Tensor) -> None:
        """Guess what follows the anchor tokens[state[START]], and put it into the next round's rows."""
        c, m, h, block, pdl = self.config, cache.drafts, self.h, self.block, self.pdl
        assert m is not None
        block_rows(cache.tokens, self.embed, self.mask, m.seen_from, cache.state, h, block, self.span, c.window,
                   c.drafts, pdl)  # fmt: skip
        for w, keys, values in zip(self.layers, m.keys, m.values, strict=True):
            norm_qkv(h, w.input_norm, w.qkv, None, None, self.cos_sin, self.q, keys, values, block, c.norm_eps, pdl)
            attention(self.q, keys, values, m.parts, m.lse, block, c.head_dim**-0.5, None, pdl, whole=True)
            attention_projection(m.parts, m.lse, w.o, h, self.span, None, pdl)
            gate_up(h, w.post_norm, w.gate, w.up, self.inner, c.norm_eps, pdl)
            projection(self.inner, w.down, h, block, pdl)
        head(h, self.norm, self.head, self.out, c.norm_eps, pdl)
        vocab, rank = len(self.vocab), c.markov_rank
        candidates(self.out, self.ids, self.base, vocab, pdl)
        markov(self.base, self.ids, self.vocab, self.before, self.bias, self.out[:, vocab : vocab + rank],
               self.out[:, vocab + rank], self.confidence, self.confidence_m, knobs, seed, cache.tokens,
               cache.row_tokens, self.guesses, self.chances, cache.state, LEAST_SURVIVAL, pdl)  # fmt: skip
