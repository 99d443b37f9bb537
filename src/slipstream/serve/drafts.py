"""A drafter under a grammar: drafts that the grammar would refuse are not worth a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from slipstream.drafters.base import Guess, Guided
from slipstream.engine.engine import LLM


class Filter(Protocol):
    """What a grammar knows about drafts."""

    def allowed(self, drafts: Sequence[int]) -> int:
        """How many of `drafts` may follow the output, from the first on."""
        ...


class FilteredDrafter:
    """The engine's own drafter; `grammar` and `limit`, a tier's most drafts a round, are those of one stream."""

    def __init__(self, llm: LLM, name: str = "auto") -> None:
        self._inner = llm.make_drafter(name)
        self.name = self._inner.name
        self.grammar: Filter | None = None
        self.limit: int | None = None

    def attach(self, guess: Guess) -> None:
        if isinstance(self._inner, Guided):
            self._inner.attach(guess)

    def begin(self, tokens: Sequence[int]) -> None:
        self._inner.begin(tokens)

    def propose(self, limit: int) -> Sequence[int]:
        drafts = self._inner.propose(limit if self.limit is None else min(limit, self.limit))
        if self.grammar is not None and drafts:
            return drafts[: self.grammar.allowed(drafts)]
        return drafts

    def observe(self, committed: Sequence[int], drafted: int, accepted: int) -> None:
        self._inner.observe(committed, drafted, accepted)
