"""`/v1/responses` through the official client."""

import openai
import pytest

TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather in a city.",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def ask(running, **options):
    call = {"model": running.model, "input": "Name three colours.", "max_output_tokens": 16, "temperature": 0}
    return running.openai().responses.create(**(call | options))


def test_a_stream_and_a_whole_response_say_the_same(smollm2):
    whole = ask(smollm2, instructions="Be brief.")
    events = list(ask(smollm2, instructions="Be brief.", stream=True))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text != ""
    assert events[-1].response.output_text == whole.output_text
    assert events[-1].response.usage.output_tokens == whole.usage.output_tokens


def test_events_come_in_the_order_of_the_api(tiny):
    events = list(ask(tiny, stream=True))
    types = [e.type.removeprefix("response.") for e in events]
    assert types[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert types[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert events[-1].response.incomplete_details.reason == "max_output_tokens"


def test_an_earlier_response_is_gone_on_from(smollm2):
    first = ask(smollm2, input="My name is Ada. Remember it.")
    second = ask(smollm2, input="What is my name?", previous_response_id=first.id)
    whole = ask(
        smollm2,
        input=[
            {"role": "user", "content": "My name is Ada. Remember it."},
            {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": "What is my name?"},
        ],
    )
    assert second.output_text == whole.output_text
    assert second.usage.input_tokens == whole.usage.input_tokens > first.usage.input_tokens
    assert second.usage.input_tokens_details.cached_tokens > 0
    client = smollm2.openai()
    assert client.responses.retrieve(first.id).output_text == first.output_text
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError) as refused:
        ask(smollm2, previous_response_id=first.id)
    assert refused.value.param == "previous_response_id"


def test_what_is_not_stored_is_not_kept(tiny):
    done = ask(tiny, store=False)
    with pytest.raises(openai.NotFoundError):
        tiny.openai().responses.retrieve(done.id)


def test_a_function_is_called_and_its_output_read(smollm2):
    call = {"tools": [TOOL], "parallel_tool_calls": False, "max_output_tokens": 64}
    first = ask(smollm2, input="The weather in Paris?", tool_choice="required", **call)
    (made,) = first.output
    assert (made.type, made.name) == ("function_call", "get_weather")
    streamed = list(ask(smollm2, input="The weather in Paris?", tool_choice="required", stream=True, **call))
    arguments = "".join(e.delta for e in streamed if e.type == "response.function_call_arguments.delta")
    assert arguments == made.arguments
    output = {"type": "function_call_output", "call_id": made.call_id, "output": "Sunny"}
    second = ask(smollm2, input=[output], previous_response_id=first.id, tool_choice="none", tools=[TOOL])
    assert second.output_text


def test_logprobs_are_there_when_asked_for(tiny):
    done = ask(tiny, include=["message.output_text.logprobs"], top_logprobs=2)
    assert len(done.output[0].content[0].logprobs) == 16


def test_wrong_requests_are_refused_by_name(tiny):
    for wrong, param in (
        ({"conversation": "c"}, "conversation"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            ask(tiny, **wrong) if "conversation" not in wrong else ask(tiny, extra_body=wrong)
        assert refused.value.param in (param, "tools[0].name"), refused.value
