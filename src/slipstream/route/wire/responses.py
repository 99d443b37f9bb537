"""Requests of OpenAI's Responses API, read and written."""

from __future__ import annotations

from typing import Any

from slipstream.route.wire.chat import DEFAULTS, read_count, read_list
from slipstream.route.wire.neutral import (
    Ask,
    Call,
    Fields,
    Format,
    Image,
    Json,
    NotCarried,
    Part,
    Result,
    Text,
    Thought,
    Tool,
    Turn,
    as_dict,
    as_list,
    as_text,
)
from slipstream.serve.errors import invalid

NAME = "openai-responses"
PATH = "/responses"

SETTINGS = ("temperature", "top_p", "seed")
HINTS = (
    "user", "store", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "safety_identifier",
    "service_tier", "service_tier_fallback", "stream_options", "metadata", "max_tool_calls", "include",
)  # fmt: skip
INCLUDED = ("reasoning.encrypted_content", "message.output_text.logprobs")


def parse(body: Json) -> Ask:
    """Raises ApiError 400 where the request makes no sense in its own API."""
    fields = Fields(body)
    ask = Ask(NAME, body, as_text(fields.take("model")), stream=fields.take("stream") is True)
    if (instructions := fields.take("instructions")) is not None:
        if not isinstance(instructions, str):
            raise invalid("instructions must be a string", "instructions")
        ask.turns.append(Turn("system", (Text(instructions),)))
    given = fields.take("input")
    if isinstance(given, str):
        ask.turns.append(Turn("user", (Text(given),)))
    else:
        _items(ask, read_list(given, "input", needed=body.get("previous_response_id") is None))
    for i, tool in enumerate(read_list(fields.take("tools"), "tools")):
        rest = Fields(tool, f"tools[{i}]")
        if rest.take("type") != "function" or not isinstance(tool.get("name"), str):
            ask.only_here.append(f"tools[{i}]")
            continue
        ask.tools.append(
            Tool(rest.take("name"), rest.take("description"), rest.take("parameters"), rest.take("strict"))
        )
        ask.only_here += rest.left()[0]
    choice = fields.take("tool_choice")
    if isinstance(choice, dict):
        if choice.get("type") != "function" or not isinstance(choice.get("name"), str):
            ask.only_here.append("tool_choice")
        else:
            ask.tool_choice = f"={choice['name']}"
    else:
        ask.tool_choice = choice
    ask.parallel = fields.take("parallel_tool_calls")
    _text(ask, as_dict(fields.take("text")))
    reasoning = Fields(as_dict(fields.take("reasoning")), "reasoning")
    ask.effort = reasoning.take("effort")
    only_here, hints = reasoning.left("summary", "generate_summary")
    ask.only_here += only_here
    ask.hints += hints
    if (most := fields.take("max_output_tokens")) is not None:
        ask.settings["max_tokens"] = read_count(most, "max_output_tokens")
    for name in SETTINGS:
        if (value := fields.take(name)) is not None:
            ask.settings[name] = value
    if fields.take("top_logprobs") or "message.output_text.logprobs" in as_list(body.get("include")):
        ask.only_here.append("top_logprobs")
    if any(one not in INCLUDED for one in as_list(body.get("include"))):
        ask.only_here.append("include")
    for name, default in (("truncation", "disabled"), ("background", False)):
        if fields.take(name) not in (None, default):
            ask.only_here.append(name)
    ask.continues = body.get("previous_response_id")
    key, metadata = body.get("prompt_cache_key"), as_dict(body.get("metadata"))
    ask.session = key if isinstance(key, str) else None
    ask.metadata = {str(name): str(value) for name, value in metadata.items()}
    only_here, hints = fields.left(*HINTS)
    ask.only_here += only_here
    ask.hints += [hint for hint in hints if hint not in ("stream_options", "include")]
    return ask


def _text(ask: Ask, text: Json) -> None:
    fields = Fields(text, "text")
    format = as_dict(fields.take("format"))
    kind = format.get("type", "text")
    if kind == "json_object":
        ask.format = Format()
    elif kind == "json_schema":
        named = format.get("name"), format.get("strict"), format.get("description")
        ask.format = Format(as_dict(format.get("schema")), *named)
    elif kind != "text":
        ask.only_here.append("text.format")
    verbosity = fields.take("verbosity")
    if verbosity not in (None, DEFAULTS["verbosity"]):
        ask.settings["verbosity"] = verbosity
    ask.only_here += fields.left()[0]


def _items(ask: Ask, items: list[Json]) -> None:
    """Items of one speaker that follow each other are one turn, as other APIs have it."""
    for i, item in enumerate(items):
        where = f"input[{i}]"
        kind = item.get("type", "message")
        parts: list[Part] = []
        speaker = "assistant"
        if kind == "message":
            role = item.get("role")
            if role not in ("user", "assistant", "system", "developer"):
                raise invalid(f"no role {role!r}; there are user, assistant, system and developer", f"{where}.role")
            speaker = "system" if role == "developer" else role
            parts = _content(ask, item.get("content"), f"{where}.content")
        elif kind == "function_call":
            parts = [Call(*(as_text(item.get(name)) for name in ("call_id", "name", "arguments")))]
        elif kind == "function_call_output":
            output = _content(ask, item.get("output"), f"{where}.output")
            texts = tuple(part for part in output if isinstance(part, Text | Image))
            speaker, parts = "user", [Result(as_text(item.get("call_id")), texts)]
        elif kind == "reasoning":
            parts = [_thought(item)]
        else:
            ask.only_here.append(where)
            continue
        last = ask.turns[-1] if ask.turns else None
        joins = speaker == "assistant" or (speaker == "user" and isinstance(parts[0] if parts else None, Result))
        if last is not None and last.role == speaker and joins:
            ask.turns[-1] = Turn(last.role, (*last.parts, *parts))
        else:
            ask.turns.append(Turn(speaker, tuple(parts)))  # type: ignore[arg-type]


def _thought(item: Json) -> Thought:
    shown = as_list(item.get("content")) or as_list(item.get("summary"))
    text = "".join(as_text(as_dict(part).get("text")) for part in shown)
    sealed = item.get("encrypted_content")
    if not isinstance(sealed, str):
        return Thought(text)
    by, _, seal = sealed.partition(":") if sealed.startswith("anthropic:") else (NAME, "", sealed)
    if by == NAME:
        return Thought(text, f"{as_text(item.get('id'))}:{seal}", by, hidden=not text)
    return Thought(text, seal, by, hidden=not text)


def _content(ask: Ask, content: Any, where: str) -> list[Part]:
    if isinstance(content, str):
        return [Text(content)] if content else []
    parts: list[Part] = []
    for i, part in enumerate(read_list(content, where)):
        fields = Fields(part, f"{where}[{i}]")
        kind = fields.take("type")
        if kind in ("input_text", "output_text", "text") and isinstance(part.get("text"), str):
            parts.append(Text(fields.take("text")))
        elif kind == "refusal":
            parts.append(Text(as_text(fields.take("refusal"))))
        elif kind == "input_image" and isinstance(part.get("image_url"), str):
            parts.append(Image(fields.take("image_url"), fields.take("detail")))
        else:
            ask.only_here.append(f"{where}[{i}]")
            continue
        only_here, hints = fields.left("annotations", "logprobs")
        ask.only_here += only_here
        ask.hints += [hint for hint in hints if part.get(hint.rpartition(".")[2])]
    return parts


def write(ask: Ask, reasoning: bool) -> tuple[Json, list[str]]:
    """`ask` of another wire as a request of this one, without its model, and what was left out.

    Nothing is stored at the target, which the other wires could not read again. Raises NotCarried.
    """
    unknown = [name for name in ask.settings if name not in (*SETTINGS, "max_tokens", "verbosity")]
    if ask.only_here or unknown:
        raise NotCarried([*ask.only_here, *unknown])
    dropped = list(ask.hints)
    items: list[Json] = []
    for turn in ask.turns:
        _write_turn(turn, items, reasoning, dropped)
    body: Json = {"input": items, "store": False}
    if ask.tools:
        body["tools"] = [_write_tool(tool) for tool in ask.tools]
    if ask.tool_choice is not None:
        named = ask.tool_choice.startswith("=")
        body["tool_choice"] = {"type": "function", "name": ask.tool_choice[1:]} if named else ask.tool_choice
    if ask.parallel is not None and ask.tools:
        body["parallel_tool_calls"] = ask.parallel
    text: Json = {}
    if ask.format is not None:
        text["format"] = _write_format(ask.format)
    settings = dict(ask.settings)
    if "verbosity" in settings:
        text["verbosity"] = settings.pop("verbosity")
    if text:
        body["text"] = text
    if reasoning:
        body["include"] = ["reasoning.encrypted_content"]
    if ask.effort is not None:
        if reasoning:
            body["reasoning"] = {"effort": ask.effort}
        else:
            dropped.append("reasoning effort")
    if "max_tokens" in settings:
        body["max_output_tokens"] = settings.pop("max_tokens")
    body |= settings
    if ask.stream:
        body["stream"] = True
    return body, sorted(set(dropped))


def _write_turn(turn: Turn, items: list[Json], reasoning: bool, dropped: list[str]) -> None:
    content: list[Json] = []

    def flush() -> None:
        if content:
            items.append({"type": "message", "role": turn.role, "content": list(content)})
            content.clear()

    for part in turn.parts:
        if isinstance(part, Text):
            content.append({"type": "output_text" if turn.role == "assistant" else "input_text", "text": part.text})
            continue
        if isinstance(part, Image):
            content.append(_write_image(part))
            continue
        flush()
        if isinstance(part, Call):
            call = {"call_id": part.id, "name": part.name, "arguments": part.arguments}
            items.append({"type": "function_call"} | call)
        elif isinstance(part, Result):
            shown: Any = [
                {"type": "input_text", "text": one.text} if isinstance(one, Text) else _write_image(one)
                for one in part.parts
            ]
            if all(isinstance(one, Text) for one in part.parts) and len(shown) < 2:
                shown = shown[0]["text"] if shown else ""
            items.append({"type": "function_call_output", "call_id": part.id, "output": shown})
            if part.is_error is not None:
                dropped.append("is_error")
        elif reasoning and part.by == NAME and part.seal:
            id, _, sealed = part.seal.partition(":")
            summary = [{"type": "summary_text", "text": part.text}] if part.text else []
            items.append({"type": "reasoning", "id": id, "summary": summary, "encrypted_content": sealed})
        elif reasoning and part.text and part.by is None:
            content_of = [{"type": "reasoning_text", "text": part.text}]
            items.append({"type": "reasoning", "id": f"rs_{len(items)}", "summary": [], "content": content_of})
        else:
            dropped.append("earlier reasoning")
    flush()


def _write_image(image: Image) -> Json:
    return {"type": "input_image", "image_url": image.url, "detail": image.detail or "auto"}


def _write_tool(tool: Tool) -> Json:
    """strict is always said: this API takes true where it is left out, the others false."""
    schema = tool.schema or {"type": "object", "properties": {}}
    written: Json = {"type": "function", "name": tool.name, "parameters": schema, "strict": bool(tool.strict)}
    return written | ({"description": tool.description} if tool.description is not None else {})


def _write_format(format: Format) -> Json:
    if format.schema is None:
        return {"type": "json_object"}
    written: Json = {"type": "json_schema", "name": format.name or "answer", "schema": format.schema}
    written["strict"] = bool(format.strict)
    return written | ({"description": format.description} if format.description is not None else {})
