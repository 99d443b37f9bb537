"""The persistent kernel against the chain on a GPU: `python benchmarks/cuda_check.py [shapes] [--length n]`.

Small enough for `compute-sanitizer --tool memcheck|racecheck`.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from cuda_round import SHAPES, shape

from slipstream.backends.cuda.backend import CudaBackend
from slipstream.backends.cuda.weights import load

CHECKED = {
    "tiny": SHAPES["tiny"],
    "wide": shape(2, 2240, 4096, 16, 4, 128, 1024, False),
    "smollm2": SHAPES["smollm2"],
}


def check(name: str, length: int) -> None:
    spec = CHECKED[name]
    weights = load(spec, None, torch.device("cuda"))
    tokens = np.random.default_rng().integers(spec.vocab, size=length).astype(np.int32)
    results = {}
    for engine, splits in (("chain", [16]), ("persistent", [16]), ("persistent", [1, 3, 8, 5, 16])):
        backend = CudaBackend(spec, weights=weights, engine=engine)
        cache, at, rows, i = backend.new_cache(length + 16), 0, [], 0
        while at < length:
            n = min(splits[i % len(splits)], length - at)
            rows.append(backend.verify(cache, tokens[at : at + n]).copy())
            at, i = at + n, i + 1
        results[engine, len(splits)] = np.concatenate(rows)
        print(name, engine, splits, "done", flush=True)
    a, b, c = results.values()
    print(name, length, "relative difference to the chain", np.linalg.norm(a - b) / np.linalg.norm(a),
          "bits equal in any company", np.array_equal(b, c), flush=True)  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shapes", nargs="*", default=list(CHECKED))
    parser.add_argument("--length", type=int, default=700)
    args = parser.parse_args()
    for chosen in args.shapes:
        check(chosen, args.length)
