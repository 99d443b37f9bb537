"""Slipstream against llama.cpp on this CPU: `make bench`, or `make bench ROWS=cpu-chat,cpu-copy` to try some.

Same GGUF file, same token ids, same threads, greedy, one stream. The two programs run in processes of their own and
take turns within one run, so that both meet the same machine; figures are medians of the repeats. A whole run writes
benchmarks/results/cpu_decode.json, from which the README's table is made.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from worker import Worker, require_peer

from slipstream.bench import results
from slipstream.bench.machine import read_bandwidth
from slipstream.bench.measure import median
from slipstream.bench.workloads import PromptSet, long_text, prompts
from slipstream.models.checkpoint import Checkpoint, load_checkpoint

PEER = "llama.cpp"
FOLDER = Path(__file__).parent / "results"


@dataclass
class Run:
    """What all rows share: the settings, the checkpoint, and the two programs, started when first needed."""

    model: str
    backend: str
    threads: int
    repeats: int
    scale: float
    stack: ExitStack

    @cached_property
    def checkpoint(self) -> Checkpoint:
        return load_checkpoint(self.model)

    @cached_property
    def ours(self) -> Worker:
        return self.stack.enter_context(Worker(self.backend, self.model, self.threads))

    @cached_property
    def peer(self) -> Worker:
        return self.stack.enter_context(Worker(PEER, self.model, self.threads))

    def prompts(self, name: PromptSet, count: int | None = None) -> list[list[int]]:
        """The set's first prompts, through the chat template, as token ids."""
        tokenizer = self.checkpoint.tokenizer
        chosen = prompts(name)[:count]
        return [tokenizer.encode(tokenizer.render_chat(p.messages, add_generation_prompt=True)) for p in chosen]

    def length(self, tokens: int) -> int:
        """An answer length, shortened by --scale for trials."""
        return max(8, round(tokens * self.scale))

    def decode_rates(
        self, contenders: Sequence[tuple[Worker, str]], prompts: list[list[int]], max_tokens: int, **options: Any
    ) -> list[Decode]:
        """For each (program, drafter): tok/s over all prompts, once a repeat. Contenders alternate within every prompt.

        options: further fields of the request, such as `temperature`.

        Raises RuntimeError where a drafter changed what Slipstream says: no speed is reported for another text.
        """
        done = [Decode() for _ in contenders]
        for number, tokens in enumerate(prompts, 1):
            said: dict[str, list[int]] = {}
            for repeat in range(self.repeats):
                order = list(enumerate(contenders))
                for i, (program, drafter) in order if repeat % 2 == 0 else reversed(order):
                    time.sleep(0.05)  # lets the other program's threads fall asleep
                    answer = program.ask("decode", tokens=tokens, max_tokens=max_tokens, drafter=drafter, **options)
                    if said.setdefault(program.name, answer["tokens"]) != answer["tokens"]:
                        raise RuntimeError(f"{program.name} gave two texts for prompt {number}, drafter {drafter}")
                    done[i].add(repeat, answer)
            rates = ", ".join(f"{p.name} {d}: {x.last:.0f} tok/s" for (p, d), x in zip(contenders, done, strict=True))
            progress(f"  prompt {number} of {len(prompts)}: {rates}")
        return done


class Decode:
    """Tokens and seconds of one contender, by repeat."""

    def __init__(self) -> None:
        self.tokens: dict[int, int] = {}
        self.seconds: dict[int, float] = {}
        self.acceptance: list[float] = []
        self.last = 0.0

    def add(self, repeat: int, answer: dict[str, Any]) -> None:
        tokens, seconds = answer["timed_tokens"], answer["decode_s"]
        self.tokens[repeat] = self.tokens.get(repeat, 0) + tokens
        self.seconds[repeat] = self.seconds.get(repeat, 0.0) + seconds
        self.acceptance.append(answer["tokens_per_round"])
        self.last = tokens / seconds

    @property
    def samples(self) -> list[float]:
        return [self.tokens[repeat] / self.seconds[repeat] for repeat in self.tokens]


def cpu_chat(run: Run) -> results.Row:
    ours, peer = run.decode_rates([(run.ours, "none"), (run.peer, "none")], run.prompts("chat", 5), run.length(128))
    return compare("cpu-chat", "decode, chat prompts, no drafter", "tok/s", ours.samples, peer.samples)


def cpu_copy(run: Run) -> results.Row:
    ours, peer = run.decode_rates([(run.ours, "suffix"), (run.peer, "none")], run.prompts("copy"), run.length(300))
    work = f"decode, repeat or edit a 1,000-token text, suffix drafter ({median(ours.acceptance):.1f} tokens a round)"
    return compare("cpu-copy", work, "tok/s", ours.samples, peer.samples)


def cpu_suffix_cost(run: Run) -> results.Row:
    with_suffix, without = run.decode_rates(
        [(run.ours, "suffix"), (run.ours, "none")], run.prompts("chat", 5), run.length(128)
    )
    work = f"decode, chat prompts, suffix drafter ({median(with_suffix.acceptance):.2f} tokens a round)"
    return compare("cpu-suffix-cost", work, "tok/s", with_suffix.samples, without.samples, peer="no drafter")


def cpu_prefill(run: Run) -> results.Row:
    tokens = run.checkpoint.tokenizer.encode(long_text())[: run.length(1000)]
    samples: dict[str, list[float]] = {}
    for _ in range(run.repeats):
        for program in (run.ours, run.peer):
            time.sleep(0.05)
            answer = program.ask("decode", tokens=tokens, max_tokens=2)
            samples.setdefault(program.name, []).append(len(tokens) / answer["ttft_s"])
        progress("  " + ", ".join(f"{name}: {rates[-1]:.0f} tok/s" for name, rates in samples.items()))
    work = f"prefill, {len(tokens):,} tokens to the first answer token"
    return compare("cpu-prefill", work, "tok/s", samples[run.ours.name], samples[run.peer.name])


def cpu_memory(run: Run) -> results.Row:
    """ratio: our peak over the size of the weights file."""
    command = ["-m", "slipstream", "run", run.model, prompts("chat")[0].messages[0]["content"]]
    command += ["--max-tokens", str(run.length(128)), "--backend", run.backend, "--threads", str(run.threads)]
    samples = [peak_memory([sys.executable, *command]) / 1e6 for _ in range(run.repeats)]
    file_mb = run.checkpoint.file_bytes / 1e6
    return compare(
        "cpu-memory", "peak memory of `slipstream run`, chat prompt", "MB", samples, [file_mb], peer="weights file"
    )


def cold_start(run: Run) -> results.Row:
    """The slower of the two starts, whole processes; PyTorch must not be in them."""
    python = [sys.executable, "-c"]
    loaded = subprocess.run(
        [*python, "import sys, slipstream, slipstream.cli; print('torch' in sys.modules)"],
        capture_output=True,
        text=True,
    )
    if loaded.stdout.strip() != "False":
        raise RuntimeError(f"importing slipstream imports torch, or fails: {loaded.stdout}{loaded.stderr}")
    starts = {
        "import slipstream": [*python, "import slipstream"],
        "slipstream --help": [sys.executable, "-m", "slipstream", "--help"],
    }
    samples = {name: [wall_s(command) for _ in range(4 * run.repeats)] for name, command in starts.items()}
    slower = max(samples, key=lambda name: median(samples[name]))
    work = f"`{slower}`, a fresh process (`import slipstream`: {median(samples['import slipstream']):.3f} s)"
    return results.Row("cold-start", work, median(samples[slower]), "s", samples=samples[slower])


def cpu_accuracy(run: Run) -> results.Row:
    """KL divergence from the fp32 reference on the same weights, and how often the likeliest token is the same."""
    tokens = run.checkpoint.tokenizer.encode(long_text())[: run.length(2000)]
    with tempfile.TemporaryDirectory() as folder:

        def logits(program: Worker) -> np.ndarray:
            progress(f"  logits of {program.name}")
            path = Path(folder) / f"{program.name}.npy"
            program.ask("logits", tokens=tokens, path=str(path), vocab=run.checkpoint.spec.vocab)
            return np.load(path, mmap_mode="r")

        with Worker("reference", run.model, run.threads) as reference:
            truth = logits(reference)
        (ours, ours_top), (peer, peer_top) = (divergence(truth, logits(program)) for program in (run.ours, run.peer))
    work = (
        f"KL divergence from the fp32 reference, {len(tokens):,} tokens of text; same likeliest token "
        f"{ours_top:.2%} (llama.cpp {peer_top:.2%})"
    )
    return compare("cpu-accuracy", work, "KL", [ours], [peer])


def divergence(truth: np.ndarray, other: np.ndarray) -> tuple[float, float]:
    """Mean KL(truth || other) in nats over rows (n, vocab) of logits, and the share of rows with the same argmax."""
    total, same = 0.0, 0
    for start in range(0, len(truth), 64):
        p, q = (log_softmax(rows[start : start + 64].astype(np.float64)) for rows in (truth, other))
        total += float((np.exp(p) * (p - q)).sum())
        same += int((p.argmax(-1) == q.argmax(-1)).sum())
    return total / len(truth), same / len(truth)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


def compare(
    id: str, work: str, unit: str, ours: Sequence[float], theirs: Sequence[float], peer: str = PEER
) -> results.Row:
    """A row of medians. ratio: how many times better, except for memory, whose limit is a multiple of the file."""
    value, peer_value = median(ours), median(theirs)
    ratio = peer_value / value if unit == "KL" else value / peer_value
    return results.Row(id, work, value, unit, peer, peer_value, ratio, list(ours))


def peak_memory(command: list[str]) -> int:
    """Bytes of the largest resident set of a fresh process.

    Started by a small process of its own: Linux counts what the parent held at the fork as the child's peak.
    """
    code = (
        "import resource, subprocess, sys\n"
        "subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    done = subprocess.run([sys.executable, "-c", code, *command], check=True, capture_output=True, text=True)
    return int(done.stdout) * (1 if sys.platform == "darwin" else 1024)


def wall_s(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


ROWS: dict[str, Callable[[Run], results.Row]] = {
    "cpu-chat": cpu_chat,
    "cpu-copy": cpu_copy,
    "cpu-suffix-cost": cpu_suffix_cost,
    "cpu-prefill": cpu_prefill,
    "cpu-memory": cpu_memory,
    "cold-start": cold_start,
    "cpu-accuracy": cpu_accuracy,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default=",".join(ROWS), help="which rows, by id, comma-separated")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--backend", default="cpu", help="the backend of Slipstream to measure")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="shorten the work, for trials")
    options = parser.parse_args()
    chosen = options.rows.split(",")
    if unknown := set(chosen) - set(ROWS):
        parser.error(f"no rows {', '.join(sorted(unknown))}; there are {', '.join(ROWS)}")
    require_peer("llama_cpp")

    rows = []
    with ExitStack() as stack:
        run = Run(options.model, options.backend, options.threads, options.repeats, options.scale, stack)
        for id in chosen:
            progress(f"{id}")
            rows.append(ROWS[id](run))
            print(results.line(rows[-1]), flush=True)
    if len(rows) == len(ROWS) and options.scale == 1.0:  # a file is one whole run
        packages = ("numpy", "llama-cpp-python", "torch")
        facts = {"threads": options.threads, "read_gb_s": round(read_bandwidth(options.threads) / 1e9, 1)}
        print(f"written to {results.write(FOLDER, 'cpu_decode', rows, packages=packages, **facts)}")


if __name__ == "__main__":
    main()
