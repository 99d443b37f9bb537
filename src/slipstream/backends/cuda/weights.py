"""A model's weights on the device, as the kernels read them: matrices of 16 bits or quantised, norms in float32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from slipstream.errors import BackendError
from slipstream.kernels.formats import FORMATS, FP8, MXFP4, Matrix, Quantised, coded, quantise, stacked
from slipstream.models.spec import ModelSpec, Rope, WeightTensor
from slipstream.models.tensors import BlockScaled

WEIGHTS = ("auto", "bf16", *FORMATS)


@dataclass(frozen=True)
class LayerWeights:
    """qkv (heads + 2 kv_heads) * d by hidden; gate_up: gate's rows, then up's; head_norm: those of q and k.

    Matrices are tensors, or `Quantised` where `load` was asked for a format.
    """

    attention_norm: torch.Tensor
    qkv: Any
    qkv_bias: torch.Tensor | None
    head_norm: tuple[torch.Tensor, torch.Tensor] | None
    o: Any
    ffn_norm: torch.Tensor
    gate_up: Any
    down: Any
    cos_sin: torch.Tensor


@dataclass(frozen=True)
class Weights:
    embed: torch.Tensor
    layers: list[LayerWeights]
    final_norm: torch.Tensor
    head: Any

    @property
    def quantised(self) -> bool:
        return isinstance(self.head, Quantised)

    def pass_bytes(self) -> int:
        """Bytes one pass over one row reads: every matrix and norm once, one row of the embedding."""
        tensors = [self.final_norm, self.head, self.embed[0]]
        for w in self.layers:
            tensors += [w.attention_norm, w.qkv, w.o, w.ffn_norm, w.gate_up, w.down]
        return sum(t.nbytes for t in tensors)

    def kernel_bytes(self) -> dict[str, int]:
        """The weights that each kernel reads in a pass, by its name in a profile."""
        return {
            "model_pass": self.pass_bytes(),
            "norm_qkv_kernel": sum(w.qkv.nbytes for w in self.layers),
            "projection_kernel": sum(w.o.nbytes + w.down.nbytes for w in self.layers),
            "gate_up_kernel": sum(w.gate_up.nbytes for w in self.layers),
            "head_kernel": self.head.nbytes,
        }


def numbers(weights: str, dtype: torch.dtype = torch.float16) -> tuple[str, torch.dtype]:
    """The format of linear layers, as `load` takes it, and the dtype of all else, by one of the names WEIGHTS."""
    if weights not in WEIGHTS:
        raise BackendError(f"weights in {weights!r} are not known; use one of {', '.join(WEIGHTS)}")
    if weights in FORMATS:
        return weights, dtype
    return "plain", torch.bfloat16 if weights == "bf16" else dtype


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


def repacked(tensor: WeightTensor, name: str, device: torch.device, dtype: torch.dtype) -> Quantised | None:
    """A tensor that a file has in the format `name`, with its very values; None where it has not."""
    format, group = FORMATS[name]
    if format == FP8 and isinstance(tensor, BlockScaled) and tensor.block == group:
        scales = torch.from_numpy(tensor.scales.float32()).to(device).repeat_interleave(group, 0)
        codes = torch.from_numpy(tensor.raw()).to(device)
        return coded(codes, scales[: len(codes)].contiguous(), format, group, dtype)
    head = {"Q4_0": 2, "Q4_1": 4, "MXFP4": 1}.get(tensor.format, 0)  # bytes of a block before its 32 values
    if not head or group != 32 or (format == MXFP4) != (head == 1):
        return None
    stored = torch.from_numpy(tensor.raw()).to(device)
    blocks = stored.view(len(stored), -1, head + 16)
    values = blocks[:, :, head:]  # first halves in the low nibbles
    codes = torch.cat([values & 15, values >> 4], 2).flatten(1)
    if format == MXFP4:
        return coded(codes, blocks[:, :, 0].contiguous(), format, group, dtype)
    scales = blocks[:, :, :head].contiguous().view(torch.float16)
    if tensor.format == "Q4_0":
        scales = torch.cat([scales, -8 * scales], 2)
    return coded(codes, scales, format, group, dtype)


def load(spec: ModelSpec, tensors: Mapping[str, WeightTensor] | None, device: torch.device,
         dtype: torch.dtype = torch.float16, seed: int = 0, format: str = "plain") -> Weights:  # fmt: skip
    """Weights of `tensors`, or, where None, random ones of the same shapes.

    format: of the linear layers, "plain" or one of `kernels.formats.FORMATS`; what the file has in it is taken as it
    is. The head is then FP8, and the embedding is plain. Raises BackendError where weights exceed `dtype` or do not
    divide.
    """
    generator = torch.Generator(device).manual_seed(seed)
    shapes = spec.tensor_shapes()
    narrow = format != "plain"
    sizes = {spec.hidden, *(layer.feed_forward.inner for layer in spec.layers)}
    if narrow and FORMATS[format][0] != FP8 and any(n % 32 for n in sizes):
        raise BackendError(f"{format} weights need sizes in multiples of 32, got {sorted(sizes)}; use fp8")

    def matrix(name: str) -> torch.Tensor:
        if tensors is not None:
            x = torch.from_numpy(tensors[name].float32()).to(device).to(dtype)
            if x.isinf().any():
                raise BackendError(f"{name} holds weights beyond {dtype}; load the model with bf16 weights")
            return x
        scale = 0.02 if len(shapes[name]) == 1 else shapes[name][1] ** -0.5
        return torch.randn(shapes[name], generator=generator, device=device, dtype=dtype).mul_(scale)

    def linear(*names: str, format: str = format) -> Matrix:
        return stacked([matrix(name) if format == "plain" else narrowed(name, format) for name in names])

    def narrowed(name: str, format: str) -> Quantised:
        if tensors is None:
            return quantise(matrix(name), format, dtype)
        as_it_is = repacked(tensors[name], format, device, dtype)
        return as_it_is or quantise(torch.from_numpy(tensors[name].float32()).to(device), format, dtype)

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
                linear(*(at + n for n in "qkv")),
                torch.cat([matrix(at + n + "_bias") for n in "qkv"]) if a.qkv_bias else None,
                (norm(at + "q_norm"), norm(at + "k_norm")) if a.qk_norm else None,
                linear(at + "o"),
                norm(at + "ffn_norm"),
                linear(at + "gate", at + "up"),
                linear(at + "down"),
                tables[a.rope],
            )
        )
    embed = matrix("embed")
    if not spec.tied_embeddings:
        head = linear("head", format="fp8" if narrow else "plain")
    elif not narrow:
        head = embed
    else:
        head = quantise(embed, "fp8", dtype) if tensors is None else narrowed("embed", "fp8")
    return Weights(embed, layers, norm("final_norm"), head)
