"""MiMo-V2-Flash (arXiv:2601.02780): five sliding-window layers with sinks to one global layer, values under key size.

    x -> norm -> q, k, v -> rope on a third of a head -> attention -> o -> + -> norm -> sigmoid top-k experts -> +

Sliding layers have twice the KV heads. Multi-token prediction layers (`model.mtp.*`) are skipped.
"""

from dataclasses import replace

from slipstream.models.families.common import (
    HF_NAMES,
    HF_UNUSED,
    Container,
    Family,
    Fields,
    Tensors,
    hf_attention,
    hf_decoder,
    hf_layer_count,
    hf_rope,
)
from slipstream.models.families.sparse import feed_forwards, sigmoid_experts
from slipstream.models.spec import Attention, Indexer, ModelSpec, Rope

PARTIAL = 0.334  # the rotated share of a head
SLIDING, FULL, SPARSE = "sliding_attention", "full_attention", "sparse_attention"


def layer_kinds(config: Fields, count: int) -> list[str]:
    """`layer_types`, or 1 for sliding in `hybrid_layer_pattern`, else every sixth layer and the first are global."""
    if "layer_types" in config:
        return config.texts("layer_types", count, SLIDING, FULL, SPARSE)
    if "hybrid_layer_pattern" in config:
        return [SLIDING if kind else FULL for kind in config.integers("hybrid_layer_pattern", count, 2)]
    return [FULL if i == 0 or (i + 1) % 6 == 0 else SLIDING for i in range(count)]


def attentions(config: Fields, count: int, indexer: Indexer | None = None) -> list[Attention]:
    """One a layer. indexer: of the global layers, which then have sinks too."""
    config.reject("attention_bias", False)
    base = hf_attention(config, partial=PARTIAL)
    values = config.integer("v_head_dim", 128, limit=1 << 14)
    for key, same in (("num_attention_heads", base.heads), ("head_dim", base.head_dim), ("v_head_dim", values)):
        config.reject(f"swa_{key}", same)
    base = replace(base, v_head_dim=values, value_scale=config.number("attention_value_scale", 1.0))
    whole = replace(
        base,
        rope=rope(config, FULL, base.head_dim),
        indexer=indexer,
        sinks=config.flag("add_full_attention_sink_bias", indexer is not None),
    )
    sliding = replace(
        base,
        rope=rope(config, SLIDING, base.head_dim),
        kv_heads=config.integer("swa_num_key_value_heads", 2 * base.kv_heads),
        window=window(config),
        sinks=config.flag("add_swa_attention_sink_bias", True),
    )
    return [sliding if kind == SLIDING else whole for kind in layer_kinds(config, count)]


def rope(config: Fields, kind: str, head_dim: int) -> Rope:
    """By kind in `rope_parameters`, else of `rope_theta` and `swa_rope_theta`."""
    if "rope_parameters" not in config:
        key, base = ("swa_rope_theta", 1e4) if kind == SLIDING else ("rope_theta", 5e6)
        config = Fields(config.source, {**config.values, "rope_theta": config.number(key, base)})
    return hf_rope(config, head_dim, kind_of_layer=kind, partial=PARTIAL)


def window(config: Fields) -> int:
    """`sliding_window_size` does not count the query itself, `sliding_window` does."""
    if "sliding_window_size" in config:
        return config.integer("sliding_window_size", limit=1 << 32) + 1
    return config.integer("sliding_window", limit=1 << 32)


def hf_spec(config: Fields, tensors: Tensors) -> ModelSpec:
    count = hf_layer_count(config, tensors)
    experts = sigmoid_experts(config, tensors, shared=False)
    return hf_decoder("mimo_v2_flash", config, attentions(config, count), feed_forwards(config, count, experts, 1))


def mtp_layers(config: Fields, tensors: Tensors) -> tuple[str, ...]:
    return ("model.mtp.",)


NAMES = HF_NAMES | {"sinks": "model.layers.{i}.self_attn.attention_sink_bias"}
FAMILY = Family(
    "mimo_v2_flash",
    hf=Container(("mimo_v2_flash",), hf_spec, NAMES, unused=HF_UNUSED, extra_layers=mtp_layers),
)
