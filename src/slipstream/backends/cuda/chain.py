"""The pass over the weights as a chain of Triton kernels: five a layer, the embedding before and the head after."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slipstream.backends.cuda.cache import CudaCache
from slipstream.backends.cuda.weights import Weights
from slipstream.kernels.attention import attention
from slipstream.kernels.embed import embed
from slipstream.kernels.gate_up import gate_up
from slipstream.kernels.head import head
from slipstream.kernels.launch import KV_SPLIT, ROWS
from slipstream.kernels.norm_qkv import norm_qkv
from slipstream.kernels.projection import attention_projection, projection
from slipstream.models.spec import ModelSpec


class Chain:
    """Buffers and order of the kernels. `pdl` false launches them plainly, for comparison."""

    def __init__(self, spec: ModelSpec, weights: Weights, logits: torch.Tensor, pdl: bool = True) -> None:
        self.spec, self.weights, self.logits, self.pdl = spec, weights, logits, pdl
        a, inner, device, dtype = (
            spec.layers[0].attention,
            max(layer.feed_forward.inner for layer in spec.layers),
            logits.device,
            weights.embed.dtype,
        )
        self.h = torch.zeros(ROWS, spec.hidden, device=device)
        self.q = torch.zeros(ROWS, a.heads * a.head_dim, dtype=dtype, device=device)
        self.inner = torch.zeros(ROWS, inner, dtype=dtype, device=device)
        self.tap_layers: tuple[int, ...] = ()
        self.taps: torch.Tensor | None = None

    def tap(self, layers: Sequence[int]) -> torch.Tensor:
        """From now on every pass leaves the residual stream after these layers in `taps` (layers, ROWS, hidden)
        float32, for the rows that run. Programs captured before know nothing of it."""
        self.tap_layers = tuple(layers)
        self.taps = torch.zeros(len(layers), *self.h.shape, device=self.h.device)
        return self.taps

    def buffers(self, cache: CudaCache) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention's parts for a cache: one a KV_SPLIT positions."""
        a, splits = self.spec.layers[0].attention, -(-cache.keys.shape[2] // KV_SPLIT)
        parts = torch.zeros(splits, ROWS, a.heads, a.head_dim, device=self.h.device)
        return parts, torch.zeros(splits, ROWS, a.heads, device=self.h.device)

    def run(self, cache: CudaCache, buffers: Sequence[torch.Tensor], logits: bool,
            rows: int = ROWS) -> None:  # fmt: skip
        """Enqueue the pass over the rows in `cache.control`; `logits` false stops at the last layer's cache. The tiles
        take 16 rows whatever `rows` is."""
        h, pdl, eps, (parts, lse) = self.h, self.pdl, self.spec.norm_eps, buffers
        embed(cache.row_tokens, self.weights.embed, h, pdl)
        for i, (layer, w) in enumerate(zip(self.spec.layers, self.weights.layers, strict=True)):
            a, inner = layer.attention, layer.feed_forward.inner
            keys, values = cache.keys[i], cache.values[i]
            norm_qkv(h, w.attention_norm, w.qkv, w.qkv_bias, w.head_norm, w.cos_sin, self.q, keys, values, cache.state,
                     eps, pdl)  # fmt: skip
            attention(self.q, keys, values, parts, lse, cache.state, a.softmax_scale, a.window, pdl)
            attention_projection(parts, lse, w.o, h, cache.state, a.window, pdl)
            gate_up(h, w.ffn_norm, w.gate_up[:inner], w.gate_up[inner:], self.inner, eps, pdl)
            projection(self.inner, w.down, h, cache.state, pdl)
            if self.taps is not None and i in self.tap_layers:
                self.taps[self.tap_layers.index(i)].copy_(h)
        if logits:
            head(h, self.weights.final_norm, self.weights.head, self.logits, eps, pdl)
