"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's Messages API."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Generator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from slipstream.serve.answers import Answer, Outcome, Service, Step, Usage, collect
from slipstream.serve.anthropic_fields import CountRequest, MessagesRequest
from slipstream.serve.depends import AskingClient, Served, check_model
from slipstream.serve.errors import ApiError
from slipstream.serve.openai_fields import extension
from slipstream.serve.output import Arguments, CallStart, Content, Delta, Reasoning
from slipstream.serve.wire import CLIENT_LEFT, EventStream, event, while_connected

router = APIRouter(tags=["Anthropic"])


@router.post("/v1/messages")
async def messages(body: MessagesRequest, request: Request, service: Served, client: AskingClient) -> Response:
    """Answer a conversation."""
    check_model(service, body.model)
    answer = await service.start(body.ask(service), client)
    reply = MessageReply(answer, service, body)
    headers = {"request-id": reply.request_id}
    if body.stream:
        stream = EventStream(reply.stream(), answer.cancel, service.config.limits.request_s)
        stream.headers.update(headers)
        return stream
    whole = await while_connected(request, reply.whole())
    return Response(status_code=CLIENT_LEFT) if whole is None else JSONResponse(whole, headers=headers)


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountRequest, service: Served, client: AskingClient) -> dict[str, int]:
    """How many tokens the prompt of such a request has."""
    check_model(service, body.model)
    tokens, _ = await asyncio.to_thread(service.tokens, body.ask(service))
    return {"input_tokens": len(tokens)}


class MessageReply:
    """An answer in the JSON of the Messages API."""

    def __init__(self, answer: Answer, service: Service, body: MessagesRequest) -> None:
        self._answer, self._service, self._body = answer, service, body
        self.request_id = f"req_{secrets.token_hex(12)}"
        self._head: dict[str, Any] = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": service.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    async def whole(self) -> dict[str, Any]:
        ((deltas, _, outcome),) = await collect(self._answer)
        usage = self._answer.usage()
        return self._head | {
            "content": blocks_of(deltas),
            **_ending(outcome),
            "usage": self._usage(usage),
            "slipstream": extension(self._answer, usage),
        }

    async def stream(self) -> AsyncIterator[bytes]:
        events = self._events()
        next(events)
        try:
            async for steps in self._answer.steps():
                yield b"".join(event(one, one["type"]) for step in steps for one in events.send(step))
        except ApiError as error:
            yield event(error.anthropic(), "error")

    def _events(self) -> Generator[list[dict[str, Any]], Step, None]:
        """A block opens when its first delta comes and closes when one of another kind does."""
        open_block, number, held = None, -1, 0
        step = yield []
        start = self._usage(self._answer.usage()) | {"output_tokens": 0}  # now the count of cached tokens is known
        events: list[dict[str, Any]] = [{"type": "message_start", "message": self._head | {"usage": start}}]
        while True:
            held += step.tokens
            for i, delta in enumerate(step.deltas):
                kind = _kind(delta)
                if isinstance(delta, CallStart) or kind != open_block:
                    if open_block is not None:
                        events.append({"type": "content_block_stop", "index": number})
                    open_block, number = kind, number + 1
                    events.append({"type": "content_block_start", "index": number, "content_block": _new_block(delta)})
                if not isinstance(delta, CallStart):
                    told = held if i == len(step.deltas) - 1 else 0
                    own = {"tokens": told, "drafted": step.drafted, "accepted": step.accepted}
                    part = {"type": "content_block_delta", "index": number, "delta": _delta(delta), "slipstream": own}
                    events.append(part)
                    held -= told
            if step.outcome:
                if open_block is not None:
                    events.append({"type": "content_block_stop", "index": number})
                usage = self._answer.usage()
                end = {"delta": _ending(step.outcome), "usage": self._usage(usage)}
                events.append({"type": "message_delta", **end, "slipstream": extension(self._answer, usage)})
                events.append({"type": "message_stop"})
            step = yield events
            events = []

    def _usage(self, usage: Usage) -> dict[str, Any]:
        """speed: `fast` only where the fast tier is what serves, and bills, this request."""
        config, served = self._service.config, self._answer.served
        fields = {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_read_input_tokens": usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "output_tokens": usage.completion_tokens,
            "service_tier": "priority" if served.tier.rank > config.tiers[config.auto].rank else "standard",
            "cost": usage.cost_usd,
        }
        if self._body.speed is not None:
            fields["speed"] = "fast" if served.name == config.fast else "standard"
        return fields


def _ending(outcome: Outcome) -> dict[str, Any]:
    reasons = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}
    reason = "stop_sequence" if outcome.stop_sequence else reasons[outcome.reason]
    return {"stop_reason": reason, "stop_sequence": outcome.stop_sequence}


def _kind(delta: Delta) -> str:
    return "thinking" if isinstance(delta, Reasoning) else "text" if isinstance(delta, Content) else "tool_use"


def _new_block(delta: Delta) -> dict[str, Any]:
    if isinstance(delta, CallStart):
        return {"type": "tool_use", "id": delta.id, "name": delta.name, "input": {}}
    if isinstance(delta, Reasoning):
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _delta(delta: Delta) -> dict[str, Any]:
    if isinstance(delta, Content):
        return {"type": "text_delta", "text": delta.text}
    if isinstance(delta, Reasoning):
        return {"type": "thinking_delta", "thinking": delta.text}
    assert isinstance(delta, Arguments)
    return {"type": "input_json_delta", "partial_json": delta.text}


def blocks_of(deltas: list[Delta]) -> list[dict[str, Any]]:
    """Content blocks, in the order in which the model wrote them."""
    blocks: list[dict[str, Any]] = []
    for delta in deltas:
        if isinstance(delta, Arguments):
            blocks[-1]["input"] += delta.text
        else:
            block = _new_block(delta)
            if isinstance(delta, CallStart):
                block["input"] = ""
            else:
                block[block["type"]] = delta.text
            blocks.append(block)
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = _object(block["input"])
    return blocks


def _object(text: str) -> dict[str, Any]:
    """Arguments as an object; what was cut off by max_tokens stays readable under a key of its own."""
    try:
        value = json.loads(text or "{}")
    except ValueError:
        return {"_partial": text}
    return value if isinstance(value, dict) else {"_value": value}
