"""Our own server, measured from outside: what the socket shows agrees with what the engine did."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from fakes import FakeBackend, FakeCache, fake_llm
from scripted_server import patiently

from slipstream.bench.agent_loop import http_create, run_agent
from slipstream.bench.endpoint import HttpEndpoint, Question
from slipstream.bench.endpoint_figures import figures
from slipstream.bench.endpoint_questions import Plan
from slipstream.bench.endpoint_run import measure
from slipstream.bench.endpoint_summary import summarize
from slipstream.bench.recorder import Recorder
from slipstream.bench.stream_clock import EndpointError
from slipstream.bench.trace import read_trace

pytest.importorskip("slipstream.serve.run")

from slipstream.serve.config import Config
from slipstream.serve.run import make_server

ROUND_S = 0.02
FORCED = Question("q", [{"role": "user", "content": "Hello"}], max_tokens=24, stops="forced")


class SteadyBackend(FakeBackend):
    """A round takes ROUND_S, whatever it verifies, and prefill four times that."""

    def verify(self, cache: FakeCache, tokens: np.ndarray) -> np.ndarray:
        time.sleep(ROUND_S)
        return super().verify(cache, tokens)

    def prefill(self, cache: FakeCache, tokens: np.ndarray) -> None:
        time.sleep(4 * ROUND_S)
        super().prefill(cache, tokens)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    backend = SteadyBackend(order=1)
    backend._table = backend._table.copy()
    backend._table[:, 128:256] -= 30  # ASCII alone, so that no round is silent
    server, _ = make_server(fake_llm(backend), Config(port=0))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    limit = time.monotonic() + 20
    while not server.started:
        assert time.monotonic() < limit
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join(20)


@patiently
def test_the_times_are_those_of_the_engines_rounds(url: str) -> None:
    answer = HttpEndpoint(url).ask(FORCED)
    found = figures(answer, FORCED)
    assert found.problem is None
    assert found.counted_by == "server"
    assert answer.speculation is not None
    assert found.ttft_s is not None
    assert found.last_s is not None
    assert found.ttft_s >= 5 * ROUND_S
    rounds_s = (answer.speculation.rounds - 1) * ROUND_S
    assert found.last_s - found.ttft_s == pytest.approx(rounds_s, rel=0.3)
    assert found.tpot_s == pytest.approx(rounds_s / (24 - (found.n_first or 0)), rel=0.3)
    assert answer.tier == "default"


def test_counts_agree_with_the_servers_metrics(url: str) -> None:
    endpoint = HttpEndpoint(url)
    endpoint.ask(FORCED)
    before = endpoint.counters()
    answer = endpoint.ask(FORCED)
    gained = endpoint.counters().since(before)
    assert answer.speculation is not None
    assert answer.usage is not None
    assert (gained.rounds, gained.accepted) == (answer.speculation.rounds, answer.speculation.accepted)
    assert gained.cached_tokens == answer.usage.cached_tokens
    assert gained.tokens_per_round == pytest.approx(answer.speculation.tokens_per_round)


def test_a_whole_run_is_believed_under_both_kinds_of_stop(url: str) -> None:
    endpoint = HttpEndpoint(url, tier="priority")
    run = measure([endpoint], Plan(requests=2, warmup=1, max_tokens=12))
    for summary in summarize(run):
        assert summary.refusals == summary.errors == {}
        assert summary.decode_tokens_per_s is not None
        assert summary.tiers == {"priority": 2}
        assert summary.tokens_per_round is not None


def test_a_tier_that_does_not_exist_is_the_servers_error(url: str) -> None:
    with pytest.raises(EndpointError, match="warp"):
        HttpEndpoint(url, tier="warp").ask(FORCED)


def test_an_agent_at_work_leaves_a_trace_of_growing_cached_prompts(url: str, tmp_path) -> None:
    path = tmp_path / "trace.jsonl"
    (tmp_path / "scratch").mkdir()
    with Recorder(http_create(HttpEndpoint(url).url), path) as create:
        work = run_agent(create, tmp_path / "scratch", model="fake", turns=3, max_tokens=48, guided=False)
    turns = read_trace(path)
    assert work.calls == len(turns) == 3
    assert [turn.prompt_tokens for turn in turns] == sorted(turn.prompt_tokens for turn in turns)
    assert turns[2].cached_tokens > turns[0].prompt_tokens
