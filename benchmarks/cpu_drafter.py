"""What the block drafter brings on this CPU: `python benchmarks/cpu_drafter.py [--drafter FOLDER] [--write]`.

With and without it, the same process on the same weights decodes the same prompts in turn, so that both meet the same
machine; a drafter that changed one token would stop the run. Figures are medians of the repeats. --write keeps them in
benchmarks/results/cpu_drafter.json.
"""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack
from functools import cached_property

import numpy as np
from cpu_decode import FOLDER, Run, compare, progress
from worker import Worker

from slipstream import LLM
from slipstream.backends.base import BlockDrafting
from slipstream.bench import results
from slipstream.bench.machine import read_bandwidth
from slipstream.bench.measure import median
from slipstream.bench.workloads import PromptSet

DRAFTS = 7


class DrafterRun(Run):
    """drafter: a folder, or `auto` for the one that ships."""

    drafter = "auto"

    @cached_property
    def ours(self) -> Worker:
        return self.stack.enter_context(Worker(self.backend, self.model, self.threads, self.drafter))


def speed(
    run: DrafterRun, id: str, work: str, set: PromptSet, tokens: int, peer: str = "none", temperature: float = 0.0
) -> results.Row:
    drafted, plain = run.decode_rates(
        [(run.ours, "auto"), (run.ours, peer)], run.prompts(set), run.length(tokens), temperature=temperature
    )
    work = f"decode, {work}, block and suffix drafters ({np.mean(drafted.acceptance):.2f} tokens a round)"
    return compare(id, work, "tok/s", drafted.samples, plain.samples, peer=f"{peer} drafter".replace("none", "no"))


def draft_ms(run: DrafterRun) -> results.Row:
    """A draft against a pass of one row, both from Python, over a context of 300 tokens."""
    llm = LLM(run.model, backend=run.backend, threads=run.threads, drafter=run.drafter, context=1024)
    backend = llm.backend
    assert isinstance(backend, BlockDrafting)
    tokens = run.prompts("copy", 1)[0][:301]
    cache = backend.new_cache(1024)
    backend.prefill(cache, np.array(tokens[:-1], np.int32))
    drafts, passes = [], []
    for _ in range(40 * run.repeats):
        started = time.perf_counter()
        backend.draft(cache, tokens[-1], temperature=0.0, seed=0, limit=DRAFTS)
        middle = time.perf_counter()
        backend.verify(cache, np.array(tokens[-1:], np.int32))
        passes.append((time.perf_counter() - middle) * 1e3)
        drafts.append((middle - started) * 1e3)
        cache.rewind(300)
    llm.close()
    work = f"a draft of {DRAFTS} tokens after 300; ratio: its share of a pass of one row"
    return results.Row("draft-cpu-ms", work, median(drafts), "ms", "one row", median(passes),
                       median(drafts) / median(passes), drafts)  # fmt: skip


def rows(run: DrafterRun) -> list[results.Row]:
    measured = []
    for id, work, set, tokens, peer, temperature in (
        ("draft-cpu", "chat prompts, greedy", "chat", 128, "none", 0.0),
        ("draft-cpu-sampled", "chat prompts, temperature 0.8", "chat", 128, "none", 0.8),
        ("draft-cpu-code", "code prompts, greedy", "code", 192, "none", 0.0),
        ("draft-cpu-suffix", "chat prompts, greedy", "chat", 128, "suffix", 0.0),
    ):
        progress(id)
        measured.append(speed(run, id, work, set, tokens, peer, temperature))
        print(results.line(measured[-1]), flush=True)
    measured.append(draft_ms(run))
    print(results.line(measured[-1]), flush=True)
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--drafter", default="auto", help="folder of a block drafter; auto is the one that ships")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="shorten the work, for trials")
    parser.add_argument("--write", action="store_true", help="keep the figures")
    options = parser.parse_args()
    with ExitStack() as stack:
        run = DrafterRun(options.model, "cpu", options.threads, options.repeats, options.scale, stack)
        run.drafter = options.drafter
        measured = rows(run)
    if options.write:
        facts = {"threads": options.threads, "read_gb_s": round(read_bandwidth(options.threads) / 1e9, 1)}
        print(f"written to {results.write(FOLDER, 'cpu_drafter', measured, packages=('numpy',), **facts)}")


if __name__ == "__main__":
    main()
