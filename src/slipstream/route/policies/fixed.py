"""Always the same choice: the arms all-strong and all-fast, and a route that only wants fallbacks and a bill."""

from __future__ import annotations

from pydantic.dataclasses import dataclass

from slipstream.route.decision import Catalogue, Conversation, Decision, SessionState
from slipstream.route.policies.common import OPTIONS, decided, named, pick


@dataclass(frozen=True, config=OPTIONS)
class Fixed:
    """use: `target` or `target/tier`; none is the first that can take the request."""

    use: str | None = None
    name = "fixed"

    def decide(self, conversation: Conversation, state: SessionState, catalogue: Catalogue) -> Decision:
        choice, reasons = pick([self.use] if self.use else [], conversation, catalogue)
        return decided(choice, reasons or [f"always {named(choice)}"], conversation, state, catalogue)
