"""A model's weights on the device, as the kernels and the library prefill read them: 16-bit matrices, float32 norms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from slipstream.errors import BackendError
from slipstream.models.spec import ModelSpec, Rope, WeightTensor


@dataclass(frozen=True)
class LayerWeights:
    """qkv (heads + 2 kv_heads) * d by hidden; gate_up: gate's rows, then up's; head_norm: those of q and k."""

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    head_norm: tuple[torch.Tensor, torch.Tensor] | None
    o: torch.Tensor
    ffn_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    cos_sin: torch.Tensor


@dataclass(frozen=True)
class Weights:
    embed: torch.Tensor
    layers: list[LayerWeights]
    final_norm: torch.Tensor
    head: torch.Tensor

    def pass_bytes(self) -> int:
        """Bytes one pass over one row reads: every matrix and norm once, one row of the embedding."""
        tensors = [self.final_norm, self.head, self.embed[0]]
        for w in self.layers:
            tensors += [w.attention_norm, w.qkv, w.o, w.ffn_norm, w.gate_up, w.down]
        return sum(t.numel() * t.element_size() for t in tensors)


def check(spec: ModelSpec) -> None:
    """Raises BackendError where the kernels cannot run the model, naming the reason."""
    if not spec.dense:
        raise BackendError("the cuda backend runs dense models so far; use --backend reference")
    for i, layer in enumerate(spec.layers):
        a, inner = layer.attention, layer.feed_forward.inner
        if 2 * len(a.rope.inv_freq) != a.head_dim:
            raise BackendError(f"the cuda backend needs rotary embedding over the whole head, layer {i} rotates a part")
        if a.head_dim & (a.head_dim - 1) or a.head_dim < 32:
            raise BackendError(f"the cuda backend needs head sizes that are powers of two from 32, got {a.head_dim}")
        if spec.hidden % 16 or inner % 16:
            raise BackendError(f"the cuda backend needs sizes in multiples of 16, got {spec.hidden} and {inner}")


def rotary_table(rope: Rope, positions: int, device: torch.device) -> torch.Tensor:
    """Cosines and sines (positions, 2, head_dim / 2) float32, computed in float64."""
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * torch.tensor(rope.inv_freq, dtype=torch.float64)
    return (torch.stack([angles.cos(), angles.sin()], 1) * rope.scale).float().to(device)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE in halves of the last axis of x, in float32."""
    low, high = x.float().chunk(2, -1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


def load(spec: ModelSpec, tensors: Mapping[str, WeightTensor] | None, device: torch.device,
         dtype: torch.dtype = torch.float16, seed: int = 0) -> Weights:  # fmt: skip
    """Weights of `tensors`, or, where None, random ones of the same shapes. BackendError where they exceed `dtype`."""
    generator = torch.Generator(device).manual_seed(seed)
    shapes = spec.tensor_shapes()

    def matrix(name: str) -> torch.Tensor:
        if tensors is not None:
            x = torch.from_numpy(tensors[name].float32()).to(device).to(dtype)
            if x.isinf().any():
                raise BackendError(f"{name} holds weights beyond {dtype}; load the model with dtype=torch.bfloat16")
            return x
        scale = 0.02 if len(shapes[name]) == 1 else shapes[name][1] ** -0.5
        return torch.randn(shapes[name], generator=generator, device=device, dtype=dtype).mul_(scale)

    def norm(name: str) -> torch.Tensor:
        return matrix(name).float() + 1 if tensors is None else torch.from_numpy(tensors[name].float32()).to(device)

    tables: dict[Rope, torch.Tensor] = {}
    layers = []
    for i, layer in enumerate(spec.layers):
        a, at = layer.attention, f"layers.{i}."
        if a.rope not in tables:
            tables[a.rope] = rotary_table(a.rope, spec.context + 16, device)
        layers.append(
            LayerWeights(
                norm(at + "attention_norm"),
                torch.cat([matrix(at + n) for n in "qkv"]),
                torch.cat([matrix(at + n + "_bias") for n in "qkv"]) if a.qkv_bias else None,
                (norm(at + "q_norm"), norm(at + "k_norm")) if a.qk_norm else None,
                matrix(at + "o"),
                norm(at + "ffn_norm"),
                torch.cat([matrix(at + "gate"), matrix(at + "up")]),
                matrix(at + "down"),
                tables[a.rope],
            )
        )
    embed = matrix("embed")
    return Weights(embed, layers, norm("final_norm"), embed if spec.tied_embeddings else matrix("head"))
