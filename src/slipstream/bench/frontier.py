"""The speed frontier: total parameters against single-stream tok/s, as PNG, SVG and one interactive HTML file.

Three kinds of point are never confused: `published` by others, `measured` by us, `predicted` by `plan`. The Pareto line
joins those that exist, so predictions are not on it. One renderer (matplotlib, the extra `[plot]`) draws all three
files; the page adds a table, sources and tooltips to its SVG.
"""

from __future__ import annotations

import io
import json
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from slipstream.errors import SlipstreamError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.transforms import Bbox

Kind = Literal["published", "measured", "predicted"]


class FrontierError(SlipstreamError):
    """Points that cannot be read or drawn."""


@dataclass(frozen=True)
class Point:
    """One model at one speed: `parameters` in all, `tokens_per_s` of one stream; `note` says what the figure is."""

    name: str
    parameters: float
    tokens_per_s: float
    kind: Kind
    source: str
    note: str = ""

    def __post_init__(self) -> None:
        if not (0 < self.parameters < math.inf and 0 < self.tokens_per_s < math.inf):
            raise FrontierError(f"{self.name}: parameters and tokens_per_s must be positive numbers")
        if self.kind not in get_args(Kind):
            raise FrontierError(f"{self.name}: kind {self.kind!r} is none of {', '.join(get_args(Kind))}")
        if not self.source:
            raise FrontierError(f"{self.name}: a point needs a source")


def published() -> list[Point]:
    """The points shipped with the package: `bench/data/published.toml`."""
    text = (files("slipstream.bench") / "data/published.toml").read_text(encoding="utf-8")
    return [Point(kind="published", **entry) for entry in tomllib.loads(text)["point"]]


def read_points(path: Path, sizes: Mapping[str, float] | None = None) -> list[Point]:
    """Points from JSON Lines: those of `slipstream bench serve`, of `slipstream plan --json`, or with `Point`'s fields.

    sizes: parameters of endpoints by name, "" for all others, where the results do not say. Raises FrontierError naming
    the line that is wrong.
    """
    measured = Measured(sizes or {})
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise FrontierError(f"cannot read {path}: {error}") from None
    points: list[Point] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if row.get("kind") in SERVE_LINES:
                points += measured.add(row)
            else:
                points.append(planned_point(row) if "prediction" in row else _given(row))
        except KeyError as error:
            raise FrontierError(f"{path}:{number}: a point lacks {error}") from None
        except (TypeError, ValueError, AttributeError) as error:
            raise FrontierError(f"{path}:{number}: not a point: {error}") from None
        except FrontierError as error:
            raise FrontierError(f"{path}:{number}: {error}") from None
    if measured.unfinished:
        raise FrontierError(f"{path}: its last run of `slipstream bench serve` did not end, so it has no summary")
    return points


SERVE_LINES = ("run", "warmup", "answer", "summary", "comparison")


class Measured:
    """Measured points from the lines of `slipstream bench serve`, in their order: one an endpoint and run.

    The speed is the median decode rate with natural stops, or with forced length where nothing else was asked.
    """

    def __init__(self, sizes: Mapping[str, float]) -> None:
        self.sizes = sizes
        self.run: Mapping[str, Any] = {}
        self.drawn: set[str] = set()
        self.unfinished = False

    def add(self, row: Mapping[str, Any]) -> list[Point]:
        """The points that `row` completes. Raises FrontierError where a rate was refused or the size is unknown."""
        if row["kind"] == "run":
            self.run, self.drawn, self.unfinished = row, set(), True
        elif row["kind"] == "summary":
            self.unfinished = False
            if row["endpoint"] not in self.drawn:
                self.drawn.add(row["endpoint"])
                return [self._point(row)]
        return []

    def _point(self, row: Mapping[str, Any]) -> Point:
        name, rate = str(row["endpoint"]), row["decode_tokens_per_s"]
        if rate is None:
            reasons = "; ".join([*row["refusals"], *row["errors"]]) or "no answer took longer than its first chunk"
            raise FrontierError(f"{name} has no decode rate: {reasons}")
        known = {each["name"]: each.get("parameters") for each in self.run.get("endpoints", [])}
        size = self.sizes.get(name) or known.get(name) or self.sizes.get("")
        if size is None:
            raise FrontierError(f"the size of {name} is not known; say it with --parameters, as in --parameters 309B")
        p50, length = rate["p50"], row["tokens_per_round"]
        drafts = f", {length:.2f} tokens a round" if length else ""
        date, client = self.run.get("date", "")[:10], self.run.get("client", {}).get("cpu", "")
        return Point(
            name=name,
            parameters=size,
            tokens_per_s=p50["value"],
            kind="measured",
            source=" ".join(("slipstream bench serve", *(("on", date, "from", client) if date else ()))),
            note=f"decode, median of {row['answers']} answers with {row['stops']} stops "
            f"(95%: {p50['low']:,.0f} to {p50['high']:,.0f} tok/s){drafts}",
        )


def _given(row: Mapping[str, Any]) -> Point:
    return Point(
        name=str(row["name"]),
        parameters=float(row["parameters"]),
        tokens_per_s=float(row["tokens_per_s"]),
        kind=row.get("kind", "measured"),
        source=str(row["source"]),
        note=str(row.get("note", "")),
    )


def planned_point(row: Mapping[str, Any]) -> Point:
    """The predicted point of a plan, from `Plan.to_json`."""
    setup, prediction = row["setup"], row["prediction"]
    devices = f"{setup['tp']} x {row['gpu']}" if setup["tp"] > 1 else row["gpu"]
    drafts = f", {setup['acceptance']:.1f} tokens a round" if setup["drafts"] else ""
    if not row["memory"]["fits"]:
        raise FrontierError(f"{row['model']} does not fit on {devices}, so it has no speed there; plan it with --tp")
    return Point(
        name=f"{row['model']}, {devices}",
        parameters=row["parameters"]["total"],
        tokens_per_s=prediction["tokens_per_s"],
        kind="predicted",
        source=f"slipstream plan: {prediction['efficiency']:.0%} of the floor ({row['floor_tokens_per_s']:,.0f} tok/s)",
        note=f"{row['dtypes']['experts']}{drafts}, launch structure {prediction['launch']}",
    )


def pareto(points: Sequence[Point]) -> list[Point]:
    """The existing points that no other existing point beats in both size and speed, by size."""
    line: list[Point] = []
    for point in sorted((p for p in points if p.kind != "predicted"), key=lambda p: (-p.parameters, -p.tokens_per_s)):
        if not line or point.tokens_per_s > line[-1].tokens_per_s:
            line.append(point)
    return line[::-1]


def write_charts(points: Sequence[Point], stem: Path) -> list[Path]:
    """Write `stem`.png, .svg and .html. Raises FrontierError without points or without matplotlib."""
    if not points:
        raise FrontierError("there are no points to draw")
    try:
        import matplotlib
    except ImportError:
        raise FrontierError("charts need matplotlib; install it with: pip install 'slipstream-llm[plot]'") from None
    stem.parent.mkdir(parents=True, exist_ok=True)
    png, svg, html = (stem.with_name(stem.name + suffix) for suffix in (".png", ".svg", ".html"))
    style: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": "frontier",
        "font.family": "DejaVu Sans",
        "text.parse_math": False,
    }
    with matplotlib.rc_context(style):
        figure = draw(points)
        figure.savefig(png, dpi=200, metadata={"Software": None})
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    svg.write_text(buffer.getvalue(), encoding="utf-8")
    html.write_text(page(points, buffer.getvalue()), encoding="utf-8")
    return [png, svg, html]


INK, MUTED, GRID, LINE = "#1b2430", "#66707d", "#e9ecf0", "#8593a6"
MARKS: Mapping[Kind, Mapping[str, Any]] = {
    "published": {"marker": "o", "color": "#3d4a5c", "markersize": 7.5, "fillstyle": "full"},
    "measured": {"marker": "D", "color": "#0b8f84", "markersize": 9, "fillstyle": "full"},
    "predicted": {
        "marker": "^",
        "color": "#d9661f",
        "markersize": 9,
        "markerfacecolor": "white",
        "markeredgewidth": 1.8,
    },
}
ORDER: Mapping[Kind, float] = {"predicted": 4, "published": 4.2, "measured": 4.4}
LEGEND: Mapping[Kind, str] = {
    "published": "published by others",
    "measured": "measured with Slipstream",
    "predicted": "predicted by slipstream plan",
}


def draw(points: Sequence[Point]) -> Figure:
    """The chart as a matplotlib figure; point i and its label carry the ids `point-i` and `label-i` in the SVG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    figure = Figure(figsize=(10.5, 6.4), facecolor="white")
    renderer = FigureCanvasAgg(figure).get_renderer()  # type: ignore[no-untyped-call]
    axes = figure.add_axes((0.065, 0.1, 0.915, 0.755))
    axes.set_xscale("log")
    axes.set_yscale("log")
    sizes, speeds = [p.parameters for p in points], [p.tokens_per_s for p in points]
    axes.set_xlim(min(sizes) / 1.7, max(sizes) * 2.6)
    axes.set_ylim(min(speeds) / 1.5, max(speeds) * 1.9)
    axes.xaxis.set_major_formatter(lambda value, _: short_count(value))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=20))
        axis.set_minor_formatter(NullFormatter())
    axes.tick_params(which="both", length=0, labelsize=9, labelcolor=MUTED, pad=6)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
    axes.set_xlabel("total parameters", color=MUTED, fontsize=10, labelpad=8)

    line = pareto(points)
    if len(line) > 1:
        xs, ys = [p.parameters for p in line], [p.tokens_per_s for p in line]
        axes.plot(xs, ys, drawstyle="steps-pre", color=LINE, linewidth=1.5, zorder=2)
        axes.fill_between(xs, ys, axes.get_ylim()[0], step="pre", color=LINE, alpha=0.07, linewidth=0, zorder=1)
    for i, p in enumerate(points):
        axes.plot(
            [p.parameters], [p.tokens_per_s], linestyle="none", zorder=ORDER[p.kind], gid=f"point-{i}", **MARKS[p.kind]
        )
    place_labels(axes, points, renderer)

    figure.text(0.02, 0.955, "The speed frontier", fontsize=17, fontweight="bold", color=INK)
    subtitle = "tokens a second of one stream: the fastest known at each size or above"
    figure.text(0.02, 0.912, subtitle, fontsize=10.5, color=MUTED)
    handles = [axes.plot([], [], linestyle="none", label=LEGEND[kind], **MARKS[kind])[0] for kind in kinds_of(points)]
    if len(line) > 1:
        handles += axes.plot([], [], color=LINE, linewidth=1.5, label="Pareto line of what exists")
    legend = figure.legend(
        handles=handles,
        loc="upper right",
        bbox_to_anchor=(0.985, 0.985),
        ncols=2,
        frameon=False,
        fontsize=9.5,
        handletextpad=0.4,
        columnspacing=1.6,
    )
    for label in legend.get_texts():
        label.set_color(INK)
    return figure


def place_labels(axes: Axes, points: Sequence[Point], renderer: Any) -> None:
    """Label every point where its text covers least: markers, the Pareto line, other labels, the edge.

    Candidates lie around the marker, near ones preferred; each label is placed again once all others are.
    """
    from matplotlib.transforms import Bbox

    unit = renderer.dpi / 72
    spots = [axes.transData.transform((p.parameters, p.tokens_per_s)) for p in points]
    texts = [f"{p.name}\n{p.tokens_per_s:,.0f} tok/s" for p in points]
    style: dict[str, Any] = {"fontsize": 8.5, "linespacing": 1.25, "va": "center"}
    sizes = []
    for text in texts:
        probe = axes.text(0, 0, text, **style)
        extent = probe.get_window_extent(renderer)
        sizes.append((extent.width, extent.height))
        probe.remove()
    frame = axes.get_window_extent(renderer)
    markers = [Bbox.from_bounds(x - 7 * unit, y - 7 * unit, 14 * unit, 14 * unit) for x, y in spots]
    obstacles = markers + _line_boxes(axes, points, unit)

    candidates = [(11, 0), (-11, 0), (0, 18), (0, -18)]
    candidates += [(dx, dy) for dy in (14, -14, 24, -24, 36, -36, 50, -50, 66, -66) for dx in (9, -9, 26, -26, 48, -48)]

    def box(i: int, dx: float, dy: float) -> Bbox:
        (x, y), (width, height) = spots[i], sizes[i]
        left = x + dx * unit - (0 if dx > 0 else width if dx < 0 else width / 2)
        return Bbox.from_bounds(left, y + dy * unit - height / 2, width, height)

    def cost(i: int, offset: tuple[float, float]) -> float:
        own = box(i, *offset)
        covered = 3 * sum(_overlap(own, other) for other in obstacles)
        covered += 2 * sum(_overlap(own, box(k, *chosen[k])) for k in range(len(points)) if k != i)
        outside = own.width * own.height - _overlap(own, frame)
        return float(covered + 4 * outside + 3 * unit * math.hypot(*offset))

    chosen: list[tuple[float, float]] = [candidates[0]] * len(points)
    for _ in range(4):
        for i in range(len(points)):
            chosen[i] = min(candidates, key=partial(cost, i))
    for i, (p, (dx, dy)) in enumerate(zip(points, chosen, strict=True)):
        leader = {"arrowstyle": "-", "color": "#b6bec9", "lw": 0.8, "shrinkA": 1, "shrinkB": 5}
        axes.annotate(
            texts[i],
            (p.parameters, p.tokens_per_s),
            (dx, dy),
            textcoords="offset points",
            ha="left" if dx > 0 else "right" if dx < 0 else "center",
            color=MARKS[p.kind]["color"],
            arrowprops=leader if abs(dy) > 20 else None,
            zorder=5,
            gid=f"label-{i}",
            **style,
        )


def _line_boxes(axes: Axes, points: Sequence[Point], unit: float) -> list[Bbox]:
    """Small boxes along the Pareto steps, so that labels keep off them."""
    from matplotlib.transforms import Bbox

    line, boxes = pareto(points), []
    for a, b in pairwise(line):
        corners = axes.transData.transform([(a.parameters, a.tokens_per_s), (a.parameters, b.tokens_per_s)])
        (x, top), (_, low) = corners
        right = axes.transData.transform((b.parameters, b.tokens_per_s))[0]
        boxes.append(Bbox.from_extents(x - unit, low, x + unit, top))
        boxes.append(Bbox.from_extents(x, low - 2 * unit, right, low + 2 * unit))
    return boxes


def _overlap(a: Bbox, b: Bbox) -> float:
    width, height = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
    return float(max(width, 0) * max(height, 0))


def page(points: Sequence[Point], svg: str) -> str:
    """The chart as one self-contained HTML page: its SVG, a tooltip on each point, switches by kind, the sources."""
    from html import escape

    template = (files("slipstream.bench") / "data/frontier.html").read_text(encoding="utf-8")
    on_line = set(pareto(points))
    rows = [
        f'<tr data-kind="{p.kind}"><td>{escape(p.name)}</td><td>{short_count(p.parameters)}</td>'
        f"<td>{p.tokens_per_s:,.0f}</td><td>{p.kind}{' · Pareto' if p in on_line else ''}</td>"
        f"<td>{escape(p.note)}</td><td>{_linked(p.source)}</td></tr>"
        for p in points
    ]
    data = [[p.name, short_count(p.parameters), f"{p.tokens_per_s:,.0f}", p.kind, p.note, p.source] for p in points]
    switches = [
        f'<label><input type="checkbox" checked value="{kind}"> {LEGEND[kind]}</label>' for kind in kinds_of(points)
    ]
    parts = {
        "SVG": svg[svg.index("<svg") :],
        "ROWS": "\n".join(rows),
        "SWITCHES": "\n".join(switches),
        "POINTS": json.dumps(data).replace("<", "\\u003c"),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)


def _linked(source: str) -> str:
    from html import escape

    return re.sub(r"https://[^\s)&;]+", lambda url: f'<a href="{url[0]}">{url[0]}</a>', escape(source))


def kinds_of(points: Sequence[Point]) -> list[Kind]:
    return [kind for kind in get_args(Kind) if any(p.kind == kind for p in points)]


def short_count(value: float) -> str:
    """A number of parameters, two or three figures: 309B, 1.02T."""
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if value >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}"
