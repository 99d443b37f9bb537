"""What a family file is made of: a checked view of a config, the rotary frequencies, and the shared decoder.

A `Family` says, for each container it occurs in, how the config becomes a `ModelSpec` and where the canonical tensors
lie. It knows nothing about files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.errors import CheckpointError
from slipstream.models.spec import Attention, FeedForward, Layer, ModelSpec, Rope, WeightTensor

Tensors = Mapping[str, WeightTensor]
_MISSING = object()


@dataclass(frozen=True)
class Fields:
    """A config or GGUF metadata whose every read is checked. Errors name `source` and the key."""

    source: str
    values: Mapping[str, Any]

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is _MISSING:
            raise CheckpointError(f"{self.source}: {key!r} is missing; download the checkpoint again")
        return value

    def _need(self, ok: bool, key: str, what: str, value: Any) -> None:
        if not ok:
            shown = ascii(value)[:60]
            raise CheckpointError(f"{self.source}: {key!r} must be {what}, not {shown}; download the checkpoint again")

    def integer(self, key: str, default: Any = _MISSING, limit: int = 1 << 24) -> int:
        """A positive integer up to `limit`, which keeps a damaged file from sizing anything absurd."""
        value = self._get(key, default)
        self._need(type(value) is int and 1 <= value <= limit, key, f"an integer in [1, {limit}]", value)
        return int(value)

    def number(self, key: str, default: Any = _MISSING) -> float:
        """A positive finite number."""
        value = self._get(key, default)
        ok = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e30
        self._need(ok, key, "a positive number", value)
        return float(value)

    def flag(self, key: str, default: Any = _MISSING) -> bool:
        value = self._get(key, default)
        self._need(isinstance(value, bool), key, "true or false", value)
        return bool(value)

    def text(self, key: str, default: Any = _MISSING) -> str:
        value = self._get(key, default)
        self._need(isinstance(value, str), key, "text", value)
        return str(value)

    def sub(self, key: str) -> Fields:
        """The fields of a nested object; none where the key is absent."""
        value = self._get(key, {})
        self._need(isinstance(value, Mapping), key, "an object", value)
        return Fields(f"{self.source}: {key}", value)

    def texts(self, key: str, count: int, *allowed: str) -> list[str]:
        """A list of `count` strings, each one of `allowed` where given."""
        value = self._get(key, _MISSING)
        ok = isinstance(value, list) and len(value) == count and all(isinstance(item, str) for item in value)
        self._need(ok, key, f"a list of {count} strings", value)
        self._need(not allowed or set(value) <= set(allowed), key, f"a list of {' or '.join(allowed)}", value)
        return list(value)

    def integers(self, key: str, count: int | None = None, limit: int = 1 << 24) -> list[int]:
        """A list of integers in [0, limit), of `count` where given."""
        value = self._get(key, _MISSING)
        ok = isinstance(value, list) and count in (None, len(value))
        ok = ok and all(type(item) is int and 0 <= item < limit for item in value)
        self._need(ok, key, f"a list of {'' if count is None else count} integers in [0, {limit})", value)
        return list(value)

    def either(self, *keys: str) -> str:
        """The first of `keys` that is present, else the first."""
        return next((key for key in keys if key in self), keys[0])

    def reject(self, key: str, *accepted: Any) -> None:
        """Raises CheckpointError where the key is present with a value other than `accepted`."""
        value = self.values.get(key)
        if value is not None and value not in accepted:
            raise CheckpointError(f"{self.source}: {key} {ascii(value)[:60]} is not supported; choose another model")


@dataclass(frozen=True)
class Container:
    """How a family occurs in one kind of file.

    types: the values of `model_type` (config.json) or `general.architecture` (GGUF).
    spec: fields and stored tensors to the spec.
    names: canonical name, without its `layers.{i}.` and the number of an expert, to stored name.
    interleaved: canonical names whose rotary elements are stored as pairs side by side.
    rearrange: takes fused stored tensors apart, before `names` apply. unused: endings of stored names to ignore.
    extra_layers: config to beginnings of stored names that belong to multi-token prediction layers, which are skipped.
    """

    types: tuple[str, ...]
    spec: Callable[[Fields, Tensors], ModelSpec]
    names: Mapping[str, str]
    interleaved: tuple[str, ...] = ()
    rearrange: Callable[[ModelSpec, Tensors], Tensors] | None = None
    unused: tuple[str, ...] = ()
    extra_layers: Callable[[Fields, Tensors], tuple[str, ...]] = lambda config, tensors: ()

    def stored_name(self, canonical: str) -> str:
        match canonical.split("."):
            case ["layers", layer, "experts", expert, name]:
                return self.names[f"experts.{name}"].format(i=layer, e=expert)
            case ["layers", layer, name]:
                return self.names[name].format(i=layer)
        return self.names[canonical]


@dataclass(frozen=True)
class Family:
    """One checkpoint family; None where it does not occur in that container."""

    name: str
    hf: Container
    gguf: Container | None = None


HF_NAMES = {
    "embed": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
    "attention_norm": "model.layers.{i}.input_layernorm.weight",
    "q": "model.layers.{i}.self_attn.q_proj.weight",
    "k": "model.layers.{i}.self_attn.k_proj.weight",
    "v": "model.layers.{i}.self_attn.v_proj.weight",
    "o": "model.layers.{i}.self_attn.o_proj.weight",
    "q_bias": "model.layers.{i}.self_attn.q_proj.bias",
    "k_bias": "model.layers.{i}.self_attn.k_proj.bias",
    "v_bias": "model.layers.{i}.self_attn.v_proj.bias",
    "q_norm": "model.layers.{i}.self_attn.q_norm.weight",
    "k_norm": "model.layers.{i}.self_attn.k_norm.weight",
    "ffn_norm": "model.layers.{i}.post_attention_layernorm.weight",
    "gate": "model.layers.{i}.mlp.gate_proj.weight",
    "up": "model.layers.{i}.mlp.up_proj.weight",
    "down": "model.layers.{i}.mlp.down_proj.weight",
    "router": "model.layers.{i}.mlp.gate.weight",
    "correction": "model.layers.{i}.mlp.gate.e_score_correction_bias",
    "experts.gate": "model.layers.{i}.mlp.experts.{e}.gate_proj.weight",
    "experts.up": "model.layers.{i}.mlp.experts.{e}.up_proj.weight",
    "experts.down": "model.layers.{i}.mlp.experts.{e}.down_proj.weight",
    "shared_gate": "model.layers.{i}.mlp.shared_experts.gate_proj.weight",
    "shared_up": "model.layers.{i}.mlp.shared_experts.up_proj.weight",
    "shared_down": "model.layers.{i}.mlp.shared_experts.down_proj.weight",
}
HF_UNUSED = ("rotary_emb.inv_freq", "lm_head.weight")

GGUF_NAMES = {
    "embed": "token_embd.weight",
    "final_norm": "output_norm.weight",
    "head": "output.weight",
    "attention_norm": "blk.{i}.attn_norm.weight",
    "q": "blk.{i}.attn_q.weight",
    "k": "blk.{i}.attn_k.weight",
    "v": "blk.{i}.attn_v.weight",
    "o": "blk.{i}.attn_output.weight",
    "q_bias": "blk.{i}.attn_q.bias",
    "k_bias": "blk.{i}.attn_k.bias",
    "v_bias": "blk.{i}.attn_v.bias",
    "q_norm": "blk.{i}.attn_q_norm.weight",
    "k_norm": "blk.{i}.attn_k_norm.weight",
    "ffn_norm": "blk.{i}.ffn_norm.weight",
    "gate": "blk.{i}.ffn_gate.weight",
    "up": "blk.{i}.ffn_up.weight",
    "down": "blk.{i}.ffn_down.weight",
}
GGUF_UNUSED = ("rope_freqs.weight",)


def hf_dense(
    family: str,
    config: Fields,
    tensors: Tensors,
    *,
    qkv_bias: bool = False,
    qk_norm: bool = False,
    windows: Callable[[Fields, int], list[int | None]] | None = None,
) -> ModelSpec:
    """The dense decoder that Llama, Mistral, Qwen2 and Qwen3 share, from a config.json.

    windows: the sliding window of each layer, given the config and the number of layers; none is full attention.
    """
    config.reject("attention_bias", qkv_bias)
    count = hf_layer_count(config, tensors)
    attention = hf_attention(config, qkv_bias=qkv_bias, qk_norm=qk_norm)
    window_of = windows(config, count) if windows else [None] * count
    feed_forward = FeedForward(config.integer("intermediate_size"))
    return hf_decoder(family, config, [replace(attention, window=w) for w in window_of], [feed_forward] * count)


def hf_layer_count(config: Fields, tensors: Tensors) -> int:
    return config.integer("num_hidden_layers", limit=max(len(tensors), 1))


def hf_attention(
    config: Fields, *, qkv_bias: bool = False, qk_norm: bool = False, partial: float | None = None, o_bias: bool = False
) -> Attention:
    """Grouped-query attention over the whole history. partial: see `hf_rope`."""
    heads = config.integer("num_attention_heads")
    head_dim = config.integer("head_dim", max(config.integer("hidden_size") // heads, 1), limit=1 << 14)
    kv_heads = config.integer("num_key_value_heads", heads)
    rope = hf_rope(config, head_dim, partial=partial)
    return Attention(heads, kv_heads, head_dim, rope, head_dim**-0.5, None, qkv_bias, qk_norm, o_bias=o_bias)


def hf_decoder(
    family: str, config: Fields, attention: Sequence[Attention], feed_forward: Sequence[FeedForward]
) -> ModelSpec:
    """The whole model of a config.json, its layers given."""
    config.reject("hidden_act", "silu")
    config.reject("mlp_bias", False)
    return ModelSpec(
        family=family,
        vocab=config.integer("vocab_size"),
        hidden=config.integer("hidden_size"),
        layers=tuple(Layer(a, f) for a, f in zip(attention, feed_forward, strict=True)),
        norm_eps=config.number(config.either("rms_norm_eps", "layernorm_epsilon"), 1e-6),
        context=config.integer("max_position_embeddings", limit=1 << 32),
        tied_embeddings=config.flag("tie_word_embeddings", False),
    )


def gguf_dense(
    family: str,
    metadata: Fields,
    tensors: Tensors,
    *,
    qkv_bias: bool = False,
    qk_norm: bool = False,
    feed_forward: FeedForward | None = None,
    truncate: bool = True,
) -> ModelSpec:
    """The same decoder from GGUF metadata, whose keys start with the architecture's name.

    feed_forward: of every layer, where it is not dense. truncate: see `gguf_rope`.
    """
    at = metadata.text("general.architecture") + "."
    if metadata.values.get(at + "expert_count") and not feed_forward:
        raise CheckpointError(
            f"{metadata.source}: a mixture of experts of the dense family {family}; choose a dense model, or qwen3moe"
        )
    feed_forward = feed_forward or FeedForward(metadata.integer(at + "feed_forward_length"))
    count = metadata.integer(at + "block_count", limit=max(len(tensors), 1))
    heads = metadata.integer(at + "attention.head_count")
    hidden = metadata.integer(at + "embedding_length")
    head_dim = metadata.integer(at + "attention.key_length", max(hidden // heads, 1), limit=1 << 14)
    metadata.reject(at + "attention.value_length", head_dim)
    context = metadata.integer(at + "context_length", limit=1 << 32)
    window = metadata.values.get(at + "attention.sliding_window") or None
    if window is not None:
        window = metadata.integer(at + "attention.sliding_window", limit=1 << 32)
    kv_heads = metadata.integer(at + "attention.head_count_kv", heads)
    rope = gguf_rope(metadata, at + "rope.", head_dim, context, tensors, truncate)
    attention = Attention(heads, kv_heads, head_dim, rope, head_dim**-0.5, window, qkv_bias, qk_norm)
    embed = tensors.get("token_embd.weight")
    if embed is None:
        raise CheckpointError(f"{metadata.source}: tensor 'token_embd.weight' is missing; download the model again")
    return ModelSpec(
        family=family,
        vocab=embed.shape[0],
        hidden=hidden,
        layers=(Layer(attention, feed_forward),) * count,
        norm_eps=metadata.number(at + "attention.layer_norm_rms_epsilon"),
        context=context,
        tied_embeddings="output.weight" not in tensors,
    )


def hf_rope(config: Fields, head_dim: int, *, kind_of_layer: str = "", partial: float | None = None) -> Rope:
    """Rotary frequencies of a config.json: `rope_theta` and `rope_scaling`, or `rope_parameters` (transformers 5).

    kind_of_layer: a key of `rope_parameters` where they differ by layer. partial: the share of a head that is rotated
    where the config does not say; None rotates all of it, whatever the config says.
    """
    scaling = config.sub("rope_parameters" if "rope_parameters" in config else "rope_scaling")
    if kind_of_layer in scaling:
        scaling = scaling.sub(kind_of_layer)
    context = config.integer("max_position_embeddings", limit=1 << 32)
    base = scaling.number("rope_theta") if "rope_theta" in scaling else config.number("rope_theta", 10000.0)
    kind = scaling.text("rope_type" if "rope_type" in scaling else "type", "default")
    if partial is not None:
        at = scaling if "partial_rotary_factor" in scaling else config
        share = at.number("partial_rotary_factor", partial)
        if share > 1:
            raise CheckpointError(
                f"{at.source}: 'partial_rotary_factor' is {share}, at most 1 can be; download it again"
            )
        head_dim = int(head_dim * share)
    frequencies = default_frequencies(head_dim, base)
    if kind == "default":
        return rope_of(frequencies)
    if kind == "linear":
        return rope_of(frequencies / scaling.number("factor"))
    if kind == "llama3":
        return rope_of(llama3_frequencies(frequencies, scaling, context))
    if kind == "yarn":
        return yarn_rope(frequencies, base, scaling, context)
    raise CheckpointError(
        f"{config.source}: rope scaling {ascii(kind)[:40]} is not supported; default, linear, llama3 and yarn are"
    )


def gguf_rope(metadata: Fields, at: str, head_dim: int, context: int, tensors: Tensors, truncate: bool = True) -> Rope:
    """Rotary frequencies of GGUF metadata; llama3 scaling is stored as a tensor of divisors.

    truncate: whether YaRN's blend begins and ends on a whole pair, which the format does not say.
    """
    dim = metadata.integer(at + "dimension_count", head_dim, limit=head_dim)
    frequencies = default_frequencies(dim, metadata.number(at + "freq_base", 10000.0))
    kind = metadata.text(at + "scaling.type", "none")
    if kind not in ("none", "linear", "yarn"):
        raise CheckpointError(
            f"{metadata.source}: rope scaling {ascii(kind)[:40]} is not supported; none, linear, llama3 and yarn are"
        )
    if kind == "yarn":
        original = metadata.number(at + "scaling.original_context_length", context)
        scaling = {"factor": metadata.number(at + "scaling.factor"), "original_max_position_embeddings": original}
        base = metadata.number(at + "freq_base", 10000.0)
        return yarn_rope(frequencies, base, Fields(metadata.source, scaling | {"truncate": truncate}), context)
    if kind == "linear":
        frequencies = frequencies / metadata.number(at + "scaling.factor")
    if divisors := tensors.get("rope_freqs.weight"):
        if divisors.shape != frequencies.shape:
            raise CheckpointError(
                f"{metadata.source}: tensor 'rope_freqs.weight' has shape {divisors.shape}, "
                f"not {frequencies.shape}; download the model again"
            )
        with np.errstate(all="ignore"):
            frequencies = frequencies / divisors.float32().astype(np.float64)
    return rope_of(frequencies)


def rope_of(frequencies: npt.NDArray[np.float64]) -> Rope:
    return Rope(tuple(frequencies.tolist()))


def default_frequencies(dim: int, base: float) -> npt.NDArray[np.float64]:
    """base^(-2j/dim) for each of dim/2 pairs."""
    return base ** (-np.arange(0, dim - dim % 2, 2, dtype=np.float64) / dim)


def llama3_frequencies(frequencies: npt.NDArray[np.float64], scaling: Fields, context: int) -> npt.NDArray[np.float64]:
    """Llama 3.1 scaling (arXiv:2407.21783): wavelengths beyond the original context are stretched by `factor`, short
    ones kept, the rest blended."""
    factor, low, high = (scaling.number(key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    turns = scaling.number("original_max_position_embeddings", context) * frequencies / (2 * math.pi)
    blend = np.clip((turns - low) / (high - low if high != low else 1.0), 0.0, 1.0)
    return frequencies * (blend + (1 - blend) / factor)


def yarn_rope(frequencies: npt.NDArray[np.float64], base: float, scaling: Fields, context: int) -> Rope:
    """YaRN (arXiv:2309.00071): pairs that turn less than `beta_slow` times in the original context are stretched by
    `factor`, those that turn more than `beta_fast` times kept, the rest blended; cos and sin grow with log(factor)."""
    original = scaling.number("original_max_position_embeddings", context)
    factor = scaling.number("factor", context / original)
    dim = 2 * len(frequencies)

    def pair(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair(scaling.number("beta_fast", 32.0)), pair(scaling.number("beta_slow", 1.0))
    if scaling.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    stretched = np.clip((np.arange(dim // 2) - low) / (high - low or 0.001), 0, 1)
    inv_freq = frequencies / factor * stretched + frequencies * (1 - stretched)
    if "attention_factor" in scaling:
        scale = scaling.number("attention_factor")
    elif scaling.values.get("mscale") and scaling.values.get("mscale_all_dim"):
        scale = yarn_scale(factor, scaling.number("mscale")) / yarn_scale(factor, scaling.number("mscale_all_dim"))
    else:
        scale = yarn_scale(factor)
    return Rope(tuple(inv_freq.tolist()), scale)


def yarn_scale(factor: float, weight: float = 1.0) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
