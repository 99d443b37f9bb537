"""Mistral (arXiv:2310.06825): Llama whose every layer may attend over a sliding window. GGUF calls it llama."""

from slipstream.models.families.common import HF_NAMES, HF_UNUSED, Container, Family, Fields, Tensors, hf_dense
from slipstream.models.spec import ModelSpec


def windows(config: Fields, layers: int) -> list[int | None]:
    window = config.integer("sliding_window", limit=1 << 32) if "sliding_window" in config else None
    return [window] * layers


def hf_spec(config: Fields, tensors: Tensors) -> ModelSpec:
    return hf_dense("mistral", config, tensors, windows=windows)


FAMILY = Family("mistral", hf=Container(("mistral",), hf_spec, HF_NAMES, unused=HF_UNUSED))
