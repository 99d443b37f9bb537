"""GLM-5: DeepSeek-V3.2 where some layers reuse the selection of the layer before them (arXiv:2603.12201).

Here the indexer's rotary elements are interleaved as attention's are.
"""

from slipstream.models.families.common import HF_UNUSED, Container, Family, Fields, Tensors
from slipstream.models.families.sparse import INDEXER_KEYS, LATENT_NAMES, extra_layers, indexer, latent_decoder
from slipstream.models.spec import Indexer, ModelSpec


def indexers(config: Fields, count: int) -> list[Indexer]:
    """`indexer_types`, or F and S in `index_topk_pattern`, else one in `index_topk_freq` layers selects."""
    if "indexer_types" in config:
        shared = [kind == "shared" for kind in config.texts("indexer_types", count, "full", "shared")]
    elif "index_topk_pattern" in config:
        pattern = config.values["index_topk_pattern"]
        letters = Fields(config.source, {"index_topk_pattern": list(pattern) if isinstance(pattern, str) else pattern})
        kinds = letters.texts("index_topk_pattern", count, "F", "S", "full", "shared")
        shared = [kind in ("S", "shared") for kind in kinds]
    else:
        every, skip = config.integer("index_topk_freq", 1), config.integer("index_skip_topk_offset", 2)
        shared = [max(i - skip + 1, 0) % every != 0 for i in range(count)]
    return [indexer(config, shared=each) for each in shared]


def hf_spec(config: Fields, tensors: Tensors) -> ModelSpec:
    return latent_decoder("glm_moe_dsa", config, tensors, indexers)


FAMILY = Family(
    "glm_moe_dsa",
    hf=Container(
        ("glm_moe_dsa",),
        hf_spec,
        LATENT_NAMES,
        ("q", "q_b", "kv_a", *INDEXER_KEYS),
        unused=HF_UNUSED,
        extra_layers=extra_layers,
    ),
)
