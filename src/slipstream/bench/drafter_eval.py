"""How well a block drafter guesses: the tokens that a round brings if every guess is verified, by task.

The acceptance length of a task is its tokens over its rounds, all answers together. Its interval is the bootstrap's
over the prompts (Efron 1979): answers are drawn again with replacement, and the middle 95% of the lengths kept.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from slipstream.bench.drafter_prompts import TASKS, Task, task_prompts
from slipstream.bench.workloads import Prompt
from slipstream.drafters.block import BlockDrafter, Free
from slipstream.engine.engine import LLM
from slipstream.engine.request import SamplingParams
from slipstream.errors import RequestError

RESAMPLES = 2000


@dataclass(frozen=True)
class Acceptance:
    """One task at one temperature.

    tokens_per_round: acceptance length; low and high: its 95% interval. promised: the length that the drafter's own
    confidence predicts. held: by place in the block, the share of guesses that were right, all before them being so.
    """

    task: str
    temperature: float
    prompts: int
    rounds: int
    tokens_per_round: float
    low: float
    high: float
    promised: float
    held: tuple[float, ...]


class Judged(BlockDrafter):
    """Has every guess verified, and notes what came of it."""

    def __init__(self) -> None:
        super().__init__(Free())
        self.name = "judged"  # not one that a device would run by itself
        self.rounds: list[tuple[int, int, float]] = []  # drafted, accepted, promised tokens

    def propose(self, limit: int) -> Sequence[int]:
        assert self._guess is not None, "an LLM with a block drafter attaches it"
        tokens, confidence = self._guess(limit)
        self._promised = 1 + float(np.cumprod(confidence).sum())
        return tokens

    def observe(self, committed: Sequence[int], drafted: int, accepted: int) -> None:
        self.rounds.append((drafted, accepted, self._promised))


def evaluate_drafter(
    model: str | os.PathLike[str] | LLM,
    drafter: str = "block",
    *,
    tasks: Sequence[Task] = TASKS,
    temperatures: Sequence[float] = (0.0, 0.8),
    drafts: int = 7,
    backend: str = "auto",
    threads: int | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> list[Acceptance]:
    """The acceptance of every task at every temperature.

    drafter: `block`, the one that ships for the model, or a folder. drafts: guesses verified a round.
    Raises SlipstreamError where model or drafter cannot be loaded, or a task does not exist.
    """
    if unknown := [task for task in tasks if task not in TASKS]:
        raise RequestError(f"no task {unknown[0]!r}; choose of {', '.join(TASKS)}")
    if not isinstance(model, LLM):
        with LLM(model, backend=backend, drafter=drafter, threads=threads) as llm:
            return evaluate_drafter(llm, tasks=tasks, temperatures=temperatures, drafts=drafts, progress=progress)
    return [
        _judge(model, task, task_prompts(task), temperature, drafts, progress)
        for temperature in temperatures
        for task in tasks
    ]


def _judge(
    llm: LLM, task: str, prompts: Sequence[Prompt], temperature: float, drafts: int, progress: Callable[[str], None]
) -> Acceptance:
    answers = []
    for seed, prompt in enumerate(prompts):
        judged = Judged()
        params = SamplingParams(max_tokens=prompt.max_tokens, temperature=temperature, seed=seed)
        with llm.session(drafter=judged, drafts=drafts) as session:
            session.chat(prompt.messages, params)
        # The last rounds of an answer are cut short by its end, which says nothing about the drafter.
        whole = [round for round in judged.rounds[:-1] if round[0] == min(drafts, judged.rounds[0][0])]
        answers.append(np.array(whole, np.float64).reshape(-1, 3))
    done = summarise(task, temperature, answers)
    progress(f"{task}, temperature {temperature:g}: {done.tokens_per_round:.2f} tokens a round")
    return done


def summarise(task: str, temperature: float, answers: Sequence[np.ndarray]) -> Acceptance:
    """answers: for each prompt its rounds (n, 3): drafted, accepted, promised tokens."""
    rounds = np.concatenate(answers)
    if not len(rounds):
        raise RequestError(f"the answers to the {task} prompts are too short to judge a drafter by")
    per_answer = np.array([(len(a), len(a) + a[:, 1].sum()) for a in answers])  # rounds, tokens
    drawn = np.random.default_rng(0).integers(0, len(answers), (RESAMPLES, len(answers)))
    totals = per_answer[drawn].sum(axis=1)
    totals = totals[totals[:, 0] > 0]
    low, high = np.percentile(totals[:, 1] / totals[:, 0], [2.5, 97.5])
    accepted, drafts = rounds[:, 1], int(rounds[:, 0].max())
    reached = [(accepted >= i).sum() for i in range(1 + drafts)]
    return Acceptance(
        task=task,
        temperature=temperature,
        prompts=len(answers),
        rounds=len(rounds),
        tokens_per_round=float(1 + accepted.mean()),
        low=float(low),
        high=float(high),
        promised=float(rounds[:, 2].mean()),
        held=tuple(float(b / a) if a else 0.0 for a, b in pairwise(reached)),
    )
