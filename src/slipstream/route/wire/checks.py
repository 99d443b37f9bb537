"""Whether the values of a request are of the types that every wire writes; beyond that its target judges."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from slipstream.route.wire.neutral import Ask, Image, Part, Result, Thought
from slipstream.serve.errors import invalid

_TEXT = (str, type(None))
_FLAG = (bool, type(None))
_OBJECT = (dict, type(None))
_NUMBERS = ("temperature", "top_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "min_p")
_COUNTS = ("top_k", "seed", "n", "top_logprobs", "min_tokens")


def check(ask: Ask) -> Ask:
    """`ask` as it is. Raises ApiError 400 that names the first field of a wrong type."""
    for field, value, kinds in _values(ask):
        numeric = bool not in kinds and isinstance(value, bool)  # to Python, true is a number
        if not isinstance(value, kinds) or numeric:
            raise invalid(f"{field} has a value of the wrong type", field, "invalid_value")
    return ask


def _values(ask: Ask) -> Iterator[tuple[str, Any, tuple[type, ...]]]:
    yield "tool_choice", ask.tool_choice, _TEXT
    yield "parallel_tool_calls", ask.parallel, _FLAG
    yield "reasoning effort", ask.effort, _TEXT
    for tool in ask.tools:
        yield "tools.description", tool.description, _TEXT
        yield "tools.parameters", tool.schema, _OBJECT
        yield "tools.strict", tool.strict, _FLAG
    if ask.format is not None:
        yield "response_format.schema", ask.format.schema, _OBJECT
        yield "response_format.name", ask.format.name, _TEXT
        yield "response_format.strict", ask.format.strict, _FLAG
    for name, value in ask.settings.items():
        if name in _NUMBERS:
            yield name, value, (int, float)
        elif name in _COUNTS:
            yield name, value, (int,)
    stops = ask.settings.get("stop", [])
    yield "stop", stops, (list,)
    for stop in stops:
        yield "stop", stop, (str,)
    for turn in ask.turns:
        for part in turn.parts:
            yield from _part(part)


def _part(part: Part) -> Iterator[tuple[str, Any, tuple[type, ...]]]:
    if isinstance(part, Image):
        yield "image detail", part.detail, _TEXT
    elif isinstance(part, Thought):
        yield "reasoning signature", part.seal, _TEXT
        yield "reasoning format", part.by, _TEXT
    elif isinstance(part, Result):
        yield "is_error", part.is_error, _FLAG
        for inner in part.parts:
            yield from _part(inner)
