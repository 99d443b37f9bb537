"""The attention half of a layer, every kind: full, sliding, sparse and latent, written out without a fast path.

    x -> queries, keys, values -> which keys each row sees -> softmax(q.k * scale, sink) values -> o

Latent attention is expanded: keys and values of every head are made from the latents each time. That is the definition
from which absorbed forms are derived.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.models.spec import Attention, Indexer, Latent, ModelSpec, Rope

Weights = Mapping[str, Tensor]


class Memory:
    """What attention keeps of one text, a tensor a layer; the first `length` positions are valid.

    keys, values: (capacity, kv_heads, head_dim | value_dim); of a latent layer (capacity, 1, rope width | kv_rank), the
    rotated keys and the latents. index_keys: (capacity, index head_dim), empty where a layer has no indexer.
    """

    def __init__(self, spec: ModelSpec, capacity: int, dtype: torch.dtype) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.index_keys: list[Tensor] = []
        for a in (layer.attention for layer in spec.layers):
            key = (1, a.rope.dim) if a.latent else (a.kv_heads, a.head_dim)
            value = (1, a.latent.kv_rank) if a.latent else (a.kv_heads, a.value_dim)
            index = a.indexer.head_dim if a.indexer and not a.indexer.shared else 0
            self.keys.append(torch.empty((capacity, *key), dtype=dtype))
            self.values.append(torch.empty((capacity, *value), dtype=dtype))
            self.index_keys.append(torch.empty((capacity if index else 0, index), dtype=dtype))
        self.length = 0


def attend(
    a: Attention, w: Weights, x: Tensor, positions: Tensor, memory: Memory, i: int, selected: Tensor | None, eps: float
) -> tuple[Tensor, Tensor | None]:
    """Attention of layer i, whose weights are w: x (n, hidden) -> (n, hidden), and the selection it used.

    positions: (n,) of the rows, whose keys and values are written to `memory`. selected: (n, end) the keys that the
    last layer with an indexer selected. eps: of the norms of q and k.
    """
    end = int(positions[-1]) + 1
    if a.latent:
        compressed = rms_norm(F.linear(x, w["q_a"]), w["q_a_norm"], a.latent.norm_eps) if a.latent.q_rank else x
        q, keys, values = latent_heads(a, a.latent, w, x, compressed, positions, memory, i)
    else:
        compressed = x
        q, keys, values = grouped_heads(a, w, x, positions, memory, i, eps)
    seen = visible(positions, end, a)
    if a.indexer:
        if not a.indexer.shared:
            selected = select(a.indexer, a.rope, w, x, compressed, positions, seen, memory.index_keys[i])
        assert selected is not None  # ModelSpec saw to it
        seen = seen & selected

    scores = torch.einsum("qhd,khd->hqk", q, keys) * a.softmax_scale
    scores = scores.masked_fill(~seen, float("-inf"))
    if a.sinks:
        sinks = w["sinks"].view(-1, 1, 1).expand(-1, len(x), 1)
        weights = torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    attended = torch.einsum("hqk,khd->qhd", weights, values).flatten(1)  # (n, heads * value_dim)
    return F.linear(attended, w["o"], w.get("o_bias")), selected


def grouped_heads(
    a: Attention, w: Weights, x: Tensor, positions: Tensor, memory: Memory, i: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (n, heads, head_dim) of the rows; keys and values (end, heads, ...) of the whole text."""
    end = int(positions[-1]) + 1
    q, k, v = (F.linear(x, w[name], w.get(f"{name}_bias")) for name in ("q", "k", "v"))
    q, k = q.view(-1, a.heads, a.head_dim), k.view(-1, a.kv_heads, a.head_dim)
    if a.qk_norm:
        q, k = rms_norm(q, w["q_norm"], eps), rms_norm(k, w["k_norm"], eps)
    memory.keys[i][positions] = rotate(k, positions, a.rope)
    memory.values[i][positions] = v.view(-1, a.kv_heads, a.value_dim) * a.value_scale
    keys, values = (t[i][:end].repeat_interleave(a.heads // a.kv_heads, dim=1) for t in (memory.keys, memory.values))
    return rotate(q, positions, a.rope), keys, values


def latent_heads(
    a: Attention, latent: Latent, w: Weights, x: Tensor, compressed: Tensor, positions: Tensor, memory: Memory, i: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The same of a latent layer, in expanded form. compressed: (n, q_rank), or x where queries are not compressed."""
    end = int(positions[-1]) + 1
    q = F.linear(compressed, w["q_b"] if latent.q_rank else w["q"]).view(-1, a.heads, a.head_dim)
    q_nope, q_rope = torch.split(q, [latent.nope_dim, a.rope.dim], dim=-1)
    q = torch.cat((q_nope, rotate(q_rope, positions, a.rope)), dim=-1)

    kv, k_rope = torch.split(F.linear(x, w["kv_a"]), [latent.kv_rank, a.rope.dim], dim=-1)
    memory.keys[i][positions] = rotate(k_rope.unsqueeze(1), positions, a.rope)
    memory.values[i][positions] = rms_norm(kv, w["kv_a_norm"], latent.norm_eps).unsqueeze(1)

    expanded = F.linear(memory.values[i][:end, 0], w["kv_b"]).view(end, a.heads, -1)
    k_nope, values = torch.split(expanded, [latent.nope_dim, a.value_dim], dim=-1)
    keys = torch.cat((k_nope, memory.keys[i][:end].expand(-1, a.heads, -1)), dim=-1)
    return q, keys, values * a.value_scale


def select(
    index: Indexer, rope: Rope, w: Weights, x: Tensor, compressed: Tensor, positions: Tensor, seen: Tensor, keys: Tensor
) -> Tensor:
    """Which keys each row may see by its indexer, (n, end); seen: (n, end) those it could. Writes the rows' keys."""
    end = seen.shape[1]
    q = F.linear(compressed, w["index_q"]).view(-1, index.heads, index.head_dim)
    k = F.layer_norm(
        F.linear(x, w["index_k"]), (index.head_dim,), w["index_k_norm"], w["index_k_norm_bias"], index.norm_eps
    )
    keys[positions] = rotate(k.unsqueeze(1), positions, rope).squeeze(1)
    matches = torch.einsum("qhd,kd->hqk", rotate(q, positions, rope), keys[:end]).relu()
    scores = torch.einsum("qh,hqk->qk", F.linear(x, w["index_weights"]), matches).masked_fill(~seen, float("-inf"))
    best = scores.sort(dim=-1, descending=True, stable=True).indices[:, : index.top_k]
    return torch.zeros_like(seen).scatter(1, best, True)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm over the last axis (arXiv:1910.07467)."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, positions: Tensor, rope: Rope) -> Tensor:
    """Rotary embedding of x (n, heads, head_dim): element j turns with j + rotary_dim/2, the rest stay."""
    half = len(rope.inv_freq)
    angles = torch.outer(positions.double(), torch.tensor(rope.inv_freq, dtype=torch.float64))  # (n, rotary_dim / 2)
    cos, sin = ((f(angles) * rope.scale).to(x.dtype).unsqueeze(1) for f in (torch.cos, torch.sin))
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def visible(positions: Tensor, end: int, attention: Attention) -> Tensor:
    """Which of keys 0..end each query sees, (n, end): none after itself, the last `window` where it slides."""
    distance = positions.unsqueeze(1) - torch.arange(end)
    seen = distance >= 0
    return seen if attention.window is None else seen & (distance < attention.window)
