"""The frontier shows every point with its source, keeps three kinds apart, and draws the Pareto line right."""

from __future__ import annotations

import json
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from scripted_server import ScriptedServer, plain

from slipstream.bench.frontier import FrontierError, Kind, Point, pareto, published, read_points, write_charts
from slipstream.cli.bench_serve import command as serve_command
from slipstream.cli.frontier import command
from slipstream.cli.plan import command as plan_command

KINDS: tuple[Kind, ...] = ("published", "measured", "predicted")
OURS = [
    Point("tiny <script>alert(1)</script> $x^2$", 135e6, 4200, "measured", "our own row", "a note & more"),
    Point("wish", 3e11, 9000, "predicted", "slipstream plan"),
]

some_points = st.lists(
    st.builds(
        Point,
        name=st.just("p"),
        parameters=st.sampled_from([1e9, 2e9, 4e9, 8e9, 1e12]),
        tokens_per_s=st.sampled_from([10.0, 50.0, 100.0, 1000.0]),
        kind=st.sampled_from(KINDS),
        source=st.just("s"),
    ),
    max_size=12,
)


def beats(a: Point, b: Point) -> bool:
    at_least = a.parameters >= b.parameters and a.tokens_per_s >= b.tokens_per_s
    return at_least and (a.parameters, a.tokens_per_s) != (b.parameters, b.tokens_per_s)


@given(some_points)
def test_the_pareto_line_is_what_exists_and_nothing_existing_beats(points: list[Point]) -> None:
    line, existing = pareto(points), [p for p in points if p.kind != "predicted"]
    assert all(p in existing for p in line)
    assert not any(beats(other, p) for p in line for other in existing)
    unbeaten = {(p.parameters, p.tokens_per_s) for p in existing if not any(beats(other, p) for other in existing)}
    assert {(p.parameters, p.tokens_per_s) for p in line} == unbeaten
    assert [p.parameters for p in line] == sorted(p.parameters for p in line)


def test_published_points_are_the_reported_ones() -> None:
    reported = {(p.parameters, p.tokens_per_s) for p in published()}
    assert {(309e9, 2000), (552e9, 1500), (1.02e12, 1000), (2.8e12, 850), (2.8e12, 50)} < reported
    assert 981 in {p.tokens_per_s for p in published()}
    assert all(p.source and p.kind == "published" for p in published())


def test_a_plan_becomes_a_predicted_point(tmp_path: Path) -> None:
    arguments = ["naive-n05-flash", "--tp", "8", "--drafts", "7", "--acceptance", "5.8", "--json"]
    planned = CliRunner().invoke(plan_command, arguments).output
    results = tmp_path / "results.jsonl"
    results.write_text(planned + '\n{"name": "m", "parameters": 1e9, "tokens_per_s": 5, "source": "s"}\n')
    predicted, measured = read_points(results)
    assert (predicted.kind, measured.kind) == ("predicted", "measured")
    assert predicted.tokens_per_s == json.loads(planned)["prediction"]["tokens_per_s"]
    assert predicted.parameters == pytest.approx(309e9, rel=0.01)
    assert "of the floor" in predicted.source


@pytest.fixture
def served(tmp_path: Path) -> Path:
    """What `bench serve --out` writes of two endpoints: `unknown`, and `known`, which says it is Llama 8B."""
    path, script = tmp_path / "served.jsonl", plain(["one ", "two ", "three "], gap_s=0.02, first_s=0.01, tokens=3)
    with ScriptedServer(script) as one, ScriptedServer(script) as two:
        options = ["--url", one.url, "--url", two.url, "--name", "unknown", "--name", "known", "--model", "scripted"]
        options += ["--model", "llama-8b", "--requests", "2", "--warmup", "1", "--stops", "natural", "--out", str(path)]
        assert CliRunner().invoke(serve_command, options, catch_exceptions=False).exit_code == 0
    return path


def test_what_bench_serve_wrote_becomes_measured_points(served: Path) -> None:
    summaries = [line for line in map(json.loads, served.read_text().splitlines()) if line["kind"] == "summary"]
    points = read_points(served, {"unknown": 70e9})
    assert [(p.name, p.kind) for p in points] == [("unknown", "measured"), ("known", "measured")]
    assert [p.parameters for p in points] == [70e9, pytest.approx(8.03e9, rel=0.01)]
    assert [p.tokens_per_s for p in points] == [s["decode_tokens_per_s"]["p50"]["value"] for s in summaries]
    assert all(p.source.startswith("slipstream bench serve on 2") for p in points)


def test_the_command_draws_what_bench_serve_wrote_and_asks_for_a_size_it_lacks(served: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    lacking = CliRunner().invoke(command, [str(served), "--out", str(tmp_path / "x")])
    assert isinstance(lacking.exception, FrontierError)
    assert "unknown is not known; say it with --parameters" in str(lacking.exception)
    sized = ["--parameters", "unknown=0.07T", "--no-published", "--out", str(tmp_path / "x")]
    assert CliRunner().invoke(command, [str(served), *sized], catch_exceptions=False).exit_code == 0
    assert "median of 2 answers with natural stops" in (tmp_path / "x.html").read_text()


def test_no_point_is_made_of_a_refused_rate_or_of_a_run_that_did_not_end(served: Path) -> None:
    lines = [json.loads(line) for line in served.read_text().splitlines()]
    served.write_text("\n".join(json.dumps(line) for line in lines[:4]))
    with pytest.raises(FrontierError, match="did not end"):
        read_points(served, {"": 1e9})
    refused = next(line for line in lines if line["kind"] == "summary")
    refused |= {"decode_tokens_per_s": None, "refusals": {"the server sent no usage": 2}}
    served.write_text(json.dumps(refused))
    with pytest.raises(FrontierError, match=":1: unknown has no decode rate: the server sent no usage"):
        read_points(served, {"": 1e9})


def test_one_endpoint_is_one_point_though_both_kinds_of_stop_were_measured(served: Path) -> None:
    lines = [json.loads(line) for line in served.read_text().splitlines()]
    forced = [line | {"stops": "forced", "answers": 9} for line in lines if line["kind"] == "summary"]
    served.write_text("\n".join(map(json.dumps, [*lines, *forced])))
    assert ["natural" in p.note for p in read_points(served, {"": 1e9})] == [True, True]


def test_a_plan_that_does_not_fit_its_machine_is_no_point(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    results.write_text(CliRunner().invoke(plan_command, ["kimi-k2.6", "--json"]).output)
    with pytest.raises(FrontierError, match="does not fit on h200"):
        read_points(results)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"name": "m", "parameters": 1e9, "tokens_per_s": 5}', ":1: a point lacks 'source'"),
        ('{"name": "m", "parameters": 0, "tokens_per_s": 5, "source": "s"}', "positive"),
        ('{"name": "m", "parameters": NaN, "tokens_per_s": 5, "source": "s"}', "positive"),
        ('{"name": "m", "parameters": 1, "tokens_per_s": 5, "source": "s", "kind": "wished"}', "'wished'"),
        ('{"name": "m", "parameters": 1, "tokens_per_s": 5, "source": ""}', "needs a source"),
        ('["m"]', ":1: not a point"),
        ("m", ":1: not a point"),
    ],
)
def test_bad_points_are_refused_with_the_line(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(line)
    with pytest.raises(FrontierError, match=message):
        read_points(path)


class Page(HTMLParser):
    """What a browser would load or show: external references, ids, cell texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.ids: set[str] = set()
        self.scripts = 0
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.ids.add(values.get("id") or "")
        self.scripts += tag == "script"
        if tag in ("script", "link", "img", "iframe"):
            self.loads += [values[key] or "" for key in ("src", "href") if key in values]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_charts_hold_every_point_and_the_page_needs_nothing_else(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    points = published() + OURS
    png, svg, html = write_charts(points, tmp_path / "charts" / "frontier")
    assert png.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"

    drawn = ElementTree.parse(svg)
    ids = {element.get("id") for element in drawn.iter()}
    assert {f"{part}-{i}" for i in range(len(points)) for part in ("point", "label")} <= ids
    words = "".join(drawn.getroot().itertext())
    for point in points:
        assert point.name in words

    page = Page(html.read_text())
    assert page.loads == []
    assert page.scripts == 1  # a name cannot add one
    assert {f"point-{i}" for i in range(len(points))} <= page.ids
    for point in points:
        assert point.source in page.text
        assert point.note in page.text


def test_charts_are_reproducible(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    first = write_charts(published(), tmp_path / "a")
    second = write_charts(published(), tmp_path / "b")
    assert [x.read_bytes() for x in first] == [x.read_bytes() for x in second]


def test_labels_cover_no_marker_of_the_published_points() -> None:
    pytest.importorskip("matplotlib")
    from slipstream.bench.frontier import draw

    figure = draw(published())
    axes = figure.axes[0]
    boxes = {text.get_gid(): text.get_window_extent() for text in axes.texts}
    for i, point in enumerate(published()):
        x, y = axes.transData.transform((point.parameters, point.tokens_per_s))
        assert not any(box.contains(x, y) for box in boxes.values()), point.name
        assert f"label-{i}" in boxes


def test_without_matplotlib_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(FrontierError, match=r"pip install 'slipstream-llm\[plot\]'"):
        write_charts(published(), tmp_path / "frontier")


def test_no_points_are_no_chart(tmp_path: Path) -> None:
    error = CliRunner().invoke(command, ["--no-published", "--out", str(tmp_path / "x")]).exception
    assert isinstance(error, FrontierError)


def test_the_command_names_what_it_wrote(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    shown = CliRunner().invoke(command, ["--out", str(tmp_path / "v1.2")])
    assert [Path(line).name for line in shown.output.split()] == ["v1.2.png", "v1.2.svg", "v1.2.html"]
