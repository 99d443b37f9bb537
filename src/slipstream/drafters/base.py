"""What a drafter is: it guesses the next tokens cheaply; the target accepts exactly those it would have chosen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Drafter(Protocol):
    """Guesses for one stream. The engine calls `begin` once, then `propose` and `observe` alternately."""

    name: str

    def begin(self, tokens: Sequence[int]) -> None:
        """A text starts, or changed: `tokens` is all of it. Cheap where it extends the text already known."""
        ...

    def propose(self, limit: int) -> Sequence[int]:
        """At most `limit` tokens guessed to follow the text; none where drafting is not expected to pay."""
        ...

    def observe(self, committed: Sequence[int], drafted: int, accepted: int) -> None:
        """A round ended: `committed` tokens extend the text, `accepted` of the `drafted` guesses were right."""
        ...
