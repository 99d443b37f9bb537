"""What a model is, as data: a `ModelSpec` lists its layers, and backends read nothing else.

A family file maps a checkpoint's config to a spec and its tensors to the canonical names below; after that no code
asks which family a model came from.

Canonical tensor names, all matrices (out_features, in_features) as in `torch.nn.Linear`:

    embed                          (vocab, hidden)
    layers.{i}.attention_norm      (hidden,)
    layers.{i}.q | k | v           (heads * head_dim, hidden) | (kv_heads * head_dim, ..) | (kv_heads * value_dim, ..)
    layers.{i}.q_bias | k_bias | v_bias     where `Attention.qkv_bias`
    layers.{i}.q_norm | k_norm     (head_dim,) where `Attention.qk_norm`
    layers.{i}.sinks               (heads,) where `Attention.sinks`
    layers.{i}.o                   (hidden, heads * value_dim), and o_bias where `Attention.o_bias`
    layers.{i}.ffn_norm            (hidden,)
    layers.{i}.gate | up           (inner, hidden)
    layers.{i}.down                (hidden, inner)
    final_norm                     (hidden,)
    head                           (vocab, hidden), absent where `ModelSpec.tied_embeddings`

where `Attention.latent`, in place of q, k and v:

    layers.{i}.q_a | q_a_norm | q_b    (q_rank, hidden) | (q_rank,) | (heads * head_dim, q_rank); without q_rank, q
    layers.{i}.kv_a | kv_a_norm        (kv_rank + rope_dim, hidden) | (kv_rank,)
    layers.{i}.kv_b                    (heads * (nope_dim + value_dim), kv_rank), each head's keys before its values

where `Attention.indexer`, unless it shares another layer's selection:

    layers.{i}.index_q | index_k       (index heads * index head_dim, q_rank or hidden) | (index head_dim, hidden)
    layers.{i}.index_k_norm | index_k_norm_bias     (index head_dim,)
    layers.{i}.index_weights           (index heads, hidden)

where `FeedForward.experts`, in place of gate, up and down:

    layers.{i}.router                  (experts, hidden), and router_bias where `Experts.bias`
    layers.{i}.correction              (experts,) where `Experts.correction`
    layers.{i}.experts.{e}.gate | up | down     as above, one set an expert; gate_bias, up_bias, down_bias with `bias`
    layers.{i}.shared_gate | shared_up | shared_down     where `Experts.shared_inner`

Rotary embedding always pairs element j with j + rotary_dim/2 (the "rotate half" order of Hugging Face checkpoints);
loaders of formats that interleave the pairs permute the rows of what makes queries and keys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864), its frequency scaling already applied.

    inv_freq: rotary_dim / 2 angular frequencies in radians a position; element pairs beyond them are not rotated.
    scale: factor on cos and sin (YaRN's attention factor; 1 elsewhere).
    """

    inv_freq: tuple[float, ...]
    scale: float = 1.0

    @property
    def dim(self) -> int:
        """Rotated elements."""
        return 2 * len(self.inv_freq)


@dataclass(frozen=True)
class Indexer:
    """The lightning indexer of DeepSeek sparse attention (arXiv:2512.02556): it picks the keys a query attends to.

    score(q, k) = sum over heads h of weight_h(q) * relu(q_h . k), one key head for all; the `top_k` highest scores are
    selected, of equal ones the earliest. Queries come from the layer's compressed query where it has one, else from
    its input; keys pass a layer norm (`norm_eps`); both rotate their first elements with the layer's `Rope`.
    shared: this layer has no indexer of its own and takes the selection of the nearest one before it.
    """

    heads: int
    head_dim: int
    top_k: int
    norm_eps: float = 1e-6
    shared: bool = False

    def __post_init__(self) -> None:
        if min(self.heads, self.head_dim, self.top_k) < 1:
            raise ValueError(f"an indexer of {self.heads} heads of {self.head_dim} that selects {self.top_k}")


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): keys and values are read from one narrow latent.

    A position keeps a normalised latent of `kv_rank` and one rotated key of the rope's width for all heads. A head's
    query and key are [nope_dim not rotated, the rest rotated]. q_rank: width of the compressed query, None is none.
    norm_eps: of the norms of both latents.
    """

    kv_rank: int
    nope_dim: int
    q_rank: int | None = None
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        if min(self.kv_rank, self.nope_dim, 1 if self.q_rank is None else self.q_rank) < 1:
            raise ValueError(f"a latent of {self.kv_rank} with {self.nope_dim} plain elements a head")


@dataclass(frozen=True)
class Attention:
    """One attention layer: grouped-query or latent softmax attention over all keys, a sliding window, or a selection.

    window: how many positions a query sees, itself included; None is the whole history.
    softmax_scale: factor on q.k before the softmax.
    v_head_dim: elements of a value where they differ from `head_dim`; read it as `value_dim`.
    sinks: each head has a learned score that joins the softmax and carries no value.
    value_scale: factor on the values. indexer: keys are selected. latent: kv_heads is then heads, head_dim is
    nope_dim + rope width.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope
    softmax_scale: float
    window: int | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    v_head_dim: int | None = None
    sinks: bool = False
    o_bias: bool = False
    value_scale: float = 1.0
    indexer: Indexer | None = None
    latent: Latent | None = None

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} query heads cannot share {self.kv_heads} KV heads evenly")
        if self.window is not None and self.window < 1:
            raise ValueError(f"sliding window of {self.window} positions")
        if self.rope.dim > self.head_dim or (self.indexer and self.rope.dim > self.indexer.head_dim):
            raise ValueError(f"rotary embedding of {self.rope.dim} elements is wider than a head")
        if self.indexer and self.window:
            raise ValueError("a layer either slides a window or selects its keys")
        if self.latent and (self.kv_heads != self.heads or self.latent.nope_dim + self.rope.dim != self.head_dim):
            raise ValueError(f"latent heads of {self.latent.nope_dim} + {self.rope.dim} are not {self.head_dim} wide")
        if self.latent and (self.qkv_bias or self.qk_norm):
            raise ValueError("latent attention has no biases or head norms")

    @property
    def kind(self) -> Literal["full", "sliding", "sparse", "latent"]:
        """What a cache must keep. A latent layer may have an indexer too."""
        return "latent" if self.latent else "sparse" if self.indexer else "sliding" if self.window else "full"

    @property
    def value_dim(self) -> int:
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    @property
    def cache_width(self) -> int:
        """Numbers kept a position: keys and values or the latent, and the indexer's key."""
        index = self.indexer.head_dim if self.indexer and not self.indexer.shared else 0
        if self.latent:
            return self.latent.kv_rank + self.rope.dim + index
        return self.kv_heads * (self.head_dim + self.value_dim) + index

    @property
    def plain(self) -> bool:
        """Full or sliding attention with none of the options that dense models lack."""
        return self == Attention(self.heads, self.kv_heads, self.head_dim, self.rope, self.softmax_scale, self.window,
                                 self.qkv_bias, self.qk_norm)  # fmt: skip

    def tensor_shapes(self, hidden: int) -> Shapes:
        """Name, without its layer, and shape of every tensor from `attention_norm` to `o`."""
        q, kv, out = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.heads * self.value_dim
        shapes: Shapes = {"attention_norm": (hidden,), "o": (hidden, out)}
        if self.latent:
            rank, kv_rank = self.latent.q_rank, self.latent.kv_rank
            shapes |= {"q_a": (rank, hidden), "q_a_norm": (rank,), "q_b": (q, rank)} if rank else {"q": (q, hidden)}
            shapes |= {"kv_a": (kv_rank + self.rope.dim, hidden), "kv_a_norm": (kv_rank,)}
            shapes["kv_b"] = (self.heads * (self.latent.nope_dim + self.value_dim), kv_rank)
        else:
            values = self.kv_heads * self.value_dim
            shapes |= {"q": (q, hidden), "k": (kv, hidden), "v": (values, hidden)}
            if self.qkv_bias:
                shapes |= {"q_bias": (q,), "k_bias": (kv,), "v_bias": (values,)}
        if self.qk_norm:
            shapes |= {"q_norm": (self.head_dim,), "k_norm": (self.head_dim,)}
        if self.sinks:
            shapes["sinks"] = (self.heads,)
        if self.o_bias:
            shapes["o_bias"] = (hidden,)
        if (index := self.indexer) and not index.shared:
            source = (self.latent and self.latent.q_rank) or hidden
            shapes |= {"index_q": (index.heads * index.head_dim, source), "index_k": (index.head_dim, hidden)}
            shapes |= {"index_k_norm": (index.head_dim,), "index_k_norm_bias": (index.head_dim,)}
            shapes["index_weights"] = (index.heads, hidden)
        return shapes


@dataclass(frozen=True)
class Experts:
    """A mixture of experts (Shazeer et al. 2017, arXiv:1701.06538) and how a token is routed.

    score = scoring(router x); the `top_k` experts with the highest score + correction are chosen and weighted by their
    scores, normalised to sum 1 where `normalise`, times `scale`. With `groups` (DeepSeek-V3, arXiv:2412.19437), only
    the `top_groups` groups with the highest sum of their two best may be chosen from.
    shared_inner: inner size of an expert that sees every token, 0 is none. bias: router and experts have biases.
    """

    count: int
    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    normalise: bool = True
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    correction: bool = False
    shared_inner: int = 0
    bias: bool = False

    def __post_init__(self) -> None:
        if self.count % self.groups or not 1 <= self.top_groups <= self.groups:
            raise ValueError(f"{self.count} experts cannot be routed by {self.top_groups} of {self.groups} groups")
        if not 1 <= self.top_k <= self.count // self.groups * self.top_groups:
            raise ValueError(f"{self.top_k} experts a token cannot be chosen from {self.count}")
        if self.groups > 1 and self.count // self.groups < 2:
            raise ValueError(f"{self.count} experts in {self.groups} groups: a group needs two")


@dataclass(frozen=True)
class FeedForward:
    """Gated feed-forward: down(activation(gate(x)) * up(x)), dense or, with `experts`, of each chosen expert.

    activation: "silu", or "clamped" (gpt-oss): with g = min(gate, limit) and u = clip(up, -limit, limit),
    g * sigmoid(alpha * g) * (u + 1). inner: inner size, of one expert where there are `experts`.
    """

    inner: int
    activation: Literal["silu", "clamped"] = "silu"
    experts: Experts | None = None
    alpha: float = 1.0
    limit: float = math.inf

    def tensor_shapes(self, hidden: int) -> Shapes:
        """Name, without its layer, and shape of every tensor from `ffn_norm` on."""
        shapes: Shapes = {"ffn_norm": (hidden,)}
        one: Shapes = {"gate": (self.inner, hidden), "up": (self.inner, hidden), "down": (hidden, self.inner)}
        experts = self.experts
        if not experts:
            return shapes | one
        shapes["router"] = (experts.count, hidden)
        if experts.correction:
            shapes["correction"] = (experts.count,)
        if experts.bias:
            shapes["router_bias"] = (experts.count,)
            one |= {f"{name}_bias": shape[:1] for name, shape in one.items()}
        if inner := experts.shared_inner:
            shapes |= {"shared_gate": (inner, hidden), "shared_up": (inner, hidden), "shared_down": (hidden, inner)}
        return shapes | {f"experts.{e}.{name}": shape for e in range(experts.count) for name, shape in one.items()}


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

    def __post_init__(self) -> None:
        own = False
        for i, layer in enumerate(self.layers):
            index = layer.attention.indexer
            if index and index.shared and not own:
                raise ValueError(f"layer {i} shares a selection that no layer before it makes")
            own = own or bool(index and not index.shared)

    def tensor_shapes(self) -> Shapes:
        """The canonical name and shape of every tensor this model needs."""
        shapes: Shapes = {"embed": (self.vocab, self.hidden), "final_norm": (self.hidden,)}
        if not self.tied_embeddings:
            shapes["head"] = (self.vocab, self.hidden)
        for i, layer in enumerate(self.layers):
            for part in (layer.attention, layer.feed_forward):
                shapes |= {f"layers.{i}.{name}": shape for name, shape in part.tensor_shapes(self.hidden).items()}
        return shapes

    def share_read(self, name: str) -> float:
        """The share of a tensor that a pass over one row reads on average: of an expert, how often it is chosen."""
        experts = self.layers[int(name.split(".")[1])].feed_forward.experts if ".experts." in name else None
        return experts.top_k / experts.count if experts else 1.0

    @property
    def dense(self) -> bool:
        """Plain attention and one silu feed-forward in every layer: what a backend without sparse kernels can run."""
        return all(x.attention.plain and x.feed_forward == FeedForward(x.feed_forward.inner) for x in self.layers)


class WeightTensor:
    """One tensor as it lies in a file: read when asked, so that a model never exists twice in memory.

    shape: logical shape, row-major, last axis contiguous.
    format: how a row is stored: F32, F16, BF16, a GGML block format (Q8_0, Q4_0, Q4_1, Q4_K, Q5_K, Q6_K, MXFP4), or
    F8_E4M3, whose scales are apart (`tensors.BlockScaled`).
    """

    shape: tuple[int, ...]
    format: str

    def raw(self) -> npt.NDArray[np.uint8]:
        """The stored bytes as (rows, bytes a row); a vector is one row."""
        raise NotImplementedError

    def float32(self) -> npt.NDArray[np.float32]:
        """The values, dequantised exactly, in `shape`."""
        raise NotImplementedError
