"""Llama 2 and 3 (arXiv:2407.21783), and SmolLM2, which is one.

    x -> norm -> q, k, v -> rope -> attention -> o -> + -> norm -> silu(gate) * up -> down -> +

GGUF files of this architecture, Mistral's among them, interleave the rotary pairs in the rows of q and k.
"""

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


def hf_spec(config: Fields, tensors: Tensors) -> ModelSpec:
    return hf_dense("llama", config, tensors)


def gguf_spec(metadata: Fields, tensors: Tensors) -> ModelSpec:
    return gguf_dense("llama", metadata, tensors)


FAMILY = Family(
    "llama",
    hf=Container(("llama",), hf_spec, HF_NAMES, unused=HF_UNUSED),
    gguf=Container(("llama",), gguf_spec, GGUF_NAMES, interleaved=("q", "k"), unused=GGUF_UNUSED),
)
