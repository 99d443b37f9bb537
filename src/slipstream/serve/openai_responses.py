"""`/v1/responses`: OpenAI's Responses API, its stream of events, and earlier responses to go on from."""

from __future__ import annotations

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from slipstream.engine.request import TokenLogprob
from slipstream.serve.answers import Answer, Outcome, Service, Step, Usage
from slipstream.serve.depends import AskingClient, Served, check_model
from slipstream.serve.errors import ApiError
from slipstream.serve.openai_fields import chat_logprobs, extension
from slipstream.serve.output import Arguments, CallStart, Content, Delta, Reasoning
from slipstream.serve.responses_fields import Item, ResponsesRequest
from slipstream.serve.wire import CLIENT_LEFT, EventStream, event, while_connected

router = APIRouter(tags=["OpenAI"])

KEPT = 1000
"""Stored responses; the oldest are forgotten. They live in memory, as long as the server."""


class ResponseStore:
    """Responses by id, each with all items up to and including its own, and the key that owns it."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[str, list[Item], dict[str, Any]]] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, owner: str, items: list[Item], response: dict[str, Any]) -> None:
        with self._lock:
            self._kept[response["id"]] = (owner, items, response)
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)

    def get(self, owner: str, id: str, param: str | None = None) -> tuple[list[Item], dict[str, Any]]:
        """Raises ApiError 404 (400 where a request's `param` names it) for what is not there, or another's."""
        with self._lock:
            found = self._kept.get(id)
        if found is None or found[0] != owner:
            status, code = (400, "previous_response_not_found") if param else (404, "not_found")
            raise ApiError(status, f"no response {id!r} is kept here", code=code, param=param)
        return found[1], found[2]

    def remove(self, owner: str, id: str) -> None:
        self.get(owner, id)
        with self._lock:
            self._kept.pop(id, None)


def _store(request: Request) -> ResponseStore:
    state = request.app.state
    if not hasattr(state, "responses"):
        state.responses = ResponseStore()
    store: ResponseStore = state.responses
    return store


@router.post("/v1/responses")
async def responses(body: ResponsesRequest, request: Request, service: Served, client: AskingClient) -> Response:
    """Answer, with all that came before under `previous_response_id`."""
    check_model(service, body.model)
    store = _store(request)
    earlier: list[Item] = []
    if body.previous_response_id is not None:
        earlier, _ = store.get(client.name, body.previous_response_id, "previous_response_id")
    answer = await service.start(body.ask(service, earlier), client)
    reply = ResponseReply(answer, service, body)

    def keep(response: dict[str, Any]) -> None:
        if body.store is not False:
            store.put(client.name, [*earlier, *body.items(), *response["output"]], response)

    if body.stream:
        return EventStream(_encoded(reply, keep), answer.cancel, service.config.limits.request_s)
    whole = await while_connected(request, _whole(reply))
    if whole is None:
        return Response(status_code=CLIENT_LEFT)
    keep(whole)
    return JSONResponse(whole)


@router.get("/v1/responses/{response_id}")
async def retrieve(response_id: str, request: Request, client: AskingClient) -> dict[str, Any]:
    """A kept response."""
    return _store(request).get(client.name, response_id)[1]


@router.delete("/v1/responses/{response_id}")
async def delete(response_id: str, request: Request, client: AskingClient) -> dict[str, Any]:
    """Forget a response."""
    _store(request).remove(client.name, response_id)
    return {"id": response_id, "object": "response", "deleted": True}


async def _encoded(reply: ResponseReply, keep: Any) -> AsyncIterator[bytes]:
    try:
        async for events in reply.events():
            last = events[-1].get("response")
            if last is not None and last["status"] in ("completed", "incomplete"):
                keep(last)
            yield b"".join(event(one, one["type"]) for one in events)
    except ApiError as error:
        failed = {"code": error.code or "server_error", "message": str(error), "param": error.param}
        yield event({"type": "error", "sequence_number": reply.count, **failed}, "error")


async def _whole(reply: ResponseReply) -> dict[str, Any]:
    async for events in reply.events():
        last = events[-1]
    response: dict[str, Any] = last["response"]
    return response


class ResponseReply:
    """An answer as the events of the Responses API; the last carries the whole response."""

    def __init__(self, answer: Answer, service: Service, body: ResponsesRequest) -> None:
        self._answer, self._service, self._body = answer, service, body
        self.count = 0
        self._output: list[dict[str, Any]] = []
        self._logprobs: list[TokenLogprob] = []
        self._head = {
            "id": f"resp_{secrets.token_hex(16)}",
            "object": "response",
            "created_at": int(time.time()),
            "model": service.model,
            "service_tier": answer.served.name,
            "instructions": body.instructions,
            "previous_response_id": body.previous_response_id,
            "metadata": body.metadata or {},
            "temperature": answer.jobs[0].request.params.temperature,
            "top_p": answer.jobs[0].request.params.top_p,
            "max_output_tokens": body.max_output_tokens,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "tool_choice": body.model_dump()["tool_choice"] or "auto",
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "text": body.text.model_dump(by_alias=True, exclude_none=True)
            if body.text
            else {"format": {"type": "text"}},
            "reasoning": body.reasoning.model_dump() if body.reasoning else {"effort": None, "summary": None},
            "truncation": body.truncation or "disabled",
            "store": body.store is not False,
            "error": None,
            "incomplete_details": None,
        }

    async def events(self) -> AsyncIterator[list[dict[str, Any]]]:
        """Those of each delivery."""
        started = self._response("in_progress")
        yield [self._event(f"response.{name}", response=started) for name in ("created", "in_progress")]
        async for steps in self._answer.steps():
            if events := [one for step in steps for one in self._events(step)]:
                yield events

    def _events(self, step: Step) -> Iterator[dict[str, Any]]:
        self._logprobs += step.logprobs
        for i, delta in enumerate(step.deltas):
            own = {"tokens": step.tokens, "drafted": step.drafted, "accepted": step.accepted} if i == 0 else None
            yield from self._add(delta, own)
        if step.outcome:
            status = "incomplete" if step.outcome.reason == "length" else "completed"
            yield from self._close(status)
            usage = self._answer.usage()
            yield self._event(f"response.{status}", response=self._response(status, usage, step.outcome))

    def _event(self, type: str, **fields: Any) -> dict[str, Any]:
        self.count += 1
        return {"type": type, "sequence_number": self.count - 1, **fields}

    def _response(self, status: str, usage: Usage | None = None, outcome: Outcome | None = None) -> dict[str, Any]:
        response = self._head | {"status": status, "output": list(self._output), "usage": None}
        if usage is not None:
            response["usage"] = {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
                "cost": usage.cost_usd,
            }
            response["slipstream"] = extension(self._answer, usage)
            response["completed_at"] = int(time.time())
        if outcome is not None and outcome.reason == "length":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        return response

    def _add(self, delta: Delta, own: dict[str, int] | None) -> Iterator[dict[str, Any]]:
        kind = {Content: "message", Reasoning: "reasoning"}.get(type(delta), "function_call")
        last = self._output[-1] if self._output else None
        if last is None or last["type"] != kind or isinstance(delta, CallStart):
            yield from self._close("completed")
            yield from self._open(kind, delta)
            last = self._output[-1]
        place = {"item_id": last["id"], "output_index": len(self._output) - 1}
        more: dict[str, Any] = {"slipstream": own} if own else {}
        if isinstance(delta, Content):
            last["content"][0]["text"] += delta.text
            found = self._take_logprobs()
            last["content"][0].setdefault("logprobs", []).extend(found)
            more |= {"content_index": 0, "delta": delta.text, "logprobs": found}
            yield self._event("response.output_text.delta", **place, **more)
        elif isinstance(delta, Reasoning):
            last["content"][0]["text"] += delta.text
            yield self._event("response.reasoning_text.delta", **place, content_index=0, delta=delta.text, **more)
        elif isinstance(delta, Arguments):
            last["arguments"] += delta.text
            yield self._event("response.function_call_arguments.delta", **place, delta=delta.text, **more)

    def _take_logprobs(self) -> list[dict[str, Any]]:
        if not self._body.wants_logprobs:
            return []
        found, self._logprobs = self._logprobs, []
        content: list[dict[str, Any]] = chat_logprobs(self._service.llm.tokenizer, found)["content"]
        return content

    def _open(self, kind: str, delta: Delta) -> Iterator[dict[str, Any]]:
        item: dict[str, Any]
        if isinstance(delta, CallStart):
            item = {"id": f"fc_{secrets.token_hex(12)}", "type": kind, "call_id": delta.id, "name": delta.name}
            item["arguments"] = ""
        elif kind == "message":
            item = {"id": f"msg_{secrets.token_hex(12)}", "type": kind, "role": "assistant", "content": []}
        else:
            item = {"id": f"rs_{secrets.token_hex(12)}", "type": kind, "summary": [], "content": []}
        item["status"] = "in_progress"
        self._output.append(item)
        index = len(self._output) - 1
        yield self._event("response.output_item.added", output_index=index, item=_copy(item))
        if kind != "function_call":
            part = {"type": "output_text", "text": "", "annotations": []}
            if kind == "reasoning":
                part = {"type": "reasoning_text", "text": ""}
            item["content"].append(part)
            place = {"item_id": item["id"], "output_index": index, "content_index": 0}
            yield self._event("response.content_part.added", **place, part=dict(part))

    def _close(self, status: str) -> Iterator[dict[str, Any]]:
        if not self._output or self._output[-1]["status"] != "in_progress":
            return
        item, index = self._output[-1], len(self._output) - 1
        item["status"] = status
        place = {"item_id": item["id"], "output_index": index}
        if item["type"] == "function_call":
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield self._event("response.function_call_arguments.done", **place, **done)
        else:
            part = item["content"][0]
            if item["type"] == "message":
                told = {"text": part["text"], "logprobs": part.setdefault("logprobs", [])}
                yield self._event("response.output_text.done", **place, content_index=0, **told)
            else:
                yield self._event("response.reasoning_text.done", **place, content_index=0, text=part["text"])
            yield self._event("response.content_part.done", **place, content_index=0, part=dict(part))
        yield self._event("response.output_item.done", output_index=index, item=_copy(item))


def _copy(item: dict[str, Any]) -> dict[str, Any]:
    return item | ({"content": [dict(part) for part in item["content"]]} if "content" in item else {})
