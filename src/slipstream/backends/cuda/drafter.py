"""The block drafter on the device: what it remembers of a text, and a draft as part of the round's graph.

    taps of the rows that ran -> norm, fuse, norm -> keys and values of every layer, at the rows' positions
    anchor, masks -> layers over the window and the block -> base logits -> candidates -> `kernels.markov`

Shapes are fixed and nothing returns to the host, so all of it can be captured. Rows that are rejected later leave
keys behind that no draft sees before the next round has written over them. Library matrix products: a draft changes no
token, so its numbers need not be invariant, only the same from run to run. `train.drafter` defines it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from slipstream.backends.cuda.cache import CudaCache
from slipstream.backends.cuda.weights import Weights, rotate
from slipstream.errors import BackendError
from slipstream.kernels.launch import ROWS, RUN_ROWS, START
from slipstream.kernels.markov import markov
from slipstream.kernels.matrix import dense
from slipstream.models.block_drafter import BlockDrafterWeights

LEAST_SURVIVAL = 0.12
"""A draft is verified while it and all before it hold with this chance: about what its row costs (docs/performance.md),
5% of a round, times the tokens such a round brings."""


class DraftMemory:
    """The drafter's keys and values (positions, layers, kv_heads, d) of one text, from position `first` to `length`.

    Positions of rounds that ran without the drafter are missing; it then sees the text from where it came back.
    """

    def __init__(self, positions: int, layers: int, kv_heads: int, d: int, dtype: torch.dtype, device: torch.device):
        self.keys = torch.zeros(positions + ROWS + 1, layers, kv_heads, d, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self.seen_from = torch.zeros((), dtype=torch.int64, device=device)
        self.first = self.length = 0

    def follow(self, start: int, rows: int) -> None:
        """Positions from `start` on are being written; tells the device where an unbroken text begins."""
        first = start if start > self.length else min(self.first, start)
        self.length = start + rows
        if first != self.first:
            self.first = first
            self.seen_from.fill_(first)


class DeviceDrafter:
    """Weights in the target's number format, and the drafter's two steps. `taps` is what the target's pass leaves."""

    def __init__(self, drafter: BlockDrafterWeights, target: Weights, taps: torch.Tensor) -> None:
        c = self.config = drafter.config
        if c.drafts >= ROWS:
            raise BackendError(f"a block of {c.block} rows exceeds the {ROWS} of a pass on the device")
        device, dtype = target.embed.device, target.embed.dtype
        w = {name: torch.from_numpy(t.float32().copy()).to(device) for name, t in drafter.tensors.items()}

        def matrix(*names: str) -> torch.Tensor:
            return torch.cat([w[f"{name}.weight"] for name in names]).to(dtype)

        self.dtype, self.device, self.embed, self.taps = dtype, device, target.embed, taps
        self.tap_norm, self.fuse = w["tap_norm.weight"][:, None], matrix("fuse")
        self.context_norm, self.norm = w["context_norm.weight"], w["norm.weight"]
        self.masks = w["mask_embedding"].expand(c.drafts - 1, -1)
        at = [f"layers.{i}." for i in range(c.layers)]
        self.kv = matrix(*(a + n for n in "kv" for a in at))  # of the context: all layers at once
        self.qkv = [matrix(*(a + n for n in "qkv")) for a in at]
        self.o, self.down = [matrix(a + "o") for a in at], [matrix(a + "down") for a in at]
        self.gate_up = [matrix(a + "gate", a + "up") for a in at]
        self.norms = [(w[a + "input_norm.weight"], w[a + "post_norm.weight"]) for a in at]
        self.inv_freq = c.rope_theta ** (-torch.arange(c.head_dim // 2, device=device, dtype=torch.float64)
                                         * 2 / c.head_dim)  # fmt: skip
        self.vocab = torch.from_numpy(drafter.tokens.copy()).to(device)
        self.head = dense(target.head[self.vocab.long()])
        self.state = matrix("markov.state")
        prev = w["markov.prev.weight"].T
        self.before = torch.cat([(e.float() @ prev).to(dtype) for e in torch.split(target.embed, 8192)])
        self.bias = (self.head.float() @ w["markov.out.weight"].T).to(dtype)
        self.confidence_y, self.confidence_m = w["confidence.y"], w["confidence.m"]
        self.confidence = torch.cat([w["confidence.p"], w["confidence.b"]])
        self.guesses = torch.zeros(c.drafts, dtype=torch.int32, device=device)
        self.chances = torch.zeros(c.drafts, device=device)
        self._rows = torch.arange(ROWS, device=device)
        self._block = torch.arange(c.drafts, device=device)

    def memory(self, positions: int) -> DraftMemory:
        c = self.config
        return DraftMemory(positions, c.layers, c.kv_heads, c.head_dim, self.dtype, self.device)

    def remember(self, memory: DraftMemory, taps: torch.Tensor, positions: torch.Tensor) -> None:
        """Write the keys and values of `positions` (n,) int64 from taps (taps, n, target hidden) float32."""
        c = self.config
        x = (F.rms_norm(taps, taps.shape[2:], None, c.norm_eps) * self.tap_norm).to(self.dtype)
        x = F.linear(x.transpose(0, 1).flatten(1), self.fuse)  # (n, hidden)
        x = F.rms_norm(x.float(), x.shape[1:], self.context_norm, c.norm_eps).to(self.dtype)
        k, v = F.linear(x, self.kv).view(len(positions), 2, c.layers, c.kv_heads, c.head_dim).unbind(1)
        cos, sin = self._angles(positions)
        memory.keys.index_copy_(0, positions, rotate(k, cos[:, None, None], sin[:, None, None]).to(self.dtype))
        memory.values.index_copy_(0, positions, v)

    def remember_rows(self, cache: CudaCache) -> None:
        """Of the rows that the pass just ran; the others go to a place that nothing reads."""
        assert cache.drafts is not None
        nowhere = len(cache.drafts.keys) - 1
        positions = torch.where(self._rows < cache.state[RUN_ROWS], cache.state[START] + self._rows, nowhere)
        self.remember(cache.drafts, self.taps, positions)

    def draft(self, cache: CudaCache, knobs: torch.Tensor, seed: torch.Tensor, pdl: bool) -> None:
        """Guess what follows the anchor tokens[state[START]], and put it into the next round's rows."""
        c, memory = self.config, cache.drafts
        assert memory is not None
        start = cache.state[START].long()
        rows = c.drafts
        window = min(c.window or len(memory.keys), len(memory.keys))
        before = start - window + torch.arange(window, device=self.device)  # positions of the context
        seen = torch.cat([before >= memory.seen_from, torch.ones(rows, dtype=torch.bool, device=self.device)])[None]
        keys, values = memory.keys[before.clamp_min(0)], memory.values[before.clamp_min(0)]
        cos, sin = (t[:, None] for t in self._angles(start + self._block))  # (rows, 1, d / 2)
        anchor = cache.tokens.index_select(0, start[None])
        x = torch.cat([self.embed.index_select(0, anchor).float(), self.masks])  # (rows, hidden)
        for i, (first, second) in enumerate(self.norms):
            a = F.rms_norm(x, x.shape[1:], first, c.norm_eps).to(self.dtype)
            qkv = F.linear(a, self.qkv[i]).view(rows, c.heads + 2 * c.kv_heads, c.head_dim)
            turned = rotate(qkv[:, : c.heads + c.kv_heads], cos, sin).to(self.dtype)
            q = turned[:, : c.heads].transpose(0, 1)[None]  # (1, heads, rows, d)
            k = torch.cat([keys[:, i], turned[:, c.heads :]]).transpose(0, 1)[None]
            v = torch.cat([values[:, i], qkv[:, c.heads + c.kv_heads :]]).transpose(0, 1)[None]
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=seen.expand(rows, -1), enable_gqa=True)
            x = x + F.linear(o[0].transpose(0, 1).flatten(1), self.o[i])
            b = F.rms_norm(x, x.shape[1:], second, c.norm_eps).to(self.dtype)
            gate, up = F.linear(b, self.gate_up[i]).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, self.down[i])
        y = F.rms_norm(x, x.shape[1:], self.norm, c.norm_eps)
        narrow = y.to(self.dtype)
        top = F.linear(narrow, self.head).float().topk(c.candidates)
        markov(top.values, top.indices, self.vocab, self.before, self.bias, F.linear(narrow, self.state).float(),
               self.confidence, self.confidence_m, y @ self.confidence_y, knobs, seed, cache.tokens, cache.row_tokens,
               self.guesses, self.chances, cache.state, LEAST_SURVIVAL, pdl)  # fmt: skip

    def _angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = positions[:, None] * self.inv_freq
        return angles.cos().float(), angles.sin().float()
