"""Sparse models on one GPU: `python benchmarks/cuda_sparse.py check`, or `... bench OUT_FOLDER [model ...]`.

check: small models with every option against the float64 reference, and the bits of rows alone and in company.
bench: a pass over random weights of the true sizes (they differ by layer and expert, so that no cache helps), its floor
from the bytes it must read with the experts that were hit, and each kernel by itself. Nothing is timed unless `check`
passed in the same process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slipstream.backends.cuda.sparse import SparseCache, SparsePass, _always, load, random_weights, threads
from slipstream.backends.cuda.sparse_weights import BF16, FP8, MXFP4
from slipstream.kernels.launch import ROWS, RUN_ROWS, START
from slipstream.models.reference import Reference
from slipstream.models.spec import Attention, Experts, FeedForward, Layer, ModelSpec, Rope, WeightTensor
from slipstream.models.tensors import BlockScaled, e4m3_values

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


class Held(WeightTensor):
    """A tensor in memory: its stored bytes and its values."""

    def __init__(self, values: np.ndarray, raw: np.ndarray, format: str) -> None:
        self.values, self.bytes, self.format, self.shape = values, raw, format, values.shape

    def raw(self) -> np.ndarray:
        return self.bytes

    def float32(self) -> np.ndarray:
        return self.values


def held(shape: tuple[int, ...], format: str, rng: np.random.Generator) -> WeightTensor:
    scale = shape[-1] ** -0.5 if len(shape) == 2 else 0.1
    if format == "F8_E4M3":
        raw = rng.integers(0, 255, shape, np.uint8)
        raw[raw & 127 == 127] = 3
        blocks = (scale / 110 * rng.uniform(0.5, 2, [n // 128 for n in shape])).astype(np.float32)
        return BlockScaled(Held(e4m3_values()[raw], raw, format), Held(blocks, blocks, "F32"))
    if format == "MXFP4":
        n, k = shape
        codes = rng.integers(0, 16, (n, k // 32, 32), np.uint8)
        exponents = (127 + round(np.log2(scale / 2.9)) + rng.integers(-1, 2, (n, k // 32, 1))).astype(np.uint8)
        values = E2M1[codes] * np.exp2(exponents.astype(np.float32) - 127)
        packed = codes[..., :16] | codes[..., 16:] << 4
        return Held(values.reshape(shape), np.concatenate([exponents, packed], -1).reshape(n, -1), format)
    x = torch.from_numpy(rng.standard_normal(shape).astype(np.float32)) * scale
    x = x.bfloat16().float() if len(shape) == 2 else x
    return Held(x.numpy(), x.numpy(), "BF16")


def tensors_of(spec: ModelSpec, format: str, seed: int = 0) -> dict[str, WeightTensor]:
    rng, tensors = np.random.default_rng(seed), {}
    for name, shape in spec.tensor_shapes().items():
        tensors[name] = held(shape, format if ".experts." in name and len(shape) == 2 else "BF16", rng)
        if name.endswith("norm"):
            tensors[name] = Held(tensors[name].float32() + 1, tensors[name].raw(), "BF16")
    return tensors


def rope(dim: int, base: float) -> Rope:
    return Rope(tuple(base ** (-2 * i / dim) for i in range(dim // 2)))


def model(layers: list[Layer], hidden: int, vocab: int, context: int = 4096) -> ModelSpec:
    return ModelSpec("bench", vocab, hidden, tuple(layers), 1e-5, context, False)


def small() -> dict[str, tuple[ModelSpec, str]]:
    """Every option of the kernels in models of a few layers."""
    qwen = Layer(
        Attention(16, 2, 128, rope(128, 1e6), 128**-0.5, qk_norm=True), FeedForward(256, experts=Experts(32, 8))
    )
    oss = Attention(16, 2, 64, rope(64, 1e4), 64**-0.5, qkv_bias=True, o_bias=True, sinks=True)
    clamped = FeedForward(192, "clamped", Experts(32, 4, bias=True), alpha=1.702, limit=7.0)
    naive = Attention(8, 1, 192, rope(64, 1e4), 192**-0.5, None, v_head_dim=128, sinks=True, value_scale=0.7)
    sigmoid = FeedForward(256, experts=Experts(64, 8, "sigmoid", correction=True))
    grouped = Experts(32, 4, "sigmoid", scale=2.5, groups=4, top_groups=2, correction=True, shared_inner=256)
    half = Attention(8, 4, 64, rope(32, 1e4), 64**-0.5)
    return {
        "qwen": (model([qwen] * 3, 512, 1000), "BF16"),
        "gpt-oss": (model([Layer(replace(oss, window=128), clamped), Layer(oss, clamped)] * 2, 320, 1000), "MXFP4"),
        "naive": (model([Layer(naive, FeedForward(512)), Layer(replace(naive, window=128), sigmoid),
                         Layer(naive, sigmoid)],
                        512, 1000), "F8_E4M3"),
        "glm": (model([Layer(half, FeedForward(128, experts=grouped))] * 2, 256, 1000), "BF16"),
    }  # fmt: skip


def upload(cache: SparseCache, start: int, tokens: list[int] | np.ndarray) -> None:
    cache.control.zero_()
    cache.state[START], cache.state[RUN_ROWS] = start, len(tokens)
    cache.row_tokens[: len(tokens)] = torch.as_tensor(np.asarray(tokens, np.int32), device=cache.control.device)


def check(name: str, spec: ModelSpec, format: str, history: int = 380) -> bool:
    device = torch.device("cuda")
    tensors = tensors_of(spec, format)
    logits = torch.full((ROWS, spec.vocab), float("nan"), device=device)
    engine = SparsePass(spec, load(spec, tensors, device, spec.context), logits)
    tokens = np.random.default_rng(1).integers(0, spec.vocab, history)
    expected = Reference(spec, tensors, torch.float64).logits(tokens.tolist())

    def passes(sizes: list[int]) -> torch.Tensor:
        cache, out, at = SparseCache(spec, history + 64, device, torch.bfloat16, []), [], 0
        for n in sizes:
            upload(cache, at, tokens[at : at + n])
            engine.run(cache, (), True, 8 if n <= 8 else 16)
            out.append(logits[:n].clone())
            at += n
        return torch.cat(out)

    n = history // 16 * 16
    wide, narrow = passes([16] * (n // 16)), passes([16] * (n // 16 - 2) + [8, 8] + [1] * 16)
    error = (wide.cpu().double() - expected[:n]).norm(dim=1) / expected[:n].norm(dim=1)
    same = bool((wide == narrow).all())
    print(f"check {name}: relative error median {error.median():.1e}, 90% {error.quantile(0.9):.1e}, "
          f"worst {error.max():.1e}; "
          f"bits of a row alone, among 8 and among 16 {'equal' if same else 'DIFFER'}", flush=True)  # fmt: skip
    if not same:
        print("  differing rows", (wide != narrow).any(1).nonzero().flatten().tolist()[:20])
    return same and bool(error.median() < 4e-2) and bool(error.isfinite().all())


def naive_rank(format: str) -> ModelSpec:
    """A rank of 8 of Naive-N0.5-Flash; its selecting layers as full ones: exact while the context is below 2,048."""
    full = Attention(8, 1, 192, rope(64, 5e6), 192**-0.5, v_head_dim=128, sinks=True)
    sliding = replace(full, window=128, rope=rope(64, 1e4))
    f = FeedForward(256, experts=Experts(256, 8, "sigmoid", correction=True))
    layers = [Layer(full if i == 0 or (i + 1) % 6 == 0 else sliding, f if i else FeedForward(2048)) for i in range(48)]
    return model(layers, 4096, 152576 // 8)


def true_sizes() -> dict[str, tuple[ModelSpec, int, int, int]]:
    """id: (spec, format of experts, rows, context)."""
    qwen = Layer(
        Attention(32, 4, 128, rope(128, 1e6), 128**-0.5, qk_norm=True), FeedForward(768, experts=Experts(128, 8))
    )
    oss = Attention(64, 8, 64, rope(64, 1.5e5), 64**-0.5, qkv_bias=True, o_bias=True, sinks=True)
    clamped = FeedForward(2880, "clamped", Experts(128, 4, bias=True), alpha=1.702, limit=7.0)
    gpt = model([Layer(oss if i % 2 else replace(oss, window=128), clamped) for i in range(36)], 2880, 201088)
    return {
        "moe-qwen3-30b": (model([qwen] * 48, 2048, 151936), BF16, 1, 2048),
        "moe-gptoss-1": (gpt, MXFP4, 1, 2048),
        "moe-gptoss-8": (gpt, MXFP4, 8, 2048),
        "naive-fp8-rank": (naive_rank("fp8"), FP8, 8, 2032),
        "naive-mxfp4-rank": (naive_rank("mxfp4"), MXFP4, 8, 2032),
    }


def distinct_experts(engine: SparsePass, cache: SparseCache, rows: int) -> list[int]:
    """How many experts the rows hit in each layer, read between the kernels."""
    counts: list[int] = []

    def launch(key: tuple[Any, ...], grid: int, args: Any) -> None:
        engine._kernels[key].launch(grid, threads(key), args, False)
        if key[0] == "expert_up":
            i = len(counts)
            e, lw = engine.spec.layers[i].feed_forward.experts, engine.weights.layers[i]
            if not e:
                counts.append(0)
                return
            scores = engine.router[: rows * e.count].view(rows, e.count)
            scores = (
                scores.sigmoid() + (0 if lw.correction is None else lw.correction) if e.scoring == "sigmoid" else scores
            )
            counts.append(len(scores.topk(e.top_k).indices.unique()))

    engine._launches(cache, True, 1 if rows <= 8 else 2, launch)
    torch.cuda.synchronize()
    return counts


def bytes_read(engine: SparsePass, distinct: list[int], rows: int, context: int) -> dict[str, float]:
    """By kernel: every weight once, each distinct expert once, keys and values that some row sees once."""
    spec, total = engine.spec, dict.fromkeys(("qkv", "attention", "output", "router", "expert_up", "expert_down"), 0.0)
    for layer, lw, hit in zip(spec.layers, engine.weights.layers, distinct, strict=True):
        a, f = layer.attention, layer.feed_forward
        kept = (f.experts.count if f.experts else 0) + _always(f)
        total["qkv"] += lw.qkv.nbytes()
        seen = context + rows if a.window is None else min(context, a.window - 1) + rows
        total["attention"] += seen * a.kv_heads * (a.head_dim + a.value_dim) * 2
        total["output"] += lw.o.nbytes()
        total["router"] += lw.router.nbytes() if lw.router else 0
        total["expert_up"] += lw.up.nbytes() * (hit + _always(f)) / kept
        total["expert_down"] += lw.down.nbytes() * (hit + _always(f)) / kept
    total["head"] = float(engine.weights.head.nbytes())
    return total


def graph_us(enqueue: Callable[[], Any], samples: int, times: int = 1) -> list[float]:
    """Device microseconds of `enqueue`, a sample a replay of a graph of `times` of them."""
    enqueue()
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        for _ in range(times):
            enqueue()
        graph.capture_end()
    took = []
    for _ in range(samples):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(100_000)
        before.record()
        graph.replay()
        after.record()
        after.synchronize()
        took.append(before.elapsed_time(after) * 1e3 / times)
    return took[5:]


def bench(
    name: str, spec: ModelSpec, format: int, rows: int, context: int, made: dict[int, SparsePass]
) -> dict[str, Any]:
    device = torch.device("cuda")
    began = time.monotonic()
    if id(spec) not in made:
        made.clear()
        torch.cuda.empty_cache()
        logits = torch.zeros(ROWS, spec.vocab, device=device)
        made[id(spec)] = SparsePass(spec, random_weights(spec, format, device, spec.context), logits)
    engine = made[id(spec)]
    cache = SparseCache(spec, context + 64, device, torch.bfloat16, [])
    for t in (*cache.layer_keys, *cache.layer_values):
        t.normal_()
    upload(cache, context, np.random.default_rng(2).integers(0, spec.vocab, rows))
    distinct = distinct_experts(engine, cache, rows)
    read = bytes_read(engine, distinct, rows, context)
    passes = graph_us(lambda: engine.run(cache, (), True, 8), 45)
    by_kernel: dict[str, list[tuple[Any, int, Any]]] = {}
    engine._launches(cache, True, 1, lambda k, grid, args: by_kernel.setdefault(k[0], []).append((k, grid, args)))
    dense = by_kernel.pop("dense")
    each = sum(2 + bool(x.feed_forward.experts) for x in spec.layers)
    assert len(dense) == each + 1
    at = 0
    for layer in spec.layers:
        for kind in ("qkv", "output", "router")[: 2 + bool(layer.feed_forward.experts)]:
            by_kernel.setdefault(kind, []).append(dense[at])
            at += 1
    by_kernel["head"] = [dense[-1]]
    kernels = {}
    for kind, launches in by_kernel.items():

        def enqueue(launches: list[tuple[Any, int, Any]] = launches) -> None:
            for key, grid, args in launches:
                engine._kernels[key].launch(grid, threads(key), args, engine.pdl)

        us = statistics.median(graph_us(enqueue, 12))
        kernels[kind] = {"launches": len(launches), "us_each": us / len(launches), "tb_s": read.get(kind, 0) / us / 1e6,
                         "grid": launches[-1][1]}  # fmt: skip
    ms = statistics.median(passes) / 1e3
    floor_ms = sum(read.values()) / 4.35e9
    result = {"id": name, "ms": ms, "floor_ms": floor_ms, "ratio": ms / floor_ms, "gb": sum(read.values()) / 1e9,
              "distinct": statistics.mean(d for d in distinct if d), "rows": rows, "context": context,
              "kernels": kernels, "samples_us": passes,
              "finite": bool(engine.logits[:rows].isfinite().all())}  # fmt: skip
    print(f"{name}: {ms:.3f} ms, floor {floor_ms:.3f} ms ({result['gb']:.2f} GB, "
          f"{result['distinct']:.1f} experts a layer), "
          f"{ms / floor_ms:.2f}x, finite {result['finite']}, {time.monotonic() - began:.0f} s", flush=True)  # fmt: skip
    for kind, k in kernels.items():
        print(
            f"    {kind:12} {k['launches']:3} x {k['us_each']:7.2f} us  {k['tb_s']:.2f} TB/s  grid {k['grid']}",
            flush=True,
        )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("check", "bench"))
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("models", nargs="*")
    args = parser.parse_args()
    passed = [check(name, *case) for name, case in small().items()]
    if args.what == "check" or not all(passed):
        sys.exit(not all(passed))
    made: dict[int, SparsePass] = {}
    shapes = true_sizes()
    results = [bench(name, *shapes[name], made) for name in args.models or shapes]
    if args.out:
        (args.out / "cuda_sparse_raw.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
