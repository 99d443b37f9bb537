"""What a round of n rows costs on this machine, relative to a round of one, learned from the rounds themselves.

Drafters weigh it against the tokens they expect to gain. It steers which drafts are tried, never which tokens come out.
"""

from __future__ import annotations

from slipstream.backends.base import MAX_DRAFTS

PRIOR_ROW_COST = 0.06
"""Assumed until measured: each further row adds this share of a one-row round. Optimistic, so that drafts are tried."""

_WARM_UP = 2  # the first one-row rounds pay for cold caches
_RELAX_EVERY = 64  # one-row rounds between two steps back towards the prior, so that a stale verdict is tried again


class RoundCost:
    """Moving averages of round times by row count. Call it with a row count for the relative cost."""

    def __init__(self) -> None:
        self._prior = [1 + PRIOR_ROW_COST * (rows - 1) for rows in range(2 + MAX_DRAFTS)]
        self._ratio = list(self._prior)
        self._one_row_s = 0.0
        self._one_row_rounds = 0

    def __call__(self, rows: int) -> float:
        return self._ratio[rows]

    def record(self, rows: int, seconds: float) -> None:
        """A round of `rows` rows took `seconds`."""
        if rows == 1:
            self._one_row_rounds += 1
            if self._one_row_rounds <= _WARM_UP:
                self._one_row_s = seconds
            else:
                # One interrupted round must not make every other look cheap.
                self._one_row_s += (min(seconds, 2 * self._one_row_s) - self._one_row_s) / 16
            if self._one_row_rounds % _RELAX_EVERY == 0:
                self._ratio = [r + (p - r) / 16 for r, p in zip(self._ratio, self._prior, strict=True)]
        elif self._one_row_rounds >= _WARM_UP:
            ratio = self._ratio[rows]
            self._ratio[rows] += (min(seconds / self._one_row_s, 2 * ratio) - ratio) / 8
