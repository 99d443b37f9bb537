"""What the router counts, for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """One registry a router."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"slipstream_route_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str) -> Histogram:
            labels = ("route", "target", "tier")
            return Histogram(f"slipstream_route_{name}", text, labels, registry=registry, buckets=_S)

        self.requests = counter("requests", "Steps by place and end.", "route", "target", "tier", "status")
        self.faults = counter("faults", "Failed attempts by target and HTTP status.", "target", "status")
        self.tokens = counter("tokens", "Tokens by target and kind.", "target", "tier", "kind")
        self.cost_usd = counter("cost_usd", "Bills, judges included.", "route", "target", "tier")
        self.arm_cost_usd = counter("arm_cost_usd", "What the same steps would have cost in one arm.", "route", "arm")
        self.arm_s = counter("arm_seconds", "How long they would have taken there, modelled.", "route", "arm")
        self.time_s = histogram("seconds", "From arrival to the last byte.")
        self.ttft_s = histogram("ttft_seconds", "From arrival to the first token.")
        self.breaker = Gauge("slipstream_route_breaker_open", "1: left alone.", ("target",), registry=registry)
        self.running = Gauge("slipstream_route_running", "Streams at a target.", ("target",), registry=registry)

    def text(self) -> bytes:
        return generate_latest(self.registry)
