"""Judges a router on questions with known outcomes, offline: quality, time and money, always beside the plain arms.

    all-strong, all-fast        the two ends
    random                      the same share of calls to strong, drawn without looking: its recovery is that share
    learned                     what the classifier does

Quality is the share answered right. The share of the gain recovered is (quality - fast) / (strong - fast); the measure
and the half-way mark follow RouteLLM (Ong et al., 2024). Intervals are percentile bootstraps over questions, or over
whole groups where subjects were held out, since questions of one subject are not independent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slipstream.route.decision import RouteError, Target, Tier
from slipstream.route.outcomes import Table
from slipstream.route.training import gain_curve

Floats = npt.NDArray[np.float64]
CHARS_A_TOKEN = 4.0


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


@dataclass(frozen=True)
class Bill:
    """What answering all questions takes in one arm, a question: quality measured, time and money modelled."""

    arm: str
    right: float
    time_s: float
    usd: float


def bills(
    data: Table,
    to_strong: npt.NDArray[np.bool_],
    strong: tuple[Target, Tier],
    fast: tuple[Target, Tier],
    *,
    output_tokens: int,
    deciding_s: float,
) -> list[Bill]:
    """The four arms, with prompts of len(text) / CHARS_A_TOKEN tokens read cold. deciding_s: on the router's bill."""
    prompts = np.array([len(text) for text in data.texts]) / CHARS_A_TOKEN

    def of(tier: Tier) -> tuple[Floats, Floats]:
        time_s = tier.latency_s + prompts / tier.prefill_speed + output_tokens / tier.decode_speed
        return time_s, (prompts * tier.input_price + output_tokens * tier.output_price) / 1e6

    (strong_s, strong_usd), (fast_s, fast_usd) = of(strong[1]), of(fast[1])
    p = float(to_strong.mean())

    def mixed(a: Floats, b: Floats) -> float:
        return float(np.where(to_strong, a, b).mean())

    return [
        Bill("all-strong", float(data.strong.mean()), float(strong_s.mean()), float(strong_usd.mean())),
        Bill("all-fast", float(data.fast.mean()), float(fast_s.mean()), float(fast_usd.mean())),
        Bill(
            f"random {p:.0%}",
            float(p * data.strong.mean() + (1 - p) * data.fast.mean()),
            float(p * strong_s.mean() + (1 - p) * fast_s.mean()),
            float(p * strong_usd.mean() + (1 - p) * fast_usd.mean()),
        ),
        Bill(
            f"learned {p:.0%}",
            mixed(data.strong, data.fast),
            mixed(strong_s, fast_s) + deciding_s,
            mixed(strong_usd, fast_usd),
        ),
    ]
