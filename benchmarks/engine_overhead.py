"""What the engine itself costs, without a model: drafting at 32k tokens of context, and Python a round.

    python benchmarks/engine_overhead.py [--write]

Limits: draft-round < 20 us, draft-index < 50 ms, round-overhead < 60 us.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from slipstream.backends.base import MAX_DRAFTS
from slipstream.bench.results import Row, write
from slipstream.drafters import Memory
from slipstream.drafters.none import NoDrafter
from slipstream.drafters.suffix import SuffixDrafter, TextIndex
from slipstream.engine.cost import RoundCost
from slipstream.engine.request import SamplingParams
from slipstream.engine.round import host_rounds
from slipstream.engine.sampling import Sampler

CONTEXT = 32_768


class Constant:
    """A backend and cache that do nothing: what is left is the engine."""

    length = 100
    logits = np.zeros((1 + MAX_DRAFTS, 64), np.float32)

    def verify(self, cache: object, tokens: object) -> np.ndarray:
        return self.logits

    def rewind(self, length: int) -> None:
        pass


def words(count: int, seed: int) -> list[int]:
    """Zipf-like tokens with phrases that come back, as text has."""
    rng = random.Random(seed)
    ranks = [int(rng.paretovariate(1.0)) % 49_000 for _ in range(count)]
    for _ in range(count // 200):
        a, b, n = rng.randrange(count - 50), rng.randrange(count - 50), rng.randrange(3, 40)
        ranks[b : b + n] = ranks[a : a + n]
    return ranks


def drafting_us(truth: list[int], prompt: list[int], memory: Memory) -> list[float]:
    """Time of propose and observe in each round of decoding `truth` after `prompt`."""
    drafter = SuffixDrafter(RoundCost(), memory)
    drafter.begin(prompt)
    at, samples = 0, []
    while at < len(truth) - 8:
        started = time.perf_counter()
        draft = drafter.propose(7)
        middle = time.perf_counter()
        accepted = 0
        while accepted < len(draft) and draft[accepted] == truth[at + accepted]:
            accepted += 1
        committed = truth[at : at + accepted + 1]
        resumed = time.perf_counter()
        drafter.observe(committed, len(draft), accepted)
        samples.append((middle - started + time.perf_counter() - resumed) * 1e6)
        at += len(committed)
    return samples


def index_ms(prompt: list[int]) -> list[float]:
    def build() -> None:
        TextIndex().extend(prompt)

    return [timed(build) * 1e3 for _ in range(7)]


def round_us(rounds: int = 2000) -> list[float]:
    """Greedy rounds of one row on the backend that does nothing."""

    def run() -> None:
        backend = Constant()
        sampler = Sampler(SamplingParams(), 0, (), 64)
        loop = host_rounds(
            backend, backend, 1, drafter=NoDrafter(), sampler=sampler, drafts=7, limit=rounds, stop_token_ids=(),
            cost=RoundCost(),
        )  # fmt: skip
        for _ in loop:
            pass

    return [timed(run) / rounds * 1e6 for _ in range(7)]


def timed(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def measure() -> list[Row]:
    prompt = words(CONTEXT, 0)
    memory = Memory()
    for seed in range(8):
        earlier = TextIndex()
        earlier.extend(words(4096, 100 + seed))
        memory.add(earlier)
    novel = drafting_us(words(4000, 1), prompt, memory)
    copied = drafting_us(prompt[5000:13_000], prompt, Memory())
    index, round_time = index_ms(prompt), round_us()
    rows = [
        ("draft-round-novel", "propose + observe, new text after 32k tokens, 8 earlier texts", novel, "us"),
        ("draft-round-copy", "propose + observe, 8 tokens a round copied from 32k tokens", copied, "us"),
        ("draft-index", "index of a prompt of 32k tokens", index, "ms"),
        ("round-overhead", "greedy round on a backend that does nothing, no drafter", round_time, "us"),
    ]
    return [
        Row(id, work, round(statistics.median(samples), 2), unit, samples=[round(s, 2) for s in spread(samples)])
        for id, work, samples, unit in rows
    ]


def spread(samples: list[float], count: int = 20) -> list[float]:
    """At most `count` or so of the samples, evenly taken."""
    return samples[:: max(1, len(samples) // count)]


if __name__ == "__main__":
    rows = measure()
    for row in rows:
        print(f"{row.id:20} {row.value:8.2f} {row.unit}   {row.work}")
    if "--write" in sys.argv:
        print(write(Path(__file__).parent / "results", "engine_overhead", rows, packages=("numpy",)))
