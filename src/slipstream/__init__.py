"""Slipstream decodes one stream of an open-weight language model as fast as the memory of the machine allows.

    from slipstream import LLM, SamplingParams

    llm = LLM("smollm2")
    print(llm.generate("The capital of France is", SamplingParams(max_tokens=16)).text)

Names load on first use, so that `import slipstream` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slipstream.engine.engine import LLM
    from slipstream.engine.request import Chunk, Completion, Piece, SamplingParams
    from slipstream.engine.session import Session
    from slipstream.errors import BackendError, CheckpointError, RequestError, SlipstreamError

__all__ = [
    "LLM",
    "BackendError",
    "CheckpointError",
    "Chunk",
    "Completion",
    "Piece",
    "RequestError",
    "SamplingParams",
    "Session",
    "SlipstreamError",
]

_HOMES = {
    "LLM": "engine.engine",
    "Session": "engine.session",
    **dict.fromkeys(("Chunk", "Completion", "Piece", "SamplingParams"), "engine.request"),
    **dict.fromkeys(("BackendError", "CheckpointError", "RequestError", "SlipstreamError"), "errors"),
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
