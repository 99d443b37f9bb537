"""Made-up software tasks that go wrong when a model is not up to a step: a closed loop for policies. Not a measurement.

    plan -> read ... -> (edit -> run the tests -> diagnose where they fail) ... -> sum up

Every figure of `World` is an assumption. A step is hard or easy; a model gets it right with the chance of its level. A
plan or an edit that is wrong leaves a fault, which is seen at once (a tool's error), or by the tests, or by nobody: a
task is done when its last tests pass within the steps allowed and no unseen fault is left. Policies read the messages
alone. All arms meet the same draws of chance for the same task, kind of step and count, so that arms compare in pairs.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from slipstream.route.decision import Catalogue, Conversation, Message, Policy, SessionState, ToolCall
from slipstream.route.replay import Run, take_step

Kind = Literal["plan", "read", "edit", "test", "diagnose", "sum up"]


@dataclass(frozen=True)
class Work:
    """Of a kind of step: tokens written, tokens of its tool's result, seconds the tool runs, whether it is hard."""

    output: int
    result: int
    tool_s: float
    hard: float


@dataclass(frozen=True)
class World:
    """The assumptions. right: chance of a right step of a target, (easy, hard). hard of `Work`: the chance that it is.

    seen_at_once: of wrong edits, those that a tool refuses. seen_by_tests: of faults, those that tests find.
    """

    right: Mapping[str, tuple[float, float]]
    prompt: int = 6000
    reads: tuple[int, int] = (3, 8)
    edits: tuple[int, int] = (2, 6)
    most_steps: int = 80
    seen_at_once: float = 0.4
    seen_by_tests: float = 0.9
    work: Mapping[Kind, Work] = field(
        default_factory=lambda: {
            "plan": Work(800, 20, 0.0, 1.0),
            "read": Work(60, 1500, 0.05, 0.0),
            "edit": Work(350, 80, 0.05, 0.3),
            "test": Work(50, 300, 5.0, 0.0),
            "diagnose": Work(700, 80, 0.05, 1.0),
            "sum up": Work(250, 0, 0.0, 0.0),
        }
    )


class Task:
    """One task of a world, played by one policy."""

    def __init__(self, world: World, seed: int, policy: Policy, catalogue: Catalogue) -> None:
        self.world, self.seed, self.policy, self.catalogue = world, seed, policy, catalogue
        self.messages = [Message("system", "You work on code with tools."), Message("user", f"Mend issue {seed}.")]
        self.prompt_tokens = world.prompt
        self.state, self.run = SessionState(f"task {seed}"), Run()
        self.seen = self.unseen = 0  # faults that tests would find, and those that nobody will
        self.counts: dict[str, int] = {}

    def play(self) -> Run:
        done = self._work()
        self.run.right = done and not self.unseen
        return self.run

    def _work(self) -> bool:
        """Whether the last tests passed within the steps allowed."""
        reads, edits = (
            int(self._rng(name).integers(low, high + 1))
            for name, (low, high) in (("reads", self.world.reads), ("edits", self.world.edits))
        )
        self._make("plan")
        for _ in range(reads):
            while self._allowed() and not self._step("read"):
                pass
        for _ in range(edits):
            self._make("edit")
            while self._allowed() and not self._tests_pass():
                self._mend()
        self._step("sum up")
        return self.seen == 0 and self._allowed()

    def _make(self, kind: Kind) -> None:
        """A plan or an edit, again where its tool refuses it; wrong ones that pass leave a fault."""
        while self._allowed():
            at_once = kind == "edit" and self._draw("seen") < self.world.seen_at_once
            if self._step(kind, says_error=at_once):
                return
            if not at_once:
                found = self._draw("found") < self.world.seen_by_tests
                self.seen, self.unseen = self.seen + found, self.unseen + (not found)
                return

    def _tests_pass(self) -> bool:
        passed = self.seen == 0
        self._step("test", says=f"{'0' if passed else self.seen} failed, 9 passed in 5.00s")
        return passed

    def _mend(self) -> None:
        if self._step("diagnose", says_error=False):
            self.seen -= 1

    def _allowed(self) -> bool:
        return self.run.steps < self.world.most_steps

    def _step(self, kind: Kind, *, says: str | None = None, says_error: bool = True) -> bool:
        """Ask for one step; whether it was right. says_error: a wrong step shows as a tool's error."""
        work = self.world.work[kind]
        spread = float(np.exp(0.4 * self._rng("tokens", kind, count=True).standard_normal()))
        output = max(10, round(work.output * spread))
        conversation = Conversation(tuple(self.messages), ("read", "edit", "run_tests"), self.prompt_tokens)
        decision, self.state = take_step(
            self.policy,
            conversation,
            self.state,
            self.catalogue,
            self.run,
            output_tokens=output,
            tool_s=work.tool_s,
        )
        hard = self._draw("hard " + kind) < work.hard
        right = self._draw("right " + kind) < self.world.right[decision.choice.target][hard]
        wrong = says_error and not right and kind not in ("test", "sum up")
        tool = {"read": "read_file", "test": "run_tests", "plan": "note"}.get(kind, "edit")
        call = ToolCall(str(self.run.steps), tool, f'{{"n": {self.run.steps}}}')
        self.messages += [
            Message("assistant", "", (call,)),
            Message("tool", says or ("refused" if wrong else "done"), tool_call_id=call.id, is_error=wrong),
        ]
        self.prompt_tokens += output + work.result
        return right

    def _draw(self, name: str) -> float:
        return float(self._rng(name, count=True).random())

    def _rng(self, *names: str, count: bool = False) -> np.random.Generator:
        name = " ".join(names)
        number = self.counts.get(name, 0)
        if count:
            self.counts[name] = number + 1
        return np.random.default_rng([self.seed, zlib.crc32(name.encode()), number])


def simulate(
    policies: Mapping[str, Callable[[], Policy]], world: World, catalogue: Catalogue, tasks: Sequence[int]
) -> dict[str, list[Run]]:
    """Every arm on the same tasks."""
    return {name: [Task(world, seed, make(), catalogue).play() for seed in tasks] for name, make in policies.items()}
