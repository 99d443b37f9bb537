"""What a round of n rows costs on this machine, relative to a round of one, learned from the rounds themselves.

Drafters weigh it against the tokens they expect to gain. It steers which drafts are tried, never which tokens come out.
"""

from __future__ import annotations

import time

import numpy as np

from slipstream.backends.base import MAX_DRAFTS, Backend

PRIOR_ROW_COST = 0.06
"""Assumed until measured: each further row adds this share of a one-row round. Optimistic, so that drafts are tried."""

PRIOR_DRAFT_COST = 0.3
"""Assumed of one block draft until one was measured."""

_WARM_UP = 2  # the first one-row rounds pay for cold caches
_RELAX_EVERY = 64  # one-row rounds between two steps back towards the prior, so that a stale verdict is tried again
_STALE = 64  # rounds after which one of one row is due, or a machine that slowed down looks like costly drafts
_STEADY = 8  # rounds of a row count from which on a new one moves the average by an eighth


class RoundCost:
    """Moving averages of round times by row count. Call it with a row count for the relative cost.

    draft: relative cost of one block draft. A row count not met yet lies on the line through its nearest ones.
    """

    def __init__(self) -> None:
        self.draft = PRIOR_DRAFT_COST
        self._rows = np.arange(2 + MAX_DRAFTS)
        self._prior = [1 + PRIOR_ROW_COST * max(0, rows - 1) for rows in range(2 + MAX_DRAFTS)]
        self._ratio = list(self._prior)
        self._seen = [0] * len(self._prior)
        self._drafts_seen = 0
        self._one_row_s = 0.0
        self._one_row_rounds = 0
        self._since_one_row = 0

    def __call__(self, rows: int) -> float:
        return self._ratio[rows]

    @property
    def one_row_due(self) -> bool:
        """Whether a round of one row should be next, since all others are measured by it."""
        return self._one_row_rounds <= _WARM_UP or self._since_one_row >= _STALE

    def record(self, rows: int, seconds: float) -> None:
        """A round of `rows` rows took `seconds`."""
        if rows == 1:
            self._record_one_row(seconds)
            return
        self._since_one_row += 1
        if self._one_row_rounds >= _WARM_UP:
            known = self._ratio[rows]
            self._seen[rows] = min(self._seen[rows] + 1, _STEADY)
            # One interrupted round must not look like the rule.
            self._ratio[rows] += (min(seconds / self._one_row_s, 2 * known) - known) / self._seen[rows]
            self._interpolate()

    def record_draft(self, seconds: float) -> None:
        """A block draft took `seconds`."""
        if self._one_row_rounds >= _WARM_UP:
            self._drafts_seen = min(self._drafts_seen + 1, _STEADY)
            self.draft += (min(seconds / self._one_row_s, 4 * self.draft) - self.draft) / self._drafts_seen

    def calibrate(self, backend: Backend) -> None:
        """Measure a few rounds of one, four and eight rows, so that the first answer need not pay for learning."""
        cache = backend.new_cache(1 + MAX_DRAFTS)
        try:
            for rows in (1, 1, 1, 8, 4, 1, 8, 4, 1):
                started = time.perf_counter()
                backend.verify(cache, np.zeros(rows, np.int32))
                self.record(rows, time.perf_counter() - started)
                cache.rewind(0)
        finally:
            cache.close()

    def _record_one_row(self, seconds: float) -> None:
        self._one_row_rounds += 1
        if self._one_row_rounds <= _WARM_UP:
            self._one_row_s = seconds
        else:
            step = 4 if self._since_one_row > _STALE / 2 or self._one_row_rounds < 16 else 16
            self._one_row_s += (min(seconds, 2 * self._one_row_s) - self._one_row_s) / step
        self._since_one_row = 0
        if self._one_row_rounds % _RELAX_EVERY == 0:
            self._ratio = [r + (p - r) / 16 for r, p in zip(self._ratio, self._prior, strict=True)]

    def _interpolate(self) -> None:
        met = [1, *(rows for rows, seen in enumerate(self._seen) if seen)]
        between = np.interp(self._rows, met, [self._ratio[rows] for rows in met])
        last, before = met[-1], met[-2]
        slope = (self._ratio[last] - self._ratio[before]) / (last - before)
        for rows in range(2, len(self._ratio)):
            if not self._seen[rows]:
                self._ratio[rows] = float(between[rows]) + slope * max(0, rows - last)
