"""One target over HTTP: its places, its breaker, its health, and one attempt at a request.

A failed attempt is a `Fault`, which says what may be done next. Another try is safe while no token of the answer came:
a stream is given up by closing it. An answer that was asked for whole and got lost may have been billed, so it is
never asked for again.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import httpx

from slipstream.route.config import Breaker, Target
from slipstream.route.wire import WIRES
from slipstream.route.wire.neutral import TOKENS, End, Event, Failure, Json, Stop
from slipstream.route.wire.read import failure, load
from slipstream.route.wire.sse import Sse, SseReader
from slipstream.serve.wire import dumps

KEEP_IDLE_S = 4.0
"""Shorter than servers keep an idle connection (uvicorn and Node: 5 s), so that none closes under a request."""
END_S = 0.1
"""How long the end of the body may come after the end of the answer."""
READ_S = 0.05
"""How long what has arrived may be read after time is up."""
MOST_AT_ONCE = 64
WHOLE_BYTES = 64 << 20
ERROR_BYTES = 1 << 20
PASSED_ON = (400, 413, 422)
"""Statuses that speak of the request itself: no other target is asked."""
TERMINAL = {"openai-chat": b"data: [DONE]\n\n", "anthropic": b'event: message_stop\ndata: {"type":"message_stop"}\n\n'}


class Fault(Exception):
    """An attempt that failed. again: this target may be tried again; elsewhere: another may; blame: it counts against
    the target. retry_s: how long the target asks to be left alone. lost: it may have been answered, and billed."""

    def __init__(
        self, status: int, message: str, *, again: bool = False, elsewhere: bool = True, blame: bool = True,
        retry_s: float | None = None, code: str | None = None, lost: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.again, self.elsewhere, self.blame = status, again, elsewhere, blame
        self.retry_s, self.code, self.lost = retry_s, code, lost


@asynccontextmanager
async def within(seconds: float) -> AsyncIterator[None]:
    """Raises TimeoutError when time is up. A busy router wakes late, to find its time up and the answer there: what has
    arrived is read first, since to ask for it again would be to pay twice."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as limit:
        up = loop.call_later(seconds, lambda: limit.reschedule(loop.time() + READ_S))
        try:
            yield
        finally:
            up.cancel()


class CircuitBreaker:
    """closed -> (failures in a row) -> open -> (open_s) -> half-open: one probe, whose first token decides."""

    def __init__(self, settings: Breaker, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings, self._clock = settings, clock
        self._failures, self._opened, self._probing = 0, 0.0, False

    @property
    def state(self) -> str:
        if self._failures < self._settings.failures:
            return "closed"
        return "half-open" if self._clock() - self._opened >= self._settings.open_s else "open"

    @property
    def ready(self) -> bool:
        """Whether a request would be let through now."""
        return self.state == "closed" or (self.state == "half-open" and not self._probing)

    def enter(self) -> bool:
        """Let a request through; each that was goes on with `begin`, `succeed`, `fail` or `leave`."""
        if not self.ready:
            return False
        self._probing = self.state == "half-open"
        return True

    def begin(self) -> None:
        """A first token came: a probe found the target up. Failures are forgotten once an answer is whole."""
        if self.state == "half-open":
            self._failures = 0
        self._probing = False

    def succeed(self) -> None:
        self._failures, self._probing = 0, False

    def fail(self) -> None:
        self._failures, self._probing = self._failures + 1, False
        self._opened = self._clock()

    def leave(self) -> None:
        self._probing = False

    def trip(self) -> None:
        """Open at once: a health check says so."""
        self._failures, self._opened = max(self._failures, self._settings.failures), self._clock()


@dataclass(frozen=True)
class Piece:
    """What arrived: the event as it came, and what it means."""

    raw: bytes
    events: list[Event]
    name: str = ""


class Upstream:
    """A target and the connections to it."""

    def __init__(self, name: str, target: Target, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self.name, self.target = name, target
        self.breaker = CircuitBreaker(target.breaker)
        self.running = 0
        self.healthy: bool | None = None
        self._places = asyncio.Semaphore(target.concurrency)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=KEEP_IDLE_S)
        timeout = httpx.Timeout(None, connect=target.timeouts.connect)
        self._client = httpx.AsyncClient(
            transport=transport, limits=limits, timeout=timeout, trust_env=False, follow_redirects=False
        )
        self._url = (target.url or "http://engine/v1") + WIRES[target.wire].path
        self._watch: asyncio.Task[None] | None = None

    def headers(self, passed: Mapping[str, str]) -> dict[str, str]:
        """passed: what of the client's headers goes on to a target of its own wire."""
        headers = {"content-type": "application/json", "accept-encoding": "identity", **passed, **self.target.headers}
        key = os.environ.get(self.target.key_env, "") if self.target.key_env else ""
        if self.target.wire == "anthropic":
            headers.setdefault("anthropic-version", "2023-06-01")
            return headers | ({"x-api-key": key} if key else {})
        return headers | ({"authorization": f"Bearer {key}"} if key else {})

    async def take_place(self) -> None:
        """Raises Fault 429 where none came free in time."""
        try:
            async with asyncio.timeout(self.target.queue_s or 0.001):
                await self._places.acquire()
        except TimeoutError:
            raise Fault(429, f"{self.name} has no place free", blame=False, retry_s=1.0) from None
        self.running += 1

    def leave_place(self) -> None:
        self.running -= 1
        self._places.release()

    def request(self, body: Json, headers: Mapping[str, str]) -> httpx.Request:
        return self._client.build_request("POST", self._url, content=dumps(body).encode(), headers=dict(headers))

    async def send(self, request: httpx.Request) -> httpx.Response:
        return await self._client.send(request, stream=True)

    def start_checks(self) -> None:
        if self.target.health and self._watch is None:
            self._watch = asyncio.create_task(self._check())

    async def _check(self) -> None:
        assert self.target.health
        settings, failed = self.target.health, 0
        url = httpx.URL(self._url).copy_with(raw_path=settings.path.encode())
        while True:
            try:
                answer = await self._client.get(url, timeout=settings.timeout_s)
                self.healthy = answer.status_code < 500
            except httpx.HTTPError:
                self.healthy = False
            if self.healthy and failed >= 2:
                self.breaker.succeed()
            failed = 0 if self.healthy else failed + 1
            if failed >= 2:
                self.breaker.trip()
            await asyncio.sleep(settings.every_s)

    async def close(self) -> None:
        """When the last stream has ended."""
        if self._watch:
            self._watch.cancel()
        while self.running:
            await asyncio.sleep(0.05)
        await self._client.aclose()


class Attempt:
    """One request to one target. `start`, then `rest` of a stream; `close` whatever happened."""

    def __init__(self, upstream: Upstream, body: Json, headers: Mapping[str, str], stream: bool) -> None:
        self.upstream = upstream
        self.prelude: list[Piece] = []
        self.whole = b""
        self.whole_events: list[Event] = []
        self._body, self._headers, self._stream = body, headers, stream
        self._wire = WIRES[upstream.target.wire]
        self._reader, self._sse = self._wire.reader(), SseReader()
        self._response: httpx.Response | None = None
        self._blocks: AsyncIterator[bytes] | None = None
        self._pending: deque[Sse] = deque()
        self._placed = self._entered = self._stopped = self._ended = False
        self._deadline = time.monotonic() + upstream.target.timeouts.total

    async def start(self) -> None:
        """Up to the first token, or the whole answer. Raises Fault."""
        name, timeouts = self.upstream.name, self.upstream.target.timeouts
        if not self.upstream.breaker.enter():
            raise Fault(503, f"{name} is left alone after failures", blame=False)
        self._entered = True
        await self.upstream.take_place()
        self._placed = True
        limit = timeouts.first_token if self._stream else timeouts.total
        try:
            async with within(min(limit, timeouts.total)):
                await self._open()
                if self._stream:
                    await self._until_token()
                else:
                    await self._read_whole()
        except TimeoutError:
            what = "first token" if self._stream else "answer"
            text = f"{name} gave no {what} within {limit:g} s"
            raise Fault(504, text, elsewhere=self._stream, lost=True) from None
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
            raise Fault(502, f"{name} cannot be reached: {type(error).__name__}", again=True) from None
        except httpx.HTTPError as error:
            safe = self._stream
            text = f"{name} closed the connection ({type(error).__name__})"
            raise Fault(502, text, again=safe, elsewhere=safe, lost=True) from None

    async def _open(self) -> None:
        request = self.upstream.request(self._body, self._headers)
        self._response = response = await self.upstream.send(request)
        kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        if response.status_code != 200:
            raise await self._refusal(response)
        json = kind.endswith("json")
        if self._stream and kind != "text/event-stream":
            text = f"{self.upstream.name} answered {kind or 'without a type'} where a stream was asked for"
            raise Fault(502, text, elsewhere=not json, lost=json)
        if not self._stream and not json:
            raise Fault(502, f"{self.upstream.name} answered {kind or 'without a type'} where JSON was asked for")
        self._blocks = response.aiter_raw()

    async def _refusal(self, response: httpx.Response) -> Fault:
        content, name = b"", self.upstream.name
        with suppress(httpx.HTTPError):
            async for block in response.aiter_raw():
                content += block
                if len(content) > ERROR_BYTES:
                    break
        try:
            told = failure(response.status_code, load(content))
        except ValueError:
            told = failure(response.status_code, {"error": f"HTTP {response.status_code}"})
        retry = response.headers.get("retry-after", "")
        seconds = float(retry) if retry.replace(".", "", 1).isdigit() else None
        return _fault(name, told, seconds)

    async def _read_whole(self) -> None:
        assert self._blocks is not None
        parts, size = [], 0
        async for block in self._blocks:
            parts.append(block)
            size += len(block)
            if size > WHOLE_BYTES:
                raise Fault(
                    502, f"{self.upstream.name} answered more than {WHOLE_BYTES} bytes", elsewhere=False, lost=True
                )
        self.whole = b"".join(parts)
        try:
            body = load(self.whole)
            self.whole_events = self._wire.read_whole(body) if not body.get("error") else [failure(None, body)]
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            text = f"{self.upstream.name} gave a malformed answer: {error}"
            raise Fault(502, text, elsewhere=False, lost=True) from None
        for one in self.whole_events:
            if isinstance(one, Failure):
                raise _fault(self.upstream.name, one, None)
        self._entered = False
        self.upstream.breaker.succeed()

    async def _until_token(self) -> None:
        while True:
            piece = await self._next()
            for one in piece.events:
                if isinstance(one, Failure):
                    raise _fault(self.upstream.name, one, None)
            self.prelude.append(piece)
            if any(isinstance(one, (*TOKENS, End)) for one in piece.events):
                self._entered = False
                self.upstream.breaker.begin()
                return

    async def rest(self) -> AsyncIterator[list[Piece]]:
        """What follows the first token, to the end: all that has arrived, each time. Raises Fault."""
        name, between = self.upstream.name, self.upstream.target.timeouts.between_tokens
        fault: Fault | None = None
        while not self._ended:
            left = self._deadline - time.monotonic()
            arrived: list[Piece] = []
            try:
                async with within(max(0.0, min(between, left))):
                    arrived.append(await self._next())
                while self._pending and not self._ended and len(arrived) < MOST_AT_ONCE:
                    arrived.append(self._take())
            except TimeoutError:
                stalled = left > between  # else a client that reads slowly may be the reason, and no target's fault
                what = f"stalled for {between:g} s" if stalled else "took longer than it may in all"
                fault = Fault(504, f"{name} {what}", elsewhere=False, blame=stalled)
            except httpx.HTTPError as error:
                fault = Fault(502, f"{name} broke off its answer ({type(error).__name__})", elsewhere=False)
            except Fault as malformed:
                fault = Fault(502, str(malformed), elsewhere=False)
            for i, piece in enumerate(arrived):
                told = next((one for one in piece.events if isinstance(one, Failure)), None)
                if told is not None:
                    text, blame = f"{name}: {told.message}", told.status >= 500
                    fault = Fault(told.status, text, elsewhere=False, blame=blame, code=told.code)
                    del arrived[i:]
                    break
            if fault is not None and fault.blame:
                self.upstream.breaker.fail()
            elif fault is None and self._ended:
                self.upstream.breaker.succeed()
            if arrived:
                yield arrived
            if fault is not None:
                raise fault

    async def _next(self) -> Piece:
        """Raises Fault for an event that is none, and where the stream ends too soon."""
        assert self._blocks is not None
        name = self.upstream.name
        while not self._pending:
            block = await anext(self._blocks, None)
            if block is None:
                if self._stopped and not self._sse.unfinished:
                    self._ended = True
                    return Piece(TERMINAL.get(self._wire.name, b""), [End()])
                raise Fault(502, f"{name} ended its stream before the answer was complete", again=True, lost=True)
            try:
                self._pending.extend(self._sse.feed(block))
            except ValueError as error:
                raise Fault(502, f"{name} sent a malformed stream: {error}", lost=True) from None
        return self._take()

    def _take(self) -> Piece:
        """The next event that has arrived. Raises Fault."""
        sse = self._pending.popleft()
        try:
            events = self._reader.feed(sse)
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise Fault(502, f"{self.upstream.name} sent a malformed event: {error}", lost=True) from None
        self._stopped |= any(isinstance(one, Stop) for one in events)
        self._ended = any(isinstance(one, End) for one in events)
        return Piece(sse.raw, events, sse.name)

    async def close(self, fault: Fault | None = None) -> None:
        """Free the place and the connection; an answer that is not over is cancelled by that."""
        if self._entered:
            self._entered = False
            if fault is not None and fault.blame:
                self.upstream.breaker.fail()
            else:
                self.upstream.breaker.leave()
        if self._ended and self._blocks is not None:  # the body's end lets the connection be used again
            with suppress(httpx.HTTPError, TimeoutError):
                async with asyncio.timeout(END_S):
                    async for _ in self._blocks:
                        pass
        if self._response is not None:
            with suppress(httpx.HTTPError, RuntimeError):
                await self._response.aclose()
            self._response = None
        if self._placed:
            self._placed = False
            self.upstream.leave_place()


def _fault(name: str, told: Failure, retry_s: float | None) -> Fault:
    """What an error that the target told of allows."""
    if told.status in PASSED_ON:
        return Fault(told.status, told.message, elsewhere=False, blame=False, code=told.code)
    if told.status in (401, 403, 404):  # the router's own key or settings: the client can do nothing about it
        return Fault(502, f"{name} refused the router's request (HTTP {told.status})")
    busy = told.status in (408, 409, 429)
    status = told.status if busy or told.status >= 500 else 502
    return Fault(status, f"{name}: {told.message}", again=True, blame=not busy, retry_s=retry_s, code=told.code)
