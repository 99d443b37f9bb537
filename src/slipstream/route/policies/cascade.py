"""Fast first; strong from the first evidence that the fast model is not up to the work, and then for good (a latch)."""

from __future__ import annotations

from pydantic import Field
from pydantic.dataclasses import dataclass

from slipstream.route.decision import Catalogue, Conversation, Decision, SessionState
from slipstream.route.policies.common import OPTIONS, Each, Pair
from slipstream.route.trajectory import signals


@dataclass(frozen=True, config=OPTIONS, kw_only=True)
class Cascade(Pair):
    """errors_in_row, repeats: the evidence. latch: whether the session stays on `strong` afterwards."""

    each: Each = "step"
    errors_in_row: int = Field(default=2, ge=1)
    repeats: int = Field(default=2, ge=1)
    latch: bool = True
    name = "cascade"

    def decide(self, conversation: Conversation, state: SessionState, catalogue: Catalogue) -> Decision:
        if state.latched:
            reason = f"escalated before, and latched to {state.latched.target}"
            return self.settle(True, [reason], conversation, state, catalogue, latch=True)
        found = signals(conversation, state)
        evidence = []
        if found.errors_in_row >= self.errors_in_row:
            evidence.append(f"{found.errors_in_row} errors in a row")
        if found.repeats >= self.repeats:
            evidence.append(f"the same call brought the same result {found.repeats + 1} times")
        said = evidence or ["no evidence against the fast model"]
        return self.settle(bool(evidence), said, conversation, state, catalogue, latch=self.latch and bool(evidence))
