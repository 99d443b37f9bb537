"""What a GPU does in a round, from a profile of a running stream: device time, launches, and each kernel's share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from slipstream.bench.measure import Summary, percentile, summarize

LAST = "advance_kernel"
"""The kernel that ends a round's acceptance; one runs a round."""


class Ran(NamedTuple):
    """One kernel of a profile, times in microseconds."""

    name: str
    begun_us: float
    ended_us: float


@dataclass(frozen=True)
class KernelShare:
    """Of one kernel: launches and microseconds a round, and the bytes of weights it reads a round."""

    name: str
    launches: float
    us: float
    weight_bytes: int

    @property
    def bytes_per_s(self) -> float:
        return self.weight_bytes / self.us * 1e6


@dataclass(frozen=True)
class DeviceReport:
    """Rounds by the device's clock: from the end of one to the end of the next."""

    round_us: Summary
    round_p99_us: float
    tokens_per_s: float
    launches: float
    kernels: list[KernelShare]


def summarise(ran: list[Ran], tokens_per_round: float, weight_bytes: Mapping[str, int]) -> DeviceReport:
    """The whole rounds of a profile. weight_bytes: what a pass reads, by kernel name.

    Raises ValueError where the profile holds fewer than two ends of rounds.
    """
    ends = sorted(r.ended_us for r in ran if r.name == LAST)
    if len(ends) < 2:
        raise ValueError(f"a profile of {len(ran)} kernels holds {len(ends)} ends of rounds; two make a round")
    rounds = len(ends) - 1
    times = [later - sooner for sooner, later in pairwise(ends)]
    calls: dict[str, list[float]] = {}
    for r in ran:
        if ends[0] < r.ended_us <= ends[-1]:
            calls.setdefault(r.name, []).append(r.ended_us - r.begun_us)
    kernels = [KernelShare(name, len(us) / rounds, sum(us) / rounds, weight_bytes.get(name, 0))
               for name, us in calls.items()]  # fmt: skip
    return DeviceReport(
        summarize(times),
        percentile(times, 99),
        tokens_per_round * rounds / (ends[-1] - ends[0]) * 1e6,
        sum(k.launches for k in kernels),
        sorted(kernels, key=lambda k: -k.us),
    )


@contextmanager
def profiled() -> Iterator[list[Ran]]:
    """Collects the kernels that run inside, once it is left."""
    import torch

    ran: list[Ran] = []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        yield ran
    events: Any = profile.events()
    ran += [Ran(e.name, e.time_range.start, e.time_range.end) for e in events if e.device_type.name == "CUDA"]
