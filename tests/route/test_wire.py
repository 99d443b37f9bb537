"""The wires by themselves: bytes cut anywhere, calls that interleave, thoughts, ids, and what may not be lost."""

import json
from contextlib import suppress
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.route.sessions import chain_of
from slipstream.route.wire import WIRES, parse_request, read, reply, write_request
from slipstream.route.wire.neutral import (
    CallDelta,
    CallStart,
    End,
    NotCarried,
    Start,
    Stop,
    TextDelta,
    ThoughtDelta,
    ThoughtEnd,
    Usage,
)
from slipstream.route.wire.sse import SseReader
from slipstream.serve.errors import ApiError

NAMES = list(WIRES)
USAGE = Usage(12, 3, 0, 7)


def reread(wire: str, events) -> list:
    """What a client of `wire` would read of these events, written as its stream."""
    writer = {"openai-chat": lambda: reply.ChatWriter(True), "openai-responses": reply.ResponsesWriter}.get(
        wire, reply.AnthropicWriter
    )()
    stream, reader = SseReader(), WIRES[wire].reader()
    blocks = b"".join(writer.feed(one) for one in events)
    return [event for sse in stream.feed(blocks) for event in reader.feed(sse)]


def told(events) -> tuple:
    """What events say, whatever their cut."""
    text = "".join(e.text for e in events if isinstance(e, TextDelta))
    thought = "".join(e.text for e in events if isinstance(e, ThoughtDelta))
    calls = {
        e.index: (e.id, e.name, json.loads(
            "".join(d.text for d in events if isinstance(d, CallDelta) and d.index == e.index) or "{}"
        )) for e in events if isinstance(e, CallStart)
    }  # fmt: skip
    seals = [(e.seal, e.by, e.hidden) for e in events if isinstance(e, ThoughtEnd) and e.seal]
    stop = [e.reason for e in events if isinstance(e, Stop)]
    usage = [(e.input, e.cached, e.output) for e in events if isinstance(e, Usage)][-1]
    return text, thought, list(calls.values()), seals, stop, usage, isinstance(events[-1], End)


texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
calls = st.lists(
    st.tuples(st.text("ab_", min_size=1, max_size=5), st.dictionaries(texts, texts, max_size=2)), max_size=3
)


@st.composite
def answers(draw) -> list:
    events = [Start("resp_1", "m")]
    if draw(st.booleans()):
        events += [ThoughtDelta(t) for t in draw(st.lists(texts, min_size=1, max_size=2))]
        events.append(ThoughtEnd(draw(st.sampled_from([None, "sig"])), "anthropic"))
    events += [TextDelta(t) for t in draw(st.lists(texts, max_size=3))]
    found = draw(calls)
    parts = []
    for i, (name, arguments) in enumerate(found):
        events.append(CallStart(i, f"call_{i}", name))
        written = json.dumps(arguments)
        cut = draw(st.integers(0, len(written)))
        parts.append([CallDelta(i, part) for part in (written[:cut], written[cut:]) if part])
    for first in zip(*parts, strict=False):  # interleaved
        events += first
    shortest = min(map(len, parts), default=0)
    events += [delta for part in parts for delta in part[shortest:]]
    return [*events, Stop("tool_calls" if found else draw(st.sampled_from(["stop", "length"]))), USAGE, End()]


@pytest.mark.parametrize("wire", NAMES)
@given(events=answers())
def test_an_answer_written_to_any_wire_reads_the_same(wire, events):
    assert told(reread(wire, events)) == told(events)


@pytest.mark.parametrize("wire", NAMES)
@given(events=answers())
def test_a_whole_answer_says_what_its_stream_says(wire, events):
    again = WIRES[wire].read_whole(json.loads(json.dumps(reply.whole(wire, events))))
    assert told(again) == told(events)


@given(st.data())
def test_events_are_the_same_wherever_the_bytes_are_cut(data):
    stream = 'event: a\r\ndata: {"x": "ü"}\r\n\r\n: comment\n\ndata: 1\ndata: 2\n\ndata: [DONE]\n\n'.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    reader = SseReader()
    found = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += [(e.name, e.data) for e in reader.feed(stream[start:end])]
    assert found == [("a", '{"x": "ü"}'), ("", "1\n2"), ("", "[DONE]")]
    assert not reader.unfinished


CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("field", "value", "wires"),
    [
        ("n", 2, ("anthropic", "openai-responses")),
        ("seed", 1, ("anthropic",)),
        ("stop", ["x"], ("openai-responses",)),
        ("logit_bias", {"1": 2}, ("anthropic", "openai-responses")),
        ("response_format", {"type": "json_object"}, ("anthropic",)),
        ("temperature", 1.5, ("anthropic",)),
        ("audio", {}, ("anthropic", "openai-responses")),
        ("web_search_options", {}, ("anthropic", "openai-responses")),
    ],
)
def test_a_setting_that_shapes_the_answer_is_carried_or_refused(field, value, wires):
    ask = WIRES["openai-chat"].parse(CHAT | {field: value})
    for wire in ("anthropic", "openai-responses"):
        if wire in wires:
            with pytest.raises(NotCarried, match=field):
                write_request(ask, wire, reasoning=False, max_output=9)
        else:
            body, dropped = write_request(ask, wire, reasoning=False, max_output=9)
            assert json.dumps(value).strip("[]") in json.dumps(body)
            assert not dropped


def test_system_prompts_keep_every_character():
    body = CHAT | {"messages": [{"role": "system", "content": "  a\n\n"}, *CHAT["messages"]]}
    ask = WIRES["openai-chat"].parse(body)
    assert write_request(ask, "anthropic", reasoning=False, max_output=9)[0]["system"] == "  a\n\n"
    told = write_request(ask, "openai-responses", reasoning=False, max_output=9)[0]["input"][0]
    assert told["content"] == [{"type": "input_text", "text": "  a\n\n"}]


def test_ids_that_anthropic_refuses_are_changed_alike_in_call_and_result():
    call = {"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [*CHAT["messages"], {"role": "assistant", "tool_calls": [call]}]
    messages.append({"role": "tool", "tool_call_id": "functions.f:0", "content": "done"})
    body, _ = write_request(
        WIRES["openai-chat"].parse(CHAT | {"messages": messages}), "anthropic", reasoning=False, max_output=9
    )
    use, result = body["messages"][1]["content"][0], body["messages"][2]["content"][0]
    assert use["id"] == result["tool_use_id"] == "functions_f_0"


@pytest.mark.parametrize("wire", ["openai-chat", "openai-responses"])
def test_what_is_left_out_is_reported(wire):
    body, dropped = write_request(
        parse_request("anthropic", BASE["anthropic"] | {"stop_sequences": None}), wire, reasoning=False, max_output=9
    )
    assert {"is_error", "metadata", "earlier reasoning", "reasoning effort", "thinking.budget_tokens"} <= set(dropped)
    assert "system[0].cache_control" in dropped
    assert "is_error" not in json.dumps(body)


def test_errors_keep_their_meaning():
    overloaded = {"type": "error", "error": {"type": "overloaded_error", "message": "busy"}}
    assert read.failure(None, overloaded).status == 529
    assert read.failure(None, {"error": {"message": "m", "code": 503}}).status == 503
    assert read.failure(429, {"detail": "slow"}).message == "slow"


BASE = {
    "openai-chat": {
        "model": "m",
        "stream": True,
        "messages": [
            {"role": "system", "content": "s"},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "x"},
                    {"type": "image_url", "image_url": {"url": "data:image/png;base64,xx"}},
                ],
            },
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "r",
                "reasoning_details": [{"type": "reasoning.text", "text": "a", "signature": "s", "format": "anthropic"}],
                "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "c", "content": "ok"},
        ],
        "tools": [
            {
                "type": "function",
                "function": {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True},
            }
        ],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}, "strict": True}},
        "stop": ["x"],
        "max_tokens": 5,
        "temperature": 1,
        "metadata": {"a": "b"},
        "stream_options": {"include_usage": True},
        "reasoning_effort": "low",
        "prompt_cache_key": "k",
        "parallel_tool_calls": False,
    },
    "openai-responses": {
        "model": "m",
        "instructions": "i",
        "input": [
            {
                "role": "user",
                "content": [{"type": "input_text", "text": "x"}, {"type": "input_image", "image_url": "http://x"}],
            },
            {
                "type": "reasoning",
                "id": "r",
                "summary": [{"type": "summary_text", "text": "t"}],
                "encrypted_content": "e",
            },
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "ok"},
        ],
        "tools": [{"type": "function", "name": "f", "parameters": {}, "strict": True}],
        "tool_choice": {"type": "function", "name": "f"},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}, "verbosity": "low"},
        "reasoning": {"effort": "low", "summary": "auto"},
        "include": ["reasoning.encrypted_content"],
        "max_output_tokens": 5,
        "metadata": {"a": "b"},
        "truncation": "disabled",
        "previous_response_id": None,
    },
    "anthropic": {
        "model": "m",
        "max_tokens": 5,
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "x"},
                    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "xx"}},
                ],
            },
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "t", "signature": "s"},
                    {"type": "tool_use", "id": "c", "name": "f", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "c",
                        "content": [{"type": "text", "text": "ok"}],
                        "is_error": True,
                    }
                ],
            },
        ],
        "tools": [{"name": "f", "input_schema": {}, "description": "d"}],
        "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {}}},
        "metadata": {"user_id": "u"},
        "stop_sequences": ["x"],
        "temperature": 1,
    },
}

JUNK = [None, 1, -1, 1.5, True, "", "x", [], {}, [1], ["x"], [[]], [{}], {"a": 1}, {"type": "text"}, [None]]


def mutated(body: dict, random: Random) -> dict:
    """`body` with a value or two replaced by something else, or gone."""
    body = json.loads(json.dumps(body))
    places: list[tuple] = []

    def walk(value) -> None:
        for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
            places.append((value, key))
            walk(value[key])

    walk(body)
    for _ in range(random.choice([1, 1, 2])):
        inside, key = random.choice(places)
        if isinstance(inside, dict) and random.random() < 0.2:
            inside.pop(key, None)
        else:
            inside[key] = random.choice(JUNK)
    return body


@pytest.mark.parametrize("wire", NAMES)
def test_a_malformed_request_is_refused_and_never_a_crash(wire):
    random, refused = Random(0), []
    for _ in range(500):
        try:
            ask = parse_request(wire, mutated(BASE[wire], random))
            ask.conversation()
            chain_of(ask)
            for target in NAMES:
                with suppress(NotCarried):
                    json.dumps(write_request(ask, target, reasoning=random.random() < 0.5, max_output=9))
        except ApiError as error:
            refused.append(error.status)
    assert set(refused) == {400}
    assert len(refused) < 500
