"""Answers of the three wires, whole or as streams, read into neutral events.

A reader is fed one event of its stream at a time. What an API lets clients ignore is ignored; what is no event of the
API at all raises ValueError.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol

from slipstream.route.wire import anthropic, responses
from slipstream.route.wire.neutral import (
    CallDelta,
    CallStart,
    End,
    Event,
    Failure,
    Json,
    Start,
    Stop,
    TextDelta,
    ThoughtDelta,
    ThoughtEnd,
    Usage,
    as_dict,
    as_int,
    as_list,
    as_text,
)
from slipstream.route.wire.sse import Sse
from slipstream.serve.wire import dumps

STATUSES = {
    "invalid_request_error": 400, "authentication_error": 401, "permission_error": 403, "not_found_error": 404,
    "request_too_large": 413, "rate_limit_error": 429, "rate_limit_exceeded": 429, "insufficient_quota": 429,
    "overloaded_error": 529, "timeout_error": 504, "context_length_exceeded": 400, "invalid_prompt": 400,
}  # fmt: skip


class Reader(Protocol):
    def feed(self, event: Sse) -> list[Event]:
        """Raises ValueError for what this API does not send."""
        ...


def load(data: str | bytes) -> Json:
    """A JSON object. Raises ValueError."""
    value = json.loads(data)
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def failure(status: int | None, body: Any) -> Failure:
    """The error of any wire's `body`; status None: told by its type."""
    body = as_dict(body)
    error = body.get("error", body.get("detail", body))
    if isinstance(error, str):
        return Failure(status or 502, error)
    error = as_dict(error)
    code = next((c for c in (error.get("code"), error.get("type")) if isinstance(c, str) and c), None)
    numbers = (error.get("code"), error.get("status_code"))
    found = next((c for c in numbers if isinstance(c, int) and 400 <= c < 600), None)
    known = STATUSES.get(str(code)) or STATUSES.get(as_text(error.get("type")))
    return Failure(status or found or known or 502, as_text(error.get("message")) or "no reason given", code)


class ChatReader:
    """`chat.completion.chunk` events, closed by [DONE]."""

    def __init__(self) -> None:
        self._started = self._stopped = False
        self._calls: set[int] = set()
        self._tier: str | None = None

    def feed(self, event: Sse) -> list[Event]:
        if event.data.strip() == "[DONE]":
            return [End()] if self._stopped else [Failure(502, "the stream was closed before its answer was complete")]
        body = load(event.data)
        if body.get("error"):
            return [failure(None, body)]
        if "choices" not in body and "usage" not in body:
            raise ValueError("a chunk without choices")
        out: list[Event] = []
        if not self._started and body.get("id"):
            self._started = True
            out.append(Start(as_text(body.get("id")), as_text(body.get("model"))))
        self._tier = body.get("service_tier") or self._tier
        for choice in map(as_dict, as_list(body.get("choices"))):
            if choice.get("index", 0) == 0:
                out += self._delta(as_dict(choice.get("delta")))
                if choice.get("finish_reason"):
                    self._stopped = True
                    out.append(chat_stop(choice))
        if isinstance(body.get("usage"), dict):
            out.append(chat_usage(body["usage"], self._tier))
        return out

    def _delta(self, delta: Json) -> list[Event]:
        out: list[Event] = []
        thought = as_text(delta.get("reasoning_content")) or as_text(delta.get("reasoning"))
        if thought:
            out.append(ThoughtDelta(thought))
        out += thought_ends(delta)
        for name in ("content", "refusal"):
            if text := as_text(delta.get(name)):
                out.append(TextDelta(text))
        for call in map(as_dict, as_list(delta.get("tool_calls"))):
            index, function = as_int(call.get("index")), as_dict(call.get("function"))
            if index not in self._calls:
                self._calls.add(index)
                id = as_text(call.get("id")) or f"call_{index}"
                out.append(CallStart(index, id, as_text(function.get("name"))))
            if text := as_text(function.get("arguments")):
                out.append(CallDelta(index, text))
        return out


def thought_ends(message: Json) -> list[Event]:
    out: list[Event] = []
    for one in map(as_dict, as_list(message.get("reasoning_details"))):
        if one.get("type") == "reasoning.encrypted":
            out.append(ThoughtEnd(one.get("data"), one.get("format"), hidden=True))
        elif one.get("signature"):
            out.append(ThoughtEnd(one.get("signature"), one.get("format")))
    return out


def chat_stop(choice: Json) -> Stop:
    reason = {"content_filter": "refusal", "function_call": "tool_calls"}.get(
        choice["finish_reason"], choice["finish_reason"]
    )
    sequence = choice.get("stop_reason")  # vLLM's: the stop string that was met
    if reason == "stop" and isinstance(sequence, str):
        return Stop("stop_sequence", sequence)
    return Stop(reason if reason in ("stop", "length", "tool_calls", "refusal") else "stop")


def chat_usage(usage: Json, tier: Any) -> Usage:
    prompt, output = as_dict(usage.get("prompt_tokens_details")), as_dict(usage.get("completion_tokens_details"))
    return Usage(
        as_int(usage.get("prompt_tokens")), as_int(prompt.get("cached_tokens")),
        as_int(prompt.get("cache_write_tokens")), as_int(usage.get("completion_tokens")),
        as_int(output.get("reasoning_tokens")), tier if isinstance(tier, str) else None,
    )  # fmt: skip


def chat_whole(body: Json) -> list[Event]:
    choice = as_dict((as_list(body.get("choices")) or [None])[0])
    message = as_dict(choice.get("message"))
    if not message or not choice.get("finish_reason"):
        raise ValueError("an answer without a message")
    calls = [
        {"index": i, "id": one.get("id"), "function": one.get("function")}
        for i, one in enumerate(map(as_dict, as_list(message.get("tool_calls"))))
    ]
    out: list[Event] = [Start(as_text(body.get("id")), as_text(body.get("model")))]
    out += ChatReader()._delta(message | {"tool_calls": calls})
    out.append(chat_stop(choice))
    return [*out, chat_usage(as_dict(body.get("usage")), body.get("service_tier")), End()]


class AnthropicReader:
    """`message_start`, blocks, `message_delta`, `message_stop`."""

    def __init__(self) -> None:
        self._kinds: dict[int, str] = {}
        self._calls: dict[int, int] = {}
        self._seals: dict[int, str] = {}
        self._empty: dict[int, Any] = {}
        self._usage: Json = {}

    def feed(self, event: Sse) -> list[Event]:
        body = load(event.data)
        kind = body.get("type", event.name)
        index = body.get("index", 0)
        if kind == "error":
            return [failure(None, body)]
        if kind == "message_start":
            message = as_dict(body.get("message"))
            self._usage |= as_dict(message.get("usage"))
            return [Start(as_text(message.get("id")), as_text(message.get("model"))), anthropic_usage(self._usage)]
        if kind == "content_block_start":
            return self._start(index, as_dict(body.get("content_block")))
        if kind == "content_block_delta":
            return self._delta(index, as_dict(body.get("delta")))
        if kind == "content_block_stop":
            return self._stop(index)
        if kind == "message_delta":
            self._usage |= {name: value for name, value in as_dict(body.get("usage")).items() if value is not None}
            return [anthropic_stop(as_dict(body.get("delta"))), anthropic_usage(self._usage)]
        if kind == "message_stop":
            return [End()]
        if not isinstance(kind, str) or not kind:
            raise ValueError("an event without a type")
        return []  # ping, and whatever comes to this API

    def _start(self, index: int, block: Json) -> list[Event]:
        kind = self._kinds[index] = as_text(block.get("type"))
        if kind == "tool_use":
            self._calls[index] = len(self._calls)
            self._empty[index] = block.get("input")
            return [CallStart(self._calls[index], as_text(block.get("id")), as_text(block.get("name")))]
        if kind == "redacted_thinking":
            return [ThoughtEnd(as_text(block.get("data")), anthropic.NAME, hidden=True)]
        if kind == "thinking":
            self._seals[index] = as_text(block.get("signature"))
        text = as_text(block.get("text"))
        return [TextDelta(text)] if kind == "text" and text else []

    def _delta(self, index: int, delta: Json) -> list[Event]:
        if text := as_text(delta.get("text")):
            return [TextDelta(text)]
        if text := as_text(delta.get("thinking")):
            return [ThoughtDelta(text)]
        if (text := as_text(delta.get("partial_json"))) and index in self._calls:
            self._empty.pop(index, None)
            return [CallDelta(self._calls[index], text)]
        if text := as_text(delta.get("signature")):
            self._seals[index] = self._seals.get(index, "") + text
        return []

    def _stop(self, index: int) -> list[Event]:
        if self._kinds.get(index) == "thinking":
            by, seal = anthropic._unseal(self._seals.get(index, ""))
            return [ThoughtEnd(seal, by)]
        if index in self._empty:
            return [CallDelta(self._calls[index], dumps(self._empty[index] or {}))]
        return []


def anthropic_stop(delta: Json) -> Stop:
    reasons = {
        "end_turn": "stop", "max_tokens": "length", "tool_use": "tool_calls", "stop_sequence": "stop_sequence",
        "refusal": "refusal", "pause_turn": "pause", "model_context_window_exceeded": "length",
    }  # fmt: skip
    return Stop(reasons.get(as_text(delta.get("stop_reason")), "stop"), delta.get("stop_sequence"))


def anthropic_usage(usage: Mapping[str, Any]) -> Usage:
    """This API counts the cached part apart; the sum is the prompt."""
    cached, written = as_int(usage.get("cache_read_input_tokens")), as_int(usage.get("cache_creation_input_tokens"))
    tier = "fast" if usage.get("speed") == "fast" else usage.get("service_tier")
    whole = as_int(usage.get("input_tokens")) + cached + written
    return Usage(whole, cached, written, as_int(usage.get("output_tokens")), 0, tier if isinstance(tier, str) else None)


def anthropic_whole(body: Json) -> list[Event]:
    if body.get("type") != "message" or not isinstance(body.get("content"), list):
        raise ValueError("an answer that is no message")
    out: list[Event] = [Start(as_text(body.get("id")), as_text(body.get("model")))]
    reader = AnthropicReader()
    for i, block in enumerate(map(as_dict, body["content"])):
        out += reader._start(i, block)
        out += reader._delta(i, {"thinking": block.get("thinking")})
        out += reader._stop(i)
    return [*out, anthropic_stop(body), anthropic_usage(as_dict(body.get("usage"))), End()]


class ResponsesReader:
    """Events with `type`; the last carries the whole response."""

    def __init__(self) -> None:
        self._calls: dict[int, int] = {}
        self._told: set[int] = set()
        self._thoughts = 0

    def feed(self, event: Sse) -> list[Event]:
        if event.data.strip() == "[DONE]":
            return []
        body = load(event.data)
        kind = as_text(body.get("type"))
        index = as_int(body.get("output_index"))
        response, item = as_dict(body.get("response")), as_dict(body.get("item"))
        if kind == "error":
            return [failure(None, body)]
        if kind == "response.created":
            return [Start(as_text(response.get("id")), as_text(response.get("model")))]
        if kind == "response.failed":
            return [failure(None, response)]
        if kind in ("response.output_text.delta", "response.refusal.delta"):
            return [TextDelta(as_text(body.get("delta")))]
        if kind in ("response.reasoning_text.delta", "response.reasoning_summary_text.delta"):
            return [ThoughtDelta(as_text(body.get("delta")))]
        if kind == "response.output_item.added" and item.get("type") == "function_call":
            return self._call(index, item)
        if kind == "response.function_call_arguments.delta" and index in self._calls:
            self._told.add(index)
            return [CallDelta(self._calls[index], as_text(body.get("delta")))]
        if kind == "response.output_item.done":
            return self._done(index, item)
        if kind in ("response.completed", "response.incomplete"):
            return [*responses_end(response, bool(self._calls)), End()]
        if not kind:
            raise ValueError("an event without a type")
        return []

    def _call(self, index: int, item: Json) -> list[Event]:
        self._calls[index] = len(self._calls)
        return [CallStart(self._calls[index], as_text(item.get("call_id")), as_text(item.get("name")))]

    def _done(self, index: int, item: Json) -> list[Event]:
        if item.get("type") == "function_call":
            out = [] if index in self._calls else self._call(index, item)
            if index not in self._told and (text := as_text(item.get("arguments"))):
                out.append(CallDelta(self._calls[index], text))
            return out
        if item.get("type") == "reasoning":
            thought = responses._thought(item)
            return [ThoughtEnd(thought.seal, thought.by, thought.hidden)]
        return []


def responses_end(response: Json, calls: bool) -> list[Event]:
    reason = "tool_calls" if calls else "stop"
    if response.get("status") == "incomplete":
        why = as_dict(response.get("incomplete_details")).get("reason")
        reason = "refusal" if why == "content_filter" else "length"
    usage = as_dict(response.get("usage"))
    prompt, output = as_dict(usage.get("input_tokens_details")), as_dict(usage.get("output_tokens_details"))
    tier = response.get("service_tier")
    counts = Usage(
        as_int(usage.get("input_tokens")), as_int(prompt.get("cached_tokens")),
        as_int(prompt.get("cache_write_tokens")), as_int(usage.get("output_tokens")),
        as_int(output.get("reasoning_tokens")), tier if isinstance(tier, str) else None,
    )  # fmt: skip
    return [Stop(reason), counts]


def responses_whole(body: Json) -> list[Event]:
    if not isinstance(body.get("output"), list):
        raise ValueError("an answer without output")
    if body.get("status") == "failed":
        return [failure(None, body)]
    out: list[Event] = [Start(as_text(body.get("id")), as_text(body.get("model")))]
    reader = ResponsesReader()
    for i, item in enumerate(map(as_dict, body["output"])):
        if item.get("type") == "message":
            for part in map(as_dict, as_list(item.get("content"))):
                out.append(TextDelta(as_text(part.get("text")) or as_text(part.get("refusal"))))
        elif item.get("type") == "reasoning" and (text := responses._thought(item).text):
            out.append(ThoughtDelta(text))
        out += reader._done(i, item)
    return [*out, *responses_end(body, bool(reader._calls)), End()]
