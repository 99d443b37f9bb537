"""gpt-oss (arXiv:2508.10925): alternating windows, a learned sink a head, biases, and experts in MXFP4.

    x -> norm -> q, k, v -> rope (YaRN) -> attention with sinks, every other layer over a window -> o -> +
      -> norm -> softmax over the top-k of the router -> clamped swiglu experts -> +

Released files keep the experts packed, gate and up rows in turn, in `*_blocks` and `*_scales`; files that transformers
writes keep them as floats, transposed. Both are read one expert at a time.
"""

from dataclasses import replace

from slipstream.errors import CheckpointError
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
from slipstream.models.families.sparse import (
    GGUF_EXPERT_NAMES,
    gate_and_up,
    gguf_experts,
    gguf_rearrange,
    unstacked,
    whole,
)
from slipstream.models.spec import Experts, FeedForward, Layer, ModelSpec, WeightTensor
from slipstream.models.tensors import PackedMXFP4, Strided

ALPHA, LIMIT = 1.702, 7.0


def hf_spec(config: Fields, tensors: Tensors) -> ModelSpec:
    count = hf_layer_count(config, tensors)
    bias = config.flag("attention_bias", True)
    attention = replace(hf_attention(config, qkv_bias=bias, o_bias=bias), sinks=True)
    window = config.integer("sliding_window", limit=1 << 32)
    kinds = ["full_attention" if i % 2 else "sliding_attention" for i in range(count)]
    if "layer_types" in config:
        kinds = config.texts("layer_types", count, "full_attention", "sliding_attention")
    experts = Experts(
        count=config.integer(config.either("num_local_experts", "num_experts"), limit=1024),
        top_k=config.integer(config.either("num_experts_per_tok", "experts_per_token")),
        bias=True,
    )
    feed_forward = FeedForward(
        config.integer("intermediate_size"),
        "clamped",
        experts,
        alpha=config.number("swiglu_alpha", ALPHA),
        limit=config.number("swiglu_limit", LIMIT),
    )
    window_of = [window if kind == "sliding_attention" else None for kind in kinds]
    return hf_decoder("gpt_oss", config, [replace(attention, window=w) for w in window_of], [feed_forward] * count)


def gguf_spec(metadata: Fields, tensors: Tensors) -> ModelSpec:
    """Even layers slide; alpha and limit are the released models', since the format does not carry them."""
    inner, experts = gguf_experts(metadata, bias=True)
    feed_forward = FeedForward(inner, "clamped", experts, alpha=ALPHA, limit=LIMIT)
    spec = gguf_dense("gpt_oss", metadata, tensors, qkv_bias=True, feed_forward=feed_forward, truncate=False)
    sliding = replace(spec.layers[0].attention, sinks=True, o_bias=True)
    kinds = (sliding, replace(sliding, window=None))
    return replace(spec, layers=tuple(Layer(kinds[i % 2], feed_forward) for i in range(len(spec.layers))))


def transposed(tensor: WeightTensor) -> dict[str, WeightTensor]:
    return {"": Strided(tensor, transposed=True)}


def transposed_gate_and_up(tensor: WeightTensor) -> dict[str, WeightTensor]:
    return {".gate": Strided(tensor, 0, 2, transposed=True), ".up": Strided(tensor, 1, 2, transposed=True)}


def hf_rearrange(spec: ModelSpec, tensors: Tensors) -> Tensors:
    experts = spec.layers[0].feed_forward.experts
    parts = {
        "experts.gate_up_proj": transposed_gate_and_up,
        "experts.down_proj": transposed,
        "experts.gate_up_proj_bias": gate_and_up,
        "experts.down_proj_bias": whole,
        "experts.gate_up_proj_blocks": gate_and_up,
        "experts.gate_up_proj_scales": gate_and_up,
        "experts.down_proj_blocks": whole,
        "experts.down_proj_scales": whole,
    }
    apart = dict(unstacked(tensors, parts, experts.count if experts else 0))
    for name in [name for name in apart if "_blocks[" in name]:
        packed = name.replace("_blocks[", "[")
        blocks, scales = apart.pop(name), apart.pop(name.replace("_blocks[", "_scales["), None)
        if scales is None or blocks.shape != (*scales.shape, 16) or {blocks.format, scales.format} != {"U8"}:
            raise CheckpointError(
                f"tensor {name[:80]!r} of shape {blocks.shape} has no matching scales; download the checkpoint again"
            )
        apart[packed] = PackedMXFP4(blocks, scales)
    return apart


NAMES = HF_NAMES | {
    "o_bias": "model.layers.{i}.self_attn.o_proj.bias",
    "sinks": "model.layers.{i}.self_attn.sinks",
    "router": "model.layers.{i}.mlp.router.weight",
    "router_bias": "model.layers.{i}.mlp.router.bias",
    "experts.gate": "model.layers.{i}.mlp.experts.gate_up_proj[{e}].gate",
    "experts.up": "model.layers.{i}.mlp.experts.gate_up_proj[{e}].up",
    "experts.down": "model.layers.{i}.mlp.experts.down_proj[{e}]",
    "experts.gate_bias": "model.layers.{i}.mlp.experts.gate_up_proj_bias[{e}].gate",
    "experts.up_bias": "model.layers.{i}.mlp.experts.gate_up_proj_bias[{e}].up",
    "experts.down_bias": "model.layers.{i}.mlp.experts.down_proj_bias[{e}]",
}
GGUF_OSS_NAMES = (
    GGUF_NAMES
    | GGUF_EXPERT_NAMES
    | {
        "ffn_norm": "blk.{i}.post_attention_norm.weight",
        "o_bias": "blk.{i}.attn_output.bias",
        "sinks": "blk.{i}.attn_sinks.weight",
        "router_bias": "blk.{i}.ffn_gate_inp.bias",
        "experts.gate_bias": "blk.{i}.ffn_gate_exps.bias[{e}]",
        "experts.up_bias": "blk.{i}.ffn_up_exps.bias[{e}]",
        "experts.down_bias": "blk.{i}.ffn_down_exps.bias[{e}]",
    }
)
FAMILY = Family(
    "gpt_oss",
    hf=Container(("gpt_oss",), hf_spec, NAMES, rearrange=hf_rearrange, unused=HF_UNUSED),
    gguf=Container(("gpt-oss",), gguf_spec, GGUF_OSS_NAMES, rearrange=gguf_rearrange, unused=GGUF_UNUSED),
)
