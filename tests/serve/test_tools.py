"""Tools and JSON answers, free and under a grammar, with and without drafts."""

import json

import numpy as np
import openai
import pydantic
import pytest
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.output import NativeOutput
from pydantic_ai.providers.openai import OpenAIProvider

from slipstream import LLM, SamplingParams
from slipstream.serve.grammar import GrammarCompiler, json_rule
from slipstream.serve.prompts import Tool, strict_grammar, tool_grammar

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "save", "description": "Save a person.", "parameters": PERSON}},
    {
        "type": "function",
        "function": {"name": "stop", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
    },
]
QUESTION = [{"role": "user", "content": "Bob is 42 years old."}]


def ask(running, **options):
    call = {"model": running.model, "messages": QUESTION, "max_tokens": 80, "temperature": 0}
    return running.openai().chat.completions.create(**(call | options))


def json_schema(schema):
    return {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}}


def test_an_answer_keeps_to_its_schema(smollm2):
    for seed in range(3):
        done = ask(smollm2, response_format=json_schema(PERSON), temperature=1.2, seed=seed)
        person = json.loads(done.choices[0].message.content)
        assert set(person) == {"name", "age"}
        assert 0 <= person["age"] <= 120
        assert done.choices[0].finish_reason == "stop"


def test_any_model_keeps_to_a_schema_however_little_sense_it_makes(tiny):
    done = ask(tiny, response_format=json_schema({"enum": ["red", "green"]}), temperature=1, seed=1)
    assert json.loads(done.choices[0].message.content) in ("red", "green")


def test_json_object_is_an_object(smollm2):
    done = ask(smollm2, response_format={"type": "json_object"}, temperature=0)
    assert isinstance(json.loads(done.choices[0].message.content), dict)


def test_drafts_change_nothing_under_a_grammar(smollm2_llm):
    compiler = GrammarCompiler(smollm2_llm)
    rule = "start: " + json_rule({"type": "array", "items": PERSON, "minItems": 4, "maxItems": 4})
    texts = []
    for drafts in (0, 7):
        with smollm2_llm.session(drafts=drafts) as session:
            params = SamplingParams(max_tokens=120, temperature=0.7, seed=3)
            done = session.chat("Four people.", params, mask=compiler.lark(rule, "x"))
            texts.append(done.text)
    assert texts[0] == texts[1]
    assert done.speculation.accepted > 0
    assert len(json.loads(texts[0])) == 4


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "frob"},
        {"type": "string", "pattern": "(((("},
        {"$ref": "#/nowhere"},
        {"$ref": "#"},
        {"minLength": "x", "type": "string"},
    ],
    ids=str,
)
def test_a_schema_that_cannot_be_compiled_is_a_400(tiny, schema):
    with pytest.raises(openai.BadRequestError) as refused:
        ask(tiny, response_format=json_schema(schema))
    assert refused.value.code == "invalid_schema"
    assert ask(tiny, max_tokens=2).usage.completion_tokens >= 1  # and the server is well


def test_deep_and_large_schemas_are_refused(tiny):
    deep: dict = {"type": "string"}
    for _ in range(40):
        deep = {"type": "object", "properties": {"a": deep}}
    for schema in (deep, {"enum": ["x" * 70_000]}):
        with pytest.raises(openai.BadRequestError, match=r"nested deeper|longer than"):
            ask(tiny, response_format=json_schema(schema))


def test_a_required_call_is_made_and_valid(smollm2):
    done = ask(smollm2, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    (choice,) = done.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls
    assert call.function.name in ("save", "stop")
    json.loads(call.function.arguments)


def test_a_named_call_streams_what_it_says_whole(smollm2):
    options = {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "save"}}}
    whole = ask(smollm2, **options).choices[0].message.tool_calls[0].function
    streamed, ids = {"name": "", "arguments": ""}, set()
    for chunk in ask(smollm2, stream=True, **options):
        for part in chunk.choices[0].delta.tool_calls or ():
            assert part.index == 0
            ids |= {part.id} - {None}
            streamed["name"] += part.function.name or ""
            streamed["arguments"] += part.function.arguments or ""
    assert streamed == {"name": whole.name, "arguments": whole.arguments}
    assert len(ids) == 1
    assert set(json.loads(whole.arguments)) == {"name", "age"}


def test_without_a_choice_tools_are_only_offered(smollm2):
    offered = ask(smollm2, tools=TOOLS, max_tokens=8)
    none = ask(smollm2, tools=TOOLS, tool_choice="none", max_tokens=8)
    plain = ask(smollm2, max_tokens=8)
    assert offered.usage.prompt_tokens > none.usage.prompt_tokens == plain.usage.prompt_tokens


def test_calls_and_results_come_back_as_messages(smollm2):
    call = ask(smollm2, tools=TOOLS, tool_choice="required", parallel_tool_calls=False).choices[0].message
    turns = [*QUESTION, call, {"role": "tool", "tool_call_id": call.tool_calls[0].id, "content": "saved"}]
    done = ask(smollm2, messages=turns, tools=TOOLS, tool_choice="none", max_tokens=8)
    assert done.choices[0].message.content


@pytest.mark.parametrize("format", ["hermes", "llama3", "mistral", "harmony"])
def test_each_formats_grammar_makes_calls_that_its_parser_reads(tiny_llm: LLM, format):
    from slipstream.serve.output import Arguments, CallStart, OutputParser, Style, merged

    schema = {"type": "object", "properties": {"c": {"enum": ["r", "g"]}}, "required": ["c"]}
    tool = Tool("pick", "", schema | {"additionalProperties": False})
    grammar = GrammarCompiler(tiny_llm).lark(tool_grammar(format, [tool], False, json_rule), "tools")
    params = SamplingParams(max_tokens=200, temperature=1, seed=1)
    with tiny_llm.session() as session:
        text = session.generate("x", params, mask=grammar).text
    parser = OutputParser(Style(None, format), {"pick": tool.parameters})
    start, arguments = merged([*parser.push(text), *parser.finish()])
    assert isinstance(start, CallStart)
    assert isinstance(arguments, Arguments)
    assert start.name == "pick"
    assert json.loads(arguments.text)["c"] in ("r", "g")


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=12)
    age: int = pydantic.Field(ge=0, le=120)


@pytest.mark.parametrize("output", [Person, NativeOutput(Person)], ids=["tool", "schema"])
def test_pydantic_ai_gets_its_objects(smollm2, output):
    provider = OpenAIProvider(base_url=f"{smollm2.url}/v1", api_key="none")
    agent = Agent(OpenAIChatModel(smollm2.model, provider=provider), output_type=output)
    done = agent.run_sync("Bob is 42 years old.", model_settings={"temperature": 0, "max_tokens": 80})
    assert isinstance(done.output, Person)


@pytest.mark.parametrize("format", ["hermes", "llama3", "mistral", "harmony"])
def test_a_strict_tool_is_schema_exact_wherever_a_call_begins(tiny_llm: LLM, format):
    from slipstream.serve.output import Arguments, CallStart, OutputParser, Style, merged

    schema = {"type": "object", "properties": {"c": {"enum": ["r", "g"]}}, "required": ["c"]}
    tools = [Tool("pick", "", schema | {"additionalProperties": False}, strict=True), Tool("other")]
    trigger, source = strict_grammar(format, tools, json_rule)
    grammar = GrammarCompiler(tiny_llm).lark(source, "tools", "", trigger)
    tokenizer, vocab = tiny_llm.tokenizer, tiny_llm.spec.vocab
    spoken = {"hermes": "Sure.\n", "mistral": "Sure."}.get(format, "")
    if format == "harmony":
        spoken = "<|channel|>commentary "
    output = tokenizer.encode(spoken, special=False) if spoken else []
    random, free = np.random.default_rng(5), np.zeros(vocab, np.float32)
    grammar(output, free)
    assert np.isfinite(free).all(), "text before a call is free"
    output += tokenizer.encode(trigger + ("pick" if format == "harmony" else ""), special=False)
    for _ in range(200):
        row = random.random(vocab).astype(np.float32)
        grammar(output, row)
        if np.isfinite(row).all():
            break
        output.append(int(row.argmax()))
    else:
        pytest.fail("the call never ended")
    parser = OutputParser(Style(None, format), {tool.name: tool.parameters for tool in tools})
    text = tokenizer.decode(output)
    deltas = merged([*parser.push(text), *parser.finish()])
    (start,) = [d for d in deltas if isinstance(d, CallStart)]
    arguments = json.loads("".join(d.text for d in deltas if isinstance(d, Arguments)))
    assert start.name in ("pick", "other")
    if start.name == "pick":
        assert set(arguments) == {"c"}
        assert arguments["c"] in ("r", "g")
    output += tokenizer.encode(trigger, special=False)
    row = np.zeros(vocab, np.float32)
    grammar(output, row)
    assert not np.isfinite(row).all(), "the next call is held to its schema too"


def test_strict_tools_leave_an_answer_in_words_as_it_is(smollm2):
    strict = [{"type": "function", "function": TOOLS[0]["function"] | {"strict": True}}]
    free = [{"type": "function", "function": TOOLS[0]["function"]}]
    texts = [
        ask(smollm2, tools=tools, messages=[{"role": "user", "content": "Say hello."}]) for tools in (free, strict)
    ]
    assert texts[0].choices[0].message.content == texts[1].choices[0].message.content != ""


def test_a_strict_schema_that_cannot_be_compiled_is_a_400(tiny):
    broken = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"type": "frob"}}}
    with pytest.raises(openai.BadRequestError) as refused:
        ask(tiny, tools=[broken])
    assert refused.value.code == "invalid_schema"


def test_with_a_schema_and_tools_the_answer_is_one_or_the_other(smollm2):
    done = ask(smollm2, tools=TOOLS, response_format=json_schema(PERSON))
    message = done.choices[0].message
    if message.tool_calls:
        assert all(json.loads(call.function.arguments) is not None for call in message.tool_calls)
    else:
        assert set(json.loads(message.content)) == {"name", "age"}


def test_one_call_at_a_time_ends_the_answer_there(smollm2, monkeypatch):
    """A grammar of two calls stands for a model that would go on: the second is neither made nor billed."""
    monkeypatch.setattr(
        "slipstream.serve.answers.tool_grammar",
        lambda format, tools, several, rule: tool_grammar(format, tools, False, rule).replace(
            "start: ", "start: call "
        ),
    )
    call = {"tools": TOOLS[1:], "tool_choice": "required", "max_tokens": 120}
    for stream in (False, True):
        one = ask(smollm2, parallel_tool_calls=False, stream=stream, **call)
        if stream:
            chunks = list(one)
            assert chunks[-1].choices[0].finish_reason == "tool_calls"
            parts = [part for c in chunks for part in c.choices[0].delta.tool_calls or ()]
            assert sum(part.id is not None for part in parts) == 1
        else:
            assert len(one.choices[0].message.tool_calls) == 1
            assert one.choices[0].finish_reason == "tool_calls"
            told = one.usage.completion_tokens
    several = ask(smollm2, parallel_tool_calls=True, **call)
    assert len(several.choices[0].message.tool_calls) == 2
    assert several.usage.completion_tokens > told
    assert smollm2.at_rest()
