"""Real clients through every pair of wires: what the target said arrives, and what the client said is told."""

import itertools
import json

import pytest
from upstreams import TEXT, Fake, routing, table, targets

from slipstream.route.ledger import read_rows

WIRES = ("openai-chat", "openai-responses", "anthropic")
PAIRS = list(itertools.product(WIRES, WIRES))
WHOLE = "".join(TEXT)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


@pytest.fixture(scope="module")
def fakes():
    with targets(*(Fake(wire) for wire in WIRES)) as found:
        yield dict(zip(WIRES, found, strict=True))


@pytest.fixture(scope="module")
def router(fakes, tmp_path_factory):
    names = {wire: wire.replace("openai-", "") for wire in WIRES}
    text = "".join(table(names[wire], fake, "reasoning = true") for wire, fake in fakes.items())
    for wire in WIRES:
        text += f'[routes."to-{wire}"]\npolicy = "fixed"\ntargets = ["{names[wire]}"]\n'
    with routing(text, tmp_path_factory.mktemp("ledger")) as running:
        yield running


def ask(router, wire: str, model: str, stream: bool, tools: bool) -> dict:
    """A conversation with a system prompt, an image, a call and its result, by the wire's own client."""
    if wire == "openai-chat":
        extra = (
            {"tools": [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]} if tools else {}
        )
        extra |= {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        answer = router.openai().chat.completions.create(
            model=model, max_tokens=50, temperature=0.5,
            messages=[
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [
                    {"type": "text", "text": "What is this?"},
                    {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}},
                ]},
                {"role": "assistant", "content": None, "tool_calls": [
                    {"id": "call_0", "type": "function",
                     "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
                ]},
                {"role": "tool", "tool_call_id": "call_0", "content": "sunny"},
            ], **extra,
        )  # fmt: skip
        if not stream:
            message = answer.choices[0].message
            calls = [(c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls or ()]
            return {"text": message.content, "calls": calls, "stop": answer.choices[0].finish_reason,
                    "usage": (answer.usage.prompt_tokens, answer.usage.completion_tokens),
                    "thought": message.reasoning_content}  # fmt: skip
        text, thought, names, arguments, stop, usage = "", "", [], "", None, None
        for chunk in answer:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                thought += getattr(choice.delta, "reasoning_content", None) or ""
                stop = choice.finish_reason or stop
                for call in choice.delta.tool_calls or ():
                    names += [call.function.name] if call.function.name else []
                    arguments += call.function.arguments or ""
        calls = [(names[0], json.loads(arguments))] if names else []
        return {"text": text, "calls": calls, "stop": stop, "thought": thought,
                "usage": (usage.prompt_tokens, usage.completion_tokens)}  # fmt: skip
    if wire == "openai-responses":
        extra = (
            {"tools": [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}]} if tools else {}
        )
        options = dict(
            model=model, instructions="Be brief.", max_output_tokens=50, temperature=0.5,
            input=[
                {"role": "user", "content": [
                    {"type": "input_text", "text": "What is this?"},
                    {"type": "input_image", "image_url": f"data:image/png;base64,{PIXEL}", "detail": "auto"},
                ]},
                {"type": "function_call", "call_id": "call_0", "name": "weather", "arguments": '{"city": "Rome"}'},
                {"type": "function_call_output", "call_id": "call_0", "output": "sunny"},
            ], **extra,
        )  # fmt: skip
        if stream:
            with router.openai().responses.stream(**options) as events:
                deltas = "".join(e.delta for e in events if e.type == "response.output_text.delta")
                answer = events.get_final_response()
            assert deltas == WHOLE
        else:
            answer = router.openai().responses.create(**options)
        calls = [(o.name, json.loads(o.arguments)) for o in answer.output if o.type == "function_call"]
        thought = "".join(part.text for o in answer.output if o.type == "reasoning" for part in o.content or ())
        stop = "tool_calls" if calls else {"completed": "stop"}[answer.status]
        return {"text": answer.output_text, "calls": calls, "stop": stop, "thought": thought,
                "usage": (answer.usage.input_tokens, answer.usage.output_tokens)}  # fmt: skip
    extra = {"tools": [{"name": "weather", "input_schema": SCHEMA}]} if tools else {}
    options = dict(
        model=model, system="Be brief.", max_tokens=50, extra_body={"temperature": 0.5},
        messages=[
            {"role": "user", "content": [
                {"type": "text", "text": "What is this?"},
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}},
            ]},
            {"role": "assistant", "content": [
                {"type": "tool_use", "id": "call_0", "name": "weather", "input": {"city": "Rome"}}
            ]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_0", "content": "sunny"}]},
        ], **extra,
    )  # fmt: skip
    if stream:
        with router.anthropic().messages.stream(**options) as events:
            assert "".join(events.text_stream) == WHOLE
            answer = events.get_final_message()
    else:
        answer = router.anthropic().messages.create(**options)
    usage = answer.usage
    return {
        "text": "".join(b.text for b in answer.content if b.type == "text"),
        "calls": [(b.name, b.input) for b in answer.content if b.type == "tool_use"],
        "stop": {"end_turn": "stop", "tool_use": "tool_calls"}[answer.stop_reason],
        "usage": (usage.input_tokens + usage.cache_read_input_tokens, usage.output_tokens),
        "thought": "".join(b.thinking for b in answer.content if b.type == "thinking"),
    }


@pytest.mark.parametrize("tools", [False, True], ids=["text", "tools"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("client", "target"), PAIRS, ids=lambda wire: wire)
def test_every_client_hears_what_every_target_says(router, fakes, client, target, stream, tools):
    got = ask(router, client, f"to-{target}", stream, tools)
    assert got["text"] == WHOLE
    assert got["thought"] == "hmm"
    assert got["calls"] == ([("weather", {"city": "Paris"})] if tools else [])
    assert got["stop"] == ("tool_calls" if tools else "stop")
    assert got["usage"] == (10, 5)
    check_told(target, fakes[target].requests[-1], tools)


def check_told(wire: str, body: dict, tools: bool) -> None:
    """What the target was told, in its own wire: nothing of the conversation is lost."""
    text = json.dumps(body)
    assert body["model"].startswith("fake-")
    assert body["temperature"] == 0.5
    assert PIXEL in text
    for part in ("Be brief.", "What is this?", "call_0", "sunny", "Rome"):
        assert text.count(part) >= 1
    assert bool(body.get("tools")) == tools
    if wire == "openai-chat":
        roles = [m["role"] for m in body["messages"]]
        assert roles == ["system", "user", "assistant", "tool"]
        assert 50 in (body.get("max_tokens"), body.get("max_completion_tokens"))
    elif wire == "anthropic":
        assert body["system"] in ("Be brief.", [{"type": "text", "text": "Be brief."}])
        assert [m["role"] for m in body["messages"]] == ["user", "assistant", "user"]
        assert body["max_tokens"] == 50
    else:
        assert body["max_output_tokens"] == 50
        kinds = [i.get("type", "message") for i in body["input"]]
        assert [k for k in kinds if k != "message"] == ["function_call", "function_call_output"]


def test_every_step_is_billed_once_with_its_tokens(router, tmp_path):
    rows = list(read_rows(router.config.ledger.path))
    before = len(rows)
    ask(router, "openai-chat", "to-anthropic", True, False)
    row = list(read_rows(router.config.ledger.path))[-1]
    assert len(list(read_rows(router.config.ledger.path))) == before + 1
    assert (row["status"], row["input"], row["cached"], row["output"]) == ("ok", 10, 4, 5)
    assert row["reasons"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_request_of_the_targets_own_wire_travels_as_it_came(router, fakes, stream):
    odd = {"unheard_of": {"deep": [1, None, "ü"]}, "logit_bias": {"1": 2}}
    client = router.openai()
    answer = client.chat.completions.create(
        model="to-openai-chat", messages=[{"role": "user", "content": "hi", "odd": 1}], stream=stream, extra_body=odd
    )
    chunks = list(answer) if stream else [answer]
    told = fakes["openai-chat"].requests[-1]
    assert told["messages"] == [{"role": "user", "content": "hi", "odd": 1}]
    assert {name: told[name] for name in odd} == odd
    assert not any(chunk.usage for chunk in chunks) or not stream  # it did not ask for usage


@pytest.mark.parametrize("target", ["openai-responses", "anthropic"])
def test_what_another_wire_cannot_say_is_refused_by_name(router, fakes, target):
    import openai

    before = len(fakes[target].requests)
    with pytest.raises(openai.BadRequestError, match="unheard_of"):
        router.openai().chat.completions.create(
            model=f"to-{target}", messages=[{"role": "user", "content": "hi"}], extra_body={"unheard_of": 1}
        )
    assert len(fakes[target].requests) == before


def test_what_changes_no_text_is_left_out_and_reported(router):
    answer = router.openai().chat.completions.with_raw_response.create(
        model="to-anthropic", messages=[{"role": "user", "content": "hi"}], user="ada", store=False
    )
    assert answer.headers["x-slipstream-dropped"] == "store, user"


def test_signed_thoughts_come_back_to_the_api_that_signed_them(router, fakes):
    client = router.openai()
    response = client.responses.create(model="to-anthropic", input="hi")
    again = [{"role": "user", "content": "hi"}, *(item.model_dump(exclude_none=True) for item in response.output)]
    client.responses.create(model="to-anthropic", input=[*again, {"role": "user", "content": "more"}])
    thought = fakes["anthropic"].requests[-1]["messages"][1]["content"][0]
    assert thought == {"type": "thinking", "thinking": "hmm", "signature": "sig"}

    message = router.anthropic().messages.create(
        model="to-openai-responses", max_tokens=9, messages=[{"role": "user", "content": "hi"}]
    )
    blocks = [block.model_dump(exclude_none=True) for block in message.content]
    router.anthropic().messages.create(
        model="to-openai-responses", max_tokens=9,
        messages=[{"role": "user", "content": "hi"}, {"role": "assistant", "content": blocks},
                  {"role": "user", "content": "more"}],
    )  # fmt: skip
    thought = next(item for item in fakes["openai-responses"].requests[-1]["input"] if item["type"] == "reasoning")
    assert (thought["id"], thought["encrypted_content"]) == ("rs_1", "enc")
