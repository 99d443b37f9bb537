"""A scripted server with known timings: its true figures must come back through a real socket and the command.

Truth is the server's own stamps, so a busy machine delays both. What remains is the time from one thread's send to the
other's read, for which TOLERANCE allows, patiently.
"""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from scripted_server import Script, ScriptedServer, chunk, event, patiently, plain, usage

from slipstream.bench.endpoint import HttpEndpoint, Question
from slipstream.bench.endpoint_figures import Figures, figures
from slipstream.cli.bench_serve import command
from slipstream.errors import SlipstreamError
from slipstream.models.checkpoint import list_models

TOLERANCE = 0.03
QUESTION = Question("q", [{"role": "user", "content": "?"}], max_tokens=100)


def measured(server: ScriptedServer, question: Question = QUESTION) -> Figures:
    return figures(HttpEndpoint(server.url).ask(question), question)


def near(value: float) -> Any:
    return pytest.approx(value, abs=TOLERANCE)


@patiently
def test_a_late_first_token_is_ttft_and_not_tpot() -> None:
    with ScriptedServer(plain(["a"] * 6, gap_s=0.04, first_s=0.3, tokens=6)) as server:
        found, truth = measured(server), server.served[0]
    assert found.ttft_s == near(truth.seconds(1))
    assert found.ttft_s >= 0.3
    assert found.tpot_s == pytest.approx((truth.seconds(6) - truth.seconds(1)) / 5, rel=0.15)
    assert found.end_to_end_tokens_per_s == pytest.approx(6 / truth.seconds(6), rel=0.1)
    assert found.problem is None


@patiently
def test_several_tokens_a_chunk_are_counted_by_usage() -> None:
    """Four chunks of four tokens, 60 ms apart: 15 ms a token, not 60."""
    with ScriptedServer(plain(["four words in here "] * 4, gap_s=0.06, first_s=0.05, tokens=16)) as server:
        found, truth = measured(server), server.served[0]
    assert found.n_first == 4
    assert found.tpot_s == pytest.approx((truth.seconds(4) - truth.seconds(1)) / 12, rel=0.15)
    assert len(found.chunk_gaps_s) == 3


@patiently
def test_stalls_are_chunk_gaps_and_keep_alives_end_none() -> None:
    pieces = [(0.02, event(chunk(content=c), "\r\n\r\n")) for c in "abc"]
    pieces[2:2] = [(0.1, b": keep-alive\r\n\r\n"), (0.1, b": keep-alive\r\n\r\n")]
    last = (0.0, event(chunk("stop"), "\r\n\r\n") + event(usage(3), "\r\n\r\n") + event("[DONE]", "\r\n\r\n"))
    with ScriptedServer(Script([*pieces, last])) as server:
        found, truth = measured(server), server.served[0]
    sent = [truth.seconds(i) for i in (0, 1, 4)]
    assert found.chunk_gaps_s == pytest.approx([b - a for a, b in pairwise(sent)], abs=TOLERANCE)
    assert max(found.chunk_gaps_s) > 0.2


@patiently
def test_a_chunk_counts_when_its_last_byte_has_come() -> None:
    """A character, and with it the chunk, is split over two TCP segments 150 ms apart."""
    whole = event(chunk(content="naïve"))
    cut = whole.index("ï".encode()) + 1
    last = (0.05, event(chunk(content="!")) + event(chunk("stop")) + event(usage(3)) + event("[DONE]"))
    with ScriptedServer(Script([(0.0, whole[:cut]), (0.15, whole[cut:]), last], chunked=False)) as server:
        found, truth = measured(server), server.served[0]
    assert found.ttft_s == near(truth.seconds(1))
    assert found.ttft_s > 0.14


@patiently
def test_the_role_only_chunk_is_no_token_and_reasoning_is() -> None:
    pieces = [
        (0.0, event(chunk(role="assistant", content=None))),
        (0.1, event(chunk(reasoning_content="hm"))),
        (0.1, event(chunk(content="ok"))),
        (0.0, event(chunk("stop")) + event(usage(2)) + event("[DONE]")),
    ]
    with ScriptedServer(Script(pieces)) as server:
        found, truth = measured(server), server.served[0]
    assert (found.ttft_s, found.ttfo_s) == (near(truth.seconds(1)), near(truth.seconds(2)))


def bench(server: ScriptedServer, *args: str, requests: int = 2) -> Result:
    options = ["--url", server.url, "--requests", str(requests), "--warmup", "1", "--stops", "natural", *args]
    return CliRunner().invoke(command, options)


@patiently
def test_the_command_reports_the_truth_as_json_and_jsonl(tmp_path: Path) -> None:
    script = plain(["one ", "two ", "three "], gap_s=0.05, first_s=0.1, tokens=3)
    metrics = [f"slipstream_rounds_total {n}\nslipstream_accepted_tokens_total {n / 2}\n" for n in (10, 30)]
    with ScriptedServer(script, metrics=metrics) as server:
        shown = bench(server, "--json", "--out", str(tmp_path / "run.jsonl"), "--price", "1", "0.1", "4")
    summary = json.loads(shown.stdout)
    assert summary["ttft_s"]["p50"]["value"] == near(0.1)
    assert summary["decode_tokens_per_s"]["p50"]["value"] == pytest.approx(20, rel=0.15)
    assert summary["end_to_end_tokens_per_s"]["p50"]["value"] == pytest.approx(15, rel=0.15)
    assert summary["tokens_per_round"] == 1.5
    assert summary["usd"] == pytest.approx(2 * (10 * 1 + 3 * 4) / 1e6)
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["run", "warmup", "answer", "answer", "summary"]
    answer = lines[2]
    last, first = (answer["chunks"][i]["at_s"] for i in (-1, 0))
    assert answer["tpot_s"] == pytest.approx((last - first) / 2)


def test_without_usage_the_command_prints_no_rate_and_says_why() -> None:
    script = plain(["one ", "two "], gap_s=0.01, first_s=0.01, tokens=2)
    bare = Script([*script.pieces[:-1], (0.0, event(chunk("stop")) + event("[DONE]"))])
    with ScriptedServer(script, script, bare) as server:
        shown = bench(server, requests=2)
    assert "no rate: the server sent no usage (1 of 2)" in shown.stdout
    assert "tok/s" not in shown.stdout
    assert "TTFT" in shown.stdout


@patiently
def test_a_question_that_fails_is_counted_and_the_others_measured() -> None:
    script = plain(["one ", "two "], gap_s=0.02, first_s=0.01, tokens=2)
    broken = Script(script.pieces[:2], cut=True)
    with ScriptedServer(script, broken, script) as server:
        shown = bench(server, "--json", requests=2)
    summary = json.loads(shown.stdout)
    assert summary["answers"] == 1
    assert list(summary["errors"].values()) == [1]
    assert summary["decode_tokens_per_s"]["p50"]["value"] == pytest.approx(50, rel=0.5)


def test_counts_are_checked_by_the_local_tokenizer_of_the_models_name() -> None:
    if not any(model.name == "smollm2" and model.path for model in list_models()):
        pytest.skip("the built-in model is not installed")
    script = plain(["one ", "two ", "three "], gap_s=0.01, first_s=0.01, tokens=3)
    with ScriptedServer(script) as server:
        known, other = (json.loads(bench(server, "--model", m, "--json").stdout) for m in ("smollm2", "scripted"))
    assert known["local_tokens"] > 0
    assert other["local_tokens"] is None


def test_a_tier_other_than_asked_is_pointed_out() -> None:
    script = plain(["one ", "two "], gap_s=0.01, first_s=0.01, tokens=2)
    with ScriptedServer(script) as server:
        shown = bench(server, "--tier", "priority")
    assert "tier priority was asked for, served: not named" in shown.stdout
    assert server.served[0].request["service_tier"] == "priority"


@patiently
def test_two_endpoints_are_asked_in_alternating_turns_and_compared() -> None:
    fast = plain(["a "] * 5, gap_s=0.02, first_s=0.02, tokens=5)
    slow = plain(["a "] * 5, gap_s=0.06, first_s=0.06, tokens=5)
    with ScriptedServer(fast) as one, ScriptedServer(slow) as two:
        shown = bench(one, "--url", two.url, "--json", requests=4)
    ratio = json.loads(shown.stdout.splitlines()[-1])
    assert ratio["decode"]["value"] == pytest.approx(3, rel=0.2)
    assert ratio["ttft"]["value"] == pytest.approx(3, rel=0.3)
    assert ratio["decode"]["low"] <= ratio["decode"]["value"] <= ratio["decode"]["high"]
    arrived = sorted(
        [(s.arrived_ns, "fast") for s in one.served[1:]] + [(s.arrived_ns, "slow") for s in two.served[1:]]
    )
    assert [name for _, name in arrived] == ["fast", "slow", "slow", "fast"] * 2
    assert [s.request for s in one.served] == [s.request for s in two.served]


def test_no_prompt_is_asked_twice_even_of_two_tiers_of_one_server() -> None:
    with ScriptedServer(plain(["a ", "b "], 0, 0, 2)) as server:
        bench(server, "--url", server.url, "--name", "x", "--name", "y", requests=6)
    starts = [s.request["messages"][0]["content"].split(".")[0] for s in server.served]
    assert len(starts) == len(set(starts)) == 2 * (1 + 6)
    seeds = [s.request["seed"] for s in server.served]
    assert sorted(seeds) == sorted(2 * list(range(7)))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--model", "a", "--model", "b"], "give --model once, or once for each --url"),
        (["--name", "a", "--name", "b"], "give --name once for each --url"),
        (["--body", "{"], "--body is not JSON"),
        (["--body", "[]"], "--body must be a JSON object"),
    ],
)
def test_senseless_options_are_refused_before_anything_is_asked(args: list[str], message: str) -> None:
    with ScriptedServer(plain(["a"], 0, 0, 1)) as server:
        shown = bench(server, *args)
        assert not server.served
    assert shown.exit_code == 2
    assert message in shown.output


def test_a_report_that_cannot_be_drawn_is_refused_before_anything_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # importing it fails
    with ScriptedServer(plain(["a"], 0, 0, 1)) as server:
        shown = bench(server, "--html", "report.html")
        assert not server.served
    assert isinstance(shown.exception, SlipstreamError)
    assert "slipstream-llm[plot]" in str(shown.exception)


def test_an_endpoint_that_fails_its_first_question_is_not_measured() -> None:
    refusal = Script([(0.0, b"no such model")], head="HTTP/1.1 404 Not Found\r\nContent-Type: text/plain\r\n")
    with ScriptedServer(refusal) as server:
        shown = bench(server)
    assert isinstance(shown.exception, SlipstreamError)
    assert "answered 404: no such model" in str(shown.exception)
