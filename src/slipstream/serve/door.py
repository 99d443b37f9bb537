"""What every request passes: its key is checked, its body read within limits, its end counted and logged."""

from __future__ import annotations

import asyncio
import json
import logging
import time

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slipstream.serve import trace
from slipstream.serve.answers import Service
from slipstream.serve.auth import Doorkeeper
from slipstream.serve.errors import ApiError

OPEN = ("/", "/health", "/ready", "/favicon.ico")
"""Paths that need no key: they tell nothing, or ask for the key themselves."""
BODY_S = 30.0
log = logging.getLogger("slipstream.access")


class Door:
    """Middleware in plain ASGI, so that a stream passes through without another task."""

    def __init__(self, app: ASGIApp, service: Service, doorkeeper: Doorkeeper) -> None:
        self._app, self._service, self._doorkeeper = app, service, doorkeeper
        self._inside = 0  # requests in progress

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status = time.perf_counter(), 500
        answered = False
        counted = scope["path"] not in OPEN
        most = self._service.config.limits.requests

        async def watched(message: Message) -> None:
            nonlocal status, answered
            if message["type"] == "http.response.start":
                status, answered = message["status"], True
                message["headers"] = [*message["headers"], *_HEADERS]
            await send(message)

        self._inside += counted
        try:
            if counted and self._inside > most:
                raise ApiError(
                    503, f"{most} requests are in progress, as many as are allowed", code="too_many_requests", retry_s=5
                )
            headers = Headers(scope=scope)
            trace.parent.set(headers.get("traceparent"))
            if counted:
                client = self._doorkeeper.admit(headers.get("authorization"), headers.get("x-api-key"))
                scope.setdefault("state", {})["client"] = client
            body = await self._body(headers, receive) if scope["method"] in ("POST", "PUT", "PATCH") else receive
            await self._app(scope, body, watched)
        except ApiError as error:
            if not answered:
                path = scope["path"]
                content = error.anthropic() if path.startswith("/v1/messages") else error.openai()
                await JSONResponse(content, error.status, error.headers)(scope, receive, watched)
        finally:
            self._inside -= counted
            self._note(scope, status, time.perf_counter() - started)

    async def _body(self, headers: Headers, receive: Receive) -> Receive:
        """Read the body here, within its limits, and pass it on. Raises ApiError 413 or 408."""
        limit = self._service.config.limits.body_bytes
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > limit:
            raise ApiError(413, f"the body has {length} bytes; {limit} are allowed", code="body_too_large")
        parts, size, more = [], 0, True
        try:
            async with asyncio.timeout(BODY_S):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ApiError(400, "the client left before its request was complete")
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    more = message.get("more_body", False)
                    if size > limit:
                        raise ApiError(413, f"the body is larger than the {limit} bytes allowed", code="body_too_large")
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {BODY_S:.0f} s", code="body_timeout") from None
        whole: list[Message] = [{"type": "http.request", "body": b"".join(parts), "more_body": False}]
        if self._service.config.prompts_in_logs:
            log.info("%s", json.dumps({"prompt": whole[0]["body"].decode("utf-8", "replace")}))

        async def replay() -> Message:
            return whole.pop() if whole else await receive()

        return replay

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        route = scope.get("route")
        path = getattr(route, "path", "unknown")  # of the route, so that a scan of made-up paths costs nothing
        self._service.metrics.requests.labels(path, str(status)).inc()
        if log.isEnabledFor(logging.INFO):
            client = scope.get("state", {}).get("client")
            line = {
                "method": scope["method"],
                "path": scope["path"][:200],
                "status": status,
                "ms": round(seconds * 1e3, 2),
            }
            log.info("%s", json.dumps(line | {"key": client.name if client else None}))


_HEADERS = [(b"x-content-type-options", b"nosniff")]
