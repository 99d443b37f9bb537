"""Bytes on the wire: server-sent events, and clients that leave before the end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

CLIENT_LEFT = 499
"""Status in the log of a request whose client left; no client sees it."""

WAITING_S = 5.0
"""Without a first round for so long, a comment tells proxies that the stream is alive; again each time."""

LATE_S = 60.0

dumps = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
quote = json.encoder.encode_basestring


def event(data: Any, name: str | None = None) -> bytes:
    """One server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {dumps(data)}\n\n".encode()


def _body(block: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": block, "more_body": more}


class EventStream(Response):
    """Sends `events` as they come. `left` is called when the client goes away, and whenever this is over."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], left: Callable[[], None], most_s: float = 3600.0) -> None:
        """most_s: time to make the answer; a reader who takes `LATE_S` longer is let go."""
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._left, self._most_s = events, left, most_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Headers go with the first round: a client that woke before it would take a core from it."""
        watcher = asyncio.create_task(self._watch(receive))
        first = asyncio.ensure_future(anext(self._events, b""))
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        try:
            async with asyncio.timeout(self._most_s + LATE_S), aclosing(self._events) as events:  # type: ignore[type-var]
                while not (await asyncio.wait({first}, timeout=WAITING_S))[0]:
                    if start:
                        await send(start)
                        start = {}
                    await send(_body(b": waiting\n\n"))
                if start:
                    await send(start)
                await send(_body(first.result()))
                async for block in events:
                    await send(_body(block))
            await send(_body(b"", more=False))
        except TimeoutError:
            pass  # unfinished, so that the connection is closed
        finally:
            self._left()
            watcher.cancel()
            first.cancel()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._left()


async def while_connected(request: Request, work: Awaitable[T]) -> T | None:
    """The result of `work`; None where the client left first, and `work` was cancelled."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for one in (task, watcher):
            one.cancel()


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
