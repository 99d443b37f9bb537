"""Measures endpoints in turns: warm-up, then every question to every endpoint, in alternating order.

A question that fails is noted and left out of the figures; what is asked is `endpoint_questions`' business.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slipstream.bench.endpoint import Answer, Counters, Endpoint, Question
from slipstream.bench.endpoint_figures import Figures, figures
from slipstream.bench.endpoint_questions import Plan
from slipstream.bench.machine import describe_machine, versions
from slipstream.bench.stream_clock import EndpointError


@dataclass(frozen=True)
class Sample:
    """One question to one endpoint: its answer and figures, or the error that came instead."""

    endpoint: str
    question: Question
    answer: Answer | None = None
    figures: Figures | None = None
    error: str | None = None
    warmup: bool = False

    def to_json(self) -> dict[str, Any]:
        """A line of the results: everything to compute the figures anew, and the figures."""
        document: dict[str, Any] = {
            "kind": "warmup" if self.warmup else "answer",
            "endpoint": self.endpoint,
            "question": self.question.id,
            "stops": self.question.stops,
            "max_tokens": self.question.max_tokens,
            "seed": self.question.seed,
        }
        if self.answer is None or self.figures is None:
            return document | {"error": self.error}
        answer = self.answer
        shown = {
            name: value
            for name, value in vars(self.figures).items()
            if not name.endswith("gaps_s") and name != "counts"
        }
        return document | {
            **shown,
            "usage": vars(answer.usage) if answer.usage else None,
            "finish_reason": answer.finish_reason,
            "tier": answer.tier,
            "speculation": vars(answer.speculation) if answer.speculation else None,
            "usd": answer.usd,
            "connect_s": answer.connect_s,
            "reads": answer.reads,
            "chunks": [
                {name: value for name, value in vars(c).items() if value not in ("", None)} for c in answer.chunks
            ],
        }


@dataclass(frozen=True)
class Run:
    """All samples in order, the warm-up apart, and what each endpoint's counters gained over the measured part."""

    plan: Plan
    endpoints: Sequence[Endpoint]
    warmup: Sequence[Sample]
    samples: Sequence[Sample]
    counters: dict[str, Counters]


def header(endpoints: Sequence[Endpoint], plan: Plan) -> dict[str, Any]:
    """The first line of the results: what is measured, when, and from where."""
    return {
        "kind": "run",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "client": describe_machine(),
        "versions": versions("slipstream-llm", "h11", "numpy"),
        "endpoints": [{"name": e.name, "tier": e.tier, "parameters": e.parameters} for e in endpoints],
        "plan": vars(plan),
    }


def measure(
    endpoints: Sequence[Endpoint],
    plan: Plan,
    progress: Callable[[Sample], None] = lambda sample: None,
) -> Run:
    """Ask everything; progress gets each sample as it comes, the warm-up's too.

    Raises EndpointError where an endpoint fails its very first question: it cannot be measured.
    """
    if len({endpoint.name for endpoint in endpoints}) < len(endpoints):
        raise EndpointError("two endpoints have the same name; give each its own with --name")

    def one(endpoint: Endpoint, question: Question, warmup: bool = False) -> Sample:
        sample = replace(ask(endpoint, question), warmup=warmup)
        progress(sample)
        return sample

    warmup: list[Sample] = []
    for endpoint, copy in copies(endpoints):
        for i, question in enumerate(plan.warmups(copy)):
            warmup.append(one(endpoint, question, warmup=True))
            if i == 0 and warmup[-1].error:
                raise EndpointError(f"{endpoint.name}: {warmup[-1].error}")
    before = {endpoint.name: endpoint.counters() for endpoint in endpoints}
    samples = [one(endpoint, question) for question, endpoint in turns(endpoints, plan)]
    gained = {endpoint.name: endpoint.counters().since(before[endpoint.name]) for endpoint in endpoints}
    return Run(plan, endpoints, warmup, samples, gained)


def turns(endpoints: Sequence[Endpoint], plan: Plan) -> Iterator[tuple[Question, Endpoint]]:
    """Natural and forced questions take turns, endpoints within each question too, in an order that alternates."""
    asked = {(e.name, stops): plan.questions(stops, copy) for e, copy in copies(endpoints) for stops in plan.stops}
    for i in range(plan.requests):
        for stops in plan.stops:
            for endpoint in endpoints if i % 2 == 0 else reversed(endpoints):
                yield asked[endpoint.name, stops][i], endpoint


def copies(endpoints: Sequence[Endpoint]) -> Iterator[tuple[Endpoint, int]]:
    """Each endpoint with the number of those before it on the same server."""
    for i, endpoint in enumerate(endpoints):
        yield endpoint, sum(other.server == endpoint.server for other in endpoints[:i])


def ask(endpoint: Endpoint, question: Question) -> Sample:
    """One sample; an error of the endpoint is part of it."""
    sample = Sample(endpoint.name, question)
    try:
        answer = endpoint.ask(question)
    except EndpointError as error:
        return replace(sample, error=str(error))
    return replace(sample, answer=answer, figures=figures(answer, question, endpoint.tokenizer, endpoint.count_locally))
