"""Qwen2 and Qwen2.5 (arXiv:2412.15115): Llama with biases on q, k and v; some layers may slide a window."""

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
    hf_dense,
)
from slipstream.models.spec import ModelSpec


def windows(config: Fields, layers: int) -> list[int | None]:
    """`layer_types` where the config lists them; before that, layers from `max_window_layers` on slide."""
    if not config.flag("use_sliding_window", False) or "sliding_window" not in config:
        return [None] * layers
    window = config.integer("sliding_window", limit=1 << 32)
    if "layer_types" in config:
        return [window if kind == "sliding_attention" else None for kind in config.texts("layer_types", layers)]
    full = config.values.get("max_window_layers", 28)
    return [None if full and i < config.integer("max_window_layers", 28) else window for i in range(layers)]


def hf_spec(config: Fields, tensors: Tensors) -> ModelSpec:
    return hf_dense("qwen2", config, tensors, qkv_bias=True, windows=windows)


def gguf_spec(metadata: Fields, tensors: Tensors) -> ModelSpec:
    return gguf_dense("qwen2", metadata, tensors, qkv_bias=True)


FAMILY = Family(
    "qwen2",
    hf=Container(("qwen2",), hf_spec, HF_NAMES, unused=HF_UNUSED),
    gguf=Container(("qwen2",), gguf_spec, GGUF_NAMES, unused=GGUF_UNUSED),
)
