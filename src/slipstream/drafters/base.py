"""What a drafter is: it guesses the next tokens cheaply; the target accepts exactly those it would have chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

Guess = Callable[[int], tuple[Sequence[int], Sequence[float]]]
"""Most guesses -> tokens to follow the text, and of each the chance that it is right if all before it are."""


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


@runtime_checkable
class Guided(Protocol):
    """A drafter that asks a model, which runs beside the target."""

    def attach(self, guess: Guess) -> None:
        """How to ask about the text that the next `begin` starts, as it stands when asked."""
        ...


class Cost(Protocol):
    """Times relative to a round of one row: called with a row count, of such a round; draft, of asking the model."""

    draft: float

    def __call__(self, rows: int) -> float: ...

    @property
    def one_row_due(self) -> bool:
        """Whether the next round should have one row, to measure by."""
        ...

    def record_draft(self, seconds: float) -> None: ...
