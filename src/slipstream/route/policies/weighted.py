"""Chance by weights, for comparisons (A/B) and for the random arm: seeded, so that every router decides alike."""

from __future__ import annotations

import hashlib
from typing import Literal

from pydantic import field_validator
from pydantic.dataclasses import dataclass

from slipstream.route.decision import Catalogue, Conversation, Decision, SessionState
from slipstream.route.policies.common import OPTIONS, decided, named, pick


@dataclass(frozen=True, config=OPTIONS)
class Weighted:
    """weights: of `target` or `target/tier`. sticky: a session keeps its draw, or each request draws anew."""

    weights: dict[str, float]
    seed: int = 0
    sticky: Literal["session", "request"] = "session"
    name = "weighted"

    @field_validator("weights")
    @classmethod
    def _positive(cls, weights: dict[str, float]) -> dict[str, float]:
        if not weights or min(weights.values()) < 0 or not 0 < sum(weights.values()) < float("inf"):
            raise ValueError("give each choice a weight of 0 or more, and one of them more than 0")
        return weights

    def decide(self, conversation: Conversation, state: SessionState, catalogue: Catalogue) -> Decision:
        drawn = f"{self.seed}\0{state.id}" + ("" if self.sticky == "session" else f"\0{state.requests}")
        at = int.from_bytes(hashlib.sha256(drawn.encode()).digest()[:8]) / 2**64 * sum(self.weights.values())
        order = list(self.weights)
        first = 0
        for first, key in enumerate(order):  # noqa: B007 - the last one where rounding left a remainder
            at -= self.weights[key]
            if at < 0:
                break
        choice, reasons = pick([order[first], *order[:first], *order[first + 1 :]], conversation, catalogue)
        reasons = reasons or [f"drew {named(choice)}, weight {self.weights[order[first]]:g}, once a {self.sticky}"]
        return decided(choice, reasons, conversation, state, catalogue)
