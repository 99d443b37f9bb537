"""Our own engine as a target: its server's application, called in this process without a socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import httpx
from starlette.types import ASGIApp, Message

from slipstream.errors import SlipstreamError
from slipstream.route.config import Target


class AsgiTransport(httpx.AsyncBaseTransport):
    """Sends requests to an ASGI application, whose answer comes through as it is written.

    httpx has a transport of this kind that waits for the whole answer.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = await request.aread()
        scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": request.method,
            "headers": [(name.lower(), value) for name, value in request.headers.raw],
            "scheme": request.url.scheme,
            "path": request.url.path,
            "raw_path": request.url.raw_path,
            "query_string": request.url.query,
            "root_path": "",
            "server": (request.url.host, 80),
            "client": ("in-process", 0),
        }
        sent: asyncio.Queue[Message | None] = asyncio.Queue(64)
        left = asyncio.Event()
        asked: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if asked:
                return asked.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def run() -> None:
            try:
                await self._app(scope, receive, sent.put)
            finally:
                with suppress(asyncio.QueueFull):
                    sent.put_nowait(None)

        task = asyncio.create_task(run())
        first = await sent.get()
        if first is None or first["type"] != "http.response.start":
            await task
            raise httpx.RemoteProtocolError("the engine gave no answer")
        return httpx.Response(first["status"], headers=first["headers"], stream=_Body(sent, left, task))

    async def aclose(self) -> None:
        return None


class _Body(httpx.AsyncByteStream):
    def __init__(self, sent: asyncio.Queue[Message | None], left: asyncio.Event, task: asyncio.Task[None]) -> None:
        self._sent, self._left, self._task = sent, left, task

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (message := await self._sent.get()) is not None:
            if message.get("body"):
                yield message["body"]
            if not message.get("more_body"):
                return
        raise httpx.ReadError("the engine broke off its answer")

    async def aclose(self) -> None:
        """An answer that is not over is cancelled, as if its client had left."""
        self._left.set()
        if not self._task.done():
            self._task.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await self._task


class LocalEngine:
    """A loaded model and its application. `close` frees it."""

    def __init__(self, target: Target) -> None:
        """Raises SlipstreamError where the model cannot be loaded."""
        from slipstream import LLM
        from slipstream.serve.app import create_app
        from slipstream.serve.config import Config

        assert target.engine is not None
        try:
            self.app = create_app(LLM(target.engine, **target.engine_options), Config(model_name=target.model))
        except TypeError as error:
            raise SlipstreamError(f"engine_options of {target.engine!r}: {error}") from error

    def transport(self) -> AsgiTransport:
        return AsgiTransport(self.app)

    def close(self) -> None:
        self.app.state.service.scheduler.close()
