"""Judges a classifier on questions with known outcomes: how much of strong's gain it recovers.

Random routing recovers the share that it sends to strong; `route.replay` adds time and money. The share recovered is
(quality - fast) / (strong - fast); the measure and the half-way mark follow RouteLLM (Ong et al., 2024). Intervals are
percentile bootstraps over questions, or over whole groups where subjects were held out, since questions of one subject
are not independent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slipstream.route.decision import RouteError
from slipstream.route.outcomes import Table
from slipstream.route.training import gain_curve

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """A figure with its 95% bootstrap interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.1%} ({self.low:.1%} to {self.high:.1%})"


@dataclass(frozen=True)
class Judged:
    """share_for_half: of calls to strong, in order of score, that recover half of the gain; random needs 0.5.

    share, recovered: at the threshold as deployed, which the test questions had no part in. curve: (share, recovered).
    """

    questions: int
    strong_right: float
    fast_right: float
    right: float
    share_for_half: Interval
    share: Interval
    recovered: Interval
    curve: Sequence[tuple[float, float]]

    @property
    def random_right(self) -> float:
        """What random routing answers right at the same share."""
        return self.fast_right + self.share.value * (self.strong_right - self.fast_right)


def judge(
    data: Table, scores: Floats, to_strong: npt.NDArray[np.bool_], *, by_group: bool, draws: int = 1000, seed: int = 0
) -> Judged:
    """scores: (n,) gains that were predicted without the test outcomes; to_strong: (n,) what was decided by them.

    Raises RouteError where strong gains nothing on `data`: shares of nothing mean nothing.
    """
    if data.gain.sum() <= 0:
        raise RouteError("strong is not right more often than fast on these questions; there is no gain to recover")
    whole = np.arange(len(data))
    samples = [whole[at] for at in resamples(data.groups if by_group else None, len(data), draws, seed)]
    kept = [at for at in samples if data.gain[at].sum() > 0]
    figures = np.array([_figures(data.gain[at], scores[at], to_strong[at]) for at in kept])
    value = _figures(data.gain, scores, to_strong)
    low, high = np.percentile(figures, [2.5, 97.5], axis=0)
    half, share, recovered = (Interval(*map(float, one)) for one in zip(value, low, high, strict=True))
    return Judged(
        len(data),
        float(data.strong.mean()),
        float(data.fast.mean()),
        float(np.where(to_strong, data.strong, data.fast).mean()),
        half,
        share,
        recovered,
        [point[1:] for point in gain_curve(scores, data.gain)],
    )


def resamples(groups: npt.NDArray[np.str_] | None, n: int, draws: int, seed: int) -> list[npt.NDArray[np.intp]]:
    """Indices (about n,) of each bootstrap draw: of questions, or of whole groups with all their questions."""
    rng = np.random.default_rng(seed)
    if groups is None:
        return [rng.integers(0, n, n) for _ in range(draws)]
    members = [np.flatnonzero(groups == name) for name in np.unique(groups)]
    return [
        np.concatenate([members[int(i)] for i in rng.integers(0, len(members), len(members))]) for _ in range(draws)
    ]


def share_for(level: float, scores: Floats, gain: Floats) -> float:
    """The smallest share of calls to strong, in order of score, that recovers `level` of the gain."""
    return next(share for _, share, recovered in gain_curve(scores, gain) if recovered >= level - 1e-12)


def _figures(gain: Floats, scores: Floats, to_strong: npt.NDArray[np.bool_]) -> tuple[float, float, float]:
    return share_for(0.5, scores, gain), float(to_strong.mean()), float(gain[to_strong].sum() / gain.sum())
