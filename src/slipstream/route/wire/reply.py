"""Neutral events written as an answer of each wire: `feed` gives the stream's bytes, `whole` the answer at once."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
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
)
from slipstream.serve.errors import ApiError
from slipstream.serve.wire import event


class Writer(Protocol):
    def feed(self, one: Event) -> bytes:
        """What the client is sent for it, perhaps nothing yet."""
        ...


def api_error(failure: Failure) -> ApiError:
    return ApiError(failure.status, failure.message, code=failure.code)


def error_bytes(wire: str, error: ApiError, count: int = 0) -> bytes:
    """The event that ends a stream of `wire` with an error."""
    if wire == anthropic.NAME:
        return event(error.anthropic(), "error")
    if wire == responses.NAME:
        failed = {"code": error.code or "server_error", "message": str(error), "param": error.param}
        return event({"type": "error", "sequence_number": count, **failed}, "error")
    return event(error.openai())


class ChatWriter:
    """Chunks. usage: the client asked for it."""

    def __init__(self, usage: bool) -> None:
        self._wants_usage = usage
        self._head: Json = {"id": "", "object": "chat.completion.chunk", "created": int(time.time()), "model": ""}
        self._usage = Usage()

    def feed(self, one: Event) -> bytes:
        if isinstance(one, Start):
            self._head |= {"id": one.id or f"chatcmpl-{secrets.token_hex(12)}", "model": one.model}
            return self._chunk({"role": "assistant", "content": ""})
        if isinstance(one, TextDelta):
            return self._chunk({"content": one.text})
        if isinstance(one, ThoughtDelta):
            return self._chunk({"reasoning_content": one.text})
        if isinstance(one, ThoughtEnd):
            return self._chunk({"reasoning_details": [_detail("", one)]}) if one.seal else b""
        if isinstance(one, CallStart):
            call = {"id": one.id, "type": "function", "function": {"name": one.name, "arguments": ""}}
            return self._chunk({"tool_calls": [{"index": one.index} | call]})
        if isinstance(one, CallDelta):
            return self._chunk({"tool_calls": [{"index": one.index, "function": {"arguments": one.text}}]})
        if isinstance(one, Stop):
            return self._chunk({}, chat_reason(one))
        if isinstance(one, Usage):
            self._usage = one
        if isinstance(one, Failure):
            return error_bytes("openai-chat", api_error(one))
        if isinstance(one, End):
            told = event(self._head | {"choices": [], "usage": chat_usage(self._usage)}) if self._wants_usage else b""
            return told + b"data: [DONE]\n\n"
        return b""

    def _chunk(self, delta: Json, reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        return event(self._head | {"choices": [choice]})


def chat_reason(stop: Stop) -> str:
    return {"stop_sequence": "stop", "refusal": "content_filter", "pause": "stop"}.get(stop.reason, stop.reason)


def chat_usage(usage: Usage) -> Json:
    return {
        "prompt_tokens": usage.input,
        "completion_tokens": usage.output,
        "total_tokens": usage.input + usage.output,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
    }


def _detail(text: str, end: ThoughtEnd) -> Json:
    if end.hidden:
        return {"type": "reasoning.encrypted", "data": end.seal, "format": end.by}
    return {"type": "reasoning.text", "text": text, "signature": end.seal, "format": end.by}


class AnthropicWriter:
    """Blocks: one opens with its first delta and closes when another begins. Calls that interleave are put in order."""

    def __init__(self) -> None:
        self._index, self._kind = -1, ""
        self._usage = Usage()
        self._stop: Stop | None = None
        self._call: int | None = None
        self._later: dict[int, list[Event]] = {}

    def feed(self, one: Event) -> bytes:
        if isinstance(one, Start):
            head = message_head(one) | {"usage": anthropic_usage(self._usage)}
            return event({"type": "message_start", "message": head}, "message_start")
        if isinstance(one, TextDelta):
            return self._delta("text", {"type": "text", "text": ""}, {"type": "text_delta", "text": one.text})
        if isinstance(one, ThoughtDelta):
            return self._thought({"type": "thinking_delta", "thinking": one.text})
        if isinstance(one, ThoughtEnd):
            return self._thought_end(one)
        if isinstance(one, CallStart | CallDelta):
            if self._call is not None and one.index != self._call:
                self._later.setdefault(one.index, []).append(one)
                return b""
            self._call = one.index
            if isinstance(one, CallStart):
                block = {"type": "tool_use", "id": anthropic.tool_id(one.id), "name": one.name, "input": {}}
                return self._close() + self._open("tool_use", block)
            return self._part({"type": "input_json_delta", "partial_json": one.text})
        if isinstance(one, Stop):
            self._stop = one
            told = b""
            for waiting in self._later.values():
                self._call = None
                told += b"".join(map(self.feed, waiting))
            self._later = {}
            return told + self._close()
        if isinstance(one, Usage):
            self._usage = one
        if isinstance(one, Failure):
            return error_bytes("anthropic", api_error(one))
        if isinstance(one, End):
            end = {"type": "message_delta", "delta": ending(self._stop), "usage": anthropic_usage(self._usage)}
            return event(end, "message_delta") + event({"type": "message_stop"}, "message_stop")
        return b""

    def _thought(self, delta: Json) -> bytes:
        return self._delta("thinking", {"type": "thinking", "thinking": "", "signature": ""}, delta)

    def _thought_end(self, end: ThoughtEnd) -> bytes:
        if end.hidden:
            return (
                self._close() + self._open("redacted", {"type": "redacted_thinking", "data": seal(end)}) + self._close()
            )
        told = b""
        if end.seal:
            told = self._thought({"type": "signature_delta", "signature": seal(end)})
        return told + (self._close() if self._kind == "thinking" else b"")

    def _delta(self, kind: str, block: Json, delta: Json) -> bytes:
        told = b"" if self._kind == kind else self._close() + self._open(kind, block)
        return told + self._part(delta)

    def _part(self, delta: Json) -> bytes:
        return event({"type": "content_block_delta", "index": self._index, "delta": delta}, "content_block_delta")

    def _open(self, kind: str, block: Json) -> bytes:
        self._index, self._kind = self._index + 1, kind
        start = {"type": "content_block_start", "index": self._index, "content_block": block}
        return event(start, "content_block_start")

    def _close(self) -> bytes:
        open, self._kind = self._kind, ""
        return event({"type": "content_block_stop", "index": self._index}, "content_block_stop") if open else b""


def seal(end: ThoughtEnd) -> str:
    """A signature for Anthropic's clients; another API's says whose it is."""
    return end.seal or "" if end.by in (None, anthropic.NAME) else f"{end.by}:{end.seal}"


def message_head(start: Start) -> Json:
    return {
        "id": start.id or f"msg_{secrets.token_hex(12)}",
        "type": "message",
        "role": "assistant",
        "model": start.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def anthropic_usage(usage: Usage) -> Json:
    return {
        "input_tokens": max(0, usage.input - usage.cached - usage.written),
        "cache_read_input_tokens": usage.cached,
        "cache_creation_input_tokens": usage.written,
        "output_tokens": usage.output,
    }


def ending(stop: Stop | None) -> Json:
    reasons = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "pause": "pause_turn"}
    reason = stop.reason if stop else "stop"
    return {"stop_reason": reasons.get(reason, reason), "stop_sequence": stop.sequence if stop else None}


class ResponsesWriter:
    """Items that open, grow and close; each call has its own place, so that they may interleave."""

    def __init__(self) -> None:
        self.count = 0
        self.output: list[Json] = []
        self._head: Json = {}
        self._usage = Usage()
        self._stop = Stop("stop")
        self._calls: dict[int, int] = {}

    def feed(self, one: Event) -> bytes:
        return b"".join(event(told, told["type"]) for told in self.events(one))

    def events(self, one: Event) -> list[Json]:
        if isinstance(one, Start):
            self._head = response_head(one)
            states = ("response.created", "response.in_progress")
            return [self._event(name, response=self.response("in_progress")) for name in states]
        if isinstance(one, TextDelta):
            return self._grow("message", "response.output_text.delta", one.text, {"logprobs": []})
        if isinstance(one, ThoughtDelta):
            return self._grow("reasoning", "response.reasoning_text.delta", one.text, {})
        if isinstance(one, ThoughtEnd):
            return self._thought_end(one)
        if isinstance(one, CallStart):
            told = self._close_last()
            self._calls[one.index] = len(self.output)
            item = {"id": f"fc_{secrets.token_hex(12)}", "type": "function_call", "call_id": one.id, "name": one.name}
            return told + self._open(item | {"arguments": ""})
        if isinstance(one, CallDelta):
            place = self._calls[one.index]
            item = self.output[place]
            item["arguments"] += one.text
            named = {"item_id": item["id"], "output_index": place}
            return [self._event("response.function_call_arguments.delta", **named, delta=one.text)]
        if isinstance(one, Stop):
            self._stop = one
        if isinstance(one, Usage):
            self._usage = one
        if isinstance(one, Failure):
            error = {"code": one.code or "server_error", "message": one.message, "param": None}
            return [self._event("error", **error)]
        return self._end() if isinstance(one, End) else []

    def _end(self) -> list[Json]:
        told: list[Json] = []
        for place in range(len(self.output)):
            told += self._close(place)
        status = "incomplete" if self._stop.reason in ("length", "refusal") else "completed"
        return [*told, self._event(f"response.{status}", response=self.response(status))]

    def response(self, status: str) -> Json:
        response = self._head | {"status": status, "output": [_copy(item) for item in self.output], "usage": None}
        if status == "incomplete":
            reason = "content_filter" if self._stop.reason == "refusal" else "max_output_tokens"
            response["incomplete_details"] = {"reason": reason}
        if status != "in_progress":
            response["usage"] = {
                "input_tokens": self._usage.input,
                "input_tokens_details": {"cached_tokens": self._usage.cached},
                "output_tokens": self._usage.output,
                "output_tokens_details": {"reasoning_tokens": self._usage.reasoning},
                "total_tokens": self._usage.input + self._usage.output,
            }
        return response

    def _event(self, type: str, **fields: Any) -> Json:
        self.count += 1
        return {"type": type, "sequence_number": self.count - 1, **fields}

    def _grow(self, kind: str, name: str, text: str, more: Json) -> list[Json]:
        told: list[Json] = []
        if not self.output or self.output[-1]["type"] != kind or self.output[-1]["status"] != "in_progress":
            told += self._close_last()
            told += self._open(new_item(kind))
        item = self.output[-1]
        item["content"][0]["text"] += text
        place = {"item_id": item["id"], "output_index": len(self.output) - 1, "content_index": 0}
        return [*told, self._event(name, **place, delta=text, **more)]

    def _thought_end(self, end: ThoughtEnd) -> list[Json]:
        told: list[Json] = []
        if end.hidden or not self.output or self.output[-1]["type"] != "reasoning":
            if not end.seal:
                return []
            told = self._close_last() + self._open(new_item("reasoning") | {"content": []})
        if end.seal:
            own = end.by == responses.NAME
            self.output[-1]["encrypted_content"] = end.seal.partition(":")[2] if own else f"{end.by}:{end.seal}"
        return told + self._close_last()

    def _open(self, item: Json) -> list[Json]:
        item["status"] = "in_progress"
        self.output.append(item)
        index = len(self.output) - 1
        told = [self._event("response.output_item.added", output_index=index, item=_copy(item) | _no_content(item))]
        if item.get("content"):
            place = {"item_id": item["id"], "output_index": index, "content_index": 0}
            told.append(self._event("response.content_part.added", **place, part=dict(item["content"][0])))
        return told

    def _close_last(self) -> list[Json]:
        return self._close(len(self.output) - 1) if self.output and not self._calls else []

    def _close(self, place: int) -> list[Json]:
        item = self.output[place]
        if item["status"] != "in_progress":
            return []
        item["status"] = "completed"
        named = {"item_id": item["id"], "output_index": place}
        told: list[Json] = []
        if item["type"] == "function_call":
            done = {"name": item["name"], "arguments": item["arguments"]}
            told.append(self._event("response.function_call_arguments.done", **named, **done))
        elif item["content"]:
            part = item["content"][0]
            kind = "output_text" if item["type"] == "message" else "reasoning_text"
            more: Json = {"logprobs": []} if kind == "output_text" else {}
            told.append(self._event(f"response.{kind}.done", **named, content_index=0, text=part["text"], **more))
            told.append(self._event("response.content_part.done", **named, content_index=0, part=dict(part)))
        return [*told, self._event("response.output_item.done", output_index=place, item=_copy(item))]


def new_item(kind: str) -> Json:
    if kind == "message":
        part: Json = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return {"id": f"msg_{secrets.token_hex(12)}", "type": kind, "role": "assistant", "content": [part]}
    part = {"type": "reasoning_text", "text": ""}
    return {"id": f"rs_{secrets.token_hex(12)}", "type": kind, "summary": [], "content": [part]}


def _copy(item: Json) -> Json:
    return item | ({"content": [dict(part) for part in item["content"]]} if "content" in item else {})


def _no_content(item: Json) -> Json:
    return {"content": []} if "content" in item else {}


def response_head(start: Start) -> Json:
    return {
        "id": start.id if start.id.startswith("resp") else f"resp_{secrets.token_hex(16)}",
        "object": "response",
        "created_at": int(time.time()),
        "model": start.model,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "temperature": None,
        "top_p": None,
        "tool_choice": "auto",
        "tools": [],
        "store": False,
    }


def whole(wire: str, events: Sequence[Event]) -> Json:
    """A whole answer of `wire`. Raises ApiError where it is an error."""
    for one in events:
        if isinstance(one, Failure):
            raise api_error(one)
    if wire == responses.NAME:
        writer = ResponsesWriter()
        told = [item for one in events for item in writer.events(one)]
        answer: Json = told[-1]["response"]
        return answer
    start = next((one for one in events if isinstance(one, Start)), Start("", ""))
    stop = next((one for one in events if isinstance(one, Stop)), Stop("stop"))
    usage = [one for one in events if isinstance(one, Usage)][-1:] or [Usage()]
    if wire == anthropic.NAME:
        return message_head(start) | {"content": _blocks(events)} | ending(stop) | {"usage": anthropic_usage(usage[0])}
    choice = {"index": 0, "message": _message(events), "logprobs": None, "finish_reason": chat_reason(stop)}
    head = {"id": start.id, "object": "chat.completion", "created": int(time.time()), "model": start.model}
    return head | {"choices": [choice], "usage": chat_usage(usage[0])}


def _message(events: Sequence[Event]) -> Json:
    text = "".join(one.text for one in events if isinstance(one, TextDelta))
    thought = "".join(one.text for one in events if isinstance(one, ThoughtDelta))
    calls = [
        {"id": one.id, "type": "function", "function": {"name": one.name, "arguments": _arguments(events, one.index)}}
        for one in events
        if isinstance(one, CallStart)
    ]
    message: Json = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
    if thought:
        message["reasoning_content"] = thought
    if sealed := [_detail(thought, one) for one in events if isinstance(one, ThoughtEnd) and one.seal]:
        message["reasoning_details"] = sealed
    return message | ({"tool_calls": calls} if calls else {})


def _arguments(events: Sequence[Event], index: int) -> str:
    return "".join(one.text for one in events if isinstance(one, CallDelta) and one.index == index)


def _blocks(events: Sequence[Event]) -> list[Json]:
    blocks: list[Json] = []
    for one in events:
        if isinstance(one, TextDelta):
            if not blocks or blocks[-1]["type"] != "text":
                blocks.append({"type": "text", "text": ""})
            blocks[-1]["text"] += one.text
        elif isinstance(one, ThoughtDelta):
            if not blocks or blocks[-1]["type"] != "thinking":
                blocks.append({"type": "thinking", "thinking": "", "signature": ""})
            blocks[-1]["thinking"] += one.text
        elif isinstance(one, ThoughtEnd) and one.hidden:
            blocks.append({"type": "redacted_thinking", "data": seal(one)})
        elif isinstance(one, ThoughtEnd) and blocks and blocks[-1]["type"] == "thinking":
            blocks[-1]["signature"] = seal(one)
        elif isinstance(one, CallStart):
            found = anthropic.arguments_of(_arguments(events, one.index))
            blocks.append({"type": "tool_use", "id": anthropic.tool_id(one.id), "name": one.name, "input": found})
    return blocks
