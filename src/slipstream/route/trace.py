"""An OpenTelemetry span a step, where its API is installed; no text goes into it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

try:
    from opentelemetry import propagate, trace
except ModuleNotFoundError:  # the extra [trace]
    installed = False
else:
    installed = True


def outgoing(traceparent: str | None) -> str | None:
    """What a target is told of the client's trace (W3C Trace Context); None for what is malformed."""
    ok = traceparent is not None and len(traceparent) == 55 and traceparent.replace("-", "").isalnum()
    return traceparent if ok else None


def record(id: str, route: str, row: Mapping[str, Any], traceparent: str | None, seconds: float) -> None:
    """A span that ends now."""
    if not installed:
        return
    now = time.time_ns()
    context = propagate.extract({"traceparent": traceparent}) if traceparent else None
    attributes = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": route,
        "gen_ai.response.model": row["model"],
        "gen_ai.usage.input_tokens": row["input"],
        "gen_ai.usage.output_tokens": row["output"],
        "slipstream.request": id,
        "slipstream.policy": row["policy"],
        "slipstream.reasons": row["reasons"],
        "slipstream.target": row["target"],
        "slipstream.tier": row["tier"],
        "slipstream.tier_served": row.get("tier_served"),
        "slipstream.cost_usd": row["cost"],
        "slipstream.ttft_s": row["ttft_s"],
        "slipstream.attempts": len(row["attempts"]) + 1,
    }
    span = trace.get_tracer("slipstream.route").start_span(
        f"route {route}",
        context=context,
        kind=trace.SpanKind.SERVER,
        start_time=now - int(seconds * 1e9),
        attributes={name: value for name, value in attributes.items() if value is not None},
    )
    if row["status"] != "ok":
        span.set_status(trace.StatusCode.ERROR)
    span.end(now)
