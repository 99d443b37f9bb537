"""By the stage of the work: planning, diagnosing, getting unstuck are hard; carrying out what was decided is easy."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from slipstream.route.decision import Catalogue, Conversation, Decision, SessionState
from slipstream.route.policies.common import OPTIONS, Each, Pair, keeps_turn
from slipstream.route.trajectory import Signals, signals

Name = Literal["plan", "resume", "diagnose", "stuck", "sub-agent", "next", "carry out"]


@dataclass(frozen=True, config=OPTIONS, kw_only=True)
class Stage(Pair):
    """hard: the stages that go to `strong`; `next`, the step after tests passed, costs a little and saves faults.
    plan_steps: the first steps of a turn that are planning.

    stuck_errors: so many errors in a row, or stuck_repeats of the same call with the same result, is stuck.
    """

    each: Each = "step"
    hard: tuple[Name, ...] = ("plan", "resume", "diagnose", "stuck")
    plan_steps: int = Field(default=1, ge=0)
    stuck_errors: int = Field(default=3, ge=1)
    stuck_repeats: int = Field(default=2, ge=1)
    name = "stage"

    def decide(self, conversation: Conversation, state: SessionState, catalogue: Catalogue) -> Decision:
        if kept := keeps_turn(self.each, conversation, state, catalogue):
            return kept
        stage, why = self.stage(signals(conversation, state))
        return self.settle(stage in self.hard, [f"stage {stage}: {why}"], conversation, state, catalogue)

    def stage(self, found: Signals) -> tuple[Name, str]:
        """The stage, and what shows it. What goes wrong counts before who asks and where the turn stands."""
        if found.errors_in_row >= self.stuck_errors:
            return "stuck", f"{found.errors_in_row} errors in a row"
        if found.repeats >= self.stuck_repeats:
            return "stuck", f"the same call brought the same result {found.repeats + 1} times"
        if found.errors_in_row:
            return "diagnose", "the newest tool result is an error, or tests failed"
        if found.compacted:
            return "resume", "the history was compacted"
        if not found.main:
            return "sub-agent", "a sub-agent asks"
        if found.just_passed:
            return "next", "tests passed, and what comes next is to be decided"
        if found.steps < self.plan_steps:
            return "plan", f"step {found.steps + 1} of the turn"
        return "carry out", f"step {found.steps + 1} of the turn, nothing went wrong"
