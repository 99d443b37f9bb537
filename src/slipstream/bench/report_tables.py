"""A summary in words and cells, for the terminal and for the page."""

from __future__ import annotations

from slipstream.bench.endpoint_summary import Comparison, Estimate, Spread, Summary

HEADINGS = ("", "p50", "95% interval", "p90", "p99")


def title(of: Summary | Comparison) -> str:
    if isinstance(of, Summary):
        return f"{of.endpoint}, {of.stops} stops: {of.answers} answers"
    return f"{of.endpoint} against {of.baseline}, {of.stops} stops: {of.questions} questions in turns"


def value_rows(summary: Summary) -> list[tuple[str, ...]]:
    """Cells under HEADINGS, for what could be measured."""
    reasoned = summary.reasoning_tokens or summary.ttfo_s != summary.ttft_s
    rows: list[tuple[str, Spread | None, str]] = [
        ("TTFT", summary.ttft_s, "s"),
        ("TTFO", summary.ttfo_s if reasoned else None, "s"),
        ("TPOT", summary.tpot_s, "s"),
        ("decode", summary.decode_tokens_per_s, "tok/s"),
        ("end to end", summary.end_to_end_tokens_per_s, "tok/s"),
        ("chunk gap", summary.chunk_gap_s, "s"),
        ("token gap", summary.token_gap_s, "s"),
    ]
    return [(label, *_cells(spread, unit)) for label, spread, unit in rows if spread is not None]


def _cells(spread: Spread, unit: str) -> tuple[str, ...]:
    p50 = spread.p50
    interval = f"{quantity(p50.low, unit)} to {quantity(p50.high, unit)}"
    return quantity(p50.value, unit), interval, quantity(spread.p90.value, unit), quantity(spread.p99.value, unit)


def facts(summary: Summary) -> list[str]:
    """What is no spread."""
    lines = []
    if summary.tokens_per_chunk:
        how = ", ".join(summary.counted_by)
        lines.append(f"{summary.tokens_per_chunk:.2f} tokens a chunk, counted by: {how}")
    if summary.tokens_per_round:
        lines.append(f"acceptance length {summary.tokens_per_round:.2f} tokens a round, from {summary.acceptance_from}")
    if summary.prompt_tokens is not None:
        hits = "cache hits not reported"
        if summary.cached_tokens is not None:
            hits = (
                f"{summary.cached_tokens:,} of them cached; {summary.cached_tokens_warmup or 0:,} in the warm-up before"
            )
        lines.append(f"prompts {summary.prompt_tokens:,} tokens ({hits})")
    if summary.output_tokens is not None:
        checked = f"{summary.local_tokens:,} by the tokenizer" if summary.local_tokens else "not checked by a tokenizer"
        reasoning = f", {summary.reasoning_tokens:,} of them reasoning" if summary.reasoning_tokens else ""
        lines.append(f"answers {summary.output_tokens:,} tokens{reasoning} ({checked})")
    if summary.peak_tokens_per_s:
        lines.append(f"peak, the best second of all: {summary.peak_tokens_per_s:,.0f} tok/s")
    if summary.tier_asked or set(summary.tiers) != {"not named"}:
        lines.append("tier served: " + ", ".join(f"{tier} ({count})" for tier, count in summary.tiers.items()))
    if summary.usd is not None:
        lines.append(f"cost ${summary.usd:.6f}")
    return lines


def complaints(summary: Summary) -> list[str]:
    """Why there is no rate, and what failed."""
    asked = summary.answers + sum(summary.errors.values())
    return [f"no rate: {reason} ({count} of {asked})" for reason, count in summary.refusals.items()] + [
        f"failed: {reason} ({count} of {asked})" for reason, count in summary.errors.items()
    ]


def ratio_lines(ratio: Comparison) -> list[str]:
    parts = (("first token", ratio.ttft), ("decode", ratio.decode), ("end to end", ratio.end_to_end))
    return [f"{label:12} {_times(estimate)}" for label, estimate in parts]


def _times(estimate: Estimate | None) -> str:
    if estimate is None:
        return "no ratio"
    return f"{estimate.value:.3g}x as fast   (95%: {estimate.low:.3g}x to {estimate.high:.3g}x)"


def quantity(value: float, unit: str) -> str:
    """Three significant digits; times in ms or us where seconds are too large a unit."""
    if unit == "s":
        scale, unit = (1, "s") if value >= 1 else (1e3, "ms") if value >= 1e-3 or value == 0 else (1e6, "us")
        value *= scale
    return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
