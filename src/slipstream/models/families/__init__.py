"""The checkpoint families that can be loaded. Adding one is a file here, its test and its line below."""

from __future__ import annotations

from slipstream.models.families import (
    deepseek_v3,
    deepseek_v32,
    glm4_moe,
    glm_moe_dsa,
    gpt_oss,
    llama,
    mimo_v2_flash,
    mistral,
    naive_n05_flash,
    qwen2,
    qwen3,
    qwen3_moe,
)
from slipstream.models.families.common import Container, Family, Fields

FAMILIES: tuple[Family, ...] = (
    deepseek_v3.FAMILY,
    deepseek_v32.FAMILY,
    glm4_moe.FAMILY,
    glm_moe_dsa.FAMILY,
    gpt_oss.FAMILY,
    llama.FAMILY,
    mimo_v2_flash.FAMILY,
    mistral.FAMILY,
    naive_n05_flash.FAMILY,
    qwen2.FAMILY,
    qwen3.FAMILY,
    qwen3_moe.FAMILY,
)

__all__ = ["FAMILIES", "Container", "Family", "Fields"]
