"""Percentiles of many answers with bootstrap intervals, and the ratio of two endpoints over the same questions.

A percentile is of times, so p90 and p99 are always the slow end; a rate at p99 is the inverse of the time there.
Intervals hold 95%: answers are drawn again with replacement, whole, since gaps within one answer are not independent
(percentile bootstrap, Efron 1979). Where one answer's usage is missing or contradictory, its group has no rate at all:
leaving out the awkward answers would choose the rate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

import numpy as np

from slipstream.bench.endpoint import Counters, Stops
from slipstream.bench.endpoint_figures import Figures
from slipstream.bench.endpoint_run import Run, Sample
from slipstream.bench.trace import Price, Turn

PERCENTS = (50, 90, 99)
RESAMPLES = 1000


@dataclass(frozen=True)
class Estimate:
    """A figure and the ends of its 95% interval."""

    value: float
    low: float
    high: float

    def inverse(self) -> Estimate:
        return Estimate(1 / self.value, 1 / self.high, 1 / self.low)


@dataclass(frozen=True)
class Spread:
    """Percentiles of one kind of time in seconds, over `answers`."""

    answers: int
    p50: Estimate
    p90: Estimate
    p99: Estimate

    def inverse(self) -> Spread:
        """The same as rates: p99 stays the slow end."""
        return Spread(self.answers, self.p50.inverse(), self.p90.inverse(), self.p99.inverse())


@dataclass(frozen=True)
class Summary:
    """One endpoint under one kind of stop; times in seconds, rates in tok/s.

    refusals: why there is no rate, with the answers it holds for. cached_tokens and cached_tokens_warmup: hits that
    usage reports, None where it reports none. tokens_per_round: acceptance length, from what acceptance_from says.
    tiers: what was served, and how often. peak_tokens_per_s: the best second of any answer.
    """

    endpoint: str
    stops: Stops
    tier_asked: str | None
    answers: int
    errors: dict[str, int]
    refusals: dict[str, int]
    notes: list[str]
    ttft_s: Spread | None
    ttfo_s: Spread | None
    tpot_s: Spread | None
    decode_tokens_per_s: Spread | None
    end_to_end_tokens_per_s: Spread | None
    chunk_gap_s: Spread | None
    token_gap_s: Spread | None
    peak_tokens_per_s: float | None
    tokens_per_chunk: float | None
    counted_by: dict[str, int]
    tokens_per_round: float | None
    acceptance_from: str | None
    prompt_tokens: int | None
    cached_tokens: int | None
    cached_tokens_warmup: int | None
    output_tokens: int | None
    local_tokens: int | None
    reasoning_tokens: int | None
    tiers: dict[str, int]
    usd: float | None

    def to_json(self) -> dict[str, Any]:
        return {"kind": "summary"} | asdict(self)


@dataclass(frozen=True)
class Comparison:
    """How many times faster `endpoint` is than `baseline`: the median over questions that both answered."""

    endpoint: str
    baseline: str
    stops: Stops
    questions: int
    ttft: Estimate | None
    decode: Estimate | None
    end_to_end: Estimate | None

    def to_json(self) -> dict[str, Any]:
        return {"kind": "comparison"} | asdict(self)


def summarize(run: Run, price: Price | None = None) -> list[Summary]:
    """A summary for each endpoint and kind of stop. price: for a bill that the server does not send."""
    made = []
    for stops in run.plan.stops:
        for endpoint in run.endpoints:
            samples = [s for s in run.samples if s.endpoint == endpoint.name and s.question.stops == stops]
            warmup = [s for s in run.warmup if s.endpoint == endpoint.name]
            shared = len(run.plan.stops) > 1
            made.append(_summary(samples, warmup, endpoint.tier, run.counters[endpoint.name], shared, price))
            if run.plan.repeats:
                made[-1].notes.append(
                    "questions repeat: a drafter that remembers answers looks better than on new text"
                )
    return made


def _summary(
    samples: Sequence[Sample],
    warmup: Sequence[Sample],
    tier: str | None,
    counters: Counters,
    counters_shared: bool,
    price: Price | None,
) -> Summary:
    done = [(s.answer, s.figures) for s in samples if s.answer is not None and s.figures is not None]
    figures = [f for _, f in done]
    refusals = Counter(f.problem for f in figures if f.problem)
    rated = not refusals

    def spread(of: Callable[[Figures], float | Sequence[float] | None]) -> Spread | None:
        found = [of(f) for f in figures]
        lists = [[x] if isinstance(x, float) else list(x) for x in found if x is not None]
        return percentiles([values for values in lists if values])

    tpot = spread(lambda f: f.tpot_s) if rated else None
    per_token = spread(lambda f: 1 / f.end_to_end_tokens_per_s if f.end_to_end_tokens_per_s else None)
    tokens = sum(f.tokens or 0 for f in figures)
    chunks = sum(len(answer.chunks) for answer, _ in done)
    length, source = _acceptance(done, counters, counters_shared)
    tiers = Counter(answer.tier or "not named" for answer, _ in done)
    peaks = [f.peak_tokens_per_s for f in figures if f.peak_tokens_per_s]
    summary = Summary(
        endpoint=samples[0].endpoint,
        stops=samples[0].question.stops,
        tier_asked=tier,
        answers=len(done),
        errors=dict(Counter(s.error for s in samples if s.error)),
        refusals=dict(refusals),
        notes=[],
        ttft_s=spread(lambda f: f.ttft_s),
        ttfo_s=spread(lambda f: f.ttfo_s),
        tpot_s=tpot,
        decode_tokens_per_s=tpot.inverse() if tpot else None,
        end_to_end_tokens_per_s=per_token.inverse() if per_token and rated else None,
        chunk_gap_s=spread(lambda f: f.chunk_gaps_s),
        token_gap_s=spread(lambda f: f.token_gaps_s) if rated and all(f.token_gaps_s for f in figures) else None,
        peak_tokens_per_s=max(peaks) if peaks and rated else None,
        tokens_per_chunk=tokens / chunks if rated and chunks else None,
        counted_by=dict(Counter(f.counted_by for f in figures if f.counted_by)),
        tokens_per_round=length,
        acceptance_from=source,
        prompt_tokens=_total(samples, "prompt_tokens"),
        cached_tokens=_total(samples, "cached_tokens"),
        cached_tokens_warmup=_total(warmup, "cached_tokens"),
        output_tokens=tokens if figures and all(f.tokens is not None for f in figures) else None,
        local_tokens=sum(f.local_tokens or 0 for f in figures) if any(f.local_tokens for f in figures) else None,
        reasoning_tokens=_total(samples, "reasoning_tokens"),
        tiers=dict(tiers),
        usd=_bill(done, price),
    )
    summary.notes.extend(_notes(summary))
    if any(f.counted_here for f in figures):
        summary.notes.append("the server sends no usage: N is the tokenizer's count, or the length that was forced")
    return summary


def _notes(summary: Summary) -> list[str]:
    """What a reader of the figures must know."""
    notes = []
    if summary.tier_asked and set(summary.tiers) != {summary.tier_asked}:
        notes.append(f"tier {summary.tier_asked} was asked for, served: {', '.join(summary.tiers)}")
    if summary.cached_tokens and summary.prompt_tokens and summary.cached_tokens > 0.5 * summary.prompt_tokens:
        notes.append("most of the prompts came from a cache; another --seed asks questions it has not seen")
    if "estimate" in summary.counted_by:
        notes.append("tokens of the first chunk are estimated by length of text; --tokenizer counts them")
    rated = summary.tpot_s.answers if summary.tpot_s else 0
    if not summary.refusals and rated < summary.answers:
        notes.append(f"{summary.answers - rated} answers came in one piece and have no TPOT")
    if 0 < summary.answers < 100:
        notes.append(f"p99 of {summary.answers} answers is little more than the slowest of them")
    return notes


def _acceptance(
    done: Sequence[tuple[Any, Figures]], counters: Counters, counters_shared: bool
) -> tuple[float | None, str | None]:
    spoken = [answer.speculation for answer, _ in done if answer.speculation]
    rounds = sum(s.rounds for s in spoken)
    if rounds:
        return (rounds + sum(s.accepted for s in spoken)) / rounds, "the answers"
    if counters.tokens_per_round is not None:
        return counters.tokens_per_round, "server counters" + (", all kinds of stop together" * counters_shared)
    return None, None


def _total(samples: Sequence[Sample], name: str) -> int | None:
    found = [getattr(s.answer.usage, name) for s in samples if s.answer and s.answer.usage]
    return sum(x for x in found if x is not None) if any(x is not None for x in found) else None


def _bill(done: Sequence[tuple[Any, Figures]], price: Price | None) -> float | None:
    sent = [answer.usd for answer, _ in done if answer.usd is not None]
    if any(sent):
        return float(sum(sent))
    usages = [answer.usage for answer, _ in done if answer.usage]
    if price is None or not usages or any(None in (u.prompt_tokens, u.completion_tokens) for u in usages):
        return None
    return price.of(Turn(u.prompt_tokens, u.cached_tokens or 0, u.completion_tokens) for u in usages)


def percentiles(groups: Sequence[Sequence[float]], resamples: int = RESAMPLES) -> Spread | None:
    """p50, p90 and p99 of all values; the groups are what is drawn again. None without values."""
    if not groups:
        return None
    values = [np.asarray(group, float) for group in groups]
    point = np.percentile(np.concatenate(values), PERCENTS)
    picks = np.random.default_rng(0).integers(len(values), size=(resamples, len(values)))
    if all(len(group) == 1 for group in values):
        drawn = np.percentile(np.concatenate(values)[picks], PERCENTS, axis=1).T
    else:
        drawn = np.stack([np.percentile(np.concatenate([values[i] for i in pick]), PERCENTS) for pick in picks])
    low, high = np.percentile(drawn, (2.5, 97.5), axis=0)
    return Spread(len(groups), *(Estimate(*map(float, ends)) for ends in zip(point, low, high, strict=True)))


def compare(run: Run) -> list[Comparison]:
    """The first endpoint against each other one."""
    first, *others = [endpoint.name for endpoint in run.endpoints]
    return [_compare(run, first, other, stops) for stops in run.plan.stops for other in others]


def _compare(run: Run, first: str, other: str, stops: Stops) -> Comparison:
    by_question = sorted(
        (s for s in run.samples if s.question.stops == stops and s.figures), key=lambda s: s.question.id
    )
    pairs: list[tuple[Figures, Figures]] = []
    for _, group in groupby(by_question, key=lambda s: s.question.id):
        found = {s.endpoint: s.figures for s in group}
        ours, theirs = found.get(first), found.get(other)
        if ours and theirs:
            pairs.append((ours, theirs))
    rated = not any(f.problem for pair in pairs for f in pair)

    def ratio(of: Callable[[Figures], float | None]) -> Estimate | None:
        """The other's time over the first's."""
        times = [(of(ours), of(theirs)) for ours, theirs in pairs]
        spread = percentiles([[theirs / ours] for ours, theirs in times if ours and theirs])
        return spread.p50 if spread else None

    return Comparison(
        endpoint=first,
        baseline=other,
        stops=stops,
        questions=len(pairs),
        ttft=ratio(lambda f: f.ttft_s),
        decode=ratio(lambda f: f.tpot_s) if rated else None,
        end_to_end=ratio(lambda f: 1 / f.end_to_end_tokens_per_s if f.end_to_end_tokens_per_s else None)
        if rated
        else None,
    )
