"""What a model is, as data: a `ModelSpec` lists its layers, and backends read nothing else.

A family file maps a checkpoint's config to a spec and its tensors to the canonical names below; after that no code
asks which family a model came from.

Canonical tensor names, all matrices (out_features, in_features) as in `torch.nn.Linear`:

    embed                          (vocab, hidden)
    layers.{i}.attention_norm      (hidden,)
    layers.{i}.q | k | v           (heads * head_dim, hidden) | (kv_heads * head_dim, hidden) | the same
    layers.{i}.q_bias | k_bias | v_bias     where `Attention.qkv_bias`
    layers.{i}.q_norm | k_norm     (head_dim,) where `Attention.qk_norm`
    layers.{i}.o                   (hidden, heads * head_dim)
    layers.{i}.ffn_norm            (hidden,)
    layers.{i}.gate | up           (inner, hidden)
    layers.{i}.down                (hidden, inner)
    final_norm                     (hidden,)
    head                           (vocab, hidden), absent where `ModelSpec.tied_embeddings`

Rotary embedding always pairs element j with j + rotary_dim/2 (the "rotate half" order of Hugging Face checkpoints);
loaders of formats that interleave the pairs permute the rows of q and k.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864), its frequency scaling already applied.

    inv_freq: rotary_dim / 2 angular frequencies in radians a position; element pairs beyond them are not rotated.
    scale: factor on cos and sin (YaRN's attention factor; 1 elsewhere).
    """

    inv_freq: tuple[float, ...]
    scale: float = 1.0


@dataclass(frozen=True)
class Attention:
    """One attention layer: grouped-query softmax attention over the whole history, or over a sliding window.

    window: how many positions a query sees, itself included; None is the whole history.
    softmax_scale: factor on q.k before the softmax.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope
    softmax_scale: float
    window: int | None = None
    qkv_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} query heads cannot share {self.kv_heads} KV heads evenly")
        if self.window is not None and self.window < 1:
            raise ValueError(f"sliding window of {self.window} positions")


@dataclass(frozen=True)
class FeedForward:
    """Dense gated feed-forward: down(activation(gate(x)) * up(x))."""

    inner: int
    activation: Literal["silu"] = "silu"


@dataclass(frozen=True)
class Layer:
    attention: Attention
    feed_forward: FeedForward


@dataclass(frozen=True)
class ModelSpec:
    """A whole decoder-only model. `context` is the longest sequence in tokens it was made for."""

    family: str
    vocab: int
    hidden: int
    layers: tuple[Layer, ...]
    norm_eps: float
    context: int
    tied_embeddings: bool

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """The canonical name and shape of every tensor this model needs."""
        shapes: dict[str, tuple[int, ...]] = {"embed": (self.vocab, self.hidden), "final_norm": (self.hidden,)}
        if not self.tied_embeddings:
            shapes["head"] = (self.vocab, self.hidden)
        for i, layer in enumerate(self.layers):
            a, inner, at = layer.attention, layer.feed_forward.inner, f"layers.{i}."
            q, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
            shapes |= {
                at + "attention_norm": (self.hidden,),
                at + "q": (q, self.hidden),
                at + "k": (kv, self.hidden),
                at + "v": (kv, self.hidden),
                at + "o": (self.hidden, q),
                at + "ffn_norm": (self.hidden,),
                at + "gate": (inner, self.hidden),
                at + "up": (inner, self.hidden),
                at + "down": (self.hidden, inner),
            }
            if a.qkv_bias:
                shapes |= {at + "q_bias": (q,), at + "k_bias": (kv,), at + "v_bias": (kv,)}
            if a.qk_norm:
                shapes |= {at + "q_norm": (a.head_dim,), at + "k_norm": (a.head_dim,)}
        return shapes


class WeightTensor:
    """One tensor as it lies in a file: read when asked, so that a model never exists twice in memory.

    shape: logical shape, row-major, last axis contiguous.
    format: how a row is stored: F32, F16, BF16 or a GGML block format (Q8_0, Q4_0, Q4_1, Q4_K, Q5_K, Q6_K).
    """

    shape: tuple[int, ...]
    format: str

    def raw(self) -> npt.NDArray[np.uint8]:
        """The stored bytes as (rows, bytes a row); a vector is one row."""
        raise NotImplementedError

    def float32(self) -> npt.NDArray[np.float32]:
        """The values, dequantised exactly, in `shape`."""
        raise NotImplementedError
