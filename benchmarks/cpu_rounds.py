"""What a round costs by its rows on this CPU: `python benchmarks/cpu_rounds.py` writes results/cpu_rounds.json.

Passes over 1 to 16 rows of the built-in model after 256 tokens, from Python, in turns, so that all meet one machine.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np

from slipstream import LLM
from slipstream.bench import results
from slipstream.bench.machine import cores, read_bandwidth
from slipstream.bench.measure import median

HISTORY, TURNS = 256, 60


def main() -> None:
    facts = {"packages": ("numpy",), "load_before": os.getloadavg()[0], "read_gb_s": read_bandwidth(cores()) / 1e9}
    llm = LLM("smollm2", backend="cpu", threads=cores(), context=512)
    tokens = np.arange(1000, 1000 + HISTORY, dtype=np.int32)  # costs do not depend on what the tokens say
    cache = llm.backend.new_cache(512)
    llm.backend.prefill(cache, tokens)
    took: dict[int, list[float]] = {rows: [] for rows in (1, 2, 4, 8, 16)}
    for _ in range(TURNS):
        for rows, samples in took.items():
            started = time.perf_counter()
            llm.backend.verify(cache, tokens[:rows])
            samples.append((time.perf_counter() - started) * 1e3)
            cache.rewind(HISTORY)
    llm.close()
    one = median(took[1])
    made = [
        results.Row(
            f"cpu-round{rows}",
            f"a pass over {rows} row{'s' if rows > 1 else ''} of SmolLM2 after {HISTORY} tokens",
            median(samples),
            "ms",
            *(("1 row", one, median(samples) / one) if rows > 1 else ()),
            samples=samples,
        )
        for rows, samples in took.items()
    ]
    for row in made:
        print(results.line(row))
    path = results.write(Path(__file__).parent / "results", "cpu_rounds", made, **facts)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
