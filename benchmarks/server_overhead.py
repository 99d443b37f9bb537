"""What HTTP, scheduling and JSON cost a stream: the server against the same engine in this process.

    python benchmarks/server_overhead.py [--write] [--pairs N]

Limits: server-decode ratio >= 0.97 (tok/s of a stream over those in process), server-ttft < 3 ms more than in process,
server-round at 4,000 tok/s, where the engine takes 2 ms for each round of 8 tokens, ratio >= 0.95.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from slipstream import LLM, SamplingParams
from slipstream.bench.results import Row, line, write
from slipstream.serve.config import Config
from slipstream.serve.run import SWITCH_S, make_server

PROMPT = [{"role": "user", "content": "Write a long story about a lighthouse keeper and the sea."}]
TOKENS = 192
FAST_TOKENS, FAST_ROUND_TOKENS, FAST_ROUND_S = 4096, 8, 0.002


@contextmanager
def served(llm: LLM) -> Iterator[int]:
    """The port of a server for `llm` in a thread, as `slipstream serve` would run it."""
    sys.setswitchinterval(SWITCH_S)
    server, _ = make_server(llm, Config(port=0))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()


def over_http(port: int, tokens: int, asks: int = 1) -> list[tuple[float, float]]:
    """(TTFT in seconds, tok/s after it) of streams, one after the other on one connection, timed where bytes arrive."""
    link = http.client.HTTPConnection("127.0.0.1", port)
    link.connect()
    measured = [exchange(link, tokens) for _ in range(asks)]
    link.close()
    return measured


def exchange(link: http.client.HTTPConnection, tokens: int) -> tuple[float, float]:
    body = {
        "model": "default", "messages": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    started = time.perf_counter()
    link.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = link.getresponse()
    first = last = 0.0
    first_tokens, events = 0, []
    while text := answer.readline():
        if not text.startswith(b"data: {"):
            continue
        last = time.perf_counter()
        events.append(text)
        if not first and b'"tokens":' in text:
            first, first_tokens = last, json.loads(text[6:])["slipstream"]["tokens"]
        if b'"finish_reason":"length"' in text:
            break
    answer.read()
    total = json.loads(events[-1][6:])["slipstream"]
    assert total["rounds"]
    return first - started, (tokens - first_tokens) / (last - first) if last > first else 0.0


def in_process(llm: LLM, tokens: int) -> tuple[float, float]:
    """The same of a stream of the engine, in a session of its own."""
    with llm.session() as session:
        started = time.perf_counter()
        first = last = 0.0
        first_tokens = 0
        for chunk in session.stream_chat(PROMPT, SamplingParams(max_tokens=tokens, ignore_eos=True)):
            last = time.perf_counter()
            if not first:
                first, first_tokens = last, len(chunk.pieces)
        return first - started, (tokens - first_tokens) / (last - first)


def client_process(port: int, tokens: int, asks: int = 1) -> list[tuple[float, float]]:
    """`over_http` in a process of its own, so that reading does not hold this one's interpreter."""
    code = f"import json, server_overhead as s; print(json.dumps(s.over_http({port}, {tokens}, {asks})))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
    )
    return [(ttft, rate) for ttft, rate in json.loads(done.stdout)]


def measure(pairs: int) -> list[Row]:
    llm = LLM("smollm2", backend="cpu", context=2048)
    server: list[tuple[float, float]] = []
    engine: list[tuple[float, float]] = []
    with served(llm) as port:
        client_process(port, 16)
        in_process(llm, 16)
        for _ in range(pairs):  # one after the other, so that both see the same machine; the prompt is new to neither
            engine.append(in_process(llm, TOKENS))
            server += client_process(port, TOKENS)
        added_ms = []
        with llm.session() as session:
            for _ in range(3):  # blocks of the two in turn: what else runs here changes slowly
                ttft_cached(session)
                own = [ttft_cached(session) for _ in range(pairs)]
                over = [ttft for ttft, _ in client_process(port, 2, 1 + pairs)[1:]]
                added_ms += [1e3 * (value - med(own)) for value in over]
    fast_server, fast_engine = fast(max(3, pairs // 2))
    return [
        compared("server-decode", f"tok/s of a stream, SmolLM2, {TOKENS} tokens", rates(server), rates(engine)),
        Row(
            "server-ttft",
            "added to the first token of a cached prompt, on an open connection",
            round(med(added_ms), 3),
            "ms",
            samples=[round(value, 3) for value in added_ms],
        ),
        compared("server-4000", "tok/s of a stream whose rounds take 2 ms for 8 tokens", fast_server, fast_engine),
    ]


def ttft_cached(session: object) -> float:
    started = time.perf_counter()
    stream = session.stream_chat(PROMPT, SamplingParams(max_tokens=2, ignore_eos=True))  # type: ignore[attr-defined]
    next(stream)
    taken = time.perf_counter() - started
    list(stream)
    return taken


def fast(count: int) -> tuple[list[float], list[float]]:
    """tok/s at the pace of a GPU: every round waits on a device, and all its drafts are right."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    from fakes import fake_llm

    llm = fake_llm(PacedBackend(), drafter="auto", drafts=7, context=8192)
    server, engine = [], []
    with served(llm) as port:
        client_process(port, 64)
        for _ in range(count):
            engine.append(in_process(llm, FAST_TOKENS)[1])
            server += rates(client_process(port, FAST_TOKENS))
    return server, engine


class PacedBackend:
    """Counts up through the letters, which the suffix drafter soon guesses; a pass takes its time without the GIL."""

    name, row_invariant = "paced", True

    def __init__(self) -> None:
        from fakes import VOCAB, fake_spec

        self.spec = fake_spec(8192)
        self._rows = np.full((VOCAB, VOCAB), -9.0, np.float32)
        for token in range(VOCAB):
            self._rows[token, 97 + (token - 96) % 26] = 9.0
        self._next = 0.0

    def new_cache(self, capacity: int) -> object:
        from fakes import FakeCache

        return FakeCache(capacity, None)

    def prefill(self, cache: object, tokens: np.ndarray) -> None:
        cache.append(tokens)  # type: ignore[attr-defined]

    def verify(self, cache: object, tokens: np.ndarray) -> np.ndarray:
        cache.append(tokens)  # type: ignore[attr-defined]
        time.sleep(FAST_ROUND_S)
        return self._rows[tokens]

    def memory_bytes(self) -> int:
        return 1


def compared(id: str, work: str, ours: list[float], peer: list[float]) -> Row:
    """A row against the engine in process; the ratio is the median of the pairs'."""
    ratio = med([a / b for a, b in zip(ours, peer, strict=True)])
    samples = [round(value, 2) for value in ours]
    return Row(id, work, round(med(ours), 2), "tok/s", "in process", round(med(peer), 2), round(ratio, 4), samples)


def rates(measured: list[tuple[float, float]]) -> list[float]:
    return [rate for _, rate in measured]


def med(values: list[float]) -> float:
    return statistics.median(values)


def main(options: SimpleNamespace) -> None:
    rows = measure(options.pairs)
    for row in rows:
        print(line(row))
    if options.write:
        packages = ("numpy", "fastapi", "starlette", "uvicorn")
        print(write(Path(__file__).parent / "results", "server_overhead", rows, packages=packages))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--pairs", type=int, default=9)
    main(SimpleNamespace(**vars(parser.parse_args())))
