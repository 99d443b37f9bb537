"""OpenTelemetry spans, one an answer, where its API is installed; an SDK (`opentelemetry-instrument`) sends them.

Names follow the semantic conventions for generative AI. No text goes into a span.
"""

from __future__ import annotations

import time
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slipstream.serve.answers import Answer

try:
    from opentelemetry import propagate, trace
except ModuleNotFoundError:  # the extra [trace]
    installed = False
else:
    installed = True

parent: ContextVar[str | None] = ContextVar("traceparent", default=None)
"""The `traceparent` header of the request that is being served (W3C Trace Context)."""


def record(answer: Answer, model: str, traceparent: str | None) -> None:
    """A span from the answer's arrival to now."""
    if not installed:
        return
    first, usage = answer.jobs[0], answer.usage()
    now, arrived = time.time_ns(), first.arrived
    context = propagate.extract({"traceparent": traceparent}) if traceparent else None
    span = trace.get_tracer("slipstream").start_span(
        f"chat {model}",
        context=context,
        kind=trace.SpanKind.SERVER,
        start_time=now - int((time.perf_counter() - arrived) * 1e9),
        attributes={
            "gen_ai.operation.name": "chat",
            "gen_ai.request.model": model,
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "slipstream.tier": answer.served.name,
            "slipstream.cached_tokens": usage.cached_tokens,
            "slipstream.queue_s": usage.queue_s,
            "slipstream.ttft_s": usage.ttft_s,
            "slipstream.rounds": usage.rounds,
            "slipstream.accepted": usage.accepted,
            "slipstream.cost_usd": usage.cost_usd,
        },
    )
    if any(job.error for job in answer.jobs):
        span.set_status(trace.StatusCode.ERROR)
    span.end(now)
