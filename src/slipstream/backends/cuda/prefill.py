"""Prefill by library kernels (cuBLAS, SDPA's FlashAttention), straight into the caches: fast, not row-invariant."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from slipstream.backends.cuda.cache import CudaCache
from slipstream.backends.cuda.weights import Weights, rotate
from slipstream.kernels.matrix import dense
from slipstream.models.spec import ModelSpec

CHUNK = 8192


def prefill(spec: ModelSpec, weights: Weights, cache: CudaCache, tokens: torch.Tensor,
            tap_layers: Sequence[int] = ()) -> torch.Tensor:  # fmt: skip
    """tokens (n,) on the device: append their keys and values, CHUNK at a time. The caller moves `cache.length`.

    Returns the residual stream after the layers `tap_layers`, (layers, n, hidden) float32.
    """
    taps = torch.empty(len(tap_layers), len(tokens), spec.hidden, device=tokens.device)
    for i in range(0, len(tokens), CHUNK):
        _chunk(spec, weights, cache, tokens[i : i + CHUNK], cache.length + i, tap_layers, taps[:, i : i + CHUNK])
    return taps


def _chunk(spec: ModelSpec, weights: Weights, cache: CudaCache, tokens: torch.Tensor, start: int,
           tap_layers: Sequence[int], taps: torch.Tensor) -> None:  # fmt: skip
    h = weights.embed[tokens.long()].float()  # (n, hidden)
    n, dtype = len(tokens), weights.embed.dtype
    end = start + n
    for i, (layer, w) in enumerate(zip(spec.layers, weights.layers, strict=True)):
        a = layer.attention
        x = F.rms_norm(h, h.shape[1:], w.attention_norm, spec.norm_eps).to(dtype)
        qkv = F.linear(x, dense(w.qkv), w.qkv_bias).view(n, a.heads + 2 * a.kv_heads, a.head_dim)
        q, k, v = torch.split(qkv, [a.heads, a.kv_heads, a.kv_heads], 1)
        if w.head_norm is not None:
            q, k = (
                F.rms_norm(t.float(), t.shape[2:], s, spec.norm_eps) for t, s in zip((q, k), w.head_norm, strict=True)
            )
        cos, sin = w.cos_sin[start:end, None].unbind(2)  # (n, 1, d / 2)
        q, k = rotate(q, cos, sin).to(dtype), rotate(k, cos, sin).to(dtype)
        cache.keys[i, :, start:end] = k.transpose(0, 1)
        cache.values[i, :, :, start:end] = v.permute(1, 2, 0)
        if i + 1 == len(spec.layers) and i not in tap_layers:
            return  # nothing reads the last layer's output
        keys = cache.keys[i, :, :end] if start else k.transpose(0, 1)
        values = cache.values[i, :, :, :end].transpose(1, 2).contiguous() if start else v.transpose(0, 1)
        o = F.scaled_dot_product_attention(q.transpose(0, 1)[None], keys[None], values[None],
                                           attn_mask=_mask(n, end, a.window, q.device), scale=a.softmax_scale,
                                           enable_gqa=a.heads != a.kv_heads)  # fmt: skip
        h += F.linear(o[0].transpose(0, 1).reshape(n, -1), dense(w.o))
        x = F.rms_norm(h, h.shape[1:], w.ffn_norm, spec.norm_eps).to(dtype)
        gate, up = F.linear(x, dense(w.gate_up)).chunk(2, -1)
        h += F.linear(F.silu(gate) * up, dense(w.down))
        if i in tap_layers:
            taps[tap_layers.index(i)] = h


def _mask(n: int, end: int, window: int | None, device: torch.device) -> torch.Tensor:
    if window is None or window >= end:
        return causal_lower_right(n, end)
    back = torch.arange(end - n, end, device=device)[:, None] - torch.arange(end, device=device)
    return (back >= 0) & (back < window)
