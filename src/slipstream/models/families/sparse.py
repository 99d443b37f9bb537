"""What sparse families share: which layers have experts, DeepSeek's router, latent attention, stacked experts.

It knows nothing about files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from slipstream.errors import CheckpointError
from slipstream.models.families.common import HF_NAMES, Fields, Tensors, hf_decoder, hf_layer_count, hf_rope, yarn_scale
from slipstream.models.spec import Attention, Experts, FeedForward, Indexer, Latent, ModelSpec, WeightTensor
from slipstream.models.tensors import FileTensor, Strided

GGUF_EXPERT_NAMES = {
    "router": "blk.{i}.ffn_gate_inp.weight",
    "experts.gate": "blk.{i}.ffn_gate_exps.weight[{e}]",
    "experts.up": "blk.{i}.ffn_up_exps.weight[{e}]",
    "experts.down": "blk.{i}.ffn_down_exps.weight[{e}]",
}
INDEXER_NAMES = {
    "index_q": "model.layers.{i}.self_attn.indexer.wq_b.weight",
    "index_k": "model.layers.{i}.self_attn.indexer.wk.weight",
    "index_k_norm": "model.layers.{i}.self_attn.indexer.k_norm.weight",
    "index_k_norm_bias": "model.layers.{i}.self_attn.indexer.k_norm.bias",
    "index_weights": "model.layers.{i}.self_attn.indexer.weights_proj.weight",
}
LATENT_NAMES = (
    HF_NAMES
    | INDEXER_NAMES
    | {
        "q_a": "model.layers.{i}.self_attn.q_a_proj.weight",
        "q_a_norm": "model.layers.{i}.self_attn.q_a_layernorm.weight",
        "q_b": "model.layers.{i}.self_attn.q_b_proj.weight",
        "kv_a": "model.layers.{i}.self_attn.kv_a_proj_with_mqa.weight",
        "kv_a_norm": "model.layers.{i}.self_attn.kv_a_layernorm.weight",
        "kv_b": "model.layers.{i}.self_attn.kv_b_proj.weight",
    }
)
INDEXER_KEYS = ("index_q", "index_k", "index_k_norm", "index_k_norm_bias")
"""The indexer's tensors whose elements are rotated."""


def sigmoid_experts(config: Fields, tensors: Tensors, *, shared: bool = True) -> FeedForward:
    """DeepSeek-V3's mixture (arXiv:2412.19437 section 2.1.2): sigmoid scores, a correction bias, groups."""
    config.reject("scoring_func", "sigmoid")
    config.reject("topk_method", "noaux_tc")
    inner = config.integer("moe_intermediate_size")
    every_token = (
        config.integer("n_shared_experts", limit=64) if shared and config.values.get("n_shared_experts") else 0
    )
    experts = Experts(
        count=expert_count(config, tensors, "n_routed_experts", "num_local_experts", "num_experts"),
        top_k=config.integer("num_experts_per_tok"),
        scoring="sigmoid",
        normalise=config.flag("norm_topk_prob", True),
        scale=config.number("routed_scaling_factor", 1.0),
        groups=config.integer("n_group", 1),
        top_groups=config.integer("topk_group", 1),
        correction=True,
        shared_inner=every_token * inner,
    )
    return FeedForward(inner, experts=experts)


def expert_count(config: Fields, tensors: Tensors, *keys: str) -> int:
    """How many experts a layer has, each of them stored apart."""
    return config.integer(config.either(*keys), limit=max(len(tensors), 1))


def feed_forwards(config: Fields, count: int, sparse: FeedForward, first_dense: int) -> list[FeedForward]:
    """One a layer: as `mlp_layer_types` or a list `moe_layer_freq` say, else dense up to `first_k_dense_replace`."""
    dense = FeedForward(config.integer("intermediate_size"))
    if "mlp_layer_types" in config:
        kinds = [kind == "sparse" for kind in config.texts("mlp_layer_types", count, "sparse", "dense")]
    elif isinstance(config.values.get("moe_layer_freq"), list):
        kinds = [bool(kind) for kind in config.integers("moe_layer_freq", count, 2)]
    else:
        config.reject("moe_layer_freq", 1)
        first = 0 if config.values.get("first_k_dense_replace") == 0 else first_dense
        if first:
            first = config.integer("first_k_dense_replace", first_dense)
        kinds = [i >= first for i in range(count)]
    return [sparse if kind else dense for kind in kinds]


def latent_decoder(
    family: str, config: Fields, tensors: Tensors, indexers: Callable[[Fields, int], Sequence[Indexer | None]]
) -> ModelSpec:
    """DeepSeek-V3 (arXiv:2412.19437) and what follows it. indexers: of each layer."""
    config.reject("attention_bias", False)
    config.reject("rope_interleave", True)
    count = hf_layer_count(config, tensors)
    heads = config.integer("num_attention_heads")
    nope, width = config.integer("qk_nope_head_dim"), config.integer("qk_rope_head_dim", limit=1 << 14)
    rank = config.integer("q_lora_rank") if "q_lora_rank" in config else None
    rope = hf_rope(config, width)
    scaling = config.sub("rope_parameters" if "rope_parameters" in config else "rope_scaling")
    scale = (nope + width) ** -0.5
    if scaling.values.get("mscale_all_dim"):  # YaRN's other factor, here on the scores (DeepSeek-V2, appendix)
        scale *= yarn_scale(scaling.number("factor"), scaling.number("mscale_all_dim")) ** 2
    attention = [
        Attention(
            heads,
            heads,
            nope + width,
            rope,
            scale,
            v_head_dim=config.integer("v_head_dim"),
            indexer=indexer,
            latent=Latent(config.integer("kv_lora_rank"), nope, rank),
        )
        for indexer in indexers(config, count)
    ]
    experts = sigmoid_experts(config, tensors)
    return hf_decoder(family, config, attention, feed_forwards(config, count, experts, first_dense=3))


def indexer(config: Fields, *, shared: bool = False) -> Indexer:
    heads, head_dim = config.integer("index_n_heads"), config.integer("index_head_dim")
    return Indexer(heads, head_dim, config.integer("index_topk", limit=1 << 32), shared=shared)


def extra_layers(config: Fields, tensors: Tensors) -> tuple[str, ...]:
    """Layers after the last are for multi-token prediction where they have its projection; drafting with them is for
    another file. One without it stays, and is an error."""
    count = hf_layer_count(config, tensors)
    extra = config.values.get("num_nextn_predict_layers", config.values.get("num_mtp_layers", 1))
    numbers = range(count, count + (extra if type(extra) is int and 0 < extra <= 16 else 1))
    return tuple(at for at in (f"model.layers.{i}." for i in numbers) if f"{at}eh_proj.weight" in tensors)


def unstacked(
    tensors: Tensors, parts: Mapping[str, Callable[[WeightTensor], Mapping[str, WeightTensor]]], count: int
) -> Tensors:
    """`tensors`, those whose name ends with a key of `parts` taken apart into one an expert, read when asked.

    Each part makes of one expert's tensor a mapping of ending to tensor; those are named `{name}[{expert}]{ending}`.
    """
    apart: dict[str, WeightTensor] = {}
    for name, tensor in tensors.items():
        part = next((part for ending, part in parts.items() if name.endswith(ending)), None)
        if part is None:
            apart[name] = tensor
            continue
        if not isinstance(tensor, FileTensor) or tensor.shape[0] != count:
            raise CheckpointError(
                f"tensor {name[:80]!r} of shape {tensor.shape} is not of {count} experts; download the checkpoint again"
            )
        for e in range(count):
            for ending, piece in part(tensor[e]).items():
                apart[f"{name}[{e}]{ending}"] = piece
    return apart


def whole(tensor: WeightTensor) -> dict[str, WeightTensor]:
    return {"": tensor}


def gate_and_up(tensor: WeightTensor) -> dict[str, WeightTensor]:
    """Rows of gate and up in turn."""
    return {".gate": Strided(tensor, 0, 2), ".up": Strided(tensor, 1, 2)}


def gguf_experts(metadata: Fields, *, bias: bool = False) -> tuple[int, Experts]:
    """Inner size of an expert, and how tokens are routed: softmax over the chosen ones."""
    at = metadata.text("general.architecture") + "."
    count, top_k = metadata.integer(at + "expert_count", limit=1024), metadata.integer(at + "expert_used_count")
    return metadata.integer(at + "expert_feed_forward_length"), Experts(count, top_k, bias=bias)


def gguf_rearrange(spec: ModelSpec, tensors: Tensors) -> Tensors:
    """GGUF stacks the experts of a layer in one tensor a matrix."""
    experts = spec.layers[0].feed_forward.experts
    names = [f"ffn_{kind}_exps.{what}" for kind in ("gate", "up", "down") for what in ("weight", "bias")]
    return unstacked(tensors, dict.fromkeys(names, whole), experts.count) if experts else tensors
