"""`/v1/messages` through the official client."""

import asyncio

import anthropic
import httpx
import pytest

TOOL = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
GREEDY = {"temperature": 0}
QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]


def ask(running, **options):
    call = {"model": running.model, "max_tokens": 24, "messages": QUESTION}
    return running.anthropic().messages.create(
        **(call | options | {"extra_body": GREEDY | options.get("extra_body", {})})
    )


def test_a_stream_and_a_whole_message_say_the_same(smollm2):
    whole = ask(smollm2, system="You are brief.")
    with smollm2.anthropic().messages.stream(
        model=smollm2.model, max_tokens=24, messages=QUESTION, extra_body=GREEDY, system="You are brief."
    ) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text != ""
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_events_come_in_the_order_of_the_api(tiny):
    types = [event.type for event in ask(tiny, stream=True)]
    assert types[:2] == ["message_start", "content_block_start"]
    assert types[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(types[2:-3]) == {"content_block_delta"}


def test_an_answer_goes_on_from_a_prefill(smollm2):
    text = ask(smollm2).content[0].text
    words = text.split(" ")
    start, rest = " ".join(words[:4]), " ".join(["", *words[4:]])
    done = ask(smollm2, messages=[*QUESTION, {"role": "assistant", "content": start}], max_tokens=12)
    assert rest.startswith(done.content[0].text)


def test_why_it_stopped(smollm2):
    assert ask(smollm2, max_tokens=3).stop_reason == "max_tokens"
    text = ask(smollm2).content[0].text
    word = text.split()[2]
    stopped = ask(smollm2, stop_sequences=[word])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", word)
    assert stopped.content[0].text == text[: text.index(word)]


def test_a_tool_is_called_and_its_result_read(smollm2):
    first = ask(smollm2, tools=[TOOL], tool_choice={"type": "any", "disable_parallel_tool_use": True}, max_tokens=64)
    assert first.stop_reason == "tool_use"
    (call,) = first.content
    assert (call.type, call.name) == ("tool_use", "get_weather")
    assert set(call.input) == {"city"}
    result = {
        "type": "tool_result",
        "tool_use_id": call.id,
        "content": [{"type": "text", "text": "Sunny, 21 degrees."}],
    }
    turns = [
        *QUESTION,
        {"role": "assistant", "content": [call.model_dump()]},
        {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
    ]
    second = ask(smollm2, tools=[TOOL], messages=turns, tool_choice={"type": "none"})
    assert second.content[0].text
    assert second.usage.cache_read_input_tokens >= 0


def test_a_streamed_tool_call_adds_up(smollm2):
    with smollm2.anthropic().messages.stream(
        model=smollm2.model, max_tokens=64, messages=QUESTION, extra_body=GREEDY, tools=[TOOL],
        tool_choice={"type": "tool", "name": "get_weather"},
    ) as stream:  # fmt: skip
        final = stream.get_final_message()
    assert (
        final.content[0].input
        == ask(smollm2, tools=[TOOL], tool_choice={"type": "tool", "name": "get_weather"}, max_tokens=64)
        .content[0]
        .input
    )


def test_counting_equals_what_is_billed(tiny):
    call = {"model": tiny.model, "messages": QUESTION, "system": "Be brief."}
    counted = tiny.anthropic().messages.count_tokens(**call).input_tokens
    usage = ask(tiny, system="Be brief.").usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens


def test_fast_is_served_and_named_fast(tiny):
    fast = ask(tiny, extra_body={"speed": "fast"}).usage
    assert (fast.speed, fast.service_tier) == ("fast", "priority")
    usual = ask(tiny, service_tier="standard_only").usage
    assert usual.service_tier == "standard"


def test_errors_have_the_shape_of_the_api(tiny):
    with pytest.raises(anthropic.BadRequestError, match="frobnicate"):
        ask(tiny, extra_body={"frobnicate": 1})
    with pytest.raises(anthropic.NotFoundError):
        ask(tiny, model="claude-9")
    body = {"model": tiny.model, "max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "image"}]}]}
    answer = httpx.post(f"{tiny.url}/v1/messages", json=body)
    assert answer.status_code == 400
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_the_asynchronous_client_gets_the_same(tiny):
    async def run():
        async with anthropic.AsyncAnthropic(base_url=tiny.url, api_key="none") as client:
            call = {"model": tiny.model, "max_tokens": 12, "messages": QUESTION, "extra_body": GREEDY}
            whole = await client.messages.create(**call)
            async with client.messages.stream(**call) as stream:
                return whole.content[0].text, await stream.get_final_text()

    whole, streamed = asyncio.run(run())
    assert whole == streamed
