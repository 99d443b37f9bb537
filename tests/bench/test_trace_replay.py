"""A trace replayed against an endpoint asks for what the trace holds, and its times are the endpoint's own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from scripted_server import ScriptedServer, patiently, plain

from slipstream.bench.endpoint import Answer, Question, TokenChunk, Usage
from slipstream.bench.stream_clock import EndpointError
from slipstream.bench.trace import Turn, read_trace, write_trace
from slipstream.bench.trace_replay import clock, replay_on
from slipstream.cli.agent import command

AGENT = Path(__file__).parents[2] / "benchmarks" / "traces" / "smollm2_agent.jsonl"


class Caching:
    """A token is four characters; what was sent or written in the last conversation is cached; 10 ms a token."""

    name = server = "caching"
    tier = tokenizer = parameters = None
    count_locally = False

    def __init__(self, **answer: object) -> None:
        self.more = answer
        self.seen = ""

    def ask(self, question: Question) -> Answer:
        prompt = "".join(message["content"] for message in question.messages)
        cached = len(self.seen) // 4 if self.seen and prompt.startswith(self.seen) else 0
        self.seen = prompt + "abcd" * question.max_tokens
        chunks = [TokenChunk(1.0 + 0.01 * i, content="abcd", tokens=1) for i in range(question.max_tokens)]
        used = Usage(len(prompt) // 4, question.max_tokens, None, cached_tokens=cached)
        return replace(Answer(chunks, used, "length"), **self.more)

    def counters(self) -> None:
        raise AssertionError("nobody asks")


def test_prompts_cached_prefixes_and_answers_have_the_lengths_of_the_trace() -> None:
    turns = read_trace(AGENT)
    done = replay_on(Caching(), turns)
    for one in done:
        assert one.done.output_tokens == one.turn.output_tokens
        assert one.done.prompt_tokens == pytest.approx(one.turn.prompt_tokens, rel=0.15)
        assert one.done.cached_tokens == pytest.approx(one.turn.cached_tokens, rel=0.15)


@pytest.mark.parametrize("second", [Turn(300, 0, 10), Turn(150, 100, 10)])
def test_a_prompt_that_lost_its_cache_or_shrank_begins_a_new_conversation(second: Turn) -> None:
    done = replay_on(Caching(), [Turn(200, 0, 10), second])
    assert done[1].done.cached_tokens == 0
    assert done[1].done.prompt_tokens == pytest.approx(second.prompt_tokens, rel=0.15)


def test_the_clock_adds_up_waiting_decoding_and_the_traces_tools() -> None:
    total = clock(replay_on(Caching(), [Turn(100, 0, 11, tool_s=3.0), Turn(200, 110, 21, tool_s=4.0)]))
    assert (total.prefill_s, total.tool_s) == (2.0, 7.0)
    assert total.decode_s == pytest.approx(0.1 + 0.2)


def test_an_answer_whose_counts_cannot_be_believed_is_not_timed() -> None:
    with pytest.raises(EndpointError, match="turn 1 cannot be timed: the server sent no usage"):
        replay_on(Caching(usage=None), [Turn(100, 0, 5)])


@patiently
def test_the_command_times_a_real_server_and_still_does_the_arithmetic(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.jsonl", [Turn(10, 0, 3, tool_s=1.0), Turn(10, 5, 3)])
    with ScriptedServer(plain(["one ", "two ", "three "], 0.05, 0.2, 3, finish="length")) as server:
        shown = CliRunner().invoke(command, [str(tmp_path / "trace.jsonl"), "--url", server.url, "--json"])
    document = json.loads(shown.stdout)
    assert document["measured"]["ttft_s"] == pytest.approx(sum(s.seconds(1) for s in server.served), abs=0.06)
    decode_s = sum(s.seconds(3) - s.seconds(1) for s in server.served)
    assert document["measured"]["decode_s"] == pytest.approx(decode_s, abs=0.04)
    assert document["measured"]["tool_s"] == 1.0
    assert len(document["tiers"]) == 3
    assert [s.request["max_tokens"] for s in server.served] == [3, 3]
