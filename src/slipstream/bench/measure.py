"""Medians and percentiles of repeated measurements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Summary:
    """The middle of some samples, and how far the fastest and slowest tenth lie from it."""

    median: float
    p10: float
    p90: float
    samples: tuple[float, ...]


def summarize(samples: Sequence[float]) -> Summary:
    """Raises ValueError where there are no samples."""
    return Summary(median(samples), percentile(samples, 10), percentile(samples, 90), tuple(samples))


def median(samples: Sequence[float]) -> float:
    return percentile(samples, 50)


def percentile(samples: Sequence[float], percent: float) -> float:
    """The value below which `percent` of the samples lie, interpolated linearly between neighbours."""
    if not samples:
        raise ValueError("no samples to summarise")
    ordered = sorted(samples)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
