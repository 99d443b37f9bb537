"""Who gets the next round: one device thread that advances the streams of an engine one step at a time.

A step is a slice of a prompt or one round. Between steps nothing is in flight, so a stream can wait there as long as it
must and go on bit for bit: whoever has the highest rank gets every step, streams of equal rank take turns, and a cancel
takes effect at the next step.

Waking a reader takes a core from the engine for a part of a round, so rounds that follow a delivery closely go with the
next: within `Config.delivery_s` and a round, and at once where the device turns to something else.

It knows nothing about HTTP: a `Job` delivers chunks, then one `Ended`, to whoever made it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from itertools import count

from slipstream.backends.base import DeviceRounds
from slipstream.engine.engine import LLM
from slipstream.engine.request import Chunk
from slipstream.engine.session import Request
from slipstream.errors import RequestError
from slipstream.serve.config import Config
from slipstream.serve.drafts import Filter
from slipstream.serve.errors import ApiError
from slipstream.serve.metrics import Metrics
from slipstream.serve.sessions import Live, SessionPool
from slipstream.serve.tiers import Served

log = logging.getLogger("slipstream.serve")

DEVICE_QUANTUM = 16
"""Rounds between two changes of stream on a backend that works rounds ahead, which a change throws away."""

SWEEP_S = 0.02
"""Between two looks at the deadlines."""

_number = count(1)


@dataclass(frozen=True)
class Ended:
    """A stream is over. error: None where the last chunk carried the completion, or the client left."""

    error: ApiError | None = None


@dataclass(eq=False)
class Job:
    """One stream: its request, whom to tell, and what happened so far. Times are of `time.perf_counter`, in seconds.

    deliver: takes what is new, which its reader may look at once `wake` was called.
    """

    served: Served
    request: Request
    deliver: Callable[[Chunk | Ended], None]
    wake: Callable[[], None]
    grammar: Filter | None = None
    client: str = ""
    after: Job | None = None
    deadline_s: float = 3600.0
    number: int = field(default_factory=lambda: next(_number))
    arrived: float = field(default_factory=time.perf_counter)
    started: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    woken: float = 0.0
    cached_tokens: int = 0
    ready: int = 0
    tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    device_s: float = 0.0
    live: Live | None = None
    stream: Generator[Chunk, None, None] | None = None
    cancelled: bool = False
    enough: bool = False
    error: ApiError | None = None
    ended: bool = False

    @property
    def may_start(self) -> bool:
        """Whether the stream whose prompt this one shares has computed it."""
        return self.after is None or self.after.stream is not None or self.after.ended

    @property
    def queue_s(self) -> float:
        return (self.started or time.perf_counter()) - self.arrived

    @property
    def ttft_s(self) -> float:
        return self.first_token - self.arrived if self.first_token else 0.0

    @property
    def tokens_per_s(self) -> float:
        """From the first round's end to the last's."""
        elapsed = self.last_token - self.first_token
        return (self.tokens - self._first_tokens) / elapsed if elapsed > 0 else 0.0

    _first_tokens: int = 0

    def count(self, chunk: Chunk) -> None:
        now = time.perf_counter()
        self.rounds += 1
        self.drafted += chunk.drafted
        self.accepted += chunk.accepted
        tokens = chunk.completion.completion_tokens - self.tokens if chunk.completion else 1 + chunk.accepted
        self.tokens += tokens
        if not self.first_token:
            self.first_token, self._first_tokens = now, tokens
        self.last_token = now


class Scheduler:
    """Owns the engine's device. `submit` and `cancel` may be called from any thread."""

    def __init__(self, llm: LLM, config: Config, pool: SessionPool, metrics: Metrics) -> None:
        self.llm, self.config, self.pool, self.metrics = llm, config, pool, metrics
        self.draining = False
        self.stream_s = 1.0  # how long a stream takes, on average: what Retry-After goes by
        self._quantum = max(config.quantum, DEVICE_QUANTUM if isinstance(llm.backend, DeviceRounds) else 1)
        self._changed = threading.Condition()
        self._waiting: dict[str, deque[Job]] = {name: deque() for name in config.tiers}
        self._active: dict[str, deque[Job]] = {name: deque() for name in config.tiers}
        self._by_rank = sorted(config.tiers, key=lambda name: -config.tiers[name].rank)
        self._turn: Job | None = None
        self._turn_left = 0
        self._untold: Job | None = None  # its reader was not woken since its last delivery
        self._news = False  # streams came, are to go, or went
        self._sweep_at = 0.0
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)
        self._thread.start()

    # ---- any thread ----

    def submit(self, jobs: list[Job]) -> None:
        """Queue the streams of one request. Raises ApiError: 503 while draining, 429 where the tier's queue is full."""
        with self._changed:
            if self.draining or self._closing:
                raise ApiError(
                    503, "the server is shutting down; ask another, or again later", code="draining", retry_s=5
                )
            for job in jobs:
                name, tier = job.served.name, job.served.tier
                free = tier.streams - len(self._active[name])
                if len(self._waiting[name]) + len(jobs) > tier.queue + max(0, free):
                    wait = self.stream_s * (1 + len(self._waiting[name])) / tier.streams
                    raise ApiError(
                        429, f"the queue of tier {name!r} is full; try again in {wait:.0f} s",
                        code="queue_full", retry_s=wait,
                    )  # fmt: skip
            for job in jobs:
                self._waiting[job.served.name].append(job)
            self._tell_device()

    def cancel(self, job: Job) -> None:
        """Nobody listens any more: free what the stream holds, at the next step."""
        with self._changed:
            job.cancelled = True
            self._tell_device()

    def finish(self, job: Job) -> None:
        """The client has all that it asked for: as `cancel`, but counted as done."""
        job.enough = True
        self.cancel(job)

    def hand_back(self) -> None:
        """End every stream with an error that tells the client to ask elsewhere, its text so far being good."""
        with self._changed:
            self.draining = True
            for job in self._jobs():
                job.error = job.error or ApiError(
                    503, "the server is shutting down; go on elsewhere from the text so far", code="draining"
                )
            self._tell_device()

    def load(self) -> dict[str, tuple[int, int]]:
        """tier -> (running, waiting)."""
        with self._changed:
            return {name: (len(self._active[name]), len(self._waiting[name])) for name in self._by_rank}

    def streams(self) -> list[Job]:
        with self._changed:
            return list(self._jobs())

    def close(self) -> None:
        """End all streams, save and free the sessions, stop the thread."""
        self.hand_back()
        with self._changed:
            self._closing = True
            self._tell_device()
        self._thread.join()

    def _tell_device(self) -> None:
        self._news = True
        self._changed.notify()

    # ---- the device thread ----

    def _jobs(self) -> Iterator[Job]:
        for queue in (*self._active.values(), *self._waiting.values()):
            yield from queue

    def _run(self) -> None:
        while True:
            with self._changed:
                gone = self._sweep()
                job = self._next()
                finished = job is None and self._closing
            if self._untold is not None and self._untold is not job:
                self._untold.wake()
                self._untold = None
            for ended in gone:
                self._end(ended)
            if finished:
                break
            if job is not None:
                self._step(job)
            elif not self.pool.save_one():  # disk is written only while nobody waits
                with self._changed:
                    if not any(self._jobs()) and not self._closing:
                        self._changed.wait(1.0)
        with self.llm.lock:
            self.pool.close()

    def _sweep(self) -> list[Job]:
        """Take out what was cancelled, failed or took too long, and admit who waits."""
        now = time.perf_counter()
        gone: list[Job] = []
        if not self._news and now < self._sweep_at:
            return gone
        self._news, self._sweep_at = False, now + SWEEP_S
        for name, tier in self.config.tiers.items():
            for queue in (self._waiting[name], self._active[name]):
                for job in [j for j in queue if j.cancelled or j.error or now - j.arrived > j.deadline_s]:
                    if not (job.cancelled or job.error):
                        job.error = ApiError(504, f"not done in {job.deadline_s:.0f} s", code="timeout")
                    queue.remove(job)
                    gone.append(job)
            while self._waiting[name] and len(self._active[name]) < tier.streams:
                self._active[name].append(self._waiting[name].popleft())
        return gone

    def _next(self) -> Job | None:
        """The job that gets the next step: of the highest rank, in turn."""
        last = self._turn
        for name in self._by_rank:
            queue = self._active[name]
            if not queue:
                continue
            if last in queue and self._turn_left > 0:
                self._turn_left -= 1
                return last
            job = next((job for job in queue if job.may_start), None)
            if job is None:
                continue
            queue.remove(job)
            queue.append(job)
            if last is not None and last.stream and not last.ended and last.served.tier.rank < job.served.tier.rank:
                self.metrics.preemptions.labels(last.served.name).inc()
            self._turn, self._turn_left = job, self._quantum - 1
            return job
        return None

    def _step(self, job: Job) -> None:
        started = time.perf_counter()
        try:
            done = self._advance(job, started)
        except RequestError as error:
            job.error, done = ApiError(400, str(error)), True
        except Exception as error:
            log.exception("stream %d failed", job.number)
            job.error, done = ApiError(500, f"the engine failed: {type(error).__name__}", code="engine_error"), True
        job.device_s += time.perf_counter() - started
        if done:
            with self._changed:
                self._active[job.served.name].remove(job)
                self._news = True
            self._end(job)

    def _advance(self, job: Job, now: float) -> bool:
        tokens = job.request.tokens
        if job.live is None:
            job.started = now
            self.metrics.queue_s.labels(job.served.name).observe(job.queue_s)
            with self.llm.lock:
                job.live, job.ready = self.pool.acquire(tokens)
            job.live.drafter.grammar, job.live.drafter.limit = job.grammar, job.served.tier.drafts
            self._prefill(job, first=True)
        elif job.stream is None and job.ready < len(tokens) - 1:
            self._prefill(job)
        if job.ready < len(tokens) - 1:
            return False
        if job.stream is None:
            stream = job.live.session.run(job.request)
            assert isinstance(stream, Generator)
            job.stream = stream
        before = job.last_token
        chunk = next(job.stream)
        job.count(chunk)
        self._measure(job, chunk, before)
        job.deliver(chunk)
        self._news |= job.error is not None  # its reader is too slow
        if chunk.completion is not None or job.last_token - job.woken >= self.config.delivery_s:
            job.wake()
            job.woken, self._untold = job.last_token, None
        else:
            self._untold = job
        return chunk.completion is not None

    def _prefill(self, job: Job, first: bool = False) -> None:
        assert job.live is not None
        upto = min(len(job.request.tokens), job.ready + self.config.prefill_slice + 1)
        with self.llm.lock:
            reused = job.live.session.kv.prepare(job.request.tokens[:upto])
        if first:
            job.cached_tokens = reused
        job.ready = upto - 1

    def _measure(self, job: Job, chunk: Chunk, before: float) -> None:
        sums = self.metrics.tiers[job.served.name]
        sums.add(chunk.drafted, chunk.accepted)
        if before:
            sums.observe((job.last_token - before) / (1 + chunk.accepted))
        else:
            self.metrics.ttft_s.labels(job.served.name).observe(job.ttft_s)

    def _end(self, job: Job) -> None:
        if job.ended:
            return
        job.ended = True
        if job.live is not None:
            if job.stream is not None:
                job.stream.close()
            broken = job.error is not None and job.error.status == 500
            self.pool.release(job.live, broken=broken)
        name, m = job.served.name, self.metrics
        if job.started:
            self.stream_s += (time.perf_counter() - job.started - self.stream_s) / 16
            m.prompt_tokens.labels(name).inc(len(job.request.tokens))
            m.cached_tokens.labels(name).inc(job.cached_tokens)
            m.completion_tokens.labels(name).inc(job.tokens)
            m.device_s.labels(name).inc(job.device_s)
        m.streams.labels(
            name, "error" if job.error else "cancelled" if job.cancelled and not job.enough else "done"
        ).inc()
        job.deliver(Ended(job.error))
        job.wake()
