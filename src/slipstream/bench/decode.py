"""Decode speed of one model on this machine, and how far it is from the floor that memory sets."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slipstream import LLM, Completion, SamplingParams, Session
from slipstream.bench.decode_cuda import DeviceReport, profiled, summarise
from slipstream.bench.machine import cores, read_bandwidth
from slipstream.bench.measure import Summary, summarize
from slipstream.bench.workloads import Prompt, PromptSet, prompts
from slipstream.drafters import Memory

PROFILED_ROUNDS = 200


@dataclass(frozen=True)
class DecodeReport:
    """One summary over all answers (TTFT, rate) or all rounds (time); times in seconds.

    tokens_per_round: mean acceptance length. weight_bytes: what one pass reads. read_bytes_per_s: what this machine's
    memory, or the GPU's, gives to a program that only reads. floor_fraction: the share of a median round that reading
    takes at least. device: of a GPU, the rounds of one answer more, by its own clock.
    """

    model: str
    backend: str
    prompt_set: str
    drafter: str
    answers: int
    tokens: int
    ttft_s: Summary
    tokens_per_s: Summary
    round_s: Summary
    tokens_per_round: float
    weight_bytes: int
    read_bytes_per_s: float | None
    floor_fraction: float | None
    device: DeviceReport | None = None


def measure_decode(
    model: str,
    prompt_set: PromptSet = "chat",
    *,
    repeats: int = 3,
    max_tokens: int | None = None,
    progress: Callable[[str], None] = lambda line: None,
    **engine: Any,
) -> DecodeReport:
    """Answer every prompt of the set `repeats` times, greedily. `engine` goes to `LLM`.

    Raises SlipstreamError where the model cannot be loaded or the set does not exist.
    """
    chosen = prompts(prompt_set)
    llm = LLM(model, **engine)
    drafter = engine.get("drafter", "auto")
    _answer(llm, chosen[0], drafter, max_tokens=8)  # touches every weight once, so that no answer pays for page faults
    completions: list[Completion] = []
    rounds: list[float] = []
    for _ in range(repeats):
        for prompt in chosen:
            completion, gaps = _answer(llm, prompt, drafter, max_tokens or prompt.max_tokens)
            completions.append(completion)
            rounds += gaps
            progress(f"{prompt.id}: {completion.timing.tokens_per_s:.0f} tok/s")

    round_s = summarize(rounds)
    weight_bytes = llm.backend.memory_bytes()
    rate = read_bandwidth(engine.get("threads") or cores()) if llm.backend.name in ("cpu", "reference") else None
    device = None
    if llm.backend.name == "cuda":
        device, rate = _on_device(llm, chosen[0], drafter)
    round_median = device.round_us.median / 1e6 if device else round_s.median
    done = [completion.speculation for completion in completions]
    return DecodeReport(
        model=model,
        backend=llm.backend.name,
        prompt_set=prompt_set,
        drafter=done[0].drafter,
        answers=len(completions),
        tokens=sum(completion.completion_tokens for completion in completions),
        ttft_s=summarize([completion.timing.ttft_s for completion in completions]),
        tokens_per_s=summarize([completion.timing.tokens_per_s for completion in completions]),
        round_s=round_s,
        tokens_per_round=sum(s.rounds + s.accepted for s in done) / sum(s.rounds for s in done),
        weight_bytes=weight_bytes,
        read_bytes_per_s=rate,
        floor_fraction=weight_bytes / rate / round_median if rate else None,
        device=device,
    )


def fresh_session(llm: LLM, drafter: str) -> Session:
    """A session that knows nothing of earlier answers, neither by its KV cache nor by its drafter's memory."""
    return llm.session(drafter=llm.make_drafter(drafter, Memory()))


def _on_device(llm: LLM, prompt: Prompt, drafter: str) -> tuple[DeviceReport, float]:
    """A long answer under the profiler, from its second round on, and the rate at which the GPU reads."""
    import torch

    from slipstream.kernels.read import read_rate

    backend: Any = llm.backend
    params = SamplingParams(max_tokens=8 * PROFILED_ROUNDS, ignore_eos=True)
    tokens = rounds = 0
    with fresh_session(llm, drafter) as session:
        chunks: Any = session.stream_chat(prompt.messages, params)
        next(chunks)
        with profiled() as ran:
            for chunk in chunks:
                rounds, tokens = rounds + 1, tokens + 1 + chunk.accepted
                if rounds == PROFILED_ROUNDS:
                    break
        chunks.close()
    report = summarise(ran, tokens / rounds, backend.weights.kernel_bytes())
    return report, read_rate(torch.device("cuda"))


def _answer(llm: LLM, prompt: Prompt, drafter: str, max_tokens: int) -> tuple[Completion, list[float]]:
    """The whole answer, and the seconds of every round but the first, whose wait is prefill."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    gaps, last, completion = [], 0.0, None
    with fresh_session(llm, drafter) as session:
        for chunk in session.stream_chat(prompt.messages, params):
            now = time.perf_counter()
            if last:
                gaps.append(now - last)
            last, completion = now, chunk.completion
    assert completion is not None  # the last chunk carries it
    return completion, gaps
