"""The one format of measured results, and the tables that documents show of them.

A topic is one file, benchmarks/results/<topic>.json:

    machine   what it ran on                      commit    of the code that was measured
    date      day, ISO 8601                       versions  of Python and packages
    rows      [{id, work, value, unit, peer, peer_value, ratio, samples}]

`value` and `samples` are in `unit`; shares are fractions. `ratio` is the multiple that a limit speaks of: 2.0 is twice
as fast as the peer, whichever way the unit counts. Rows without a peer leave the three peer fields null.

A document shows a topic between two markers, and `render` fills in what stands between them:

    <!-- results: cpu_decode -->
    <!-- /results -->

The topic `all` stands for every file, each under its own heading.
"""

from __future__ import annotations

import datetime
import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from slipstream.bench.machine import describe_machine, git_commit, versions

UNITS = ("us", "ms", "s", "tok/s", "tok/round", "GB/s", "MB", "x", "fraction", "KL", "perplexity")


@dataclass(frozen=True)
class Row:
    """One measured figure, checked when made. Raises ValueError for one that no table should show."""

    id: str
    work: str
    value: float
    unit: str
    peer: str | None = None
    peer_value: float | None = None
    ratio: float | None = None
    samples: Sequence[float] = ()

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", self.id):
            raise ValueError(f"row id {self.id!r} is not lower-case words joined by hyphens")
        if self.unit not in UNITS:
            raise ValueError(f"row {self.id}: unit {self.unit!r} is none of {', '.join(UNITS)}")
        if not self.work:
            raise ValueError(f"row {self.id} does not say what work was measured")
        numbers = [self.value, *self.samples, *(v for v in (self.peer_value, self.ratio) if v is not None)]
        if not all(math.isfinite(number) for number in numbers):
            raise ValueError(f"row {self.id} holds a figure that is not finite: {numbers}")
        if (self.peer is None) != (self.peer_value is None):
            raise ValueError(f"row {self.id} names a peer without its value, or a value without its peer")


@dataclass(frozen=True)
class Results:
    """One topic's file."""

    machine: dict[str, Any]
    commit: str
    date: str
    versions: dict[str, str]
    rows: list[Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        datetime.date.fromisoformat(self.date)
        ids = [row.id for row in self.rows]
        if len(set(ids)) < len(ids):
            raise ValueError(f"row ids repeat: {ids}")


def write(folder: Path, topic: str, rows: Sequence[Row], *, packages: Sequence[str] = (), **machine: Any) -> Path:
    """Write `topic` as measured here and now.

    packages: whose versions matter to the figures. machine: further facts, such as `read_gb_s`.
    """
    results = Results(
        machine=describe_machine() | machine,
        commit=git_commit(folder),
        date=datetime.date.today().isoformat(),
        versions=versions("slipstream-llm", *packages),
        rows=list(rows),
    )
    path = folder / f"{topic}.json"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(results), indent=2) + "\n", encoding="utf-8")
    return path


def read(path: Path) -> Results:
    """Raises ValueError where the file is not in the format."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        return Results(**(fields | {"rows": [Row(**row) for row in fields["rows"]]}))
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(f"{path.name} is not a results file: {error}") from None


def render(document: str, folder: Path) -> str:
    """`document` with every marked table filled in from the results in `folder`."""

    def body(topic: str) -> str:
        path = folder / f"{topic}.json"
        return table(read(path)) if path.exists() else "Not measured yet."

    def fill(match: re.Match[str]) -> str:
        found = body(match["topic"])
        if match["topic"] == "all":
            topics = sorted(path.stem for path in folder.glob("*.json"))
            found = "\n\n".join(f"### {topic}\n\n{body(topic)}" for topic in topics) or "Not measured yet."
        return f"{match['open']}\n{found}\n{match['close']}"

    return re.sub(
        r"(?P<open><!-- results: (?P<topic>\w+) -->)\n.*?(?P<close><!-- /results -->)", fill, document, flags=re.S
    )


def table(results: Results) -> str:
    """A topic as a Markdown table, with the machine and the commit beneath it."""
    lines = ["| id | work | Slipstream | peer | ratio |", "|---|---|---|---|---|"]
    for row in results.rows:
        peer = f"{quantity(row.peer_value, row.unit)} ({row.peer})" if row.peer_value is not None else ""
        ratio = quantity(row.ratio, "x") if row.ratio is not None else ""
        lines.append(f"| {row.id} | {row.work} | {quantity(row.value, row.unit)} | {peer} | {ratio} |")
    machine = results.machine
    where = f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB"
    if "read_gb_s" in machine:
        where += f", {machine['read_gb_s']:.0f} GB/s measured reads"
    named = ", ".join(f"{name} {version}" for name, version in results.versions.items() if name != "slipstream-llm")
    return "\n".join([*lines, "", f"Measured {results.date} on {where}; commit {results.commit}; {named}."])


def line(row: Row) -> str:
    """A row in one line, for a terminal."""
    peer = f"   {row.peer} {quantity(row.peer_value, row.unit)}" if row.peer_value is not None else ""
    ratio = f"   {quantity(row.ratio, 'x')}" if row.ratio is not None else ""
    return f"{row.id:16} {quantity(row.value, row.unit)}{peer}{ratio}   {row.work}"


def quantity(value: float, unit: str) -> str:
    """A figure with three significant digits and its unit."""
    if unit == "fraction":
        return f"{value:.1%}"
    if unit == "KL":
        return f"{value:.2e}"
    digits = f"{value:.0f}" if abs(value) >= 100 else f"{value:#.3g}"
    return f"{digits}x" if unit == "x" else f"{digits} {unit}"
