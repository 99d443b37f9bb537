"""Qwen3 dense (arXiv:2505.09388): Llama with RMS norms on each head of q and k, and its own head size."""

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
from slipstream.models.families.qwen2 import windows
from slipstream.models.spec import ModelSpec


def hf_spec(config: Fields, tensors: Tensors) -> ModelSpec:
    return hf_dense("qwen3", config, tensors, qk_norm=True, windows=windows)


def gguf_spec(metadata: Fields, tensors: Tensors) -> ModelSpec:
    return gguf_dense("qwen3", metadata, tensors, qk_norm=True)


FAMILY = Family(
    "qwen3",
    hf=Container(("qwen3",), hf_spec, HF_NAMES, unused=HF_UNUSED),
    gguf=Container(("qwen3",), gguf_spec, GGUF_NAMES, unused=GGUF_UNUSED),
)
