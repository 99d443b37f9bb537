"""Content, reasoning and tool calls come apart alike, however rounds cut the text."""

import json
import random

import pytest

from slipstream.serve.output import Arguments, CallStart, Content, OutputParser, Reasoning, Style, detect_style, merged

TOOLS = {"f": {"properties": {"b": {"type": "string"}}}, "g": {}}
THINK = ("<think>", "</think>")


def parse(style, parts, thinking=False, **options):
    parser = OutputParser(style, TOOLS, thinking=thinking, **options)
    return merged([delta for part in parts for delta in parser.push(part)] + parser.finish())


def shown(deltas):
    return [(type(d).__name__, d.name if isinstance(d, CallStart) else d.text) for d in deltas]


CALL_F = [("CallStart", "f"), ("Arguments", '{"a": 1}')]
CASES = {
    "hermes": (
        Style(None, "hermes"),
        'Sure.\n<tool_call>\n{"name": "f", "arguments": {"a": "</tool_call>", "b": [1, {"c": 2}]}}\n</tool_call>\n'
        '<tool_call>{"arguments": {"x": 1}, "name": "g"}</tool_call>',
        [
            ("Content", "Sure."),
            ("CallStart", "f"),
            ("Arguments", '{"a": "</tool_call>", "b": [1, {"c": 2}]}'),
            ("CallStart", "g"),
            ("Arguments", '{"x": 1}'),
        ],
    ),
    "xml": (
        Style(THINK, "hermes"),
        "<think>hm</think>\n\n<tool_call>\n<function=f>\n<parameter=a>\n12\n</parameter>\n<parameter=b>\n34\n</parameter>\n"
        "</function>\n</tool_call>",
        [("Reasoning", "hm"), ("CallStart", "f"), ("Arguments", '{"a": 12, "b": "34"}')],
    ),
    "no call": (
        Style(None, "hermes"),
        "A <tool_call>nonsense</tool_call> B <b>",
        [("Content", "A <tool_call>nonsense</tool_call> B <b>")],
    ),
    "cut call": (Style(None, "hermes"), "A <tool_call>nonsense", [("Content", "A <tool_call>nonsense")]),
    "llama3": (
        Style(None, "llama3"),
        '<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
        [*CALL_F, ("CallStart", "g"), ("Arguments", "{}")],
    ),
    "llama3 json": (Style(None, "llama3"), '{"name": "zz", "a": 1}', [("Content", '{"name": "zz", "a": 1}')]),
    "mistral": (
        Style(None, "mistral"),
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {"b": "]"}}]',
        [*CALL_F, ("CallStart", "g"), ("Arguments", '{"b": "]"}')],
    ),
    "mistral named": (
        Style(None, "mistral"),
        'Hi [TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{"b": 2}',
        [("Content", "Hi"), *CALL_F, ("CallStart", "g"), ("Arguments", '{"b": 2}')],
    ),
    "harmony": (
        Style(None, "harmony"),
        "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>commentary to=functions.f "
        '<|constrain|>json<|message|>{"a": 1}<|end|><|start|>assistant<|channel|>final<|message|>Done <|x',
        [("Reasoning", "Think."), *CALL_F, ("Content", "Done <|x")],
    ),
    "plain": (Style(), "A <tool_call> is text here.\n", [("Content", "A <tool_call> is text here.\n")]),
}


@pytest.mark.parametrize("case", CASES)
def test_parts_come_apart_wherever_the_text_is_cut(case):
    style, text, expected = CASES[case]
    assert shown(parse(style, [text])) == expected
    assert shown(parse(style, text)) == expected  # character by character
    for seed in range(40):
        cuts = sorted(random.Random(seed).sample(range(len(text)), 6))
        parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert shown(parse(style, parts)) == expected, parts


def test_a_prompt_may_open_the_thought():
    style = Style(THINK, "hermes")
    deltas = parse(style, ["I think", ".\n</thi", "nk>\n\nHello"], thinking=True)
    assert deltas == [Reasoning("I think.\n"), Content("Hello")]


def test_json_arguments_stream_before_the_call_is_closed():
    parser = OutputParser(Style(None, "hermes"), TOOLS)
    parser.push('<tool_call>{"name": "f", "arguments": {"a"')
    assert parser.push(": 12, ") == [Arguments(0, ": 12, ")]


def test_calls_past_the_limit_are_dropped():
    style, text, _ = CASES["llama3"]
    deltas = parse(style, [text], most_calls=1)
    assert [d.name for d in deltas if isinstance(d, CallStart)] == ["f"]
    assert json.loads("".join(d.text for d in deltas if isinstance(d, Arguments))) == {"a": 1}


@pytest.mark.parametrize(
    ("template", "style"),
    [
        (None, Style(None, "hermes")),
        ("{% if tools %}<tool_call>{% endif %}</think>", Style(THINK, "hermes")),
        ("<|python_tag|>", Style(None, "llama3")),
        ("[TOOL_CALLS]", Style(None, "mistral")),
        ("<|channel|>analysis", Style(None, "harmony")),
    ],
)
def test_a_style_is_told_by_the_template(template, style):
    assert detect_style(template) == style
