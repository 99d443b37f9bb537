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
from slipstream.models.families.sparse import GGUF_EXPERT_NAMES, expert_count, gguf_experts, gguf_rearrange
from slipstream.models.spec import Experts, FeedForward, ModelSpec


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
    inner, experts = gguf_experts(metadata)
    feed_forward = FeedForward(inner, experts=experts)
    return gguf_dense("qwen3_moe", metadata, tensors, qk_norm=True, feed_forward=feed_forward)


GGUF_MOE_NAMES = GGUF_NAMES | GGUF_EXPERT_NAMES
FAMILY = Family(
    "qwen3_moe",
    hf=Container(("qwen3_moe",), hf_spec, HF_NAMES, unused=HF_UNUSED),
    gguf=Container(("qwen3moe",), gguf_spec, GGUF_MOE_NAMES, rearrange=gguf_rearrange, unused=GGUF_UNUSED),
)
