"""The GPU table on one machine: `python benchmarks/cuda_decode.py MODEL.gguf OUT.json [--rows a,b] [--commit c]`.

Groups of rows: rounds, compile, text, prefill, large, pdl, accuracy, gate. Rows with a peer alternate the two sides in
one process; all report medians. OUT.json is a results file. MODEL is SmolLM2-135M-Instruct; the 1B and 8B rows use
random weights of Llama's shapes.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cuda_round import SHAPES, pass_us, round_us

from slipstream.backends.cuda.backend import CudaBackend
from slipstream.backends.cuda.weights import Weights, load
from slipstream.bench.machine import describe_machine, versions
from slipstream.bench.results import Results, Row
from slipstream.bench.workloads import prompts
from slipstream.kernels.read import read_rate
from slipstream.models.checkpoint import Checkpoint, load_checkpoint

ROWS: list[Row] = []
DEVICE = torch.device("cuda")


def row(id: str, work: str, samples: list[float], unit: str, peer: str | None = None,
        peer_samples: list[float] | None = None, ratio: float | None = None) -> None:  # fmt: skip
    value = statistics.median(samples)
    peer_value = statistics.median(peer_samples) if peer_samples else None
    ROWS.append(Row(id, work, value, unit, peer, peer_value, ratio, [round(x, 4) for x in samples]))
    print(id, round(value, 4), unit, "peer", peer_value, "ratio", ratio, flush=True)


def write(out: Path, commit: str) -> None:
    """The rows so far as a results file."""
    host, gpu = describe_machine(), torch.cuda.get_device_name()
    machine = host | {"cpu": f"one {gpu}, host {host['cpu']}", "gpu": gpu}
    packages = versions("torch", "triton") | {"cuda": str(torch.version.cuda)}
    results = Results(machine, commit, datetime.date.today().isoformat(), packages, ROWS)
    out.write_text(json.dumps(asdict(results), indent=2) + "\n")


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


def generate(backend: CudaBackend, prompt: np.ndarray, limit: int, drafts: int, stops: tuple[int, ...] = (),
             temperature: float = 0.0, drafter: str = "suffix") -> tuple[list[int], int, float, float]:  # fmt: skip
    """(tokens, rounds, seconds of decoding, seconds to the first token)."""
    cache = backend.new_cache(4096)
    torch.cuda.synchronize()
    begun = time.perf_counter()
    backend.prefill(cache, prompt[:-1])
    tokens: list[int] = []
    count, first = 0, 0.0
    for r in backend.rounds(cache, prompt, temperature=temperature, top_k=0, top_p=1.0, min_p=0.0, seed=1,
                            drafts=drafts, limit=limit, stop_token_ids=stops, drafter=drafter):  # fmt: skip
        first = first or time.perf_counter()
        count += 1
        tokens += r.tokens
    took = time.perf_counter() - first
    cache.close()
    return tokens, count, took, first - begun


def row_counts(checkpoint: Checkpoint) -> None:
    """What a pass costs by its rows, and a round of one."""
    backend = CudaBackend(checkpoint.spec, checkpoint.tensors)
    counts = (1, 2, 3, 4, 5, 6, 7, 8, 16)
    passes: dict[int, list[float]] = {n: [] for n in counts}
    rounds: list[float] = []
    for _ in range(5):
        rounds += round_us(backend, 512, 1, 25)
        for n in counts:
            passes[n] += pass_us(backend, 512, n, 12)
    row("cuda-smollm2", "SmolLM2-135M, real weights, one token, no drafts, context 512", rounds, "us")
    tail = sorted(rounds)[int(len(rounds) * 0.99)]
    row("cuda-round-p99", "the 99th percentile of those rounds (each the mean of a graph of 4)", [tail], "us")
    one = statistics.median(passes[1])
    for n in counts[1:]:
        ratio = statistics.median(passes[n]) / one
        row(
            f"cuda-round{n}", f"a pass over {n} rows against one over 1 row", passes[n], "us", "1 row", passes[1], ratio
        )


def against_compile(checkpoint: Checkpoint) -> None:
    backend = CudaBackend(checkpoint.spec, checkpoint.tensors)
    peer = compiled(checkpoint.spec, load(checkpoint.spec, checkpoint.tensors, DEVICE, torch.bfloat16), 512)
    ours, theirs = [], []
    for _ in range(5):
        ours += round_us(backend, 512, 1, 15)
        theirs += [timed(peer) for _ in range(10)]
    row("cuda-smollm2-vs-compile", "the same against torch.compile max-autotune in a CUDA graph", ours, "us",
        "torch.compile", theirs, statistics.median(theirs) / statistics.median(ours))  # fmt: skip


def text(checkpoint: Checkpoint) -> None:
    """Wall-clock decoding."""
    backend = CudaBackend(checkpoint.spec, checkpoint.tensors)
    copies = encoded(checkpoint, "copy")
    for drafts in (7, 15):
        for p in copies:
            generate(backend, p, 64, drafts)
        rates, steps = [], []
        for _ in range(5):
            tokens = took = 0.0
            for p in copies:
                out, count, seconds, _ = generate(backend, p, 800, drafts, checkpoint.eos_token_ids)
                tokens, took = tokens + len(out), took + seconds
                steps.append(len(out) / count)
            rates.append(tokens / took)
        work = f"copy prompts, up to {drafts} drafts by the device's suffix drafter, wall clock"
        row("cuda-copy" if drafts == 15 else "cuda-copy-7", work, rates, "tok/s")
        row(f"cuda-copy-tokens-{drafts}", "tokens a round on them", steps, "tok/round")
    plain = []
    for p in encoded(checkpoint, "chat")[:5]:
        out, _, seconds, _ = generate(backend, p, 256, 0)
        plain.append((len(out) - 1) / seconds)
    row("cuda-chat-wall", "chat prompts, no drafts, wall clock", plain, "tok/s")
    short = np.resize(copies[0], 100)
    first = [generate(backend, short, 4, 0)[3] * 1e3 for _ in range(9)][2:]
    row("cuda-ttft-100", "first token of a 100-token prompt", first, "ms")


def prefills(checkpoint: Checkpoint) -> None:
    backend = CudaBackend(checkpoint.spec, checkpoint.tensors)
    long = np.resize(encoded(checkpoint, "copy")[0], 8000)
    for mode in ("fast", "exact"):
        backend.prefill_mode = mode  # type: ignore[assignment]
        cache, times = backend.new_cache(8192), []
        for _ in range(5):
            cache.rewind(0)
            torch.cuda.synchronize()
            begun = time.perf_counter()
            backend.prefill(cache, long)
            torch.cuda.synchronize()
            times.append((time.perf_counter() - begun) * 1e3)
        row(f"cuda-prefill-{mode}", f"prefill of 8,000 tokens, {mode}", times[1:], "ms")
        cache.close()


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
    rate = read_rate(DEVICE, 1 << 31)
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


def exactness(checkpoint: Checkpoint) -> None:
    """The whole gate in `exact` mode, the part that `fast` claims in `fast` mode: checks passed of all."""
    from slipstream.bench.verify import verify
    from slipstream.engine.engine import LLM

    for mode in ("exact", "fast"):
        backend = CudaBackend(checkpoint.spec, checkpoint.tensors, prefill_mode=mode)
        checks = verify(LLM(checkpoint, backend=backend))
        for check in checks:
            print(mode, check, flush=True)
        row(f"cuda-gate-{mode}", f"checks of the exactness gate that pass, {mode} prefill",
            [sum(c.passed for c in checks) / len(checks)], "fraction")  # fmt: skip


def right(checkpoint: Checkpoint) -> None:
    from cuda_accuracy import logits_errors, same_texts

    for mode in ("exact", "fast"):
        backend = CudaBackend(checkpoint.spec, checkpoint.tensors, prefill_mode=mode)
        errors, agreement = logits_errors(backend, checkpoint)
        if mode == "exact":
            row(
                "cuda-logits",
                "relative error of logits against float64, the median of 512 positions",
                errors,
                "fraction",
            )
            row("cuda-logits-worst", "the worst position of them", [max(errors)], "fraction")
            row("cuda-top1", "positions with the same most likely token", [agreement], "fraction")
        share = same_texts(backend, checkpoint)
        row(
            f"cuda-texts-{mode}",
            f"of 20 greedy texts those that float64 arithmetic writes, {mode} prefill",
            [share],
            "fraction",
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", default="rounds,compile,text,prefill,large,pdl,accuracy,gate")
    parser.add_argument("--commit", default="")
    args = parser.parse_args()
    checkpoint: Any = load_checkpoint(args.model) if set(args.rows.split(",")) - {"large", "pdl"} else None
    groups: dict[str, Callable[[], None]] = {
        "rounds": lambda: row_counts(checkpoint), "compile": lambda: against_compile(checkpoint),
        "text": lambda: text(checkpoint), "prefill": lambda: prefills(checkpoint), "large": large, "pdl": pdl_gain,
        "accuracy": lambda: right(checkpoint), "gate": lambda: exactness(checkpoint)}  # fmt: skip
    for name in args.rows.split(","):
        begun = time.time()
        try:
            groups[name]()
        except Exception:
            traceback.print_exc()  # the other groups still run: the machine is borrowed
        gc.collect()
        torch.cuda.empty_cache()
        print(name, f"{time.time() - begun:.0f} s", flush=True)
        write(args.out, args.commit)


if __name__ == "__main__":
    main()
