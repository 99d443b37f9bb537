"""One program under test in a process of its own: `python worker.py PROGRAM MODEL THREADS [DRAFTER]`.

PROGRAM is `llama.cpp` or a backend of Slipstream. Reads a JSON request a line, answers with a JSON line, and sleeps on
its pipe in between, so that two programs can take turns on the same cores. Prompts are token ids, the same for both.

    {"do": "decode", "tokens": [...], "max_tokens": n, "drafter": "none", "temperature": 0}
        -> {"tokens": [...], "timed_tokens", "ttft_s", "decode_s", "tokens_per_round"}
    {"do": "logits", "tokens": [...], "path": "x.npy", "vocab": n}
        -> the logits after every token, (tokens, vocab) float32, in that file

decode_s runs from the end of the first round to that of the last, over timed_tokens. ttft_s is the whole prompt,
computed anew, and the first token. DRAFTER is the folder of a block drafter; left out, the one that ships is there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np

CONTEXT = 4096


def require_peer(*modules: str) -> None:
    """Ends the program with what is missing, in a line, where llama.cpp is not installed."""
    if missing := [name for name in modules if find_spec(name) is None]:
        sys.exit(
            f"llama.cpp to compare with is not installed (no {', '.join(missing)}): `make bench` installs it, "
            "or pip install -e '.[bench]'; both need a C++ compiler"
        )


class Program(Protocol):
    def decode(self, tokens: list[int], max_tokens: int, **options: Any) -> dict[str, Any]: ...

    def logits(self, tokens: list[int], out: np.ndarray) -> None: ...


class Slipstream:
    """Also the reference, which is a backend of the same engine."""

    def __init__(self, model: str, threads: int, backend: str, drafter: str = "auto") -> None:
        from slipstream import LLM

        self.llm = LLM(model, backend=backend, threads=threads, context=CONTEXT, drafter=drafter)

    def decode(
        self, tokens: list[int], max_tokens: int, drafter: str = "none", temperature: float = 0.0
    ) -> dict[str, Any]:
        from slipstream import SamplingParams
        from slipstream.bench.decode import fresh_session

        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=temperature, seed=1)
        with fresh_session(self.llm, drafter) as session:
            done = session.generate(tokens, params)
        timed = round(done.timing.tokens_per_s * done.timing.decode_s)
        return {
            "tokens": done.token_ids,
            "timed_tokens": timed,
            "ttft_s": done.timing.ttft_s,
            "decode_s": done.timing.decode_s,
            "tokens_per_round": done.speculation.tokens_per_round,
        }

    def logits(self, tokens: list[int], out: np.ndarray) -> None:
        backend = self.llm.backend
        cache = backend.new_cache(len(tokens))
        for start in range(0, len(tokens), 8):
            rows = np.array(tokens[start : start + 8], np.int32)
            out[start : start + len(rows)] = backend.verify(cache, rows)
        cache.close()


class LlamaCpp:
    def __init__(self, model: str, threads: int) -> None:
        from slipstream.models.checkpoint import load_checkpoint

        self.path = str(load_checkpoint(model).path)
        self.options = {"n_threads": threads, "n_threads_batch": threads, "n_ctx": CONTEXT, "verbose": False}
        self.llama = self._load()

    def _load(self, **options: Any) -> Any:
        from llama_cpp import Llama

        return Llama(self.path, **self.options, **options)

    def decode(self, tokens: list[int], max_tokens: int, drafter: str = "none") -> dict[str, Any]:
        self.llama.reset()
        said, times = [], []
        start = time.perf_counter()
        for token in self.llama.generate(tokens, temp=0.0):
            said.append(token)
            times.append(time.perf_counter())
            if len(said) == max_tokens:
                break
        return {
            "tokens": said,
            "timed_tokens": len(said) - 1,
            "ttft_s": times[0] - start,
            "decode_s": times[-1] - times[0],
            "tokens_per_round": 1.0,
        }

    def logits(self, tokens: list[int], out: np.ndarray) -> None:
        llama = self._load(logits_all=True)
        llama.eval(tokens)
        out[:] = llama.scores[: len(tokens)]


def main(program: str, model: str, threads: int, drafter: str = "auto") -> None:
    reply = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints must not end up among the answers
    worker: Program = (
        LlamaCpp(model, threads) if program == "llama.cpp" else Slipstream(model, threads, program, drafter)
    )
    print(json.dumps({"ready": True}), file=reply, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if request.pop("do") == "decode":
            answer = worker.decode(**request)
        else:
            path, vocab = request["path"], request["vocab"]
            out = np.lib.format.open_memmap(path, "w+", np.float32, (len(request["tokens"]), vocab))
            worker.logits(request["tokens"], out)
            answer = {"path": path}
        print(json.dumps(answer), file=reply, flush=True)


class Worker:
    """The other end: starts a worker process and asks it. Use as a context manager."""

    def __init__(self, program: str, model: str, threads: int, *drafter: str) -> None:
        self.name = program
        command = [sys.executable, str(Path(__file__)), program, model, str(threads), *drafter]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._receive()

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **request}) + "\n")
        self.process.stdin.flush()
        return self._receive()

    def _receive(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} stopped with exit code {self.process.wait()}; its own message is above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.communicate()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
