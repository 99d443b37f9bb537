"""The GPU table on one machine: `python benchmarks/cuda_decode.py MODEL.gguf OUT.json [--only id ...]`.

Every row alternates its two sides in one process and reports medians; the rows go to OUT.json in the results format's
fields. MODEL is SmolLM2-135M-Instruct; the 1B and 8B rows use random weights of Llama's shapes.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from cuda_round import SHAPES, pass_us, round_us

from slipstream.backends.cuda.backend import CudaBackend
from slipstream.backends.cuda.weights import Weights, load
from slipstream.bench.workloads import prompts
from slipstream.models.checkpoint import Checkpoint, load_checkpoint

ROWS: list[dict[str, Any]] = []
DEVICE = torch.device("cuda")


def row(id: str, work: str, samples: list[float], unit: str, peer: str | None = None,
        peer_samples: list[float] | None = None, ratio: float | None = None) -> None:  # fmt: skip
    value = statistics.median(samples)
    peer_value = statistics.median(peer_samples) if peer_samples else None
    ROWS.append({"id": id, "work": work, "value": value, "unit": unit, "peer": peer, "peer_value": peer_value,
                 "ratio": ratio, "samples": [round(s, 4) for s in samples]})  # fmt: skip
    print(id, round(value, 4), unit, "peer", peer_value, "ratio", ratio, flush=True)


@triton.jit
def read_kernel(x, out, per, BLOCK: tl.constexpr):
    acc = tl.zeros((BLOCK,), tl.int32)
    first = tl.program_id(0).to(tl.int64) * per * BLOCK
    for i in range(per):
        acc ^= tl.load(x + first + i * BLOCK + tl.arange(0, BLOCK))
    tl.store(out + tl.program_id(0), tl.sum(acc, 0))


def read_rate() -> float:
    """Bytes a second at which a plain kernel reads 8 GiB."""
    x, out = torch.randint(1 << 30, (1 << 31,), dtype=torch.int32, device=DEVICE), torch.zeros(1 << 15, device=DEVICE)
    per, block = 8, 8192
    grid = x.numel() // (per * block)
    best = triton.testing.do_bench(lambda: read_kernel[(grid,)](x, out, per, BLOCK=block, num_warps=8), warmup=20,
                                   rep=100, return_mode="median")  # fmt: skip
    return x.numel() * 4 / best * 1e3


class Plain(torch.nn.Module):
    """One token of a Llama in the plainest PyTorch with a static cache: what torch.compile is given."""

    def __init__(self, spec: Any, w: Weights, positions: int) -> None:
        super().__init__()
        self.spec, self.w = spec, w
        a = spec.layers[0].attention
        self.k = torch.zeros(
            len(spec.layers), 1, a.kv_heads, positions, a.head_dim, dtype=torch.bfloat16, device=DEVICE
        )
        self.v = torch.zeros_like(self.k)
        self.at = torch.arange(positions, device=DEVICE)

    def forward(self, token: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        F, h = torch.nn.functional, self.w.embed[token]  # (1, hidden)
        mask = (self.at <= position)[None, None, None]
        for i, (layer, w) in enumerate(zip(self.spec.layers, self.w.layers, strict=True)):
            a = layer.attention
            x = F.rms_norm(h.float(), h.shape[1:], w.attention_norm, self.spec.norm_eps).bfloat16()
            q, k, v = F.linear(x, w.qkv).view(-1, a.head_dim).split([a.heads, a.kv_heads, a.kv_heads])
            cos, sin = w.cos_sin[position].unbind(1)  # (1, d / 2)

            def turn(t: torch.Tensor, cos: torch.Tensor = cos, sin: torch.Tensor = sin) -> torch.Tensor:
                low, high = t.float().chunk(2, -1)
                return torch.cat([low * cos - high * sin, high * cos + low * sin], -1).bfloat16()

            self.k[i].index_copy_(2, position, turn(k)[None, :, None])
            self.v[i].index_copy_(2, position, v[None, :, None])
            o = F.scaled_dot_product_attention(turn(q)[None, :, None], self.k[i], self.v[i], mask, enable_gqa=True)
            h = h + F.linear(o.reshape(1, -1), w.o)
            x = F.rms_norm(h.float(), h.shape[1:], w.ffn_norm, self.spec.norm_eps).bfloat16()
            gate, up = F.linear(x, w.gate_up).chunk(2, -1)
            h = h + F.linear(F.silu(gate) * up, w.down)
        x = F.rms_norm(h.float(), h.shape[1:], self.w.final_norm, self.spec.norm_eps).bfloat16()
        return F.linear(x, self.w.head).argmax(-1)


def compiled(spec: Any, weights: Weights, context: int) -> Callable[[], None]:
    """A replay of one token by torch.compile(max-autotune) captured in a CUDA graph."""
    model = Plain(spec, weights, context + 512)
    token, position = torch.tensor([5], device=DEVICE), torch.tensor([context], device=DEVICE)
    step = torch.compile(model, mode="max-autotune-no-cudagraphs", fullgraph=True, dynamic=False)
    with torch.inference_mode():
        for _ in range(3):
            step(token, position)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step(token, position)

    def replay() -> Any:
        graph.replay()
        return token, position, model  # which must live as long as the graph

    return replay


def timed(run: Callable[[], Any], times: int = 8) -> float:
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(200_000)
    before.record()
    for _ in range(times):
        run()
    after.record()
    after.synchronize()
    return before.elapsed_time(after) * 1e3 / times


def encoded(checkpoint: Checkpoint, name: Any) -> list[np.ndarray]:
    t = checkpoint.tokenizer
    return [np.array(t.encode(t.render_chat(p.messages)), np.int32) for p in prompts(name)]


def generate(backend: CudaBackend, prompt: np.ndarray, limit: int, drafts: int,
             stops: tuple[int, ...] = ()) -> tuple[list[int], int, float, float]:  # fmt: skip
    """(tokens, rounds, seconds of decoding, seconds to the first token), greedy."""
    cache = backend.new_cache(4096)
    torch.cuda.synchronize()
    begun = time.perf_counter()
    backend.prefill(cache, prompt[:-1])
    tokens: list[int] = []
    count, first = 0, 0.0
    for r in backend.rounds(cache, prompt, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=1, drafts=drafts,
                            limit=limit, stop_token_ids=stops):  # fmt: skip
        first = first or time.perf_counter()
        count += 1
        tokens += r.tokens
    took = time.perf_counter() - first
    cache.close()
    return tokens, count, took, first - begun


def smollm2(checkpoint: Checkpoint) -> None:
    spec = checkpoint.spec
    weights = load(spec, checkpoint.tensors, DEVICE)
    backend = CudaBackend(spec, weights=weights, pdl=False)
    peer = compiled(spec, weights, 512)
    ours, theirs, one, eight = [], [], [], []
    for _ in range(5):
        ours += round_us(backend, 512, 1, 15)
        theirs += [timed(peer) for _ in range(10)]
        one += pass_us(backend, 512, 1, 15)
        eight += pass_us(backend, 512, 8, 15)
    median = statistics.median
    row("cuda-smollm2", "SmolLM2-135M bf16, one token, no drafts, context 512", ours, "us")
    row("cuda-smollm2-vs-compile", "the same against torch.compile max-autotune in a CUDA graph", ours, "us",
        "torch.compile", theirs, median(theirs) / median(ours))  # fmt: skip
    row(
        "cuda-round8",
        "a pass over 8 rows against one over 1 row",
        eight,
        "us",
        "1 row",
        one,
        median(eight) / median(one),
    )
    copies = encoded(checkpoint, "copy")
    for p in copies:
        generate(backend, p, 64, 15)
    rates, steps = [], []
    for _ in range(5):
        tokens = took = 0.0
        for p in copies:
            out, count, seconds, _ = generate(backend, p, 800, 15, checkpoint.eos_token_ids)
            tokens, took = tokens + len(out), took + seconds
            steps.append(len(out) / count)
        rates.append(tokens / took)
    print("tokens a round", [round(x, 2) for x in steps[: len(copies)]], flush=True)
    row("cuda-copy", "copy prompts, drafts by the device's suffix drafter, wall clock", rates, "tok/s")
    plain = []
    for p in encoded(checkpoint, "chat")[:5]:
        out, _, seconds, _ = generate(backend, p, 256, 0)
        plain.append((len(out) - 1) / seconds)
    row("cuda-chat-wall", "chat prompts, no drafts, wall clock", plain, "tok/s")
    short = np.resize(copies[0], 100)
    first = [generate(backend, short, 4, 0)[3] * 1e3 for _ in range(9)][2:]
    row("cuda-ttft-100", "first token of a 100-token prompt", first, "ms")
    long = np.resize(copies[0], 8000)
    for mode in ("fast", "exact"):
        backend.prefill_mode = mode
        cache, times = backend.new_cache(8192), []
        for _ in range(5):
            cache.rewind(0)
            torch.cuda.synchronize()
            begun = time.perf_counter()
            backend.prefill(cache, long)
            torch.cuda.synchronize()
            times.append((time.perf_counter() - begun) * 1e3)
        row(f"cuda-prefill-{mode}", f"prefill of 8,000 tokens, {mode}", times[1:], "ms")


def pdl_gain() -> None:
    weights = load(SHAPES["smollm2"], None, DEVICE)
    sides = [CudaBackend(SHAPES["smollm2"], weights=weights, engine="chain", pdl=pdl) for pdl in (True, False)]
    with_pdl, without = [], []
    for _ in range(3):
        with_pdl += pass_us(sides[0], 512, 1, 12)
        without += pass_us(sides[1], 512, 1, 12)
    gain = statistics.median(without) / statistics.median(with_pdl)
    row("cuda-pdl-gain", "the chain of Triton kernels with PDL against without, one row", with_pdl, "us", "no PDL",
        without, gain)  # fmt: skip


def large() -> None:
    rate = read_rate()
    print("read rate", rate / 1e12, flush=True)
    for name in ("1b", "8b"):
        backend = CudaBackend(SHAPES[name], pdl=False)
        times = round_us(backend, 512, 1, 25)
        if name == "1b":
            row("cuda-1b", "Llama-1B shapes, random weights, one token, context 512", times, "us")
        else:
            shares = [backend.memory_bytes() / (t * 1e-6) / rate for t in times]
            row("cuda-8b-bandwidth", f"Llama-8B shapes, random weights: share of the read rate {rate / 1e12:.2f} TB/s",
                shares, "fraction")  # fmt: skip
        del backend
        gc.collect()
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="+", default=["large", "pdl", "smollm2"])
    args = parser.parse_args()
    for name in args.only:
        if name == "smollm2":
            smollm2(load_checkpoint(args.model))
        else:
            {"pdl": pdl_gain, "large": large}[name]()
        args.out.write_text(json.dumps(ROWS))


if __name__ == "__main__":
    main()
