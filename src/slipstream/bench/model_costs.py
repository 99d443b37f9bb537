"""What a model costs to run, read from its config alone: parameters, cache rows and experts, layer by layer.

It knows nothing about hardware, numbers of rows or time; `plan` multiplies. No weights are needed: a Hugging Face
`config.json` (or the directory that holds it), a GGUF file's header, or a description shipped under `bench/data/`.

    config.json ─┐
    *.gguf      ─┼─ from_config ─> ModelCosts(layers=(LayerCosts(attention, feed_forward), ...))
    models.toml ─┘
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from slipstream.errors import SlipstreamError
from slipstream.models.checkpoint import list_models


class PlanError(SlipstreamError):
    """A model, a machine or a way to run one on the other that cannot be planned."""


DTYPE_BITS: Mapping[str, float] = {
    "fp32": 32,
    "bf16": 16,
    "fp16": 16,
    "fp8": 8 + 32 / 128**2,  # one fp32 scale per 128x128 block
    "int8": 8.5,  # one fp16 scale per 32
    "mxfp4": 4.25,  # one e8m0 scale per 32 (OCP Microscaling 1.0)
    "nvfp4": 4.5,  # one e4m3 scale per 16
    "int4": 4.5,  # one fp16 scale per 32
    "q8_0": 8.5,
    "q6_k": 6.5625,
    "q5_k": 5.5,
    "q4_1": 5,
    "q4_k": 4.5,
    "q4_0": 4.5,
}
"""Bits a stored weight, scales included (GGML block formats by their block sizes)."""

_DTYPE_NAMES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "f32": "fp32", "f16": "fp16"}


def dtype_bytes(dtype: str) -> float:
    """Bytes a weight of `dtype`: a name, or a mean such as "4.83-bit". Raises PlanError for one it does not know."""
    try:
        bits = dtype.removesuffix("-bit")
        return (float(bits) if bits != dtype else DTYPE_BITS[dtype]) / 8
    except (KeyError, ValueError):
        raise PlanError(f"unknown dtype {dtype!r}; choose one of {', '.join(DTYPE_BITS)}") from None


@dataclass(frozen=True)
class Indexer:
    """The lightning indexer of sparse attention (DeepSeek-V3.2): scores every past key with `heads` small heads."""

    params: int
    heads: int
    dim: int


@dataclass(frozen=True)
class AttentionCosts:
    """One attention layer.

    kind: full, sliding, sparse, latent or sparse latent.
    query_params: of the projections that tensor parallelism splits by query head; kv_params: by KV head;
    shared_params: copied to every rank. kv_row: cached elements a token and KV head (a latent cache has one).
    flops_per_key: for one query, all heads, and one key that is attended.
    window, selected: how many past tokens a query attends at most; None is all of them.
    """

    kind: str
    heads: int
    kv_heads: int
    query_params: int
    kv_params: int
    shared_params: int
    kv_row: int
    flops_per_key: int
    window: int | None = None
    selected: int | None = None
    indexer: Indexer | None = None

    @property
    def params(self) -> int:
        return self.query_params + self.kv_params + self.shared_params + (self.indexer.params if self.indexer else 0)


@dataclass(frozen=True)
class FeedForwardCosts:
    """One feed-forward layer: `dense_params` always run (shared experts too), `top_k` of `experts` are routed to."""

    dense_params: int = 0
    inner: int = 0
    experts: int = 0
    top_k: int = 0
    expert_params: int = 0
    router_params: int = 0

    @property
    def params(self) -> int:
        return self.dense_params + self.router_params + self.experts * self.expert_params

    @property
    def active_params(self) -> int:
        return self.dense_params + self.router_params + self.top_k * self.expert_params


@dataclass(frozen=True)
class LayerCosts:
    attention: AttentionCosts
    feed_forward: FeedForwardCosts


@dataclass(frozen=True)
class Dtypes:
    """How each kind of weight is stored; routers and norms stay bf16 or wider and are counted as bf16."""

    attention: str = "bf16"
    experts: str = "bf16"
    dense_ffn: str = "bf16"
    head: str = "bf16"

    def __post_init__(self) -> None:
        for dtype in (self.attention, self.experts, self.dense_ffn, self.head):
            dtype_bytes(dtype)


@dataclass(frozen=True)
class ModelCosts:
    name: str
    family: str
    hidden: int
    vocab: int
    context: int
    tied_embeddings: bool
    layers: tuple[LayerCosts, ...]
    dtypes: Dtypes
    source: str = ""
    notes: tuple[str, ...] = ()

    @property
    def head_params(self) -> int:
        return self.vocab * self.hidden

    @property
    def total_params(self) -> int:
        """Every parameter, tied embeddings once. Multi-token-prediction layers are not counted."""
        embeddings = self.head_params * (1 if self.tied_embeddings else 2)
        return embeddings + self.hidden + sum(x.attention.params + x.feed_forward.params for x in self.layers)

    @property
    def active_params(self) -> int:
        """Parameters one token passes through, counted as model cards do: embedding and head included."""
        inactive = sum(x.feed_forward.params - x.feed_forward.active_params for x in self.layers)
        return self.total_params - inactive

    @property
    def is_moe(self) -> bool:
        return any(layer.feed_forward.experts for layer in self.layers)

    def with_dtype(self, dtype: str) -> ModelCosts:
        """Store the bulk of the weights as `dtype`: the feed-forward of a sparse model, all layers of a dense one."""
        attention = self.dtypes.attention if self.is_moe else dtype
        head = dtype if self.tied_embeddings and dtype in ("bf16", "fp16", "fp32") else self.dtypes.head
        return replace(self, dtypes=Dtypes(attention, dtype, dtype, head))


def load_model(name: str) -> ModelCosts:
    """The model at `name`: a shipped description, config.json, its directory, a .gguf file, or a hub id in the cache.

    Raises PlanError where nothing is found or the config does not describe a model that can be costed.
    """
    shipped = described_models()
    path = Path(name).expanduser()
    if name not in shipped and path.exists():
        return _from_path(path)
    if "/" in name and (cached := next((m.path for m in list_models() if m.name == name), None)):
        return _from_path(cached)
    key = same_name(name.rpartition("/")[2], shipped)
    if key is None:
        raise PlanError(
            f"no model {name!r}: give a config.json, its directory, a .gguf file, or one of {', '.join(shipped)}"
        )
    entry = dict(shipped[key])
    weights, source = entry.pop("weights", {}), entry.pop("source", "")
    model = from_config(entry, key, source=source)
    return replace(model, dtypes=replace(model.dtypes, **weights))


def known_parameters(name: str) -> int | None:
    """Parameters of the model that `load_model` finds under `name`; None where it finds none."""
    try:
        return load_model(name).total_params
    except SlipstreamError:
        return None


def same_name(name: str, names: Iterable[str]) -> str | None:
    """The one of `names` that equals `name` but for case and punctuation: naive-n0.5-flash finds naive-n05-flash."""

    def bare(text: str) -> str:
        return "".join(c for c in text.lower() if c.isalnum())

    return next((each for each in names if bare(each) == bare(name)), None)


def _from_path(path: Path) -> ModelCosts:
    if path.is_dir():
        path = path / "config.json"
    if path.suffix == ".gguf":
        from slipstream.bench.gguf_costs import from_gguf  # imports this module

        return from_gguf(path)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PlanError(f"cannot read {path} as JSON: {error}") from None
    if not isinstance(config, dict):
        raise PlanError(f"{path} holds no JSON object; expected a model's config.json")
    return from_config(config, path.resolve().parent.name, source=str(path))


@cache
def described_models() -> Mapping[str, Mapping[str, Any]]:
    """The configs shipped with the package, by name: `bench/data/models.toml`."""
    return tomllib.loads((files("slipstream.bench") / "data/models.toml").read_text(encoding="utf-8"))


MOST = 2**40
"""No count of a config is larger; one that is would keep the planner busy for ever."""


class _Config:
    """A config dict whose missing and malformed keys are errors with names."""

    def __init__(self, values: Mapping[str, Any], name: str) -> None:
        self.values, self.name = values, name

    def get(self, *keys: str) -> Any:
        """The first of `keys` that is present and not null."""
        return next((self.values[key] for key in keys if self.values.get(key) is not None), None)

    def count(self, *keys: str, default: int | None = None, least: int = 1) -> int:
        """An integer of at least `least` under the first of `keys`."""
        value = self.get(*keys)
        if value is None and default is not None:
            return default
        if value is None:
            raise PlanError(
                f"the config of {self.name} lacks {' or '.join(keys)}; plan needs it to count bytes, and reads configs "
                "with the keys of Llama and its kin, at the top or under text_config"
            )
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MOST:
            key = next(key for key in keys if self.values.get(key) is not None)
            expected = "a positive integer" if least else "an integer that is not negative"
            raise PlanError(f"the config of {self.name} has {key}={value!r}; expected {expected}")
        return value

    def listed(self, key: str, layers: int | None = None) -> list[Any] | None:
        """A list, where layers is given one entry a layer; None where the key is absent."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list):
            raise PlanError(f"the config of {self.name} has {key}={value!r}; expected a list")
        if layers is not None and len(value) != layers:
            raise PlanError(f"the config of {self.name} names {len(value)} {key} for {layers} layers")
        return value

    def table(self, key: str) -> Mapping[str, Any]:
        """An object, empty where the key is absent."""
        value = self.get(key)
        if not isinstance(value, (dict, type(None))):
            raise PlanError(f"the config of {self.name} has {key}={value!r}; expected an object")
        return value or {}


_FAMILIES = {
    *("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gpt_oss", "mimo_v2_flash", "naive_n05_flash"),
    *("deepseek_v3", "deepseek_v32", "kimi_k2", "glm4_moe", "glm_moe_dsa"),
}

_KINDS = {
    "full_attention": "full",
    "sliding_attention": "sliding",
    "sparse_attention": "sparse",
    "indexed_attention": "sparse",
}


def from_config(config: Mapping[str, Any], name: str, source: str = "") -> ModelCosts:
    """Costs of the model that a Hugging Face style config describes, by the config's keys.

    Raises PlanError where a needed key is missing, or a layer kind is one that cannot be costed.
    """
    for wrapper in ("text_config", "llm_config", "language_config"):  # multimodal models nest the language model
        if nested := _Config(config, name).table(wrapper):
            outer = ("quantization_config", "dtype", "torch_dtype", "tie_word_embeddings")
            config = {key: config[key] for key in outer if key in config} | dict(nested)
    c = _Config(config, name)
    family = str(c.get("model_type") or "unknown")
    layers, notes = c.count("num_hidden_layers"), []
    if layers > 10_000:
        raise PlanError(f"the config of {name} has {layers:,} layers; expected fewer than 10,000")
    if family not in _FAMILIES:
        notes.append(f"model type {family!r} is not one the package knows: read by its keys as gated, pre-norm layers")
    kinds, sparse_ffn = _attention_kinds(c, family, layers), _sparse_ffn(c, family, layers)
    indexers = _indexer_layers(c, layers)
    attention = {key: _attention(c, family, *key) for key in set(zip(kinds, indexers, strict=True))}
    feed_forward = {sparse: _feed_forward(c, family, sparse) for sparse in set(sparse_ffn)}
    return ModelCosts(
        name=name,
        family=family,
        hidden=c.count("hidden_size"),
        vocab=c.count("vocab_size"),
        context=c.count("max_position_embeddings", default=2**20),
        tied_embeddings=bool(c.get("tie_word_embeddings")),
        layers=tuple(
            LayerCosts(attention[kind, indexer], feed_forward[sparse])
            for kind, indexer, sparse in zip(kinds, indexers, sparse_ffn, strict=True)
        ),
        dtypes=_dtypes(c),
        source=source,
        notes=tuple(notes),
    )


def _attention_kinds(c: _Config, family: str, layers: int) -> list[str]:
    types, pattern = c.listed("layer_types", layers), c.listed("hybrid_layer_pattern", layers)
    if types is not None:
        unknown = sorted(set(map(str, types)) - set(_KINDS))
        if unknown:
            raise PlanError(f"{c.name} has {', '.join(unknown)} layers; plan can cost {', '.join(_KINDS)}")
        kinds = [_KINDS[kind] for kind in types]
    elif pattern is not None:  # MiMo checkpoints: 1 is sliding
        kinds = ["sliding" if sliding else "full" for sliding in pattern]
    elif family in ("mimo_v2_flash", "naive_n05_flash"):  # global at 0, 5, 11, ...
        kinds = ["full" if i == 0 or (i + 1) % 6 == 0 else "sliding" for i in range(layers)]
    elif family == "gpt_oss":
        kinds = ["full" if i % 2 else "sliding" for i in range(layers)]
    elif family in ("mistral", "mixtral") and c.get("sliding_window"):
        kinds = ["sliding"] * layers
    elif c.get("use_sliding_window") and c.get("sliding_window"):  # Qwen
        full = c.count("max_window_layers", default=0, least=0)
        kinds = ["full" if i < full else "sliding" for i in range(layers)]
    else:
        kinds = ["full"] * layers
    if c.get("index_topk"):
        kinds = ["sparse" if kind == "full" else kind for kind in kinds]
    return kinds


def _indexer_layers(c: _Config, layers: int) -> list[bool]:
    """Which layers run their own indexer; the others reuse the selection of the one before (GLM)."""
    types, frequency = c.listed("indexer_types", layers), c.count("index_topk_freq", default=1)
    if types is not None:
        return [kind == "full" for kind in types]
    offset = c.count("index_skip_topk_offset", default=2, least=0)
    return [max(i - offset + 1, 0) % frequency == 0 for i in range(layers)]


def _attention(c: _Config, family: str, kind: str, indexed: bool) -> AttentionCosts:
    hidden, heads = c.count("hidden_size"), c.count("num_attention_heads")
    bias = bool(c.get("attention_bias")) or family == "qwen2"
    norms = 2 * hidden
    selected = c.count("index_topk") if kind == "sparse" else None
    if c.get("kv_lora_rank"):
        latent, rope = c.count("kv_lora_rank"), c.count("qk_rope_head_dim")
        nope, value = c.count("qk_nope_head_dim"), c.count("v_head_dim")
        rank = c.count("q_lora_rank", default=0, least=0)
        query = (rank or hidden) * heads * (nope + rope)
        return AttentionCosts(
            kind="sparse latent" if selected else "latent",
            heads=heads,
            kv_heads=1,
            query_params=query + latent * heads * (nope + value) + heads * value * hidden,
            kv_params=0,
            shared_params=norms + hidden * (latent + rope) + latent + ((hidden + 1) * rank if rank else 0),
            kv_row=latent + rope,
            flops_per_key=2 * heads * (2 * latent + rope),  # absorbed: scores and values both in the latent space
            selected=selected,
            indexer=_indexer(c, rank or hidden, layer_norm=True) if selected and indexed else None,
        )
    kv_heads = c.count("num_key_value_heads", default=heads)
    qk = c.count("head_dim", default=max(hidden // heads, 1))
    value = c.count("v_head_dim", default=qk)
    sinks = 0
    if family in ("mimo_v2_flash", "naive_n05_flash") and kind == "sliding":
        kv_heads, heads = (
            c.count("swa_num_key_value_heads", default=2 * kv_heads),
            c.count("swa_num_attention_heads", default=heads),
        )
        qk, value = c.count("swa_head_dim", default=qk), c.count("swa_v_head_dim", default=value)
        sinks = heads
    if family == "gpt_oss" or (family == "naive_n05_flash" and kind == "sparse"):
        sinks = heads
    bias = bias and not family.startswith("mimo")
    qk_norm = 2 * qk if family in ("qwen3", "qwen3_moe") or c.get("use_qk_norm") else 0
    output_bias = hidden if bias and family in ("gpt_oss", "llama") else 0
    return AttentionCosts(
        kind=kind,
        heads=heads,
        kv_heads=kv_heads,
        query_params=heads * (hidden * (qk + value) + (qk if bias else 0)) + sinks,
        kv_params=kv_heads * (hidden + bool(bias)) * (qk + value),
        shared_params=norms + qk_norm + output_bias,
        kv_row=qk + value,
        flops_per_key=2 * heads * (qk + value),
        window=c.count("sliding_window_size", "sliding_window") if kind == "sliding" else None,
        selected=selected,
        indexer=_indexer(c, hidden) if selected and indexed else None,
    )


def _indexer(c: _Config, query_in: int, layer_norm: bool = False) -> Indexer:
    hidden, heads, dim = c.count("hidden_size"), c.count("index_n_heads"), c.count("index_head_dim")
    return Indexer(query_in * heads * dim + hidden * (dim + heads) + (2 * dim if layer_norm else 0), heads, dim)


def _sparse_ffn(c: _Config, family: str, layers: int) -> list[bool]:
    types = c.listed("mlp_layer_types", layers)
    if not c.get("n_routed_experts", "num_local_experts", "num_experts"):
        return [False] * layers
    if types is not None:
        return [kind == "sparse" for kind in types]
    if isinstance(c.get("moe_layer_freq"), list):
        return [bool(sparse) for sparse in c.listed("moe_layer_freq", layers) or ()]
    first = c.count("first_k_dense_replace", default=int(family in ("mimo_v2_flash", "naive_n05_flash")), least=0)
    step, dense = c.count("decoder_sparse_step", default=1), c.listed("mlp_only_layers") or []
    return [i >= first and i not in dense and (i + 1) % step == 0 for i in range(layers)]


def _feed_forward(c: _Config, family: str, sparse: bool) -> FeedForwardCosts:
    hidden = c.count("hidden_size")
    if not sparse:
        inner = c.count("intermediate_size")
        bias = (2 * inner + hidden) if c.get("mlp_bias") and family == "llama" else 0
        return FeedForwardCosts(dense_params=3 * hidden * inner + bias, inner=inner)
    experts = c.count("n_routed_experts", "num_local_experts", "num_experts")
    top_k = c.count("num_experts_per_tok", "moe_topk")
    if top_k > experts:
        raise PlanError(f"the config of {c.name} routes each token to {top_k} of {experts} experts")
    inner = c.count("moe_intermediate_size", "intermediate_size")
    shared = c.count("n_shared_experts", default=0, least=0) * 3 * hidden * inner
    biased = family == "gpt_oss"
    return FeedForwardCosts(
        dense_params=shared,
        inner=inner,
        experts=experts,
        top_k=top_k,
        expert_params=3 * hidden * inner + (2 * inner + hidden if biased else 0),
        router_params=experts * (hidden + (1 if biased else 0)),
    )


def _dtypes(c: _Config) -> Dtypes:
    plain = str(c.get("dtype", "torch_dtype") or "bf16").removeprefix("torch.")
    plain = _DTYPE_NAMES.get(plain, plain)
    if plain not in DTYPE_BITS:
        raise PlanError(f"the config of {c.name} has dtype {plain!r}; plan knows {', '.join(DTYPE_BITS)}")
    quantization = c.table("quantization_config")
    if not quantization:
        return Dtypes(plain, plain, plain, plain)
    inner = _Config(quantization, f"{c.name}, quantization_config")
    method = str(inner.get("quant_method"))
    bits = inner.count("bits", default=4 if inner.get("load_in_4bit") else 16)
    groups = _Config(inner.table("config_groups"), inner.name)
    for group in groups.values:
        weights = _Config(groups.table(group), inner.name).table("weights")
        bits = _Config(weights, inner.name).count("num_bits", default=bits)
    packed = {"fp8": "fp8", "mxfp4": "mxfp4", "nvfp4": "nvfp4"}.get(method) or {4: "int4", 8: "int8"}.get(bits)
    if packed is None:
        raise PlanError(f"{c.name} is quantized with {method!r}; plan knows fp8, mxfp4, nvfp4 and 4 or 8 bit integers")
    skipped = inner.listed("modules_to_not_convert") or inner.listed("ignore") or inner.listed("ignored_layers") or []
    plain_attention = method == "mxfp4" or any("attn" in str(x) or "o_proj" in str(x) for x in skipped)
    return Dtypes(plain if plain_attention else packed, packed, packed, plain)
