"""No speculation: every round verifies the anchor alone."""

from __future__ import annotations

from collections.abc import Sequence


class NoDrafter:
    name = "none"

    def begin(self, tokens: Sequence[int]) -> None:
        """Nothing to prepare."""

    def propose(self, limit: int) -> Sequence[int]:
        return ()

    def observe(self, committed: Sequence[int], drafted: int, accepted: int) -> None:
        """Nothing to learn."""
