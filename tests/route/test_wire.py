"""The wires by themselves: bytes cut anywhere, calls that interleave, thoughts, ids, and what may not be lost."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.route.wire import WIRES, read, reply, write_request
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


def test_errors_keep_their_meaning():
    overloaded = {"type": "error", "error": {"type": "overloaded_error", "message": "busy"}}
    assert read.failure(None, overloaded).status == 529
    assert read.failure(None, {"error": {"message": "m", "code": 503}}).status == 503
    assert read.failure(429, {"detail": "slow"}).message == "slow"
