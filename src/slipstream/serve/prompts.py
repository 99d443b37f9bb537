"""From an API's messages and tools to the tokens of a prompt, through the model's own chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slipstream.engine.engine import LLM
from slipstream.serve.errors import invalid

_HOW_TO_CALL = """# Tools

You may call functions to help with the user's request. They are listed as JSON within <tools></tools>:
<tools>
{tools}
</tools>

To call one, answer with a JSON object of its name and arguments within <tool_call></tool_call>:
<tool_call>
{{"name": "function name", "arguments": {{"argument": "value"}}}}
</tool_call>"""


@dataclass(frozen=True)
class Tool:
    """A function that the model may call. parameters: JSON schema. strict: arguments must keep to it."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    strict: bool = False

    def as_template(self) -> dict[str, Any]:
        """As chat templates expect it, which is OpenAI's form."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


def text_of(content: Any, param: str) -> str:
    """A message's content, a string or a list of text parts. Raises ApiError 400 for what is not text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = (
            part.get("text", part.get("refusal")) if kind in ("text", "input_text", "output_text", "refusal") else None
        )
        if not isinstance(text, str):
            raise invalid(f"content of type {kind!r} is not supported; this model reads text", f"{param}[{i}]")
        texts.append(text)
    return "".join(texts)


def chat_prompt(
    llm: LLM,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Tool],
    template: Mapping[str, Any],
    prefill: str = "",
) -> tuple[list[int], str]:
    """(tokens, text) of a conversation in OpenAI's form, up to where the assistant speaks, or has spoken `prefill`."""
    source = llm.tokenizer.chat_template
    if source is None:
        raise invalid("this model has no chat template; use /v1/completions", "messages")
    knows_tools = "tools" in source
    turns = [_turn(dict(message), knows_tools, source) for message in messages]
    variables = dict(template)
    if tools and knows_tools:
        variables["tools"] = [tool.as_template() for tool in tools]
    elif tools:
        listed = "\n".join(json.dumps(tool.as_template(), ensure_ascii=False) for tool in tools)
        how = _HOW_TO_CALL.format(tools=listed)
        if turns and turns[0]["role"] == "system":
            turns[0]["content"] += "\n\n" + how
        else:
            turns.insert(0, {"role": "system", "content": how})
    text = llm.tokenizer.render_chat(turns, add_generation_prompt=True, **variables) + prefill
    return llm.tokenizer.encode(text), text


def _turn(message: dict[str, Any], knows_tools: bool, source: str) -> dict[str, Any]:
    """A message as the template takes it; one that knows no tools gets calls and results as text."""
    if message["role"] == "developer" and "developer" not in source:
        message["role"] = "system"
    calls = message.get("tool_calls") or []
    if knows_tools:
        if calls:
            message["tool_calls"] = [_parsed(call) for call in calls]
        return message
    if calls:
        written = [
            json.dumps(
                {"name": c["function"]["name"], "arguments": _parsed(c)["function"]["arguments"]}, ensure_ascii=False
            )
            for c in calls
        ]
        blocks = "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in written)
        content = message.get("content")
        return {"role": "assistant", "content": f"{content}\n{blocks}" if content else blocks}
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    return {"role": message["role"], "content": message["content"]}


def _parsed(call: Mapping[str, Any]) -> dict[str, Any]:
    """A tool call whose arguments are an object where they can be read as one."""
    function = dict(call["function"])
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (TypeError, ValueError):
        arguments = None
    if isinstance(arguments, dict):
        function["arguments"] = arguments
    return {**call, "function": function}


def tool_grammar(format: str, tools: Sequence[Tool], several: bool, rule: Any) -> str:
    """A Lark grammar of one call, or several, of `tools` in a model's own format. rule: schema -> Lark expression."""
    begin, end, between = {
        "llama3": ('{{"name": {name}, "parameters": ', "}}", "; "),
        "mistral": ('[TOOL_CALLS][{{"name": {name}, "arguments": ', "}}]", ""),
        "harmony": ("<|channel|>commentary to=functions.{bare} <|constrain|>json<|message|>", "", ""),
    }.get(format, ('<tool_call>\n{{"name": {name}, "arguments": ', "}}\n</tool_call>", "\n"))
    lines = []
    for i, tool in enumerate(tools):
        head = json.dumps(begin.format(name=json.dumps(tool.name), bare=tool.name))
        tail = json.dumps(end.format()) if end else ""
        lines.append(f"call_{i}: {head} {rule(tool.parameters)} {tail}")
    choice = " | ".join(f"call_{i}" for i in range(len(tools)))
    more = f" ({json.dumps(between)} call)*" if several and between else ""
    return "\n".join([f"start: call{more}", f"call: {choice}", *lines])


def strict_grammar(format: str, tools: Sequence[Tool], rule: Any) -> tuple[str, str]:
    """(text that begins a call, a Lark grammar of what follows it up to the call's end).

    Strict tools get arguments by their schema, others any object. The rest of the answer is free.
    """
    trigger, head, tail = {
        "llama3": ('{"name"', '": " {name} ", \\"parameters\\": "', '"}"'),
        "mistral": ("[TOOL_CALLS]", '"[{{\\"name\\": " {name} ", \\"arguments\\": "', '"}]"'),
        "harmony": (
            "to=functions.",
            '{bare} "<|channel|>commentary"? (" <|constrain|>json" | " json")? "<|message|>"',
            "",
        ),
    }.get(
        format,
        ("<tool_call>", 'space? "{{\\"name\\": " {name} ", \\"arguments\\": "', '"}" space? "</tool_call>"'),
    )
    lines = []
    for i, tool in enumerate(tools):
        name = json.dumps(tool.name)
        begin = head.format(name=json.dumps(name), bare=name)
        lines.append(f"call_{i}: {begin} {rule(tool.parameters if tool.strict else {'type': 'object'})} {tail}")
    choice = " | ".join(f"call_{i}" for i in range(len(tools)))
    space = ["space: /[ \\n]{1,2}/"] if "space" in head else []
    return trigger, "\n".join([f"start: {choice}", *space, *lines])
