"""The three wires: each reads and writes requests and answers; `neutral` stands between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from slipstream.route.wire import anthropic, chat, read, reply, responses
from slipstream.route.wire.checks import check
from slipstream.route.wire.neutral import Ask, Event, Json


@dataclass(frozen=True)
class Wire:
    """One API. path: below a target's url."""

    name: str
    path: str
    parse: Callable[[Json], Ask]
    reader: Callable[[], read.Reader]
    read_whole: Callable[[Json], list[Event]]
    writer: Callable[[Ask], reply.Writer]


WIRES = {
    chat.NAME: Wire(
        chat.NAME, chat.PATH, chat.parse, read.ChatReader, read.chat_whole,
        lambda ask: reply.ChatWriter(ask.wants_usage),
    ),
    responses.NAME: Wire(
        responses.NAME, responses.PATH, responses.parse, read.ResponsesReader, read.responses_whole,
        lambda ask: reply.ResponsesWriter(),
    ),
    anthropic.NAME: Wire(
        anthropic.NAME, anthropic.PATH, anthropic.parse, read.AnthropicReader, read.anthropic_whole,
        lambda ask: reply.AnthropicWriter(),
    ),
}  # fmt: skip


def parse_request(wire: str, body: Json) -> Ask:
    """A request of `wire`, its values checked. Raises ApiError 400."""
    return check(WIRES[wire].parse(body))


def write_request(ask: Ask, wire: str, *, reasoning: bool, max_output: int) -> tuple[Json, list[str]]:
    """The body for a target of `wire`, without its model, and what was left out. Raises NotCarried.

    On its own wire a request travels as it came, but that a stream of chunks is asked for its usage.
    """
    if wire == ask.wire:
        body = dict(ask.body)
        if wire == chat.NAME and ask.stream:
            options = body.get("stream_options")
            body["stream_options"] = (options if isinstance(options, dict) else {}) | {"include_usage": True}
        return body, []
    if wire == chat.NAME:
        return chat.write(ask, reasoning)
    if wire == responses.NAME:
        return responses.write(ask, reasoning)
    return anthropic.write(ask, reasoning, max_output)
