"""The checkpoint families that can be loaded. Adding one is a file here, its test and its line below."""

from __future__ import annotations

from slipstream.models.families import llama, mistral, qwen2, qwen3
from slipstream.models.families.common import Container, Family, Fields

FAMILIES: tuple[Family, ...] = (llama.FAMILY, mistral.FAMILY, qwen2.FAMILY, qwen3.FAMILY)

__all__ = ["FAMILIES", "Container", "Family", "Fields"]
