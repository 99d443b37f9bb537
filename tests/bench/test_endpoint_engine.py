"""The engine, measured by the same code as a server, agrees with what it says of itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from fakes import FakeBackend, fake_llm

from slipstream.bench.endpoint import Question
from slipstream.bench.endpoint_engine import EngineEndpoint, open_engine
from slipstream.bench.endpoint_figures import figures
from slipstream.bench.endpoint_questions import Plan
from slipstream.bench.endpoint_run import measure
from slipstream.bench.endpoint_summary import summarize
from slipstream.bench.model_costs import load_model
from slipstream.bench.stream_clock import EndpointError
from slipstream.cli.bench_serve import command
from slipstream.errors import BackendError

FORCED = Question("q", [{"role": "user", "content": "Hello"}], max_tokens=64, stops="forced")


@pytest.mark.parametrize("drafter", ["none", "suffix"])
def test_tokens_rounds_and_length_are_the_engines_own(drafter: str) -> None:
    llm = fake_llm(FakeBackend(order=2), drafter=drafter)
    answer = EngineEndpoint(llm, "fake").ask(FORCED)
    found = figures(answer, FORCED)
    assert found.problem is None
    assert found.tokens == 64
    assert answer.speculation is not None
    assert answer.speculation.rounds + answer.speculation.accepted >= 64
    assert sum(chunk.tokens or 0 for chunk in answer.chunks) in (63, 64)
    assert found.tpot_s is not None
    assert found.last_s is not None
    assert found.ttft_s is not None
    assert found.tpot_s * (64 - (found.n_first or 0)) == pytest.approx(found.last_s - found.ttft_s)


def test_drafting_puts_several_tokens_into_a_chunk_and_changes_no_count() -> None:
    endpoints = [EngineEndpoint(fake_llm(FakeBackend(order=1), drafter=d), d) for d in ("suffix", "none")]
    suffix, none = summarize(measure(endpoints, Plan(requests=3, warmup=1, stops=("forced",), max_tokens=64)))
    assert suffix.refusals == none.refusals == {}
    assert suffix.output_tokens == none.output_tokens == 3 * 64
    assert suffix.tokens_per_chunk is not None
    assert none.tokens_per_chunk is not None
    assert suffix.tokens_per_chunk > none.tokens_per_chunk


def test_the_command_measures_the_engine_of_a_checkpoint(tiny_gguf: Path, tmp_path: Path) -> None:
    options = ["--requests", "2", "--warmup", "1", "--max-tokens", "8", "--stops", "forced", "--json"]
    address = f"engine:{tiny_gguf}?backend=cpu&threads=1"
    try:
        open_engine(address)
    except BackendError as error:
        pytest.skip(str(error))
    options += ["--out", str(tmp_path / "run.jsonl")]
    shown = CliRunner().invoke(command, ["--url", address, *options], catch_exceptions=False)
    assert json.loads(shown.stdout)["output_tokens"] == 16
    header = json.loads((tmp_path / "run.jsonl").read_text().splitlines()[0])
    assert header["endpoints"][0]["parameters"] == load_model(str(tiny_gguf)).total_params  # for `bench frontier`


@pytest.mark.parametrize("query", ["drafter", "speed=9", "threads=many"])
def test_an_unknown_option_of_an_engine_names_those_there_are(query: str) -> None:
    with pytest.raises(EndpointError, match="an engine takes backend, drafter"):
        open_engine(f"engine:smollm2?{query}")
