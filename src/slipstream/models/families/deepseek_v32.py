"""DeepSeek-V3.2 (arXiv:2512.02556): DeepSeek-V3 whose every layer attends to the keys that an indexer selects.

The indexer reads the query latent. Its own rotary elements are stored in rotate-half order, unlike attention's.
"""

from slipstream.models.families.common import HF_UNUSED, Container, Family, Fields, Tensors
from slipstream.models.families.sparse import LATENT_NAMES, extra_layers, indexer, latent_decoder
from slipstream.models.spec import ModelSpec


def hf_spec(config: Fields, tensors: Tensors) -> ModelSpec:
    return latent_decoder("deepseek_v32", config, tensors, lambda config, count: [indexer(config)] * count)


FAMILY = Family(
    "deepseek_v32",
    hf=Container(
        ("deepseek_v32",), hf_spec, LATENT_NAMES, ("q", "q_b", "kv_a"), unused=HF_UNUSED, extra_layers=extra_layers
    ),
)
