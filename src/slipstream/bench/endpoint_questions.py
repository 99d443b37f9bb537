"""What endpoints are asked: real text, since random tokens distort acceptance, and never the same question twice.

`mixed` crosses tasks with subjects, so that natural stops, forced length and the warm-up share no question: a drafter
that remembers earlier answers gains nothing. The other sets are those of `workloads`, which repeat when they run out. A
number comes first in all, so that no two prompts share more than the chat template's beginning.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from slipstream.bench.endpoint import Question, Stops
from slipstream.bench.workloads import Message, Prompt, prompts
from slipstream.errors import RequestError

QuestionSet = Literal["mixed", "chat", "code", "copy"]

TASKS = (
    "Explain to a curious twelve-year-old how {} works.",
    "Write a short story in which {} plays the main part.",
    "What are the three most common misunderstandings about {}?",
    "Give a short history of {} with the dates that matter.",
    "Write a polite letter to a neighbour about {}.",
    "Compare {} with its closest alternative, in a table of five rows.",
    "Write ten questions for a quiz about {}, with answers.",
    "Plan a half-day lesson about {} for adults who know nothing of it.",
    "Write a Python class that models {}, with docstrings and two tests.",
    "As a sceptical journalist, interview an expert on {}.",
)

SUBJECTS = (
    "a tide table", "a pressure cooker", "a sundial", "the library catalogue", "a suspension bridge", "beekeeping",
    "a weather balloon", "sourdough bread", "the postal service", "a canal lock", "noise-cancelling headphones",
    "a compost heap", "double-entry bookkeeping", "a lighthouse", "the bicycle gear", "a heat pump", "chess notation",
    "a vending machine", "a barcode", "the fire brigade", "a violin", "crop rotation", "a parking meter",
    "the subway map", "a recycling plant", "a pendulum clock", "vaccination", "the elevator", "glass blowing",
    "a chain of coffee shops",
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """What is asked. requests: of each endpoint, for each kind of stop. warmup: more before them, not measured."""

    question_set: QuestionSet = "mixed"
    requests: int = 10
    warmup: int = 2
    stops: tuple[Stops, ...] = ("natural", "forced")
    max_tokens: int | None = None
    seed: int = 0
    temperature: float = 0.0

    def warmups(self, copy: int = 0) -> list[Question]:
        return self._questions(self.stops[0], 0, self.warmup, copy)

    def questions(self, stops: Stops, copy: int = 0) -> list[Question]:
        """copy: the same under other numbers, for a second endpoint that may share a cache with a first."""
        start = self.warmup + self.stops.index(stops) * self.requests
        return self._questions(stops, start, self.requests, copy)

    @property
    def repeats(self) -> bool:
        """Whether the set is too small for all questions to differ in more than their number."""
        return self.warmup + len(self.stops) * self.requests > len(pool(self.question_set, self.seed))

    def _questions(self, stops: Stops, start: int, count: int, copy: int) -> list[Question]:
        chosen = pool(self.question_set, self.seed)
        numbers = random.Random(f"{self.seed}/{copy}").sample(range(100_000, 1_000_000), start + count)
        made = []
        for i in range(start, start + count):
            prompt = chosen[i % len(chosen)]
            made.append(
                Question(
                    id=f"{prompt.id}/{i}",
                    messages=unique(prompt.messages, numbers[i]),
                    max_tokens=self.max_tokens or prompt.max_tokens,
                    stops=stops,
                    seed=self.seed + i,
                    temperature=self.temperature,
                )
            )
        return made


def pool(name: QuestionSet, seed: int) -> Sequence[Prompt]:
    """The prompts of a set, the mixed ones in an order that the seed draws. Raises RequestError for an unknown set."""
    if name not in get_args(QuestionSet):
        raise RequestError(f"no question set {name!r}; choose one of {', '.join(get_args(QuestionSet))}")
    if name != "mixed":
        return prompts(name)
    made = [
        Prompt(f"mixed-{t}-{s}", ({"role": "user", "content": task.format(subject)},), 192)
        for t, task in enumerate(TASKS, 1)
        for s, subject in enumerate(SUBJECTS, 1)
    ]
    random.Random(seed).shuffle(made)
    return made


def unique(messages: Sequence[Message], number: int) -> list[Message]:
    """`messages` with a number as their very first words."""
    first, *rest = messages
    return [first | {"content": f"Note {number}. {first['content']}"}, *rest]
