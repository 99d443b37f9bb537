"""Plays a policy through an agent's steps offline: what each step takes at its target, switches and judges included.

    conversation, state -> policy.decide -> time and money (`route.estimate`) -> the state that the gateway would keep

Recorded trajectories are replayed open-loop: the recorded messages stand whatever was chosen, so they show time and
money and say nothing of quality. `route.simulate` closes the loop with a model of what fails. Caches never expire here.

A recording is JSON Lines, one session a line:
    {"messages": [...], "steps": [{"messages": 2, "prompt_tokens": 429, "output_tokens": 32, "tool_s": 0.01}, ...]}
with messages of OpenAI's chat API; a step's `messages` is how many of them it was asked with.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.route.decision import (
    Catalogue,
    Choice,
    Conversation,
    Decision,
    Message,
    Policy,
    RouteError,
    SessionState,
    ToolCall,
)
from slipstream.route.estimate import estimate
from slipstream.route.evaluate import Interval
from slipstream.route.outcomes import Outcome
from slipstream.route.policies import make_policy

CHARS_A_TOKEN = 4


@dataclass
class Run:
    """What one session took. time_s: tools included. right: whether the task was done; None where nobody knows."""

    right: bool | None = None
    time_s: float = 0.0
    usd: float = 0.0
    deciding_s: float = 0.0
    steps: int = 0
    switches: int = 0
    reread_tokens: int = 0
    chosen: dict[Choice, int] = field(default_factory=dict)

    def share(self, target: str) -> float:
        """Of the steps, those that `target` took."""
        return sum(n for choice, n in self.chosen.items() if choice.target == target) / max(1, self.steps)


def take_step(
    policy: Policy,
    conversation: Conversation,
    state: SessionState,
    catalogue: Catalogue,
    run: Run,
    *,
    output_tokens: int,
    tool_s: float,
) -> tuple[Decision, SessionState]:
    """Decide one step, put it on `run`, and return what the gateway would remember."""
    decision = policy.decide(conversation, state, catalogue)
    choice = decision.choice
    took = estimate(choice, conversation, state, replace(catalogue, expected_output=output_tokens))
    time_s = took.time_s + decision.judge_time_s + tool_s
    run.time_s += time_s
    run.usd += took.cost + decision.judge_cost
    run.deciding_s += decision.judge_time_s
    run.steps += 1
    run.switches += state.last is not None and state.last.target != choice.target
    run.reread_tokens += took.reread_tokens
    run.chosen[choice] = run.chosen.get(choice, 0) + 1
    starts = bool(conversation.messages) and conversation.messages[-1].role == "user"
    return decision, replace(
        state,
        last=choice,
        cached={**state.cached, choice.target: conversation.prompt_tokens + output_tokens},
        latched=choice if decision.latch else state.latched,
        turn_choice=choice if starts or state.turn_choice is None else state.turn_choice,
        spent=state.spent + took.cost + decision.judge_cost,
        elapsed_s=state.elapsed_s + time_s,
        requests=state.requests + 1,
    )


@dataclass(frozen=True)
class RecordedStep:
    """One call of a model: the messages it saw, and the server's own counts."""

    conversation: Conversation
    output_tokens: int
    tool_s: float


def replay(policy: Policy, steps: Sequence[RecordedStep], catalogue: Catalogue, session: str) -> Run:
    """One recorded session, open-loop."""
    run, state = Run(), SessionState(session)
    for step in steps:
        _, state = take_step(
            policy,
            step.conversation,
            state,
            catalogue,
            run,
            output_tokens=step.output_tokens,
            tool_s=step.tool_s,
        )
    return run


def ask_once(
    policy: Policy, outcomes: Sequence[Outcome], catalogue: Catalogue, strong: Choice, fast: Choice
) -> list[Run]:
    """Every question a session of its own; its prompt's tokens are estimated by its length where none are given."""
    runs = []
    for i, one in enumerate(outcomes):
        tokens = one.tokens or max(1, len(one.text) // CHARS_A_TOKEN)
        step = Conversation((Message("user", one.text),), prompt_tokens=tokens)
        run, state = Run(), SessionState(f"question {i}")
        decision, _ = take_step(
            policy, step, state, catalogue, run, output_tokens=catalogue.expected_output, tool_s=0.0
        )
        known = {strong.target: one.strong, fast.target: one.fast}
        if decision.choice.target not in known:
            raise RouteError(f"nobody knows what {decision.choice.target} answers; only strong's and fast's are given")
        run.right = known[decision.choice.target]
        runs.append(run)
    return runs


def with_plain_arms(
    play: Callable[[Policy], list[Run]], policy: Policy, strong: Choice, fast: Choice
) -> dict[str, list[Run]]:
    """The runs of `policy`, of all-strong and all-fast, and of random with the policy's own share of steps to strong.

    Raises RouteError for a policy that asks a model: offline there is none to ask.
    """
    if hasattr(policy, "decide_asking"):
        raise RouteError(f"policy {policy.name} asks a model at each turn, which a replay cannot; run it live instead")
    mine = play(policy)
    steps = sum(run.steps for run in mine)
    share = sum(run.share(strong.target) * run.steps for run in mine) / max(1, steps)
    texts = [f"{one.target}/{one.tier}" for one in (strong, fast)]
    drawn = {"weights": dict(zip(texts, (share, 1 - share), strict=True)), "sticky": "request"}
    return {
        "all-strong": play(make_policy("fixed", {"use": texts[0]})),
        "all-fast": play(make_policy("fixed", {"use": texts[1]})),
        f"random {share:.0%}": play(make_policy("weighted", drawn)),
        policy.name: mine,
    }


def read_recording(path: Path) -> list[list[RecordedStep]]:
    """All sessions of a file. Raises RouteError naming the line that is wrong."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RouteError(f"cannot read the recording {path}: {error}") from None
    sessions = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            messages = [from_chat(message) for message in row["messages"]]
            sessions.append([_step(step, messages) for step in row["steps"]])
        except KeyError as error:
            raise RouteError(f"{path}:{number}: a session lacks {error}") from None
        except (TypeError, ValueError, AttributeError) as error:
            raise RouteError(f"{path}:{number}: not a recorded session: {error}") from None
    if not sessions:
        raise RouteError(f"the recording {path} holds no sessions")
    return sessions


def _step(step: Mapping[str, Any], messages: Sequence[Message]) -> RecordedStep:
    seen = int(step["messages"])
    if not 0 < seen <= len(messages):
        raise ValueError(f"a step saw {seen} of {len(messages)} messages")
    conversation = Conversation(tuple(messages[:seen]), ("tools",), int(step["prompt_tokens"]))
    return RecordedStep(conversation, int(step["output_tokens"]), float(step.get("tool_s", 0.0)))


def from_chat(message: Mapping[str, Any]) -> Message:
    """A message of OpenAI's chat API whose content is text."""
    calls = tuple(
        ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls") or ()
    )
    role = message["role"]
    if role not in ("system", "user", "assistant", "tool"):
        raise ValueError(f"there is no role {role!r}")
    return Message(role, message.get("content") or "", calls, message.get("tool_call_id"), message.get("is_error"))


@dataclass(frozen=True)
class ArmFigures:
    """The mean session of an arm. time_saved, usd_saved: against all-strong, as shares, with bootstrap intervals over
    sessions (paired). right: share of tasks done, and right_lost against all-strong; NaN where nobody knows."""

    arm: str
    sessions: int
    right: float
    time_s: float
    usd: float
    strong_share: float
    steps: float
    switches: float
    reread_tokens: float
    time_saved: Interval
    usd_saved: Interval
    right_lost: Interval


def compare(
    arms: Mapping[str, Sequence[Run]], strong: str, *, base: str = "all-strong", draws: int = 1000, seed: int = 0
) -> list[ArmFigures]:
    """arms: the same sessions, in the same order, of each arm. strong: the target whose share is told."""
    n = len(arms[base])
    at = np.random.default_rng(seed).integers(0, n, (draws, n))

    def column(name: str, key: str) -> np.ndarray[Any, np.dtype[np.float64]]:
        values = [getattr(run, key) for run in arms[name]]
        return np.array([np.nan if value is None else value for value in values], np.float64)

    def saved(name: str, key: str) -> Interval:
        ours, theirs = column(name, key), column(base, key)
        low, high = np.percentile(1 - ours[at].mean(1) / theirs[at].mean(1), [2.5, 97.5])
        return Interval(float(1 - ours.mean() / theirs.mean()), float(low), float(high))

    def lost(name: str) -> Interval:
        less = column(base, "right") - column(name, "right")
        low, high = np.percentile(less[at].mean(1), [2.5, 97.5])
        return Interval(float(less.mean()), float(low), float(high))

    return [
        ArmFigures(
            name,
            n,
            float(column(name, "right").mean()),
            float(column(name, "time_s").mean()),
            float(column(name, "usd").mean()),
            sum(run.share(strong) * run.steps for run in runs) / max(1, sum(run.steps for run in runs)),
            float(column(name, "steps").mean()),
            float(column(name, "switches").mean()),
            float(column(name, "reread_tokens").mean()),
            saved(name, "time_s"),
            saved(name, "usd"),
            lost(name),
        )
        for name, runs in arms.items()
    ]
