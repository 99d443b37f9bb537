"""The router's HTTP side: who may come in, what they may ask, and answers that pass through as they are made."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import Message, Receive, Scope, Send

from slipstream.route.config import LOOPBACK, Key
from slipstream.route.gateway import Gateway, Live
from slipstream.route.step import Step
from slipstream.route.wire import parse_request, reply
from slipstream.route.wire.neutral import Ask, Json
from slipstream.serve.errors import ApiError, invalid
from slipstream.serve.wire import CLIENT_LEFT, WAITING_S, while_connected

log = logging.getLogger("slipstream.route.access")
PATHS = {"/v1/chat/completions": "openai-chat", "/v1/responses": "openai-responses", "/v1/messages": "anthropic"}
BODY_S = 60.0
SLOW_S = 60.0
"""A client that takes none of its stream for so long has left, though its connection stands."""


def create_app(gateway: Gateway, more: Sequence[BaseRoute] = ()) -> Starlette:
    """The router as an ASGI application. more: further pages, which see `request.app.state.gateway`."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        gateway.start()
        yield
        await gateway.close()

    routes = [Route(path, _answer, methods=["POST"]) for path in PATHS]
    routes += [
        Route("/v1/messages/count_tokens", _count_tokens, methods=["POST"]),
        Route("/v1/models", _models),
        Route("/v1/models/{model:path}", _model),
        Route("/health", _health),
        Route("/ready", _ready),
        Route("/metrics", _metrics),
    ]
    cors = gateway.live.config.server.cors
    middleware = []
    if cors:
        allowed = {"allow_origins": list(cors), "allow_methods": ["GET", "POST"], "allow_headers": ["*"]}
        middleware.append(Middleware(CORSMiddleware, **allowed))  # type: ignore[arg-type]
    app = Starlette(
        routes=[*routes, *more],
        lifespan=lifespan,
        middleware=middleware,
        exception_handlers={ApiError: _refused, HTTPException: _http_error, Exception: _failed},
    )
    app.state.gateway = gateway
    return app


def _gateway(request: Request) -> Gateway:
    gateway: Gateway = request.app.state.gateway
    return gateway


def admitted(request: Request) -> tuple[Live, Key | None]:
    """The settings in use, and who asks. Raises ApiError 401 or 403."""
    live = _gateway(request).live
    if not live.config.keys and request.url.hostname not in LOOPBACK:
        # a page of another site may have its name lead here (DNS rebinding), and no key stands in its way
        raise ApiError(403, "without [[keys]] only clients of 127.0.0.1 or localhost are served", code="wrong_host")
    return live, live.client(request.headers.get("authorization"), request.headers.get("x-api-key"))


async def _answer(request: Request) -> Response:
    gateway, began = _gateway(request), time.perf_counter()
    step, status = None, 500
    try:
        _, key = admitted(request)
        if gateway.draining:
            raise ApiError(503, "the router is shutting down", code="shutting_down", retry_s=5.0)
        ask = await read_ask(request)
        step = Step(gateway, ask, key, request.headers)
        opened = await while_connected(request, _opened(step))
        if opened is None:
            status = CLIENT_LEFT
            return Response(status_code=CLIENT_LEFT)
        if ask.stream:
            status = 200
            return Relayed(step)
        body = await while_connected(request, step.whole())
        status = 200 if body is not None else CLIENT_LEFT
        if body is None:
            return Response(status_code=CLIENT_LEFT)
        return Response(body, media_type="application/json", headers=step.headers())
    except ApiError as error:
        status = error.status
        raise
    finally:
        if step is not None and status != 200:
            await asyncio.shield(step.abandon("cancelled" if status == CLIENT_LEFT else "failed"))
        if log.isEnabledFor(logging.INFO):
            line = {"path": request.url.path, "status": status, "ms": round((time.perf_counter() - began) * 1e3, 2)}
            if step is not None:
                line |= {"request": step.id, "route": step.route_name, "target": step.choice.target}
            log.info("%s", json.dumps(line))


async def _opened(step: Step) -> bool:
    await step.open()
    return True


async def read_json(request: Request) -> Json:
    """The body, within its limits. Raises ApiError 400, 408, 413 or 415."""
    limit = _gateway(request).live.config.server.body_bytes
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # also what keeps pages of other origins out, which cannot send this unasked
        raise ApiError(415, "send application/json", code="unsupported_media_type")
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length) > limit:
        raise ApiError(413, f"the body has {length} bytes; {limit} are allowed", code="body_too_large")
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                parts.append(part)
                size += len(part)
                if size > limit:
                    raise ApiError(413, f"the body is larger than the {limit} bytes allowed", code="body_too_large")
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {BODY_S:.0f} s", code="body_timeout") from None
    try:
        body = json.loads(b"".join(parts))
        if b"\\ud" in b"".join(parts).lower():
            json.dumps(body, ensure_ascii=False).encode()  # half a surrogate pair is no text
    except (ValueError, RecursionError):
        raise invalid("the body is not valid JSON", code="invalid_json") from None
    if not isinstance(body, dict):
        raise invalid("the body must be a JSON object", code="invalid_json")
    return body


async def read_ask(request: Request) -> Ask:
    """Raises ApiError."""
    body = await read_json(request)
    if not isinstance(body.get("model"), str):
        raise invalid("missing required parameter: 'model'", "model", "missing_required_parameter")
    return parse_request(PATHS[request.url.path], body)


class Relayed(Response):
    """A stream: its headers go with the first token, or when a client has waited long enough to wonder."""

    media_type = "text/event-stream"

    def __init__(self, step: Step) -> None:
        super().__init__()
        self._step = step

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def patiently(message: Message) -> None:
            async with asyncio.timeout(SLOW_S):
                await send(message)

        work = asyncio.create_task(self._relay(patiently))
        watcher = asyncio.create_task(_left(receive))
        try:
            await asyncio.wait({work, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                work.cancel()
            with suppress(asyncio.CancelledError, TimeoutError):  # then the connection is closed, unfinished
                await work
        finally:
            work.cancel()
            watcher.cancel()
            await asyncio.shield(self._step.abandon("cancelled"))

    async def _relay(self, send: Send) -> None:
        """Raises ApiError while the client was told nothing yet."""
        begun = False
        async with aclosing(self._step.stream()) as blocks:  # type: ignore[type-var]
            first = asyncio.ensure_future(anext(blocks))
            try:
                while not (await asyncio.wait({first}, timeout=WAITING_S))[0]:
                    if not begun:
                        await self._begin(send)
                        begun = True
                    await send(_body(b": waiting\n\n"))
                block = first.result()
            except ApiError as error:
                if not begun:
                    raise
                await send(_body(reply.error_bytes(self._step.ask.wire, error)))
                await send(_body(b"", more=False))
                return
            finally:
                if not first.done():
                    first.cancel()
                    with suppress(asyncio.CancelledError, ApiError):
                        await first
            if not begun:
                await self._begin(send)
            await send(_body(block))
            async for block in blocks:
                await send(_body(block))
        await send(_body(b"", more=False))

    async def _begin(self, send: Send) -> None:
        headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-store"}
        headers |= {"x-accel-buffering": "no"} | self._step.headers()
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})


def _body(block: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": block, "more_body": more}


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _count_tokens(request: Request) -> Response:
    """Of the conversation, estimated: the targets' tokenizers are not at hand."""
    live, key = admitted(request)
    body = await read_json(request)
    live.route_of(str(body.get("model")), key)
    ask = parse_request("anthropic", body)
    return JSONResponse({"input_tokens": ask.conversation().prompt_tokens})


def _public(live: Live, key: Key | None) -> list[Json]:
    out: list[Json] = []
    for model, route in live.models(key):
        targets = live.config.catalogue(live.config.routes[route]).targets
        context = max(target.context for target in targets.values())
        entry = {"id": model, "object": "model", "created": 0, "owned_by": "slipstream", "type": "model"}
        out.append(entry | {"display_name": model, "context_length": context, "targets": list(targets)})
    return out


async def _models(request: Request) -> Response:
    data = _public(*admitted(request))
    ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
    return JSONResponse({"object": "list", "data": data, "has_more": False} | ends)


async def _model(request: Request) -> Response:
    live, key = admitted(request)
    name = request.path_params["model"]
    live.route_of(name, key)
    return JSONResponse(next(one for one in _public(live, key) if one["id"] == name))


async def _health(request: Request) -> Response:
    return JSONResponse({"status": "ok"})


async def _ready(request: Request) -> Response:
    gateway = _gateway(request)
    up = any(upstream.breaker.ready for upstream in gateway.live.upstreams.values())
    state = "draining" if gateway.draining else "ready" if up else "no target is up"
    return JSONResponse({"status": state}, 200 if state == "ready" else 503)


async def _metrics(request: Request) -> Response:
    admitted(request)
    return Response(_gateway(request).metrics_text(), media_type="text/plain; version=0.0.4")


def shaped(path: str, error: ApiError) -> JSONResponse:
    """`error` as the clients of this path read it."""
    body = error.anthropic() if path.startswith("/v1/messages") else error.openai()
    return JSONResponse(body, error.status, error.headers)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return shaped(request.url.path, error)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    texts = {404: f"there is no {request.url.path[:200]} here", 405: f"{request.method} is not allowed here"}
    refusal = ApiError(error.status_code, texts.get(error.status_code, str(error.detail)), code="not_found")
    response = shaped(request.url.path, refusal)
    response.headers.update(error.headers or {})
    return response


async def _failed(request: Request, error: Exception) -> Response:
    return shaped(request.url.path, ApiError(500, "the router failed; its log says why", code="internal_error"))
