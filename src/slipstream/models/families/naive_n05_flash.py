"""Naive-N0.5-Flash: MiMo-V2-Flash whose global layers select 2,048 keys with a lightning indexer (arXiv:2512.02556).

    x -> norm -> q, k, v -> rope ---------------------------------> attention over the selection -> o -> + -> ...
           \\-> index q (16 heads), index k (one) -> top 2,048 keys --/

Grouped-query attention as in its base, with sinks in every layer. The names of the indexer's config keys and tensors
are those of DeepSeek-V3.2; its queries come from the layer's input, since there is no compressed query.
"""

from slipstream.models.families.common import HF_UNUSED, Container, Family, Fields, Tensors, hf_decoder, hf_layer_count
from slipstream.models.families.mimo_v2_flash import NAMES, attentions, mtp_layers
from slipstream.models.families.sparse import INDEXER_NAMES, feed_forwards, sigmoid_experts
from slipstream.models.spec import Indexer, ModelSpec


def hf_spec(config: Fields, tensors: Tensors) -> ModelSpec:
    count = hf_layer_count(config, tensors)
    heads, head_dim = config.integer("index_n_heads", 16), config.integer("index_head_dim", 128)
    indexer = Indexer(heads, head_dim, config.integer("index_topk", 2048, limit=1 << 32))
    experts = sigmoid_experts(config, tensors, shared=False)
    feed_forward = feed_forwards(config, count, experts, 1)
    return hf_decoder("naive_n05_flash", config, attentions(config, count, indexer), feed_forward)


FAMILY = Family(
    "naive_n05_flash",
    hf=Container(("naive_n05_flash",), hf_spec, NAMES | INDEXER_NAMES, unused=HF_UNUSED, extra_layers=mtp_layers),
)
