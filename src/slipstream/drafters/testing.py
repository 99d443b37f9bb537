"""Drafters that know the answer: one is always right, the other always wrong. What they speed up must stay the same."""

from __future__ import annotations

from collections.abc import Sequence


class ScriptedDrafter:
    """Guesses from `script`, the tokens known to follow `prompt_tokens` tokens of prompt.

    vocab: None guesses right; a vocabulary size guesses another token than the right one, every time.
    """

    name = "scripted"

    def __init__(self, prompt_tokens: int, script: Sequence[int], vocab: int | None = None) -> None:
        self._start, self._at = prompt_tokens, 0
        self._guesses = list(script) if vocab is None else [(token + 1) % vocab for token in script]

    def begin(self, tokens: Sequence[int]) -> None:
        self._at = len(tokens) - self._start

    def propose(self, limit: int) -> Sequence[int]:
        return self._guesses[self._at : self._at + limit]

    def observe(self, committed: Sequence[int], drafted: int, accepted: int) -> None:
        self._at += len(committed)
