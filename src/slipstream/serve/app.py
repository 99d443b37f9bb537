"""The application: routes, the door in front of them, and errors in the shape that each API's clients read."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from slipstream.engine.engine import LLM
from slipstream.serve import anthropic, openai_chat, openai_completions, openai_responses, operations, studio
from slipstream.serve.answers import Service
from slipstream.serve.auth import Doorkeeper
from slipstream.serve.config import Config
from slipstream.serve.door import Door
from slipstream.serve.errors import ApiError
from slipstream.serve.metrics import Metrics
from slipstream.serve.scheduler import Scheduler
from slipstream.serve.sessions import SessionPool
from slipstream.serve.spill import SpillStore, fingerprint

REFUSALS = {
    400: "The request is wrong; `param` says where.",
    401: "No valid API key.",
    403: "The key may not use this.",
    404: "No such model or response.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    429: "A queue or a rate limit is full; see Retry-After.",
    500: "The engine failed.",
    503: "The server is shutting down, or has too many requests in progress.",
    504: "Not done in time.",
}


STREAMED = ("chat_completions", "completions", "responses_v1", "messages_v1_messages_post")
"""Operations that answer with events where `stream` is true."""


def open_service(llm: LLM, config: Config) -> Service:
    """The engine with its scheduler, running. `service.scheduler.close()` ends it."""
    metrics = Metrics()
    folder = config.sessions.dir
    store = SpillStore(folder, fingerprint(llm), config.sessions.disk_mb << 20) if folder else None
    pool = SessionPool(llm, config.sessions, store, config.drafter)
    scheduler = Scheduler(llm, config, pool, metrics)
    metrics.gauge("sessions_busy", "Sessions with a running stream.", lambda: pool.busy)
    metrics.gauge("sessions_idle", "Sessions kept for their prefix.", lambda: pool.idle)
    metrics.gauge("kv_bytes", "Keys and values held.", lambda: pool.held_bytes)
    metrics.gauge("running", "Streams running.", lambda: sum(r for r, _ in scheduler.load().values()))
    metrics.gauge("waiting", "Streams waiting.", lambda: sum(w for _, w in scheduler.load().values()))
    return Service(llm, config, pool, scheduler, metrics)


def create_app(llm: LLM, config: Config | None = None) -> FastAPI:
    """The service for `llm` as an ASGI application; its lifespan ends with all sessions saved and freed."""
    config = config or Config()
    service = open_service(llm, config)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        service.scheduler.close()

    app = FastAPI(
        title="Slipstream",
        version=version("slipstream-llm"),
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        responses={
            status: {"description": text, "content": {"application/json": {"schema": {"type": "object"}}}}
            for status, text in REFUSALS.items()
        },
    )
    app.state.service = service
    for module in (openai_chat, openai_completions, openai_responses, anthropic, operations, studio):
        app.include_router(module.router)
    app.add_exception_handler(ApiError, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _failed)
    app.add_middleware(Door, service=service, doorkeeper=Doorkeeper(config.keys))
    if config.cors:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(config.cors), allow_methods=["GET", "POST"], allow_headers=["*"]
        )
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


def shaped(path: str, error: ApiError) -> JSONResponse:
    """`error` as the clients of this path read it."""
    body = error.anthropic() if path.startswith("/v1/messages") else error.openai()
    return JSONResponse(body, error.status, error.headers)


async def _refused(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError)
    return shaped(request.url.path, error)


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    errors = error.errors()
    first = max(errors, key=lambda e: len(e["loc"])) if errors else {"loc": (), "msg": "invalid", "type": ""}
    if unknown := [e for e in errors if e["type"] == "extra_forbidden"]:
        first = unknown[0]
    where = _place(error.body, first["loc"][1:], first["type"] == "missing")
    if first["type"] == "extra_forbidden":
        message, code = f"unknown parameter: {where!r}", "unknown_parameter"
    elif first["type"] == "json_invalid":
        message, code, where = "the body is not valid JSON", "invalid_json", ""
    elif not where:
        message, code = "the body must be a JSON object, with Content-Type: application/json", "invalid_value"
    elif first["type"] == "missing":
        message, code = f"missing required parameter: {where!r}", "missing_required_parameter"
    else:
        message, code = f"invalid value for {where!r}: {first['msg']}", "invalid_value"
    return shaped(request.url.path, ApiError(400, message, code=code, param=where or None))


def _place(body: Any, loc: Sequence[str | int], missing: bool) -> str:
    """Where in `body` an error lies, without the types of a union that pydantic tried there."""
    where, value = "", body
    for i, part in enumerate(loc):
        if isinstance(part, int) and isinstance(value, list) and part < len(value):
            where, value = f"{where}[{part}]", value[part]
        elif isinstance(value, dict) and part in value:
            where, value = f"{where}.{part}", value[part]
        elif missing and i == len(loc) - 1:
            where += f".{part}"
    return where.removeprefix(".")


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    texts = {404: f"there is no {request.url.path} here", 405: f"{request.method} is not allowed here"}
    codes = {400: "invalid_json", 404: "not_found", 405: "method_not_allowed"}
    message = texts.get(error.status_code, str(error.detail))
    refusal = ApiError(error.status_code, message, code=codes.get(error.status_code))
    response = shaped(request.url.path, refusal)
    response.headers.update(error.headers or {})
    return response


async def _failed(request: Request, error: Exception) -> JSONResponse:
    return shaped(request.url.path, ApiError(500, "the server failed; its log says why", code="internal_error"))


def _openapi(app: FastAPI) -> dict[str, Any]:
    """The document without what FastAPI adds by habit: nothing here answers 422."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        for path in document["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
                if operation["operationId"].startswith(STREAMED):
                    operation["responses"]["200"]["content"]["text/event-stream"] = {"schema": {"type": "string"}}
                operation["security"] = [{"bearer": []}, {"key": []}, {}]
        parts = document.setdefault("components", {})
        for name in ("HTTPValidationError", "ValidationError"):
            parts.get("schemas", {}).pop(name, None)
        parts["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
        app.openapi_schema = document
    return app.openapi_schema
