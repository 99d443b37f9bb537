"""What endpoints of different makers put in a stream, read for what it is."""

from __future__ import annotations

import json
from typing import Any

import pytest
from scripted_server import ScriptedServer, chunk, event, plain, usage

from slipstream.bench.endpoint import Counters, HttpEndpoint, Question, Speculation, Usage, read_answer, read_counters
from slipstream.bench.stream_clock import EndpointError, Read, events

QUESTION = Question("q", [{"role": "user", "content": "?"}], max_tokens=9, seed=4, temperature=0.5)


def read(*documents: dict[str, Any]) -> Any:
    """The answer in a stream of one document every 10 s."""
    stream = [(i * 10_000_000_000, json.dumps(document)) for i, document in enumerate(documents, 1)]
    return read_answer([*stream, (10**12, "[DONE]"), (10**13, "nonsense after the end")])


def test_role_only_and_finish_chunks_carry_no_token() -> None:
    answer = read(chunk(role="assistant", content=""), chunk(content="a"), chunk("stop", content=""), usage(1))
    assert [(c.at_s, c.content) for c in answer.chunks] == [(20.0, "a")]
    assert (answer.finish_reason, answer.usage) == ("stop", Usage(10, 1, 11))


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_goes_by_either_of_its_names(name: str) -> None:
    answer = read(chunk(**{name: "hm"}), chunk(content="a"))
    assert [(c.reasoning, c.content) for c in answer.chunks] == [("hm", ""), ("", "a")]


def test_a_tool_call_is_a_token_by_its_name_or_arguments_not_by_its_number() -> None:
    calls = [{"index": 0, "id": "x", "type": "function", "function": {"name": "", "arguments": ""}}]
    named = [{"index": 0, "function": {"name": "run", "arguments": ""}}]
    more = [{"index": 0, "function": {"arguments": "{}"}}]
    answer = read(chunk(tool_calls=calls), chunk(tool_calls=named), chunk(tool_calls=more), chunk("tool_calls"))
    assert [(c.at_s, c.tool) for c in answer.chunks] == [(20.0, "run"), (30.0, "{}")]


def test_only_the_first_choice_is_measured() -> None:
    other = chunk(content="b")
    other["choices"][0]["index"] = 1
    assert len(read(chunk(content="a"), other).chunks) == 1


def test_tokens_of_a_chunk_come_from_running_usage_logprobs_or_our_own_field() -> None:
    running = read(chunk(content="a") | usage_of(3), chunk(content="b") | usage_of(5))
    assert [c.tokens for c in running.chunks] == [3, 2]
    listed = chunk(content="ab")
    listed["choices"][0]["logprobs"] = {"content": [{}, {}]}
    own = chunk(content="abc") | {"slipstream": {"tokens": 3}}
    assert [c.tokens for c in read(listed, own, chunk(content="d")).chunks] == [2, 3, None]


def usage_of(tokens: int) -> dict[str, Any]:
    return {"usage": {"prompt_tokens": 1, "completion_tokens": tokens}}


def test_counts_tier_bill_and_acceptance_are_read() -> None:
    details = {"prompt_tokens_details": {"cached_tokens": 7}, "completion_tokens_details": {"reasoning_tokens": 2}}
    last = usage(4, **details, cost=0.25) | {"service_tier": "priority", "slipstream": {"rounds": 2, "accepted": 2}}
    answer = read(chunk(content="a") | {"service_tier": "default"}, last)
    assert answer.usage == Usage(10, 4, 14, cached_tokens=7, reasoning_tokens=2)
    assert (answer.tier, answer.usd) == ("priority", 0.25)
    assert answer.speculation.tokens_per_round == 2.0
    llama = read(chunk(content="a") | {"timings": {"predicted_n": 10, "draft_n": 8, "draft_n_accepted": 6}})
    assert llama.speculation == Speculation(rounds=4, drafted=8, accepted=6)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ('{"error": {"message": "out of\\nmemory"}}', "error: out of memory"),
        ("<html>", "no chunk of an answer: '<html>'"),
        ('["list"]', "no chunk"),
        ('{"choices": [7]}', "no chunk"),
    ],
)
def test_errors_and_nonsense_in_a_stream_are_errors(data: str, message: str) -> None:
    with pytest.raises(EndpointError, match=message):
        read_answer([(0, data)])


def test_counters_are_summed_over_labels_and_told_apart_by_maker() -> None:
    text = """# HELP slipstream_rounds_total Rounds.
slipstream_rounds_total{tier="default"} 3.0
slipstream_rounds_total{tier="fl ex"} 1e1
slipstream_rounds_created{tier="default"} 1.7e9
slipstream_accepted_tokens_total 26
"""
    counters = read_counters(text)
    assert counters == Counters(rounds=13, accepted=26)
    assert counters.since(Counters(rounds=3, accepted=6, cached_tokens=4)) == Counters(rounds=10, accepted=20)
    assert Counters(rounds=10, accepted=20).tokens_per_round == 3.0
    assert read_counters("vllm:spec_decode_num_drafts_total 5\nvllm:prefix_cache_hits_total 8\n").cached_tokens == 8
    assert read_counters("<html>") == Counters()


def test_the_request_is_what_was_asked_and_the_body_can_be_amended() -> None:
    with ScriptedServer(plain(["a"], 0, 0, 1)) as server:
        endpoint = HttpEndpoint(server.url, tier="priority", body={"max_tokens": None, "max_completion_tokens": 9})
        endpoint.ask(QUESTION)
        body = server.served[0].request
    assert endpoint.name == f"scripted at {server.url.removeprefix('http://')}/v1"
    assert body == {
        "model": "scripted",
        "messages": [{"role": "user", "content": "?"}],
        "temperature": 0.5,
        "seed": 4,
        "stream": True,
        "stream_options": {"include_usage": True},
        "service_tier": "priority",
        "max_completion_tokens": 9,
    }


def test_passwords_in_an_address_and_keys_stay_out_of_names() -> None:
    endpoint = HttpEndpoint("http://me:secret@host/v1/", "m", key="sk-secret")
    assert "secret" not in endpoint.name
    assert "sk-secret" not in repr(endpoint)


def test_an_answer_that_is_no_stream_is_refused() -> None:
    script = plain(["a"], 0, 0, 1)
    script.head = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
    refusal = plain([], 0, 0, 1)
    refusal.head = "HTTP/1.1 429 Too Many Requests\r\nContent-Type: application/json\r\n"
    refusal.pieces = [(0.0, b'{"error": {"message": "queue is full"}}')]
    with ScriptedServer(script, refusal) as server:
        endpoint = HttpEndpoint(server.url)
        with pytest.raises(EndpointError, match="answered application/json, not text/event-stream"):
            endpoint.ask(QUESTION)
        with pytest.raises(EndpointError, match="answered 429: queue is full"):
            endpoint.ask(QUESTION)


def test_an_answer_cut_into_single_bytes_reads_the_same() -> None:
    stream = event(chunk(content="žluťoučký 🐎"), "\r\n\r\n") + event(usage(3), "\r\n\r\n") + event("[DONE]")
    reads = [Read(i, stream[i : i + 1]) for i in range(len(stream))]
    assert read_answer(events(reads)).chunks[0].content == "žluťoučký 🐎"
