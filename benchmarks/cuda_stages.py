"""Where a pass of the persistent kernel spends its time: `python benchmarks/cuda_stages.py smollm2 [--rows 8]`.

For every stage of a layer, in clocks: median over the blocks that take part and the layers of the time spent waiting
for input and of the time spent on the stage's own work, and the time the slowest block took.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from cuda_round import SHAPES

from slipstream.backends.cuda.backend import CudaBackend
from slipstream.kernels.launch import RUN_ROWS, START

STAGES = ("qkv", "attention", "output", "gate_up", "down")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--context", type=int, default=512)
    args = parser.parse_args()
    backend = CudaBackend(SHAPES[args.shape], engine="persistent")
    cache = backend.new_cache(args.context + 64)
    layers, blocks = len(backend.spec.layers), backend.pass_.blocks
    backend.pass_.profile = profile = torch.zeros(blocks * (layers * 16 + 2), dtype=torch.int64, device="cuda")
    for _ in range(3):
        backend._upload(cache, {START: args.context, RUN_ROWS: args.rows}, np.arange(args.rows, dtype=np.int32) + 5)
        profile.zero_()
        backend._program(cache, "verify", args.rows)()
    flat = profile.cpu().numpy().astype(float)
    t, head = flat[: blocks * layers * 16].reshape(blocks, layers, 16), flat[blocks * layers * 16 :].reshape(blocks, 2)
    t[t == 0] = np.nan
    # Stamps: 0 start, 1 qkv input, 2 qkv done, 3 attention done, 4 and 5 output, 6 and 7 gate_up, 8 and 9 down, 10 end
    print("layer, median clocks", np.nanmedian(t[:, 1:, 0] - t[:, :-1, 0]))
    print(
        "head, median clocks waiting and working",
        np.median(head[:, 0] - t[:, -1, 10]),
        np.median(head[:, 1] - head[:, 0]),
    )
    last = t[:, 1:-1, 0]
    for name, (ready, done) in zip(STAGES, ((1, 2), (None, 3), (4, 5), (6, 7), (8, 9)), strict=True):
        if ready is None:
            took = t[:, 1:-1, 3] - np.where(np.isnan(t[:, 1:-1, 2]), last, t[:, 1:-1, 2])
            print(f"{name:10} whole {np.nanmedian(took):6.0f} slowest 5% {np.nanpercentile(took, 95):6.0f} "
                  f"max {np.nanmax(took):6.0f}")  # fmt: skip
            inside = np.diff(t[:, 1:-1, 11:14], axis=-1)
            print("  tasks: scores to parts, join:", np.nanmedian(inside, axis=(0, 1)), np.nanmax(inside, axis=(0, 1)))
            last = t[:, 1:-1, 3]
            continue
        wait, work = t[:, 1:-1, ready] - last, t[:, 1:-1, done] - t[:, 1:-1, ready]
        print(f"{name:10} wait {np.nanmedian(wait):6.0f} (least {np.nanmin(wait):5.0f}) work {np.nanmedian(work):6.0f} "
              f"max {np.nanmax(work):6.0f}")  # fmt: skip
        last = np.where(np.isnan(t[:, 1:-1, done]), last, t[:, 1:-1, done])


if __name__ == "__main__":
    main()
