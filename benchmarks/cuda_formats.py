"""Weight formats on one GPU, their speed beside their quality: `python benchmarks/cuda_formats.py (--smoke | MODEL)`.

--smoke: random weights. Compiles every kernel, checks each against its reference and rows against rows, and prints what
a token costs at 1B and 8B shapes, formats in turn. MODEL: perplexity on a fixed text and KL against bf16 as well, both
through the round's kernels. --out: a results file, written after every stage.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import statistics
import subprocess
import sys
import time
import traceback
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cuda_decode import row, write
from cuda_round import SHAPES, pass_us, round_us

from slipstream.backends.cuda.backend import CudaBackend
from slipstream.backends.cuda.weights import WEIGHTS, load, numbers
from slipstream.bench.kernels import bench_kernels, need_gpu
from slipstream.kernels.read import read_rate
from slipstream.models.checkpoint import load_checkpoint

DEVICE = torch.device("cuda")
CONTEXT = 512
POSITIONS = 1024


def random_backend(name: str, weights: str, layers: int | None = None, engine: str = "auto") -> CudaBackend:
    spec = SHAPES[name]
    spec = dataclasses.replace(spec, layers=spec.layers[: layers or len(spec.layers)])
    format, dtype = numbers(weights)
    return CudaBackend(spec, weights=load(spec, None, DEVICE, dtype, format=format), engine=engine)


def compile_all(weights: str, shapes: list[str]) -> None:
    """Fill Triton's cache with what a format needs: a round of one layer of each shape."""
    for name in shapes:
        backend = random_backend(name, weights, 1)
        round_us(backend, CONTEXT, 1, 6)
        pass_us(backend, CONTEXT, 8, 6)


def warm(shapes: list[str]) -> None:
    """Every format in a process of its own: compiling takes one core each."""
    command = [sys.executable, __file__, "--shapes", *shapes, "--compile"]
    started = [subprocess.Popen([*command, w]) for w in WEIGHTS]
    print("compiling failed for", [w for w, p in zip(WEIGHTS, started, strict=True) if p.wait()] or "none", flush=True)


def bits(weights: str) -> None:
    """Rows alone, among others and drafted: the same bits and tokens."""
    backend = random_backend("tiny", weights)
    tokens = np.random.default_rng().integers(backend.spec.vocab, size=40).astype(np.int32)
    found = []
    for sizes in ([16, 16, 8], [1] * 40, [3, 13, 8, 16]):
        cache, at, rows = backend.new_cache(128), 0, []
        for n in sizes:
            rows.append(backend.verify(cache, tokens[at : at + n]).copy())
            at += n
        found.append(np.concatenate(rows))
    same = all(np.array_equal(found[0], other) for other in found[1:])
    texts = []
    for drafts in (0, 7, 15):
        cache, prompt = backend.new_cache(256), np.tile(tokens[:6], 3)
        backend.prefill(cache, prompt[:-1])
        rounds = backend.rounds(cache, prompt, temperature=0.8, top_k=0, top_p=1.0, min_p=0.0, seed=3, drafts=drafts,
                                limit=100, stop_token_ids=())  # fmt: skip
        texts.append([t for r in rounds for t in r.tokens])
    drafted = texts[0] == texts[1] == texts[2]
    row(f"format-{weights}-exact", f"{weights}: bits of rows in any company and texts with any drafts are the same",
        [float(same and drafted and np.isfinite(found[0]).all())], "fraction")  # fmt: skip


def kernels(name: str, weights: str) -> None:
    """Each kernel against its reference, then its time."""
    report = bench_kernels(SHAPES[name], weights, CONTEXT)
    for k in report.kernels:
        print(f"  {name} {weights:9} {k.name:20} {k.us:7.1f} us {k.bytes_per_s / 1e12:5.2f} TB/s "
              f"{k.bytes_per_s / report.read_bytes_per_s:4.0%}", flush=True)  # fmt: skip


def speed(name: str, weights: str, rate: float, plain: list[float], engine: str = "auto") -> list[float]:
    backend = random_backend(name, weights, engine=engine)
    times = round_us(backend, CONTEXT, 1, 25)
    eight = statistics.median(pass_us(backend, CONTEXT, 8, 15))
    floor = backend.memory_bytes() / rate * 1e6
    took = statistics.median(times)
    label = weights if engine == "auto" else f"{weights}-{engine}"
    peer = ("auto", plain, statistics.median(plain) / took) if plain else (None, None, None)
    work = f"{label} weights, Llama-{name.upper()} shapes, random, one token, context {CONTEXT}"
    row(f"format-{label}-{name}", f"{work}; {floor / took:.0%} of the floor, 8 rows {eight:.0f} us", times, "us", *peer)
    return times


def real(path: str) -> None:
    """Speed, perplexity and KL of every format of one model."""
    checkpoint = load_checkpoint(path)
    texts = files("slipstream.bench").joinpath("texts")
    text = "".join(texts.joinpath(f"{name}.txt").read_text("utf-8") for name in ("lighthouse", "minutes", "inventory"))
    tokens = np.array(checkpoint.tokenizer.encode(text, bos=True)[: POSITIONS + 1], np.int32)
    expected: torch.Tensor | None = None
    for weights in ("bf16", *(w for w in WEIGHTS if w != "bf16")):
        backend = CudaBackend(checkpoint.spec, checkpoint.tensors, format=weights)
        times = round_us(backend, CONTEXT, 1, 30)
        cache, parts = backend.new_cache(len(tokens) + 16), []
        for i in range(0, len(tokens) - 1, 16):
            logits = torch.from_numpy(backend.verify(cache, tokens[i : min(i + 16, len(tokens) - 1)]).copy()).to(DEVICE)
            parts.append(logits.double().log_softmax(-1))
        logs = torch.cat(parts)
        if expected is None:
            expected = logs
        following = torch.from_numpy(tokens[1:]).long().to(DEVICE)
        ppl = float((-logs.gather(1, following[:, None]).mean()).exp())
        kl = float((expected.exp() * (expected - logs)).sum(-1).mean())
        size = backend.memory_bytes() / 1e6
        name = Path(path).stem.lower()
        row(f"format-{weights}-us", f"{name}, {weights} weights, {size:.0f} MB a pass, one token", times, "us")
        row(f"format-{weights}-ppl", f"{name}, {weights}: perplexity of {len(following)} tokens", [ppl], "perplexity")
        row(f"format-{weights}-kl", f"{name}, {weights}: KL of bf16 from it, nats a token", [kl], "KL")
        del backend
        gc.collect()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["1b", "8b"])
    parser.add_argument("--compile", choices=WEIGHTS, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default="")
    args = parser.parse_args()
    if args.compile:
        compile_all(args.compile, [*args.shapes, "tiny"])
        return
    if not args.smoke and not args.model:
        parser.error("name a model, or --smoke")
    need_gpu("this benchmark")
    begun = time.time()

    def stage(run: Any, *arguments: Any) -> Any:
        try:
            return run(*arguments)
        except Exception:
            traceback.print_exc()  # the others still run: the machine is borrowed
        finally:
            gc.collect()
            torch.cuda.empty_cache()
            if args.out:
                write(args.out, args.commit)
            print(f"{time.time() - begun:.0f} s", flush=True)

    if args.smoke:
        stage(warm, args.shapes)
        for weights in WEIGHTS:
            stage(bits, weights)
        rate = read_rate(DEVICE)
        print(f"memory reads {rate / 1e12:.2f} TB/s", flush=True)
        for name in args.shapes:
            plain = stage(speed, name, "auto", rate, [])
            for weights in WEIGHTS[1:]:
                stage(speed, name, weights, rate, plain)
            stage(speed, name, "auto", rate, plain, "chain")
        for weights in WEIGHTS[1:]:
            stage(kernels, args.shapes[0], weights)
    if args.model:
        stage(real, args.model)


if __name__ == "__main__":
    main()
