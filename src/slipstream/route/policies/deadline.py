"""Whatever meets the deadline at the least cost, or is quickest within the budget: mostly a choice of speed tier.

    steps left = max(1, steps - steps done)
    deadline:  the cheapest choice with   next + (steps left - 1) x later  <=  (deadline - elapsed) x margin
    budget:    the quickest choice with   next + (steps left - 1) x later  <=  (budget - spent) x margin

`next` re-reads the prompt where no KV cache holds it, `later` does not. Where none fits, the quickest or the cheapest.
"""

from __future__ import annotations

import math

from pydantic import Field
from pydantic.dataclasses import dataclass

from slipstream.route.decision import Catalogue, Choice, Conversation, Decision, Estimate, RouteError, SessionState
from slipstream.route.estimate import estimate, feasible, parse_choice, settled
from slipstream.route.policies.common import OPTIONS, decided, named


@dataclass(frozen=True, config=OPTIONS, kw_only=True)
class _Limits:
    """use: the choices that are weighed, `target` for all its tiers; none is every one. steps: requests that a session
    is expected to make. margin: the share of what is left that may be planned with."""

    use: tuple[str, ...] = ()
    steps: int = Field(default=20, ge=1)
    margin: float = Field(default=0.9, gt=0, le=1)

    def weigh(
        self, conversation: Conversation, state: SessionState, catalogue: Catalogue
    ) -> tuple[int, list[Estimate]]:
        """Steps left, and what finishing them takes on each choice."""
        left = max(1, self.steps - state.requests)
        able = feasible(conversation, catalogue)
        if self.use:
            able = [one for one in able if self._wanted(one, catalogue)]
            if not able:
                raise RouteError(f"none of {', '.join(self.use)} can take this request; name more targets in use")
        found = []
        for one in able:
            now = estimate(one, conversation, state, catalogue)
            later = settled(one, conversation, state, catalogue)
            found.append(
                Estimate(
                    one,
                    now.time_s + (left - 1) * later.time_s,
                    now.cost + (left - 1) * later.cost,
                    now.reread_tokens,
                )
            )
        return left, found

    def _wanted(self, choice: Choice, catalogue: Catalogue) -> bool:
        return any(text == choice.target or parse_choice(text, catalogue) == choice for text in self.use)


def _limit(conversation: Conversation, key: str, otherwise: float) -> float:
    """The request's own limit in its metadata, where that is a number; the route's where it is not."""
    try:
        given = float(conversation.metadata.get(key, otherwise))
    except ValueError:
        return otherwise
    return given if math.isfinite(given) else otherwise


@dataclass(frozen=True, config=OPTIONS, kw_only=True)
class Deadline(_Limits):
    """deadline_s: from a session's first request; a request's metadata `deadline_s` comes before it."""

    deadline_s: float = Field(gt=0)
    name = "deadline"

    def decide(self, conversation: Conversation, state: SessionState, catalogue: Catalogue) -> Decision:
        left, found = self.weigh(conversation, state, catalogue)
        rest_s = _limit(conversation, "deadline_s", self.deadline_s) - state.elapsed_s
        meets = [one for one in found if one.time_s <= rest_s * self.margin]
        if meets:
            best = min(meets, key=lambda one: (one.cost, one.time_s))
            why = f"the cheapest that ends {left} steps in {best.time_s:.1f} s of {rest_s:.1f} s"
        else:
            best = min(found, key=lambda one: (one.time_s, one.cost))
            why = f"the quickest; none ends {left} steps within {rest_s:.1f} s"
        return decided(best.choice, [f"{named(best.choice)}: {why}"], conversation, state, catalogue)


@dataclass(frozen=True, config=OPTIONS, kw_only=True)
class Budget(_Limits):
    """budget_usd: of a session; a request's metadata `budget_usd` comes before it."""

    budget_usd: float = Field(gt=0)
    name = "budget"

    def decide(self, conversation: Conversation, state: SessionState, catalogue: Catalogue) -> Decision:
        left, found = self.weigh(conversation, state, catalogue)
        rest = _limit(conversation, "budget_usd", self.budget_usd) - state.spent
        meets = [one for one in found if one.cost <= rest * self.margin]
        if meets:
            best = min(meets, key=lambda one: (one.time_s, one.cost))
            why = f"the quickest that ends {left} steps for ${best.cost:.4f} of ${rest:.4f}"
        else:
            best = min(found, key=lambda one: (one.cost, one.time_s))
            why = f"the cheapest; none ends {left} steps for ${rest:.4f}"
        return decided(best.choice, [f"{named(best.choice)}: {why}"], conversation, state, catalogue)
