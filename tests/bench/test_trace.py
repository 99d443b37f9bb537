"""The arithmetic of a chain of calls: what faster decoding saves, where it stops helping, and what that costs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from scripted_server import ScriptedServer, plain

from slipstream.bench.recorder import Recorder
from slipstream.bench.trace import (
    Price,
    Speed,
    Tier,
    TraceError,
    Turn,
    compare_tiers,
    read_trace,
    replay,
    trajectory,
    useful_decode_rate,
    workflow,
    write_trace,
)
from slipstream.cli.agent import command as agent
from slipstream.cli.rollout import command as rollout

counts = st.integers(0, 10_000)
turns = st.lists(
    st.builds(
        lambda fresh, cached, output, tool_s: Turn(fresh + cached, cached, output, tool_s),
        counts,
        counts,
        counts,
        st.floats(0, 60),
    ),
    min_size=1,
    max_size=20,
)


def test_a_workflow_whose_calls_drop_from_10_s_to_2_s_falls_from_8_minutes_to_under_2() -> None:
    """48 calls of 1,000 tokens, no tool time: 48 x 10 s = 480 s, and 48 x 2 s = 96 s."""
    slow, fast = (replay(workflow(), Speed(rate)) for rate in (100, 500))
    assert (slow.total_s, fast.total_s) == (480, 96)


def test_that_workflow_stays_under_2_minutes_with_tools_up_to_30_s_in_all_and_not_beyond() -> None:
    """8 minutes at 10 s a call with tools: n x 10 + tools = 480 and n x 2 + tools < 120 need tools < 30 s."""

    def fast_s(calls: int) -> float:
        chain = workflow(calls, tool_s=(480 - 10 * calls) / calls)
        assert replay(chain, Speed(100)).total_s == pytest.approx(480)
        return replay(chain, Speed(500)).total_s

    assert fast_s(46) == pytest.approx(112)  # 20 s of tools
    assert fast_s(45) == pytest.approx(120)  # 30 s
    assert fast_s(30) == pytest.approx(240)  # 3 minutes of tools: half the time, no more


@pytest.mark.parametrize("generated", [0.2, 0.3, 0.4])
def test_a_million_token_trajectory_spends_about_95_percent_of_its_time_generating(generated: float) -> None:
    """100 turns, 0.8 s of tool each, prefix cached, 10,000 tok/s prefill, 100 tok/s decode."""
    slow = replay(trajectory(generated=generated), Speed(100))
    assert slow.decode_share == pytest.approx(0.95, abs=0.03)
    fast = replay(trajectory(generated=generated), Speed(2000))
    assert fast.total_s / slow.total_s == pytest.approx(0.1, abs=0.025)


def test_a_trajectory_has_the_tokens_and_the_share_it_was_asked_for() -> None:
    made = trajectory(tokens=100_003, generated=0.25, turns=7)
    assert made[-1].prompt_tokens + made[-1].output_tokens == 100_003
    assert sum(t.output_tokens for t in made) == pytest.approx(25_000, abs=7)
    assert sum(t.prompt_tokens - t.cached_tokens + t.output_tokens for t in made) == 100_003


def test_prefill_or_tools_become_the_limit_once_decoding_is_fast() -> None:
    assert replay(trajectory(cached=False), Speed(2000)).limit == "prefill"
    assert replay(trajectory(tool_s=20), Speed(2000)).limit == "tools"
    assert replay(trajectory(tool_s=0), Speed(2000, 1e9, call_s=5)).limit == "calls"
    assert replay(trajectory(), Speed(100)).limit == "decode"


@given(turns, st.floats(1, 1e4))
def test_faster_decoding_never_takes_longer_and_never_beats_what_is_not_decoding(
    chain: list[Turn], rate: float
) -> None:
    slow, fast = replay(chain, Speed(rate)), replay(chain, Speed(2 * rate))
    rest_s = slow.total_s - slow.decode_s
    assert rest_s - 1e-6 <= fast.total_s <= slow.total_s
    assert slow.total_s == pytest.approx(slow.decode_s + slow.prefill_s + slow.call_s + slow.tool_s)


def test_at_the_useful_rate_half_of_the_time_is_decoding() -> None:
    chain = trajectory()
    assert replay(chain, Speed(useful_decode_rate(chain, Speed(100)))).decode_share == pytest.approx(0.5)
    assert useful_decode_rate(workflow(), Speed(100)) == float("inf")


def test_the_bill_counts_fresh_cached_and_written_tokens_at_their_prices() -> None:
    bill = Price(input=1, cached=0.1, output=4).of([Turn(1_000_000, 600_000, 500_000)], multiplier=3)
    assert bill == pytest.approx(3 * (0.4 + 0.06 + 2.0))


def test_price_of_a_faster_tier_is_stated_for_each_hour_it_saves() -> None:
    """A task of 1 h at $6 list; twice the price for 10x the speed saves 0.9 h for $6 more."""
    chain = [Turn(0, 0, 360_000)]
    slow, fast = compare_tiers(chain, [Tier(100), Tier(1000, 2)], Price(0, 0, 6 / 0.36), 1e4, 0)
    assert slow.usd == pytest.approx(6)
    assert slow.usd_per_hour_saved is None
    assert fast.usd_per_hour_saved == pytest.approx(6 / 0.9)


def test_a_task_bears_the_price_at_which_waiting_and_paying_cost_the_same() -> None:
    """1 h at $6 list becomes 0.1 h; at $20 an hour that saves $18, so the bill may be $24: four times the list."""
    chain, price = [Turn(0, 0, 360_000)], Price(0, 0, 6 / 0.36)
    _, fast, dear = compare_tiers(chain, [Tier(100), Tier(1000, 4), Tier(1000, 6)], price, 1e4, 0, usd_per_hour=20)
    assert fast.bears == dear.bears == pytest.approx(4)
    assert fast.usd + 20 * fast.clock.total_s / 3600 == pytest.approx(6 + 20)
    assert not dear.pays


@pytest.mark.parametrize(("hour", "price_is_the_limit"), [("5", [False, True, True]), ("40", [False, False, False])])
def test_the_table_names_price_as_the_limit_where_a_tier_costs_more_than_it_saves(
    hour: str, price_is_the_limit: list[bool]
) -> None:
    tiers = ["--tier", "100@1", "--tier", "1000@2", "--tier", "2000@4"]
    shown = CliRunner().invoke(rollout, [*tiers, "--hour", hour]).output.splitlines()[1:4]
    assert [", price" in line for line in shown] == price_is_the_limit, shown


@pytest.mark.parametrize("multiplier", [2, 3, 6])
def test_a_tier_multiplies_the_whole_bill(multiplier: float) -> None:
    base, dear = compare_tiers(trajectory(), [Tier(100), Tier(2000, multiplier)], Price(1, 0.1, 4), 1e4, 0)
    assert dear.usd == pytest.approx(multiplier * base.usd)
    assert dear.clock.total_s < base.clock.total_s


@given(turns)
def test_a_trace_reads_back_as_written(chain: list[Turn]) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        write_trace(path, chain)
        assert read_trace(path) == chain


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt_tokens": 4}\n', ":1: a turn lacks 'output_tokens'"),
        ('\n{"prompt_tokens": 4, "output_tokens": "many"}\n', ":2: not a turn"),
        ('{"prompt_tokens": 4, "output_tokens": 1, "cached_tokens": 5}', ":1: .*5 cached tokens in a prompt of 4"),
        ('{"prompt_tokens": -4, "output_tokens": 1}', "negative"),
        ("[1, 2]", ":1: not a turn"),
        ("nonsense", ":1: not a turn"),
        ("", "holds no turns"),
    ],
)
def test_bad_traces_are_refused_with_the_line(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(TraceError, match=message):
        read_trace(path)


@pytest.mark.parametrize("bad", [{"generated": 0.0}, {"generated": 1.5}, {"turns": 0}, {"tokens": 5, "turns": 9}])
def test_impossible_trajectories_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(TraceError):
        trajectory(**bad)


class FakeClient:
    """Answers like an OpenAI client, with a clock that it moves itself."""

    def __init__(self) -> None:
        self.now = 0.0

    def create(self, stream: bool = False, usage: bool = True, **_: Any) -> Any:
        self.now += 2.0
        details = SimpleNamespace(cached_tokens=30)
        counted = (
            SimpleNamespace(prompt_tokens=100, completion_tokens=7, prompt_tokens_details=details) if usage else None
        )
        if stream:
            return iter([SimpleNamespace(usage=None, text="a"), SimpleNamespace(usage=counted, text="b")])
        return SimpleNamespace(usage=counted, text="ab")


def test_recording_counts_usage_and_the_time_between_calls(tmp_path: Path) -> None:
    client, path = FakeClient(), tmp_path / "trace.jsonl"
    with Recorder(client.create, path, clock=lambda: client.now) as create:
        assert create(model="x").text == "ab"
        client.now += 1.5  # a tool runs
        assert [chunk.text for chunk in create(stream=True)] == ["a", "b"]
        client.now += 60.0  # after the last answer no tool is known to run
    assert read_trace(path) == [Turn(100, 30, 7, 1.5), Turn(100, 30, 7, 0.0)]


def test_recording_an_asynchronous_client_gives_the_same_trace(tmp_path: Path) -> None:
    client, path = FakeClient(), tmp_path / "trace.jsonl"

    async def create(**request: Any) -> Any:
        answer = client.create(**request)
        return later(answer) if request.get("stream") else answer

    async def later(chunks: Any) -> AsyncIterator[Any]:
        for chunk in chunks:
            yield chunk

    async def agent() -> None:
        with Recorder(create, path, clock=lambda: client.now) as recorded:
            assert (await recorded(model="x")).text == "ab"
            client.now += 1.5
            assert [chunk.text async for chunk in await recorded(stream=True)] == ["a", "b"]
            with pytest.raises(TraceError, match="include_usage"):
                await recorded(usage=False)

    asyncio.run(agent())
    assert read_trace(path)[0] == Turn(100, 30, 7, 1.5)


@pytest.mark.parametrize("stream", [False, True])
def test_recording_refuses_answers_without_usage(stream: bool, tmp_path: Path) -> None:
    create = Recorder(FakeClient().create, tmp_path / "trace.jsonl")
    with pytest.raises(TraceError, match="include_usage"):
        list(create(stream=stream, usage=False))


def test_the_agent_command_replays_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    write_trace(path, [Turn(1000, 0, 500, 1.0), Turn(2000, 1500, 500, 1.0)])
    shown = CliRunner().invoke(agent, [str(path), "--tier", "100", "--tier", "1000@6", "--prefill", "1000", "--json"])
    document = json.loads(shown.output)
    assert [tier["total_s"] for tier in document["tiers"]] == pytest.approx([10 + 1.5 + 2, 1 + 1.5 + 2])
    assert document["tiers"][1]["multiplier"] == 6
    assert document["tiers"][1]["limit"] == "tools"


def test_the_commands_show_people_the_published_arithmetic() -> None:
    assert "8m00s" in CliRunner().invoke(agent, []).output
    assert "decode 95%" in CliRunner().invoke(rollout, []).output
    assert CliRunner().invoke(agent, ["--tier", "fast"]).exit_code == 2


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_real_openai_client_is_recorded_whichever_way_its_stream_is_read(tmp_path: Path, asynchronous: bool) -> None:
    openai = pytest.importorskip("openai")
    path, seen = tmp_path / "trace.jsonl", []
    ask = {"model": "m", "messages": [{"role": "user", "content": "?"}], "stream": True}
    ask |= {"stream_options": {"include_usage": True}}

    def read(create: Any) -> None:
        seen.extend(create(**ask))
        with create(**ask) as stream:
            assert stream.response.status_code == 200
            seen.extend(stream)

    async def read_async(create: Any) -> None:
        seen.extend([chunk async for chunk in await create(**ask)])
        async with await create(**ask) as stream:
            seen.extend([chunk async for chunk in stream])

    with ScriptedServer(plain(["a", "b"], 0, 0, 2)) as server:
        kind = openai.AsyncOpenAI if asynchronous else openai.OpenAI
        client = kind(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        with Recorder(client.chat.completions.create, path) as create:
            asyncio.run(read_async(create)) if asynchronous else read(create)
    assert [(turn.prompt_tokens, turn.output_tokens) for turn in read_trace(path)] == [(10, 2), (10, 2)]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in seen if chunk.choices) == "abab"
