"""What HTTP, scheduling and JSON cost a stream: the server against the same engine in this process.

    python benchmarks/server_overhead.py [--write] [--pairs N]

Limits: server-decode ratio >= 0.97 (tok/s of a stream over those in process), server-ttft < 3 ms more than in process,
server-4000, where the engine takes 2 ms for each round of 8 tokens, ratio >= 0.95.

SmolLM2 runs without drafts: each side would learn from the other's text, and their rounds would differ. The client is a
process on the same cores that only receives; it reads what came once all has come.
"""

from __future__ import annotations

import argparse
import json
import re
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from slipstream import LLM, SamplingParams, Session
from slipstream.bench.results import Row, line, write
from slipstream.serve.config import Config
from slipstream.serve.run import SWITCH_S, make_server

PROMPT = [{"role": "user", "content": "Write a long story about a lighthouse keeper and the sea."}]
TOKENS = 128
FAST_TOKENS, FAST_ROUND_TOKENS, FAST_ROUND_S = 4096, 8, 0.002

Timed = tuple[float, float]
"""TTFT in seconds, and tok/s after the first arrival."""


@contextmanager
def served(llm: LLM, drafter: str) -> Iterator[Callable[[int], Timed]]:
    """Streams of so many tokens, from a server in a thread, run as `slipstream serve` would, to another process."""
    sys.setswitchinterval(SWITCH_S)
    server, _ = make_server(llm, Config(port=0, drafter=drafter))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    command = [sys.executable, __file__, "--client", str(port)]
    client = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert client.stdin is not None
    assert client.stdout is not None
    asks, answers = client.stdin, client.stdout

    def ask(tokens: int) -> Timed:
        print(tokens, file=asks, flush=True)
        ttft_s, rate = json.loads(answers.readline())
        return ttft_s, rate

    try:
        yield ask
    finally:
        asks.close()
        client.wait()
        server.should_exit = True
        thread.join()


def be_client(port: int) -> None:
    """Ask for as many tokens as each line of standard input says, on one connection."""
    with socket.create_connection(("127.0.0.1", port)) as link:
        for text in sys.stdin:
            print(json.dumps(over_http(link, int(text))), flush=True)


def over_http(link: socket.socket, tokens: int) -> Timed:
    body = json.dumps(
        {
            "model": "default", "messages": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True},
        }
    )  # fmt: skip
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    arrived: list[tuple[float, bytes]] = []
    started = time.perf_counter()
    link.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
    while not arrived or not arrived[-1][1].endswith(b"0\r\n\r\n"):
        part = link.recv(1 << 16)
        arrived.append((time.perf_counter(), part))
        assert part, "the server left"
    counts = [(at, sum(map(int, re.findall(rb'"tokens":(\d+)', part)))) for at, part in arrived]
    told = [(at, count) for at, count in counts if count]
    assert sum(count for _, count in told) == tokens, "not every token was told of, or an event came in two"
    (first, first_tokens), (last, _) = told[0], told[-1]
    return first - started, rate(tokens - first_tokens, last - first)


def in_process(session: Session, tokens: int) -> Timed:
    """The same of a stream of the engine."""
    started = time.perf_counter()
    first = last = 0.0
    first_tokens = 0
    for chunk in session.stream_chat(PROMPT, SamplingParams(max_tokens=tokens, ignore_eos=True)):
        last = time.perf_counter()
        if not first:
            first, first_tokens = last, len(chunk.pieces)
    return first - started, rate(tokens - first_tokens, last - first)


def rate(tokens: int, seconds: float) -> float:
    return tokens / seconds if seconds > 0 else 0.0


def in_turns(llm: LLM, ask: Callable[[int], Timed], tokens: int, pairs: int) -> list[tuple[Timed, Timed]]:
    """(server, engine) of streams, one after the other and first in turn, so that both see the same machine."""
    measured = []
    with llm.session() as session:
        for i in range(-2, pairs):  # two that do not count: prompts are read, caches fill
            if i % 2:
                engine = in_process(session, tokens)
                pair = ask(tokens), engine
            else:
                pair = ask(tokens), in_process(session, tokens)
            measured.append(pair)
    return measured[2:]


def measure(pairs: int) -> list[Row]:
    llm = LLM("smollm2", backend="cpu", context=2048, drafter="none")
    with served(llm, "none") as ask:
        decode = in_turns(llm, ask, TOKENS, pairs)
        first = in_turns(llm, ask, 2, 4 * pairs)
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    from fakes import fake_llm

    llm = fake_llm(PacedBackend(), drafter="auto", drafts=7, context=8192)
    with served(llm, "auto") as ask:
        fast = in_turns(llm, ask, FAST_TOKENS, max(3, pairs // 4))
    added_ms = [1e3 * (ours[0] - engine[0]) for ours, engine in first]
    return [
        compared("server-decode", f"tok/s of a stream, SmolLM2 without drafts, {TOKENS} tokens", decode),
        Row(
            "server-ttft",
            "added to the first token of a cached prompt, on an open connection",
            round(statistics.median(added_ms), 3),
            "ms",
            samples=[round(value, 3) for value in added_ms],
        ),
        compared("server-4000", "tok/s of a stream whose rounds take 2 ms for 8 tokens", fast),
    ]


def compared(id: str, work: str, measured: list[tuple[Timed, Timed]]) -> Row:
    """A row against the engine in process; the ratio is the median of the pairs'."""
    ours, peer = ([timed[1] for timed in side] for side in zip(*measured, strict=True))
    ratios = sorted(a / b for a, b in zip(ours, peer, strict=True))
    middle, off = len(ratios) // 2, round(len(ratios) ** 0.5)  # in ranks: the median's 95% interval
    low, high = ratios[max(0, middle - off)], ratios[min(middle + off, len(ratios) - 1)]
    print(f"{id}: {len(ratios)} pairs, 95% interval of the ratio {low:.4f} to {high:.4f}")
    med, samples = statistics.median, [round(value, 2) for value in ours]
    return Row(
        id, work, round(med(ours), 2), "tok/s", "in process", round(med(peer), 2), round(med(ratios), 4), samples
    )


class PacedBackend:
    """Counts up through the letters, which the suffix drafter soon guesses; a pass takes its time without the GIL."""

    name, row_invariant = "paced", True

    def __init__(self) -> None:
        from fakes import VOCAB, fake_spec

        self.spec = fake_spec(8192)
        self._rows = np.full((VOCAB, VOCAB), -9.0, np.float32)
        for token in range(VOCAB):
            self._rows[token, 97 + (token - 96) % 26] = 9.0

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


def main(options: SimpleNamespace) -> None:
    if options.client:
        be_client(options.client)
        return
    rows = measure(options.pairs)
    for row in rows:
        print(line(row))
    if options.write:
        packages = ("numpy", "fastapi", "starlette", "uvicorn")
        print(write(Path(__file__).parent / "results", "server_overhead", rows, packages=packages))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--client", type=int, metavar="PORT", help=argparse.SUPPRESS)
    main(SimpleNamespace(**vars(parser.parse_args())))
