"""A run of `slipstream bench serve` as one HTML file with its plots inline: nothing to fetch, nothing to run.

Matplotlib (the extra `[plot]`) draws; the page adds tables. `report_tables` holds what terminal and page say alike.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.bench.endpoint_run import Run, Sample, header
from slipstream.bench.endpoint_summary import Comparison, Summary
from slipstream.bench.frontier import GRID, MUTED
from slipstream.bench.report_tables import HEADINGS, complaints, facts, quantity, ratio_lines, title, value_rows
from slipstream.errors import SlipstreamError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#0b8f84", "#d9661f", "#3d4a5c", "#7b4fb5", "#b3261e", "#1f6fd9", "#8a7a00", "#c2458f")


class ReportError(SlipstreamError):
    """A report that cannot be drawn or written."""


def require_matplotlib() -> None:
    """Raises ReportError without it, so that nobody measures for an hour first."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ReportError("reports need matplotlib; install it with: pip install 'slipstream-llm[plot]'") from None


def write_report(path: Path, run: Run, summaries: Sequence[Summary], ratios: Sequence[Comparison]) -> None:
    """Raises ReportError where matplotlib is missing or the file cannot be written."""
    require_matplotlib()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page(run, summaries, ratios), encoding="utf-8")
    except OSError as error:
        raise ReportError(f"cannot write {path}: {error.strerror}") from None


def page(run: Run, summaries: Sequence[Summary], ratios: Sequence[Comparison]) -> str:
    """The whole document."""
    facts_of_run = header(run.endpoints, run.plan)
    client, plan = facts_of_run["client"], run.plan
    named = ", ".join(f"{name} {version}" for name, version in facts_of_run["versions"].items())
    template = (files("slipstream.bench") / "data/report.html").read_text(encoding="utf-8")
    parts = {
        "TITLE": escape("Single-stream speed of " + " and ".join(endpoint.name for endpoint in run.endpoints)),
        "PLAN": escape(
            f"{facts_of_run['date'][:10]}: {plan.question_set} questions, {plan.requests} answers of each kind after "
            f"{plan.warmup} of warm-up, temperature {plan.temperature:g}, seed {plan.seed}"
        ),
        "RATIOS": "\n".join(_paragraphs(title(ratio), ratio_lines(ratio)) for ratio in ratios),
        "SVG": _svg(draw(run)),
        "GROUPS": "\n".join(map(_group, summaries)),
        "CLIENT": escape(f"Measured from {client['cpu']}, {client['cores']} cores; {named}."),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)


def _group(summary: Summary) -> str:
    heads = "".join(f"<th>{escape(heading)}" for heading in HEADINGS)
    rows = "\n".join(
        "<tr>" + "".join(f"<td>{escape(cell)}" for cell in cells) + "</tr>" for cells in value_rows(summary)
    )
    table = f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>\n{rows}\n</tbody></table></div>'
    lines = [f"<p>{escape(line)}</p>" for line in facts(summary)]
    lines += [f'<p class="refused">{escape(line)}</p>' for line in complaints(summary)]
    lines += [f'<p class="note">{escape(line)}</p>' for line in summary.notes]
    return "\n".join((f"<h2>{escape(title(summary))}</h2>", table, *lines))


def _paragraphs(heading: str, lines: Sequence[str]) -> str:
    return "\n".join((f"<h2>{escape(heading)}</h2>", *(f"<p>{escape(line)}</p>" for line in lines)))


def draw(run: Run) -> Figure:
    """Four plots: rate of each answer, time to its first token, tokens over time, and the two kinds of gap."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8.2), facecolor="white", layout="constrained")
    rates, firsts, times, gaps = figure.subplots(2, 2).flat
    groups = [
        (
            f"{endpoint.name}, {stops}",
            [s for s in run.samples if (s.endpoint, s.question.stops) == (endpoint.name, stops)],
        )
        for endpoint in run.endpoints
        for stops in run.plan.stops
    ]
    for place, (label, samples) in enumerate(groups):
        color = COLORS[place % len(COLORS)]
        believed = [s for s in samples if s.figures and not s.figures.problem]
        _strip(rates, place, [s.figures.decode_tokens_per_s for s in believed if s.figures], color)
        _shares(firsts, [s.figures.ttft_s for s in samples if s.figures], color, "-", label)
        for sample in believed:
            _progress(times, sample, color)
        _shares(gaps, [gap for s in samples if s.figures for gap in s.figures.chunk_gaps_s], color, "-")
        _shares(gaps, [gap for s in believed if s.figures for gap in s.figures.token_gaps_s or ()], color, ":")
    rates.set_xticks(range(len(groups)), [""] * len(groups))
    rates.set_ylim(bottom=0)
    for axes, heading, x, y in (
        (rates, "Decode, each answer", "", "tok/s"),
        (firsts, "Time to first token", "s", "share of answers"),
        (times, "Tokens over time, each answer", "s after the request", "tokens"),
        (gaps, "Gaps between chunks (solid) and tokens (dotted)", "", "share of gaps"),
    ):
        axes.set_title(heading, loc="left", fontsize=11)
        axes.set_xlabel(x, color=MUTED, fontsize=9)
        axes.set_ylabel(y, color=MUTED, fontsize=9)
        axes.tick_params(length=0, labelsize=9, labelcolor=MUTED)
        axes.grid(color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
    if gaps.lines:
        gaps.set_xscale("symlog", linthresh=1e-4)  # tokens of one chunk lie 0 s apart
        gaps.set_xlim(left=0)
        gaps.xaxis.set_major_formatter(lambda gap, _: quantity(gap, "s") if gap else "0")
    figure.legend(*firsts.get_legend_handles_labels(), loc="outside lower left", frameon=False, fontsize=9, ncols=2)
    return figure


def _strip(axes: Axes, place: int, values: Sequence[float | None], color: str) -> None:
    """A dot an answer, side by side where they would hide each other, and a line at the median."""
    from slipstream.bench.measure import median

    found = [value for value in values if value is not None]
    if not found:
        return
    spread = [place + 0.5 * ((i * 0.618) % 1 - 0.5) for i in range(len(found))]
    axes.plot(spread, found, "o", color=color, markersize=5, alpha=0.6, markeredgewidth=0)
    axes.plot([place - 0.35, place + 0.35], [median(found)] * 2, color=color, linewidth=2)


def _shares(axes: Axes, values: Sequence[float | None], color: str, style: str, label: str = "_") -> None:
    """The empirical distribution."""
    found = sorted(value for value in values if value is not None)
    if found:
        shares = [i / len(found) for i in range(len(found) + 1)]
        axes.step([found[0], *found], shares, style, where="post", color=color, linewidth=1.6, label=label)


def _progress(axes: Axes, sample: Sample, color: str) -> None:
    """Tokens that had arrived, over time; the answer's own count is spread evenly where chunks are not counted."""
    if sample.answer is None or sample.figures is None or sample.figures.tokens is None:
        return
    at_s = [chunk.at_s for chunk in sample.answer.chunks]
    counts: Any = sample.figures.counts or [sample.figures.tokens / len(at_s)] * len(at_s)
    total, line = 0.0, []
    for count in counts:
        total += count
        line.append(total)
    axes.step([at_s[0], *at_s], [0, *line], where="post", color=color, linewidth=0.8, alpha=0.6)


def _svg(figure: Figure) -> str:
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "report", "text.parse_math": False}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]
