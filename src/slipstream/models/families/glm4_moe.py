"""GLM-4.5 and 4.6 (arXiv:2508.06471): grouped-query attention over half-rotated heads, DeepSeek-V3's mixture.

The multi-token prediction layer after the last is skipped.
"""

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
)
from slipstream.models.families.sparse import extra_layers, feed_forwards, sigmoid_experts
from slipstream.models.spec import ModelSpec


def hf_spec(config: Fields, tensors: Tensors) -> ModelSpec:
    count = hf_layer_count(config, tensors)
    bias, normed = config.flag("attention_bias", False), config.flag("use_qk_norm", False)
    attention = hf_attention(config, qkv_bias=bias, qk_norm=normed, partial=0.5)
    experts = sigmoid_experts(config, tensors)
    feed_forward = feed_forwards(config, count, experts, first_dense=1)
    return hf_decoder("glm4_moe", config, [attention] * count, feed_forward)


FAMILY = Family("glm4_moe", hf=Container(("glm4_moe",), hf_spec, HF_NAMES, unused=HF_UNUSED, extra_layers=extra_layers))
