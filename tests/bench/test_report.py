"""The report is one file that stands alone and says what the terminal says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fakes import FakeBackend, fake_llm

from slipstream.bench.endpoint_engine import EngineEndpoint
from slipstream.bench.endpoint_questions import Plan
from slipstream.bench.endpoint_run import Run, measure
from slipstream.bench.endpoint_summary import compare, summarize
from slipstream.bench.report import ReportError, write_report
from slipstream.bench.report_tables import facts, quantity, value_rows

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def run() -> Run:
    endpoints = [EngineEndpoint(fake_llm(FakeBackend(order=1), drafter=d), f"<{d}> & co") for d in ("suffix", "none")]
    return measure(endpoints, Plan(requests=3, warmup=1, max_tokens=16))


def test_the_page_fetches_nothing_and_escapes_names(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "new" / "report.html"
    write_report(path, run, summarize(run), compare(run))
    text = path.read_text(encoding="utf-8")
    assert "<svg" in text
    assert not re.search(r"(src|href)\s*=\s*[\"'](?!#)", text.replace('xlink:href="#', ""))
    assert "@import" not in text
    assert "{{" not in text
    assert "<suffix>" not in text
    assert "&lt;suffix&gt; &amp; co" in text


def test_the_page_has_every_figure_of_the_tables(run: Run, tmp_path: Path) -> None:
    summaries = summarize(run)
    write_report(tmp_path / "r.html", run, summaries, compare(run))
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    for summary in summaries:
        for row in value_rows(summary):
            assert "".join(f"<td>{cell}" for cell in row) in text
        for line in facts(summary):
            assert line in text


def test_a_place_that_cannot_be_written_is_named(run: Run, tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="cannot write"):
        write_report(tmp_path, run, summarize(run), [])


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [
        (1.5, "s", "1.5 s"),
        (0.0123, "s", "12.3 ms"),
        (0.0, "s", "0 ms"),
        (45e-6, "s", "45 us"),
        (1234.5, "tok/s", "1,234 tok/s"),
    ],
)
def test_quantities_have_the_unit_people_would_use(value: float, unit: str, shown: str) -> None:
    assert quantity(value, unit) == shown
