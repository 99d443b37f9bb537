"""Fake targets that speak one wire each over loopback, fail on demand and count what they would have billed."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import anthropic
import openai
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from slipstream.route.config import Config, read_config
from slipstream.route.gateway import Gateway
from slipstream.route.run import make_server

TEXT = ["Hel", "lo, ", "wörld ", "\U0001f600"]
ARGUMENTS = ['{"city": ', '"Paris"}']
PATHS = {"openai-chat": "/v1/chat/completions", "openai-responses": "/v1/responses", "anthropic": "/v1/messages"}


@dataclass
class Fake:
    """A target. faults: what the next requests meet, one each; then all is well. A fault of a stream is `kind@place`,
    the place a name or the number of an event; `late` bills its first token and never sends it. delay_s: between
    events. bills: the requests that would be billed."""

    wire: str
    faults: list[str] = field(default_factory=list)
    delay_s: float = 0.0
    tier: str | None = None
    prompt: int = 10
    url: str = ""
    requests: list[dict] = field(default_factory=list)
    headers: list[dict] = field(default_factory=list)
    peers: set[int] = field(default_factory=set)
    bills: list[str] = field(default_factory=list)
    cancelled: int = 0
    running: int = 0
    most: int = 0

    @property
    def billed(self) -> int:
        return len(self.bills)

    def app(self) -> Starlette:
        return Starlette(routes=[Route(PATHS[self.wire], self.answer, methods=["POST"]), Route("/health", health)])

    async def answer(self, request: Request) -> Response:
        body = await request.json()
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        self.peers.add(request.client.port)
        id = request.headers.get("idempotency-key", "").partition("-")[0]
        fault = self.faults.pop(0) if self.faults else ""
        if fault in ("429", "500", "503", "400", "401"):
            error = {"type": "rate_limit_error" if fault == "429" else "server_error", "message": f"fake {fault}"}
            headers = {"retry-after": "0"} if fault == "429" else {}
            return JSONResponse({"type": "error", "error": error}, int(fault), headers)
        if fault == "html":
            return Response("<html>a proxy's page</html>", media_type="text/html")
        if fault == "stall":
            await asyncio.sleep(30)
        tool = bool(body.get("tools"))
        if not body.get("stream"):
            if fault == "reset":
                return StreamingResponse(cut(b'{"id":'), media_type="application/json")
            if fault == "malformed":
                return Response("{nonsense", media_type="application/json")
            self.bills.append(id)
            return JSONResponse(WHOLE[self.wire](tool, self.prompt, self.tier))
        if fault == "json":
            self.bills.append(id)
            return JSONResponse(WHOLE[self.wire](tool, self.prompt, self.tier))
        return StreamingResponse(self.stream(tool, fault, id), media_type="text/event-stream")

    async def stream(self, tool: bool, fault: str, id: str) -> AsyncIterator[bytes]:
        events = STREAM[self.wire](tool, self.prompt, self.tier)
        kind, _, place = fault.partition("@")
        first = next(i for i, (_, token) in enumerate(events) if token)
        places = {"": -1, "start": 0, "first": first, "middle": first + 2, "end": len(events) - 1}
        at = places[place] if place in places else int(place)
        self.running += 1
        self.most = max(self.most, self.running)
        done = False
        try:
            for i, (block, _token) in enumerate(events):
                if i == at:
                    if kind == "reset":
                        raise RuntimeError("reset")
                    if kind == "stall":
                        await asyncio.sleep(30)
                    if kind == "malformed":
                        yield b"data: {nonsense\n\n"
                        await asyncio.sleep(1)
                    if kind == "cut":
                        done = True
                        return
                    if kind == "error":
                        yield ERROR[self.wire]
                        return
                if i == first:
                    self.bills.append(id)
                    if kind == "late":
                        await asyncio.sleep(30)
                yield block
                await asyncio.sleep(self.delay_s)
            done = True
        finally:
            self.running -= 1
            self.cancelled += not done


async def health(request: Request) -> Response:
    return JSONResponse({})


async def cut(block: bytes) -> AsyncIterator[bytes]:
    yield block
    raise RuntimeError("reset")


def sse(data: dict | str, name: str = "") -> bytes:
    text = data if isinstance(data, str) else json.dumps(data)
    return (f"event: {name}\n" if name else "").encode() + f"data: {text}\n\n".encode()


def chat_usage(prompt: int) -> dict:
    return {"prompt_tokens": prompt, "completion_tokens": 5, "total_tokens": prompt + 5,
            "prompt_tokens_details": {"cached_tokens": 4}}  # fmt: skip


def chat_stream(tool: bool, prompt: int, tier: str | None) -> list[tuple[bytes, bool]]:
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "fake"}
    head |= {"service_tier": tier} if tier else {}

    def chunk(delta: dict, reason: str | None = None) -> bytes:
        return sse(head | {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]})

    events = [(chunk({"role": "assistant", "content": ""}), False), (chunk({"reasoning_content": "hmm"}), True)]
    events += [(chunk({"content": part}), True) for part in TEXT]
    if tool:
        call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "weather", "arguments": ""}}
        events.append((chunk({"tool_calls": [call]}), True))
        events += [(chunk({"tool_calls": [{"index": 0, "function": {"arguments": a}}]}), True) for a in ARGUMENTS]
    events.append((chunk({}, "tool_calls" if tool else "stop"), False))
    events.append((sse(head | {"choices": [], "usage": chat_usage(prompt)}), False))
    return [*events, (sse("[DONE]"), False)]


def chat_whole(tool: bool, prompt: int, tier: str | None) -> dict:
    message = {"role": "assistant", "content": "".join(TEXT), "reasoning_content": "hmm"}
    if tool:
        function = {"name": "weather", "arguments": "".join(ARGUMENTS)}
        message["tool_calls"] = [{"id": "call_1", "type": "function", "function": function}]
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if tool else "stop"}
    return {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "fake", "choices": [choice],
            "usage": chat_usage(prompt), "service_tier": tier}  # fmt: skip


def anthropic_blocks(tool: bool) -> list[dict]:
    blocks = [{"type": "thinking", "thinking": "hmm", "signature": "sig"}, {"type": "text", "text": "".join(TEXT)}]
    if tool:
        blocks.append({"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Paris"}})
    return blocks


def anthropic_usage(prompt: int, tier: str | None, output: int = 5) -> dict:
    usage = {"input_tokens": prompt - 4, "cache_read_input_tokens": 4, "cache_creation_input_tokens": 0}
    return usage | {"output_tokens": output} | ({"service_tier": tier} if tier else {})


def anthropic_whole(tool: bool, prompt: int, tier: str | None) -> dict:
    return {"id": "msg_1", "type": "message", "role": "assistant", "model": "fake", "content": anthropic_blocks(tool),
            "stop_reason": "tool_use" if tool else "end_turn", "stop_sequence": None,
            "usage": anthropic_usage(prompt, tier)}  # fmt: skip


def anthropic_stream(tool: bool, prompt: int, tier: str | None) -> list[tuple[bytes, bool]]:
    head = anthropic_whole(tool, prompt, tier) | {"content": [], "stop_reason": None}
    head["usage"] = anthropic_usage(prompt, tier, 0)
    events: list[tuple[dict, bool]] = [({"type": "message_start", "message": head}, False), ({"type": "ping"}, False)]
    for i, block in enumerate(anthropic_blocks(tool)):
        empty = {"thinking": {"thinking": "", "signature": ""}, "text": {"text": ""}, "tool_use": {"input": {}}}
        start = {"type": "content_block_start", "index": i, "content_block": block | empty[block["type"]]}
        events.append((start, block["type"] == "tool_use"))
        deltas = {
            "thinking": [
                {"type": "thinking_delta", "thinking": "hmm"},
                {"type": "signature_delta", "signature": "sig"},
            ],
            "text": [{"type": "text_delta", "text": part} for part in TEXT],
            "tool_use": [{"type": "input_json_delta", "partial_json": part} for part in ARGUMENTS],
        }[block["type"]]
        events += [({"type": "content_block_delta", "index": i, "delta": delta}, True) for delta in deltas]
        events.append(({"type": "content_block_stop", "index": i}, False))
    ending = {"stop_reason": "tool_use" if tool else "end_turn", "stop_sequence": None}
    events.append(({"type": "message_delta", "delta": ending, "usage": {"output_tokens": 5}}, False))
    events.append(({"type": "message_stop"}, False))
    return [(sse(event, event["type"]), token) for event, token in events]


def responses_whole(tool: bool, prompt: int, tier: str | None) -> dict:
    part = {"type": "output_text", "text": "".join(TEXT), "annotations": []}
    output = [
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hmm"}],
         "encrypted_content": "enc"},
        {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [part]},
    ]  # fmt: skip
    if tool:
        output.append({"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "weather",
                       "arguments": "".join(ARGUMENTS), "status": "completed"})  # fmt: skip
    usage = {"input_tokens": prompt, "input_tokens_details": {"cached_tokens": 4}, "output_tokens": 5,
             "output_tokens_details": {"reasoning_tokens": 1}, "total_tokens": prompt + 5}  # fmt: skip
    return {"id": "resp_1", "object": "response", "created_at": 1, "model": "fake", "status": "completed",
            "output": output, "usage": usage, "parallel_tool_calls": True, "tool_choice": "auto", "tools": [],
            "service_tier": tier}  # fmt: skip


def responses_stream(tool: bool, prompt: int, tier: str | None) -> list[tuple[bytes, bool]]:
    whole = responses_whole(tool, prompt, tier)
    empty = whole | {"status": "in_progress", "output": [], "usage": None}
    events: list[tuple[dict, bool]] = [({"type": "response.created", "response": empty}, False)]
    for i, item in enumerate(whole["output"]):
        place = {"output_index": i, "item_id": item["id"]}
        start = item | ({"arguments": ""} if item["type"] == "function_call" else {"content": []})
        start.pop("encrypted_content", None)
        added = {"type": "response.output_item.added", "output_index": i, "item": start}
        events.append((added, item["type"] == "function_call"))
        name, parts = {
            "reasoning": ("reasoning_text", ["hmm"]),
            "message": ("output_text", TEXT),
            "function_call": ("function_call_arguments", ARGUMENTS),
        }[item["type"]]
        if item["type"] != "function_call":
            kind = {"type": "output_text", "text": "", "annotations": []}
            kind = {"type": "reasoning_text", "text": ""} if item["type"] == "reasoning" else kind
            events.append(({"type": "response.content_part.added", **place, "content_index": 0, "part": kind}, False))
        for part in parts:
            delta = {"type": f"response.{name}.delta", **place, "content_index": 0, "delta": part, "logprobs": []}
            events.append((delta, True))
        events.append(({"type": "response.output_item.done", "output_index": i, "item": item}, False))
    events.append(({"type": "response.completed", "response": whole}, False))
    return [(sse(e | {"sequence_number": n}, e["type"]), token) for n, (e, token) in enumerate(events)]


WHOLE = {"openai-chat": chat_whole, "openai-responses": responses_whole, "anthropic": anthropic_whole}
STREAM = {"openai-chat": chat_stream, "openai-responses": responses_stream, "anthropic": anthropic_stream}
ERROR = {
    "openai-chat": sse({"error": {"message": "fake overload", "type": "server_error", "code": 503}}),
    "openai-responses": sse({"type": "error", "code": "server_error", "message": "fake overload"}, "error"),
    "anthropic": sse({"type": "error", "error": {"type": "overloaded_error", "message": "fake overload"}}, "error"),
}


@contextmanager
def running(app: Starlette | None = None, server: uvicorn.Server | None = None) -> Iterator[str]:
    """The address of a server in a thread."""
    own = server is None
    if server is None:
        config = uvicorn.Config(app, port=0, log_level="critical", access_log=False, timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.002)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        server.force_exit = own  # a fake that stalls is not waited for
        thread.join(10)


@dataclass
class Router:
    url: str
    gateway: Gateway
    config: Config

    def openai(self, key: str = "none", **options) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=10, **options)

    def anthropic(self, key: str = "none", **options) -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=self.url, api_key=key, max_retries=0, timeout=10, **options)


@contextmanager
def routing(text: str, tmp_path) -> Iterator[Router]:
    """A router with these settings, its ledger under tmp_path."""
    config = read_config(text)
    ledger = config.ledger.model_copy(update={"path": tmp_path / "route.db"})
    config = config.model_copy(
        update={"ledger": ledger, "server": config.server.model_copy(update={"port": 0, "drain_s": 1.0})}
    )
    gateway = Gateway(config)
    server, _ = make_server(gateway)
    with running(server=server) as url:
        yield Router(url, gateway, config)


@contextmanager
def targets(*fakes: Fake) -> Iterator[tuple[Fake, ...]]:
    """The fakes, each on its own port."""
    if not fakes:
        yield ()
        return
    with running(fakes[0].app()) as url, targets(*fakes[1:]) as rest:
        fakes[0].url = url
        yield (fakes[0], *rest)


def table(name: str, fake: Fake, more: str = "") -> str:
    """A `[targets.NAME]` for a fake."""
    base = fake.url if fake.wire == "anthropic" else f"{fake.url}/v1"
    return f'[targets.{name}]\nurl = "{base}"\nwire = "{fake.wire}"\nmodel = "fake-{name}"\nimages = true\n{more}\n'
