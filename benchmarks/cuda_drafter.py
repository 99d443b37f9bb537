"""The block drafter in the GPU round: `python benchmarks/cuda_drafter.py --model M.gguf (--smoke | --drafter FOLDER)`.

--smoke: random weights of the shipped drafter's shape: same tokens as without, device time of a draft and of each of
its kernels, share of the round.
--drafter: the same with a trained one, then decoding of held-out prompts with and without it in turns, end to end
(prefill and host included), tokens compared. --out: a results file, written after every stage.
"""

from __future__ import annotations

import argparse
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cuda_decode import generate, row, write
from cuda_round import round_us
from cuda_sparse import graph_us

from slipstream.backends.cuda import drafter as device_drafter
from slipstream.backends.cuda import rounds
from slipstream.backends.cuda.backend import CudaBackend
from slipstream.backends.cuda.cache import CudaCache
from slipstream.bench.drafter_prompts import Task, task_prompts
from slipstream.kernels.launch import CAPACITY, RUN_ROWS, START
from slipstream.models.block_drafter import BlockDrafterConfig, BlockDrafterWeights, load_block_drafter
from slipstream.models.checkpoint import Checkpoint, load_checkpoint

DRAFTS = 7
CONTEXT = 512
TEMPERATURES = {"": 0.0, "-sampled": 0.8}


@dataclass(frozen=True)
class Random:
    """A tensor of `BlockDrafterWeights`."""

    values: np.ndarray

    def float32(self) -> np.ndarray:
        return self.values


def random_drafter(spec: Any) -> BlockDrafterWeights:
    config = BlockDrafterConfig(
        target="", fingerprint=None, vocab=spec.vocab, target_hidden=spec.hidden, target_layers=len(spec.layers),
        taps=(2, 9, 16, 23, 28), hidden=spec.hidden, layers=3, heads=9, kv_heads=3, head_dim=64, inner=1536,
        rope_theta=1e5, norm_eps=1e-5, block=1 + DRAFTS, window=512, draft_vocab=16384, markov_rank=64, candidates=16,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    tensors: dict[str, Any] = {}
    for name, shape in config.tensor_shapes().items():
        values = rng.standard_normal(shape, np.float32) * np.float32(shape[-1] ** -0.5)
        tensors[name] = Random(1 + values if "norm" in name else values)
    return BlockDrafterWeights(Path(), config, tensors, np.arange(config.draft_vocab, dtype=np.int32))


def recorded(run: Callable[[], None]) -> list[tuple[str, Callable[[], None]]]:
    """The kernels that `run` has the drafter launch, by name, each to be launched by itself."""
    names = ("block_rows", "norm_qkv", "attention", "attention_projection", "gate_up", "projection", "head",
             "candidates", "markov", "fuse")  # fmt: skip
    calls: list[tuple[str, Callable[[], None]]] = []

    def note(name: str, kernel: Callable[..., None]) -> Callable[..., None]:
        return lambda *args, **options: calls.append((name, lambda: kernel(*args, **options)))

    real = {name: getattr(device_drafter, name) for name in names}
    for name, kernel in real.items():
        setattr(device_drafter, name, note(name, kernel))
    try:
        run()
    finally:
        for name, kernel in real.items():
            setattr(device_drafter, name, kernel)
    return calls


class Bench:
    def __init__(self, checkpoint: Checkpoint, drafter: BlockDrafterWeights, prompts: int, tokens: int, repeats: int):
        self.checkpoint, self.prompts, self.tokens, self.repeats = checkpoint, prompts, tokens, repeats
        self.backend = CudaBackend(checkpoint.spec, checkpoint.tensors)
        self.backend.load_drafter(drafter)

    def encoded(self, task: Task) -> list[np.ndarray]:
        t = self.checkpoint.tokenizer
        return [np.array(t.encode(t.render_chat(p.messages)), np.int32) for p in task_prompts(task)[: self.prompts]]

    def same_tokens(self) -> None:
        """Of texts with the drafter on, the share that is the same without. Also compiles and captures everything."""
        same, drafted = [], []
        for temperature in TEMPERATURES.values():
            for prompt in [*self.encoded("chat")[:2], *self.encoded("code")[:2]]:
                plain, _, _, _ = generate(self.backend, prompt, 96, 0, (), temperature, "none")
                for name in ("block", "auto"):
                    tokens, count, _, _ = generate(self.backend, prompt, 96, DRAFTS, (), temperature, name)
                    same.append(float(tokens == plain))
                    drafted.append(len(tokens) / count)
        print("tokens a round", [round(x, 2) for x in drafted], flush=True)
        row("draft-cuda-same", "texts that are the same with the drafter on", [statistics.mean(same)], "fraction")

    def _cache(self) -> CudaCache:
        cache = self.backend.new_cache(CONTEXT + 64)
        slots = {START: CONTEXT, RUN_ROWS: 1 + DRAFTS, CAPACITY: cache.capacity}
        self.backend._upload(cache, slots, np.arange(1 + DRAFTS, dtype=np.int32) + 5)
        return cache

    def parts(self) -> None:
        """Device time of what the drafter adds to a round, by part."""
        cache, b = self._cache(), self.backend.buffers
        drafter = self.backend.drafter
        assert drafter is not None
        draft = graph_us(lambda: drafter.draft(cache, b.knobs, b.seed), 17, 20)
        row("draft-cuda-draft", f"a draft of {DRAFTS} tokens, window full", draft, "us")
        remember = graph_us(lambda: drafter.remember_rows(cache), 17, 20)
        row("draft-cuda-remember", "keys and values of a round's rows", remember, "us")
        cache.close()

    def share(self) -> None:
        plain, drafted = [], []
        for _ in range(3):
            plain += round_us(self.backend, CONTEXT, 1 + DRAFTS, 20)
            drafted += round_us(self.backend, CONTEXT, 1 + DRAFTS, 20, "drafted rounds")
        row("draft-cuda-round", f"a round of up to {1 + DRAFTS} rows; ratio: times that without a drafter",
            drafted, "us", "without", plain, statistics.median(drafted) / statistics.median(plain))  # fmt: skip
        share = 1 - statistics.median(plain) / statistics.median(drafted)
        row("draft-share", f"of such a round what the drafter takes, context {CONTEXT}", [share], "fraction")

    def kernels(self) -> None:
        cache, b = self._cache(), self.backend.buffers
        drafter = self.backend.drafter
        assert drafter is not None
        calls = recorded(lambda: drafter.draft(cache, b.knobs, b.seed))
        calls += recorded(lambda: drafter.remember_rows(cache))
        before = 0.0
        for i, (name, call) in enumerate(calls):
            alone = statistics.median(graph_us(call, 17, 20))
            upto = statistics.median(graph_us(lambda i=i: [c() for _, c in calls[: i + 1]], 17, 20))  # type: ignore
            print(f"  {name:21} {alone:6.1f} us alone, {upto - before:6.1f} us more in the chain", flush=True)
            before = upto
        print(f"{len(calls)} kernels a round, remembering included", flush=True)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            drafter.draft(cache, b.knobs, b.seed)
            torch.cuda.synchronize()
        ran = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        print(f"{len(ran)} kernels a draft, as the profiler saw them: {sorted({e.name[:40] for e in ran})}", flush=True)
        cache.close()

    def speed(self, task: Task) -> None:
        """Whole answers, prefill included, the drafters in turn."""
        prompts, stops = self.encoded(task), self.checkpoint.eos_token_ids
        for label, temperature in TEMPERATURES.items():
            rates: dict[str, list[float]] = {"none": [], "block": [], "auto": []}
            lengths: dict[str, list[float]] = {name: [] for name in rates}
            texts: dict[str, list[list[int]]] = {}
            for repeat in range(self.repeats + 1):
                for name in rates:
                    written, count = [], 0
                    begun = time.perf_counter()
                    for prompt in prompts:
                        drafts = 0 if name == "none" else DRAFTS
                        tokens, ran, _, _ = generate(
                            self.backend, prompt, self.tokens, drafts, stops, temperature, name
                        )
                        written.append(tokens)
                        count += ran
                    total = sum(map(len, written))
                    if repeat:  # the first compiles
                        rates[name].append(total / (time.perf_counter() - begun))
                        lengths[name].append(total / count)
                    texts[name] = written
            work = f"{task} prompts, {'greedy' if not temperature else f'temperature {temperature}'}, end to end"
            plain = statistics.median(rates["none"])
            for name in ("block", "auto"):
                if texts[name] != texts["none"]:
                    raise SystemExit(f"{work}: the {name} drafter changed tokens")
                id = f"{task}{label}" + ("-auto" if name == "auto" else "")
                main = "draft-cuda" if id == "chat" else f"draft-cuda-{id}"
                row(main, f"{work}, drafter {name}", rates[name], "tok/s", "no drafter", rates["none"],
                    statistics.median(rates[name]) / plain)  # fmt: skip
                row(f"draft-accept-{id}", f"{work}, drafter {name}: tokens a round", lengths[name][:1], "tok/round")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--smoke", action="store_true")
    what.add_argument("--drafter", type=Path)
    parser.add_argument("--prompts", type=int, default=6, help="of each task")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default="")
    args = parser.parse_args()
    begun = time.time()
    checkpoint: Any = load_checkpoint(args.model)
    if args.smoke:
        device_drafter.LEAST_SURVIVAL = 0.0  # random guesses are verified, too, so that a wrong one could do harm
        drafter = random_drafter(checkpoint.spec)
    else:
        drafter = load_block_drafter(args.drafter, checkpoint.spec, checkpoint.tensors)
    bench = Bench(checkpoint, drafter, args.prompts, args.tokens, args.repeats)
    print(f"loaded after {time.time() - begun:.0f} s, {rounds.UNROLLED} rounds a graph", flush=True)
    stages: list[Callable[[], None]] = [bench.same_tokens, bench.parts, bench.share]
    if args.drafter:
        stages += [lambda: bench.speed("chat"), lambda: bench.speed("code")]
    for stage in [*stages, bench.kernels]:
        try:
            stage()
        except Exception:
            traceback.print_exc()  # the others still run: the machine is borrowed
        if args.out:
            write(args.out, args.commit)
        print(f"{time.time() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
