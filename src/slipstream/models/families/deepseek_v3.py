"""DeepSeek-V3 and R1 (arXiv:2412.19437): latent attention, then a sigmoid-routed mixture with a shared expert.

    x -> norm -> q latent -> q;  kv latent -> k, v of every head;  one rotated key -> attention -> o -> +
      -> norm -> (groups ->) top-k experts + the shared expert -> +

The rotary pairs are stored interleaved. The multi-token prediction layer after the last is skipped.
"""

from slipstream.models.families.common import HF_UNUSED, Container, Family, Fields, Tensors
from slipstream.models.families.sparse import LATENT_NAMES, extra_layers, latent_decoder
from slipstream.models.spec import ModelSpec


def hf_spec(config: Fields, tensors: Tensors) -> ModelSpec:
    return latent_decoder("deepseek_v3", config, tensors, lambda config, count: [None] * count)


FAMILY = Family(
    "deepseek_v3",
    hf=Container(
        ("deepseek_v3",), hf_spec, LATENT_NAMES, ("q", "q_b", "kv_a"), unused=HF_UNUSED, extra_layers=extra_layers
    ),
)
