"""What a family file is made of: a checked view of a config, the rotary frequencies, and the shared dense decoder.

A `Family` says, for each container it occurs in, how the config becomes a `ModelSpec` and where the canonical tensors
lie. It knows nothing about files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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

    def texts(self, key: str, count: int) -> list[str]:
        """A list of `count` strings."""
        value = self._get(key, _MISSING)
        ok = isinstance(value, list) and len(value) == count and all(isinstance(item, str) for item in value)
        self._need(ok, key, f"a list of {count} strings", value)
        return list(value)

    def reject(self, key: str, *accepted: Any) -> None:
        """Raises CheckpointError where the key is present with a value other than `accepted`."""
        value = self.values.get(key)
        if value is not None and value not in accepted:
            raise CheckpointError(f"{self.source}: {key} {ascii(value)[:60]} is not supported; choose another model")


@dataclass(frozen=True)
class Container:
    """How a family occurs in one kind of file.

    types: the values of `model_type` (config.json) or `general.architecture` (GGUF).
    spec: fields and stored tensors to the spec. names: canonical name, without its `layers.{i}.`, to stored name.
    interleaved: rows of q and k hold rotary pairs side by side. unused: stored tensors that may be ignored.
    """

    types: tuple[str, ...]
    spec: Callable[[Fields, Tensors], ModelSpec]
    names: Mapping[str, str]
    interleaved: bool = False
    unused: tuple[str, ...] = ()

    def stored_name(self, canonical: str) -> str:
        layer, _, name = canonical.removeprefix("layers.").rpartition(".")
        return self.names[name].format(i=layer)


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
    config.reject("hidden_act", "silu")
    config.reject("quantization_config")
    config.reject("mlp_bias", False)
    config.reject("attention_bias", qkv_bias)
    count = config.integer("num_hidden_layers", limit=max(len(tensors), 1))
    heads = config.integer("num_attention_heads")
    hidden = config.integer("hidden_size")
    head_dim = config.integer("head_dim", max(hidden // heads, 1), limit=1 << 14)
    context = config.integer("max_position_embeddings", limit=1 << 32)
    inner = config.integer("intermediate_size")
    kv_heads = config.integer("num_key_value_heads", heads)
    rope = hf_rope(config, head_dim, context)
    feed_forward = FeedForward(inner)
    window_of = windows(config, count) if windows else [None] * count
    return ModelSpec(
        family=family,
        vocab=config.integer("vocab_size"),
        hidden=hidden,
        layers=tuple(
            Layer(Attention(heads, kv_heads, head_dim, rope, head_dim**-0.5, window, qkv_bias, qk_norm), feed_forward)
            for window in window_of
        ),
        norm_eps=config.number("rms_norm_eps", 1e-6),
        context=context,
        tied_embeddings=config.flag("tie_word_embeddings", False),
    )


def gguf_dense(
    family: str, metadata: Fields, tensors: Tensors, *, qkv_bias: bool = False, qk_norm: bool = False
) -> ModelSpec:
    """The same decoder from GGUF metadata, whose keys start with the architecture's name."""
    at = metadata.text("general.architecture") + "."
    if metadata.values.get(at + "expert_count"):
        raise CheckpointError(f"{metadata.source}: mixtures of experts are not supported; choose a dense model")
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
    rope = gguf_rope(metadata, at + "rope.", head_dim, context, tensors)
    attention = Attention(heads, kv_heads, head_dim, rope, head_dim**-0.5, window, qkv_bias, qk_norm)
    embed = tensors.get("token_embd.weight")
    if embed is None:
        raise CheckpointError(f"{metadata.source}: tensor 'token_embd.weight' is missing; download the model again")
    return ModelSpec(
        family=family,
        vocab=embed.shape[0],
        hidden=hidden,
        layers=(Layer(attention, FeedForward(metadata.integer(at + "feed_forward_length"))),) * count,
        norm_eps=metadata.number(at + "attention.layer_norm_rms_epsilon"),
        context=context,
        tied_embeddings="output.weight" not in tensors,
    )


def hf_rope(config: Fields, head_dim: int, context: int) -> Rope:
    """Rotary frequencies of a config.json: `rope_theta` and `rope_scaling`, or `rope_parameters` (transformers 5)."""
    scaling = config.sub("rope_parameters" if "rope_parameters" in config else "rope_scaling")
    base = scaling.number("rope_theta") if "rope_theta" in scaling else config.number("rope_theta", 10000.0)
    kind = scaling.text("rope_type" if "rope_type" in scaling else "type", "default")
    frequencies = default_frequencies(head_dim, base)
    if kind == "default":
        return rope_of(frequencies)
    if kind == "linear":
        return rope_of(frequencies / scaling.number("factor"))
    if kind == "llama3":
        return rope_of(llama3_frequencies(frequencies, scaling, context))
    raise CheckpointError(
        f"{config.source}: rope scaling {ascii(kind)[:40]} is not supported; default, linear and llama3 are"
    )


def gguf_rope(metadata: Fields, at: str, head_dim: int, context: int, tensors: Tensors) -> Rope:
    """Rotary frequencies of GGUF metadata; llama3 scaling is stored as a tensor of divisors."""
    dim = metadata.integer(at + "dimension_count", head_dim, limit=head_dim)
    frequencies = default_frequencies(dim, metadata.number(at + "freq_base", 10000.0))
    kind = metadata.text(at + "scaling.type", "none")
    if kind not in ("none", "linear"):
        raise CheckpointError(
            f"{metadata.source}: rope scaling {ascii(kind)[:40]} is not supported; none, linear and llama3 are"
        )
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
