"""What the server counts, for Prometheus; one registry a server, so that several live in one process."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

_SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TOKEN_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1)


@dataclass
class Rounds:
    """Sums of one tier's rounds: plain numbers, as only the device thread writes them and every round pays for it."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    token_s: float = 0.0
    counts: list[int] = field(default_factory=lambda: [0] * (len(_TOKEN_S) + 1))  # of token times, by bucket

    def add(self, drafted: int, accepted: int) -> None:
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted

    def observe(self, token_s: float) -> None:
        self.token_s += token_s
        self.counts[bisect_left(_TOKEN_S, token_s)] += 1


class Metrics:
    """Counters and histograms by tier. Names are part of the API: `slipstream bench` reads them."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"slipstream_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"slipstream_{name}", text, ("tier",), registry=registry, buckets=buckets)

        self.requests = counter("requests", "HTTP requests by path and status.", "path", "status")
        self.streams = counter("streams", "Answers by tier and how they ended.", "tier", "end")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens.", "tier")
        self.cached_tokens = counter("cached_tokens", "Prompt tokens reused from a session.", "tier")
        self.completion_tokens = counter("completion_tokens", "Tokens decoded.", "tier")
        self.preemptions = counter("preemptions", "Streams paused for one of a higher rank.", "tier")
        self.device_s = counter("device_seconds", "Time of the device.", "tier")
        self.cost_usd = counter("cost_usd", "Price of what was served.", "tier")
        self.queue_s = histogram("queue_seconds", "From arrival to the first work on it.", _SHORT_S)
        self.ttft_s = histogram("ttft_seconds", "From arrival to the first token.", _SHORT_S)
        self.tiers: dict[str, Rounds] = defaultdict(Rounds)
        registry.register(_RoundsReading(self.tiers))

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """A value that is read when asked for."""
        self.registry.register(_Reading(f"slipstream_{name}", text, read))

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _RoundsReading(Collector):
    def __init__(self, tiers: dict[str, Rounds]) -> None:
        self._tiers = tiers

    def collect(self) -> Iterable[Metric]:
        tiers = list(self._tiers.items())
        for name, text, attribute in (
            ("rounds", "Rounds of decoding.", "rounds"),
            ("drafted_tokens", "Drafts verified.", "drafted"),
            ("accepted_tokens", "Drafts accepted.", "accepted"),
        ):
            family = CounterMetricFamily(f"slipstream_{name}", text, labels=("tier",))
            for tier, sums in tiers:
                family.add_metric((tier,), getattr(sums, attribute))
            yield family
        times = HistogramMetricFamily(
            "slipstream_inter_token_seconds", "Between tokens: a round's time over its tokens.", labels=("tier",)
        )
        bounds = [*map(str, _TOKEN_S), "+Inf"]
        for tier, sums in tiers:
            times.add_metric((tier,), list(zip(bounds, accumulate(sums.counts), strict=True)), sums.token_s)
        yield times


class _Reading(Collector):
    def __init__(self, name: str, text: str, read: Callable[[], float]) -> None:
        self._name, self._text, self._read = name, text, read

    def collect(self) -> Iterable[GaugeMetricFamily]:
        yield GaugeMetricFamily(self._name, self._text, value=self._read())
