"""The results format: checked when written and read, and rendered as tables."""

import json
import re
from pathlib import Path

import pytest

from slipstream.bench.results import Row, line, quantity, read, render, table, write

ROW = Row("cpu-chat", "decode, chat prompts", 200.0, "tok/s", "llama.cpp", 100.0, 2.0, [199.0, 200.0, 203.0])
COMMITTED = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("*.json"))


def test_what_is_written_is_read_back(tmp_path):
    path = write(tmp_path, "cpu_decode", [ROW], packages=("numpy",), read_gb_s=30.0)
    found = read(path)
    assert found.rows == [ROW]
    assert found.machine["read_gb_s"] == 30.0
    assert found.machine["cpu"]
    assert {"python", "numpy", "slipstream-llm"} <= set(found.versions)
    fields = json.loads(path.read_text())
    assert set(fields) == {"machine", "commit", "date", "versions", "rows"}
    assert set(fields["rows"][0]) == {"id", "work", "value", "unit", "peer", "peer_value", "ratio", "samples"}


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"id": "CPU chat"}, "id"),
        ({"unit": "bananas"}, "bananas"),
        ({"work": ""}, "work"),
        ({"value": float("nan")}, "not finite"),
        ({"samples": [float("inf")]}, "not finite"),
        ({"peer": None}, "peer"),
        ({"peer_value": None}, "peer"),
    ],
)
def test_a_row_that_no_table_should_show_is_refused(change, cause):
    fields = {name: getattr(ROW, name) for name in ROW.__dataclass_fields__}
    with pytest.raises(ValueError, match=cause):
        Row(**(fields | change))


def test_rows_with_the_same_id_are_refused(tmp_path):
    with pytest.raises(ValueError, match="repeat"):
        write(tmp_path, "cpu_decode", [ROW, ROW])
    assert not list(tmp_path.iterdir())


def test_a_damaged_file_is_refused_by_name(tmp_path):
    path = write(tmp_path, "cpu_decode", [ROW])
    for damage in ("{", '{"rows": []}', path.read_text().replace('"unit"', '"einheit"')):
        path.write_text(damage)
        with pytest.raises(ValueError, match=r"cpu_decode\.json"):
            read(path)


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.name)
def test_committed_results_are_in_the_format(path):
    assert read(path).rows


def test_render_fills_between_the_markers_and_touches_nothing_else(tmp_path):
    write(tmp_path, "cpu_decode", [ROW])
    document = "before\n<!-- results: cpu_decode -->\nold\n<!-- /results -->\nafter\n"
    filled = render(document, tmp_path)
    assert filled.startswith("before\n<!-- results: cpu_decode -->\n| id |")
    assert "| cpu-chat | decode, chat prompts | 200 tok/s | 100 tok/s (llama.cpp) | 2.00x |" in filled
    assert filled.endswith("\n<!-- /results -->\nafter\n")
    assert "old" not in filled
    assert render(filled, tmp_path) == filled


def test_render_says_where_nothing_was_measured(tmp_path):
    assert "Not measured yet." in render("<!-- results: gpu -->\n<!-- /results -->", tmp_path)


def test_table_names_the_machine_and_the_commit(tmp_path):
    found = read(write(tmp_path, "cpu_decode", [ROW]))
    assert str(found.machine["cpu"]) in table(found)
    assert found.date in table(found)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(96.24, "tok/s", "96.2 tok/s"), (1234.5, "us", "1234 us"), (0.085, "s", "0.0850 s"), (0.991, "fraction", "99.1%"),
     (0.00012, "KL", "1.20e-04"), (1.5, "x", "1.50x")],
)  # fmt: skip
def test_figures_have_three_digits_and_a_unit(value, unit, text):
    assert quantity(value, unit) == text


def test_line_says_the_same_in_a_terminal():
    assert "llama.cpp 100 tok/s   2.00x" in line(ROW)


def test_the_topic_all_shows_every_file_under_its_name(tmp_path):
    page = "<!-- results: all -->\nold\n<!-- /results -->"
    assert "Not measured yet." in render(page, tmp_path)
    for topic in ("b_topic", "a_topic"):
        write(tmp_path, topic, [ROW])
    shown = render(page, tmp_path)
    assert shown.index("### a_topic") < shown.index("### b_topic")
    assert shown.count("cpu-chat") == 2
    assert "old" not in shown


BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_every_committed_topic_stands_on_the_page_with_one_command_that_makes_it() -> None:
    text = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
    commands = text[text.index("## Reproduce") : text.index("## Results")]
    for path in BENCHMARKS.glob("results/*.json"):
        assert f"`{path.stem}`" in commands, f"add how to make {path.stem} to benchmarks/README.md, Reproduce"
        assert f"### {path.stem}\n" in text, "run `make docs-tables`"
        for row in read(path).rows:
            assert f"| {row.id} |" in text, "run `make docs-tables`"
    for script in re.findall(r"`python (benchmarks/\w+\.py)", commands):
        assert (BENCHMARKS.parent / script).exists(), script


def test_a_missing_peer_is_named_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from worker import require_peer

    require_peer("json")
    with pytest.raises(SystemExit, match=r"not installed \(no no_such_peer\): `make bench` installs it") as stopped:
        require_peer("json", "no_such_peer")
    assert "\n" not in str(stopped.value)
