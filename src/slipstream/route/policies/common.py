"""What policies share: a choice that can be asked now, keeping a turn together, staying at the KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from slipstream.route.decision import Catalogue, Choice, Conversation, Decision, SessionState
from slipstream.route.estimate import estimate, feasible, parse_choice, settled

OPTIONS = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
Each = Literal["turn", "step"]


def pick(wanted: Sequence[str], conversation: Conversation, catalogue: Catalogue) -> tuple[Choice, list[str]]:
    """The first of `wanted` (`target` or `target/tier`) that can take the request, else the first choice that can.

    With a reason for each that was passed over. Raises RouteError where nothing can.
    """
    able = feasible(conversation, catalogue)
    reasons: list[str] = []
    for text in wanted:
        choice = parse_choice(text, catalogue)
        if choice in able:
            return choice, reasons
        reasons.append(f"{text} cannot take this request now")
    return able[0], [*reasons, f"{named(able[0])} is the first that can"]


def decided(
    choice: Choice,
    reasons: Sequence[str],
    conversation: Conversation,
    state: SessionState,
    catalogue: Catalogue,
    *,
    score: float | None = None,
    latch: bool = False,
) -> Decision:
    """A decision that lists every choice it could have been."""
    weighed = tuple(estimate(one, conversation, state, catalogue) for one in feasible(conversation, catalogue))
    return Decision(choice, tuple(reasons), weighed, score, latch)


def keeps_turn(each: Each, conversation: Conversation, state: SessionState, catalogue: Catalogue) -> Decision | None:
    """The turn's own choice where a policy classifies once a turn and the turn goes on (a tool's result came)."""
    inside = each == "turn" and conversation.messages and conversation.messages[-1].role != "user"
    if not inside or state.turn_choice not in feasible(conversation, catalogue) or state.turn_choice is None:
        return None
    reason = f"the turn began on {named(state.turn_choice)} and is classified once"
    return decided(state.turn_choice, [reason], conversation, state, catalogue)


@dataclass(frozen=True, config=OPTIONS, kw_only=True)
class Pair:
    """Options of every policy that chooses between two.

    strong, fast: `target` or `target/tier`. each: classify once a user turn, or at every step.
    affinity_steps: a step down to `fast` must pay for re-reading the prompt within so many steps; 0 moves at once.
    usd_per_hour: what an hour of waiting is worth against money, when that is weighed.
    """

    strong: str
    fast: str
    each: Each = "turn"
    affinity_steps: int = Field(default=5, ge=0)
    usd_per_hour: float = Field(default=10.0, ge=0)

    def settle(
        self,
        hard: bool,
        reasons: Sequence[str],
        conversation: Conversation,
        state: SessionState,
        catalogue: Catalogue,
        *,
        score: float | None = None,
        latch: bool = False,
    ) -> Decision:
        """`strong` for what is hard. What is easy stays on `strong` while moving does not pay; work never moves up
        for the cache's sake, since easy work that costs less on the strong model's warm cache is rare and logged."""
        wanted = (self.strong, self.fast) if hard else (self.fast, self.strong)
        choice, passed = pick(wanted, conversation, catalogue)
        said = [*reasons, *passed]
        stay = state.last
        if not hard and stay == parse_choice(self.strong, catalogue) and stay is not None and stay != choice:
            moving, staying = (self._price(one, conversation, state, catalogue) for one in (choice, stay))
            if self.affinity_steps and stay in feasible(conversation, catalogue) and staying <= moving:
                said.append(
                    f"stays on {named(stay)}: reading the prompt again on {named(choice)} "
                    f"does not pay within {self.affinity_steps} steps"
                )
                choice = stay
        return decided(choice, said, conversation, state, catalogue, score=score, latch=latch)

    def _price(self, choice: Choice, conversation: Conversation, state: SessionState, catalogue: Catalogue) -> float:
        """Dollars of the next `affinity_steps` steps, time included at its price."""
        now = estimate(choice, conversation, state, catalogue)
        later = settled(choice, conversation, state, catalogue)
        more = max(0, self.affinity_steps - 1)
        return now.cost + more * later.cost + (now.time_s + more * later.time_s) * self.usd_per_hour / 3600


def named(choice: Choice) -> str:
    return f"{choice.target}/{choice.tier}"
