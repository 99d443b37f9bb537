"""The target over a batch of whole texts, by library kernels: the taps a drafter reads, and what it should say."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.backends.cuda.weights import Weights, rotate
from slipstream.models.spec import ModelSpec


@torch.no_grad()
def run(spec: ModelSpec, weights: Weights, tokens: Tensor, taps: Sequence[int]) -> tuple[Tensor, Tensor]:
    """tokens (b, n), padded at the end: the residual stream after layers `taps` (b, n, taps, hidden) float32, and the
    normalised final hidden states (b, n, hidden) in the weights' dtype. A dense model, or the weights do not exist."""
    dtype, (b, n) = weights.embed.dtype, tokens.shape
    h = weights.embed[tokens].float()
    kept = []
    back = torch.arange(n, device=tokens.device)[:, None] - torch.arange(n, device=tokens.device)
    windows = {layer.attention.window for layer in spec.layers}
    masks = {window: (back >= 0) & (back < window) if window else None for window in windows}
    for i, (layer, w) in enumerate(zip(spec.layers, weights.layers, strict=True)):
        a = layer.attention
        x = F.rms_norm(h, h.shape[2:], w.attention_norm, spec.norm_eps).to(dtype)
        qkv = F.linear(x, w.qkv, w.qkv_bias).view(b, n, -1, a.head_dim)
        q, k, v = torch.split(qkv, [a.heads, a.kv_heads, a.kv_heads], 2)
        if w.head_norm is not None:
            q, k = (
                F.rms_norm(t.float(), t.shape[3:], s, spec.norm_eps) for t, s in zip((q, k), w.head_norm, strict=True)
            )
        cos, sin = w.cos_sin[:n, None].unbind(2)  # (n, 1, d / 2)
        q, k = rotate(q, cos, sin).to(dtype), rotate(k, cos, sin).to(dtype)
        o = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
                                           attn_mask=masks[a.window], is_causal=not a.window,
                                           scale=a.softmax_scale, enable_gqa=a.heads != a.kv_heads)  # fmt: skip
        h = h + F.linear(o.transpose(1, 2).flatten(2), w.o)
        x = F.rms_norm(h, h.shape[2:], w.ffn_norm, spec.norm_eps).to(dtype)
        gate, up = F.linear(x, w.gate_up).chunk(2, -1)
        h = h + F.linear(F.silu(gate) * up, w.down)
        if i in taps:
            kept.append(h)
    return torch.stack(kept, 2), F.rms_norm(h, h.shape[2:], weights.final_norm, spec.norm_eps).to(dtype)
