"""Qwen3 mixtures of experts (arXiv:2505.09388): Qwen3 whose feed-forward is a softmax router over many small experts.

x -> norm -> q, k (normed by head), v -> rope -> attention -> o -> + -> norm -> top-k experts -> +
"""

from dataclasses import replace

from slipstream.models.families.common import (
    GGUF_NAMES,
    GGUF_UNUSED,
    HF_NAMES,
    HF_UNUSED,
    Container,
    Family,
    Fields,
    Tensors,
    gguf_dense,
    hf_attention,
    hf_decoder,
    hf_layer_count,
)
from slipstream.models.families.sparse import expert_count, unstacked, whole
from slipstream.models.spec import Experts, FeedForward, ModelSpec

STACKED = ("ffn_gate_exps.weight", "ffn_up_exps.weight", "ffn_down_exps.weight")


def hf_spec(config: Fields, tensors: Tensors) -> ModelSpec:
    """Layers in `mlp_only_layers`, and those that `decoder_sparse_step` steps over, are dense."""
    config.reject("attention_bias", False)
    count = hf_layer_count(config, tensors)
    attention = hf_attention(config, qk_norm=True)
    if config.flag("use_sliding_window", False) and "sliding_window" in config:
        attention = replace(attention, window=config.integer("sliding_window", limit=1 << 32))
    experts = Experts(
        count=expert_count(config, tensors, "num_experts", "num_local_experts"),
        top_k=config.integer("num_experts_per_tok"),
        normalise=config.flag("norm_topk_prob", False),
    )
    sparse = FeedForward(config.integer("moe_intermediate_size"), experts=experts)
    dense = FeedForward(config.integer("intermediate_size"))
    step = config.integer("decoder_sparse_step", 1)
    plain = set(config.integers("mlp_only_layers") if "mlp_only_layers" in config else ())
    feed_forward = [dense if i in plain or (i + 1) % step else sparse for i in range(count)]
    return hf_decoder("qwen3_moe", config, [attention] * count, feed_forward)


def gguf_spec(metadata: Fields, tensors: Tensors) -> ModelSpec:
    at = metadata.text("general.architecture") + "."
    experts = Experts(metadata.integer(at + "expert_count", limit=4096), metadata.integer(at + "expert_used_count"))
    feed_forward = FeedForward(metadata.integer(at + "expert_feed_forward_length"), experts=experts)
    return gguf_dense("qwen3_moe", metadata, tensors, qk_norm=True, feed_forward=feed_forward)


def gguf_rearrange(spec: ModelSpec, tensors: Tensors) -> Tensors:
    experts = spec.layers[0].feed_forward.experts
    return unstacked(tensors, dict.fromkeys(STACKED, whole), experts.count) if experts else tensors


GGUF_MOE_NAMES = GGUF_NAMES | {
    "router": "blk.{i}.ffn_gate_inp.weight",
    "experts.gate": "blk.{i}.ffn_gate_exps.weight[{e}]",
    "experts.up": "blk.{i}.ffn_up_exps.weight[{e}]",
    "experts.down": "blk.{i}.ffn_down_exps.weight[{e}]",
}
FAMILY = Family(
    "qwen3_moe",
    hf=Container(("qwen3_moe",), hf_spec, HF_NAMES, unused=HF_UNUSED),
    gguf=Container(("qwen3moe",), gguf_spec, GGUF_MOE_NAMES, rearrange=gguf_rearrange, unused=GGUF_UNUSED),
)
