"""What the router adds to a first token: a stream through it against the same stream straight from its target.

    python benchmarks/route_overhead.py [--write] [--pairs N]

The target, a fake that answers at once, the router with its ledger on disk, and the client are three processes on
loopback; each pair of requests is sent one after the other on open connections. Limit: route-added-ttft-ms below 5 ms
at the median, whichever wires the two sides speak.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slipstream.bench.results import Row, line, write

ROOT = Path(__file__).parent.parent
CONVERSATION = [
    {"role": "user" if i % 2 == 0 else "assistant", "content": f"Message {i}. " + "All work and no play. " * 40}
    for i in range(41)
]


@contextmanager
def process(code: str) -> Iterator[int]:
    """The port that a Python process prints."""
    paths = f"import sys; sys.path.insert(0, {str(ROOT / 'tests' / 'route')!r})\n"
    child = subprocess.Popen([sys.executable, "-c", paths + code], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    try:
        yield int(child.stdout.readline())
    finally:
        child.kill()
        child.wait()


def fake(wire: str) -> str:
    return f"""
from upstreams import Fake, running
import time
with running(Fake({wire!r}).app()) as url:
    print(url.rpartition(":")[2], flush=True)
    time.sleep(3600)
"""


def router(port: int, wire: str, folder: str) -> str:
    return f"""
from pathlib import Path
from upstreams import Fake, routing, table
import time
target = table("a", Fake({wire!r}, url="http://127.0.0.1:{port}"))
with routing(target + '[routes.auto]\\npolicy = "fixed"\\n', Path({folder!r})) as running:
    print(running.url.rpartition(":")[2], flush=True)
    time.sleep(3600)
"""


def ttft_s(link: http.client.HTTPConnection, body: bytes, path: str) -> float:
    """From the request to the first token, timed where bytes arrive; then the rest is read."""
    started = time.perf_counter()
    link.request("POST", path, body, {"Content-Type": "application/json"})
    answer = link.getresponse()
    assert answer.status == 200, answer.read()
    while text := answer.readline():
        if b"hmm" in text:
            break
    taken = time.perf_counter() - started
    answer.read()
    return taken


def added_ms(wire: str, pairs: int) -> list[float]:
    """Milliseconds, a pair each: OpenAI Chat at the client, `wire` at the target."""
    path = "/v1/chat/completions"
    direct_path = {"anthropic": "/v1/messages"}.get(wire, path)
    body = json.dumps({"model": "auto", "messages": CONVERSATION, "max_tokens": 64, "stream": True}).encode()
    with (
        tempfile.TemporaryDirectory() as folder,
        process(fake(wire)) as port,
        process(router(port, wire, folder)) as routed,
    ):
        direct, through = (http.client.HTTPConnection("127.0.0.1", one) for one in (port, routed))
        found = []
        for i in range(pairs + 10):
            own = ttft_s(direct, body, direct_path)
            over = ttft_s(through, body, path)
            if i >= 10:
                found.append(1e3 * (over - own))
        return found


def measure(pairs: int) -> list[Row]:
    same, other = added_ms("openai-chat", pairs), added_ms("anthropic", pairs)
    size = len(json.dumps(CONVERSATION)) // 1000
    return [
        Row(id, f"added to the first token, {size} kB of conversation, {work}", round(statistics.median(ms), 3), "ms",
            samples=[round(value, 3) for value in ms])
        for id, work, ms in (
            ("route-added-ttft-ms", "OpenAI Chat on both sides", same),
            ("route-added-ttft-translated-ms", "OpenAI Chat to Anthropic", other),
        )
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--pairs", type=int, default=200)
    options = parser.parse_args()
    rows = measure(options.pairs)
    for row in rows:
        print(line(row))
    if options.write:
        write(Path(__file__).parent / "results", "route_overhead", rows, packages=("httpx", "starlette", "uvicorn"))


if __name__ == "__main__":
    main()
