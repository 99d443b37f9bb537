"""Device time of a round on one GPU: `python benchmarks/cuda_round.py smollm2 [--engine chain] [--no-pdl] [--rows 8]`.

Random weights of the named shapes unless `--real`; the text starts at `--context`. Prints one JSON line a variant.
"""

from __future__ import annotations

import argparse
import json
import statistics

import numpy as np
import torch

from slipstream.backends.cuda import rounds
from slipstream.backends.cuda.backend import CudaBackend
from slipstream.backends.cuda.weights import load
from slipstream.kernels.launch import CAPACITY, LEFT, ROUND, ROWS, RUN_ROWS, START
from slipstream.models.spec import Attention, FeedForward, Layer, ModelSpec, Rope


def shape(layers: int, hidden: int, inner: int, heads: int, kv_heads: int, d: int, vocab: int, tied: bool) -> ModelSpec:
    rope = Rope(tuple(1e5 ** (-2 * i / d) for i in range(d // 2)))
    layer = Layer(Attention(heads, kv_heads, d, rope, d**-0.5), FeedForward(inner))
    return ModelSpec("llama", vocab, hidden, (layer,) * layers, 1e-5, 8192, tied)


SHAPES = {
    "tiny": shape(3, 128, 256, 4, 2, 32, 512, True),
    "smollm2": shape(30, 576, 1536, 9, 3, 64, 49152, True),
    "1b": shape(16, 2048, 8192, 32, 8, 64, 128256, True),
    "8b": shape(32, 4096, 14336, 32, 8, 128, 128256, False),
}


def round_us(backend: CudaBackend, context: int, rows: int, samples: int = 40, kind: str = "rounds") -> list[float]:
    """Microseconds a round of `rows` rows (sampling and acceptance included), one sample a graph of UNROLLED."""
    cache = backend.new_cache(context + 8 * ROWS * rounds.UNROLLED)
    cache.keys.normal_()
    cache.values.normal_()
    program = backend._program(cache, kind, rows)
    times = []
    for _ in range(samples):
        slots = {
            START: context,
            RUN_ROWS: rows,
            LEFT: 1 << 20,
            ROUND: backend.buffers.next_round,
            CAPACITY: cache.capacity,
        }
        backend._upload(cache, slots, np.arange(rows, dtype=np.int32) + 5)
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        backend.buffers.next_round += rounds.UNROLLED  # the ring's tags never repeat
        torch.cuda._sleep(200_000)  # the host gets ahead, so that only device time lies between the events
        before.record()
        program()
        after.record()
        after.synchronize()
        times.append(before.elapsed_time(after) * 1e3 / rounds.UNROLLED)
    return times[5:]


def pass_us(backend: CudaBackend, context: int, rows: int, samples: int = 30) -> list[float]:
    """Microseconds a pass with logits over `rows` rows, one sample a replay."""
    cache = backend.new_cache(context + 64)
    cache.keys.normal_()
    cache.values.normal_()
    backend._upload(cache, {START: context, RUN_ROWS: rows}, np.arange(rows, dtype=np.int32) + 5)
    program = backend._program(cache, "verify", rows)
    times = []
    for _ in range(samples):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(200_000)
        before.record()
        for _ in range(4):
            program()
        after.record()
        after.synchronize()
        times.append(before.elapsed_time(after) * 1e3 / 4)
    return times[5:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shapes", nargs="+", choices=SHAPES)
    parser.add_argument("--engine", nargs="+", default=["auto"])
    parser.add_argument("--no-pdl", action="store_true")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--context", type=int, default=512)
    args = parser.parse_args()
    for name in args.shapes:
        weights = load(SHAPES[name], None, torch.device("cuda"))
        for engine in args.engine:
            backend = CudaBackend(SHAPES[name], weights=weights, engine=engine, pdl=not args.no_pdl)
            for rows in args.rows:
                passes = pass_us(backend, args.context, rows)
                line = {"shape": name, "engine": engine, "pdl": not args.no_pdl, "rows": rows,
                        "pass_us": round(statistics.median(passes), 1),
                        "TB/s": round(backend.memory_bytes() / statistics.median(passes) / 1e6, 3)}  # fmt: skip
                if rows == 1:
                    line["round_us"] = round(statistics.median(round_us(backend, args.context, 1)), 1)
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
