"""The whole forward pass in plain PyTorch: the oracle that every backend and kernel is checked against.

    tokens -> embed -> [ x + attend(norm(x)) -> x + feed_forward(norm(x)) ] * layers -> norm -> head -> logits

Naive on purpose, and more precise than what it judges: weights dequantised to float32 or float64, angles computed in
float64, every key kept. It knows nothing about text, sampling, files or families.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.models.spec import Attention, ModelSpec, Rope, WeightTensor


class Memory:
    """Keys and values of one text, each (layers) x (capacity, kv_heads, head_dim); the first `length` are valid."""

    def __init__(self, spec: ModelSpec, capacity: int, dtype: torch.dtype) -> None:
        shapes = [(capacity, layer.attention.kv_heads, layer.attention.head_dim) for layer in spec.layers]
        self.keys = [torch.empty(shape, dtype=dtype) for shape in shapes]
        self.values = [torch.empty(shape, dtype=dtype) for shape in shapes]
        self.length = 0


class Reference:
    """A model in plain PyTorch, on the CPU.

    tensors: canonical names, as in `Checkpoint.tensors`; dtype: float32 or float64.
    """

    def __init__(
        self, spec: ModelSpec, tensors: Mapping[str, WeightTensor], dtype: torch.dtype = torch.float32
    ) -> None:
        self.spec, self.dtype = spec, dtype
        self.weights = {name: torch.from_numpy(tensors[name].float32()).to(dtype) for name in spec.tensor_shapes()}
        self.weights.setdefault("head", self.weights["embed"])  # tied

    def memory(self, capacity: int) -> Memory:
        """Room for `capacity` positions, empty."""
        return Memory(self.spec, capacity, self.dtype)

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int], memory: Memory | None = None) -> Tensor:
        """Next-token logits (n, vocab) after each of n tokens, which are appended to `memory`."""
        return self.hidden(tokens, memory or self.memory(len(tokens))) @ self.weights["head"].T

    @torch.inference_mode()
    def hidden(self, tokens: Sequence[int], memory: Memory) -> Tensor:
        """Final normalised hidden states (n, hidden) of n tokens, which are appended to `memory`."""
        start, end = memory.length, memory.length + len(tokens)
        positions = torch.arange(start, end)
        x = self.weights["embed"][torch.as_tensor(tokens)]  # (n, hidden)
        for i in range(len(self.spec.layers)):
            x = x + self.attend(i, self.norm(x, f"layers.{i}.attention_norm"), positions, memory)
            x = x + self.feed_forward(i, self.norm(x, f"layers.{i}.ffn_norm"))
        memory.length = end
        return self.norm(x, "final_norm")

    def attend(self, i: int, x: Tensor, positions: Tensor, memory: Memory) -> Tensor:
        """Grouped-query attention of layer i, x: (n, hidden) -> (n, hidden)."""
        a, at, w = self.spec.layers[i].attention, f"layers.{i}.", self.weights
        q, k, v = (F.linear(x, w[at + name], w.get(f"{at}{name}_bias")) for name in ("q", "k", "v"))
        q = q.view(-1, a.heads, a.head_dim)
        k, v = (t.view(-1, a.kv_heads, a.head_dim) for t in (k, v))
        if a.qk_norm:
            q, k = self.norm(q, at + "q_norm"), self.norm(k, at + "k_norm")
        q, k = rotate(q, positions, a.rope), rotate(k, positions, a.rope)

        end = int(positions[-1]) + 1
        memory.keys[i][positions], memory.values[i][positions] = k, v
        keys = memory.keys[i][:end].repeat_interleave(a.heads // a.kv_heads, dim=1)  # (end, heads, head_dim)
        values = memory.values[i][:end].repeat_interleave(a.heads // a.kv_heads, dim=1)

        scores = torch.einsum("qhd,khd->hqk", q, keys) * a.softmax_scale
        scores = scores.masked_fill(~visible(positions, end, a), float("-inf"))
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
        return F.linear(attended.flatten(1), w[at + "o"])

    def feed_forward(self, i: int, x: Tensor) -> Tensor:
        """Gated feed-forward of layer i, x: (n, hidden) -> (n, hidden)."""
        gate, up, down = (self.weights[f"layers.{i}.{name}"] for name in ("gate", "up", "down"))
        return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)

    def norm(self, x: Tensor, name: str) -> Tensor:
        """Root mean square norm over the last axis (arXiv:1910.07467)."""
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.spec.norm_eps) * self.weights[name]


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
