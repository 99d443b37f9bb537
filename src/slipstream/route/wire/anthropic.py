"""Requests of Anthropic's Messages API, read and written."""

from __future__ import annotations

import json
import re
from typing import Any

from slipstream.route.wire.chat import read_count, read_list
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
    as_text,
)
from slipstream.serve.errors import invalid
from slipstream.serve.wire import dumps

NAME = "anthropic"
PATH = "/v1/messages"

SETTINGS = ("temperature", "top_p", "top_k", "seed")
HINTS = ("service_tier", "service_tier_fallback", "speed", "cache_control", "diagnostics", "metadata")
TOOL_HINTS = ("cache_control", "eager_input_streaming", "input_examples", "defer_loading")
EFFORTS = ("low", "medium", "high", "xhigh", "max")
SESSION = re.compile(r"session_[\w-]{8,}|\"session_id\":\s*\"([\w-]{8,})\"")


def parse(body: Json) -> Ask:
    """Raises ApiError 400 where the request makes no sense in its own API."""
    fields = Fields(body)
    ask = Ask(NAME, body, as_text(fields.take("model")), stream=fields.take("stream") is True)
    system = _content(ask, fields.take("system"), "system", "system")
    if system:
        ask.turns.append(Turn("system", tuple(system)))
    for i, message in enumerate(read_list(fields.take("messages"), "messages", needed=True)):
        role = message.get("role")
        if role not in ("user", "assistant", "system"):
            raise invalid(f"no role {role!r}; there are user and assistant", f"messages[{i}].role")
        parts = _content(ask, message.get("content"), f"messages[{i}].content", role)
        ask.turns.append(Turn(role, tuple(parts)))
    if ask.turns[-1].role == "assistant":
        ask.only_here.append("messages (the last one is the assistant's, which this API goes on from)")
    for i, tool in enumerate(read_list(fields.take("tools"), "tools")):
        _tool(ask, tool, f"tools[{i}]")
    _choice(ask, as_dict(fields.take("tool_choice")))
    if (most := fields.take("max_tokens")) is not None:
        ask.settings["max_tokens"] = read_count(most, "max_tokens")
    if stop := fields.take("stop_sequences"):
        ask.settings["stop"] = stop
    for name in SETTINGS:
        if (value := fields.take(name)) is not None:
            ask.settings[name] = value
    _reasoning(ask, as_dict(fields.take("thinking")), as_dict(fields.take("output_config")))
    metadata = as_dict(body.get("metadata"))
    ask.metadata = {str(name): str(value) for name, value in metadata.items()}
    if found := SESSION.search(as_text(metadata.get("user_id"))):  # Claude Code names its session there
        ask.session = found[1] or found[0]
    only_here, hints = fields.left(*HINTS)
    ask.only_here += only_here
    ask.hints += hints
    return ask


def _choice(ask: Ask, choice: Json) -> None:
    if not choice:
        return
    kind = choice.get("type")
    if kind not in ("auto", "any", "tool", "none"):
        ask.only_here.append("tool_choice")
        return
    ask.tool_choice = f"={as_text(choice.get('name'))}" if kind == "tool" else {"any": "required"}.get(kind, kind)
    if choice.get("disable_parallel_tool_use") is not None:
        ask.parallel = not choice["disable_parallel_tool_use"]


def _reasoning(ask: Ask, thinking: Json, output: Json) -> None:
    rest = Fields(output, "output_config")
    ask.effort = rest.take("effort")
    format = rest.take("format")
    if format is not None:
        if as_dict(format).get("type") == "json_schema":
            ask.format = Format(as_dict(format.get("schema")), strict=True)
        else:
            ask.only_here.append("output_config.format")
    ask.only_here += rest.left()[0]
    if not thinking:
        return
    if thinking.get("type") == "disabled":
        ask.effort = "none"
    elif thinking.get("type") == "enabled":
        ask.hints.append("thinking.budget_tokens")
    elif thinking.get("type") != "adaptive":
        ask.only_here.append("thinking")


def _tool(ask: Ask, tool: Json, where: str) -> None:
    fields = Fields(tool, where)
    if fields.take("type") not in (None, "custom") or not isinstance(tool.get("name"), str):
        ask.only_here.append(where)
        return
    if fields.take("allowed_callers") not in (None, ["direct"]):
        ask.only_here.append(f"{where}.allowed_callers")
    named = (fields.take("name"), fields.take("description"), fields.take("input_schema"), fields.take("strict"))
    ask.tools.append(Tool(*named))
    only_here, hints = fields.left(*TOOL_HINTS)
    ask.only_here += only_here
    ask.hints += [hint for hint in hints if tool.get(hint.rpartition(".")[2])]


def _content(ask: Ask, content: Any, where: str, role: str) -> list[Part]:
    if content is None:
        return []
    if isinstance(content, str):
        return [Text(content)] if content else []
    parts: list[Part] = []
    for i, block in enumerate(read_list(content, where)):
        place = f"{where}[{i}]"
        fields = Fields(block, place)
        kind = fields.take("type")
        if kind == "text" and isinstance(block.get("text"), str):
            parts.append(Text(fields.take("text")))
        elif kind == "image" and (url := _url(fields.take("source"))) is not None:
            parts.append(Image(url))
        elif kind == "tool_use" and role == "assistant":
            arguments = fields.take("input")
            parts.append(Call(as_text(fields.take("id")), as_text(fields.take("name")), dumps(arguments or {})))
            if as_dict(fields.take("caller")).get("type", "direct") != "direct":
                ask.only_here.append(f"{place}.caller")
        elif kind == "tool_result" and role == "user":
            inner = _content(ask, fields.take("content"), f"{place}.content", "result")
            shown = tuple(part for part in inner if isinstance(part, Text | Image))
            parts.append(Result(as_text(fields.take("tool_use_id")), shown, fields.take("is_error")))
        elif kind == "thinking" and role == "assistant":
            by, seal = _unseal(as_text(fields.take("signature")))
            parts.append(Thought(as_text(fields.take("thinking")), seal, by))
        elif kind == "redacted_thinking" and role == "assistant":
            by, seal = _unseal(as_text(fields.take("data")))
            parts.append(Thought("", seal, by, hidden=True))
        else:
            ask.only_here.append(place)
            continue
        only_here, hints = fields.left("cache_control", "citations")
        ask.only_here += only_here
        ask.hints += [hint for hint in hints if block.get(hint.rpartition(".")[2])]
    return parts


def _unseal(signature: str) -> tuple[str | None, str | None]:
    """(API, what it sealed): another API's comes with its name before it."""
    if not signature:
        return None, None
    if signature.startswith("openai-responses:"):
        by, _, seal = signature.partition(":")
        return by, seal
    return NAME, signature


def _url(source: Any) -> str | None:
    kind = as_dict(source).get("type")
    if kind == "url" and isinstance(source.get("url"), str):
        return str(source["url"])
    if kind == "base64" and isinstance(source.get("data"), str):
        return f"data:{source.get('media_type')};base64,{source['data']}"
    return None


def write(ask: Ask, reasoning: bool, max_output: int) -> tuple[Json, list[str]]:
    """`ask` of another wire as a request of this one, without its model, and what was left out or put in.

    max_output: asked for where the client named no limit, since this API needs one. Raises NotCarried.
    """
    unknown = [name for name in ask.settings if name not in ("temperature", "top_p", "top_k", "stop", "max_tokens")]
    if ask.format is not None and ask.format.schema is None:
        unknown.append("response_format json_object")
    if (ask.settings.get("temperature") or 0) > 1:
        unknown.append("temperature above 1")
    dropped = list(ask.hints)
    system: list[Json] = []
    messages: list[Json] = []
    for i, turn in enumerate(ask.turns):
        if turn.role == "system":
            if messages:
                unknown.append(f"messages[{i}] (a system message within the conversation)")
            system += [{"type": "text", "text": part.text} for part in turn.parts if isinstance(part, Text)]
            continue
        blocks = [block for part in turn.parts if (block := _block(part, dropped)) is not None]
        if messages and messages[-1]["role"] == turn.role:
            messages[-1]["content"] += blocks
        elif blocks:
            messages.append({"role": turn.role, "content": blocks})
    if not messages:
        unknown.append("messages without one of the user")
    if ask.only_here or unknown:
        raise NotCarried([*ask.only_here, *unknown])
    body: Json = {"messages": messages, "max_tokens": ask.settings.get("max_tokens", max_output)}
    if system:
        body["system"] = system[0]["text"] if len(system) == 1 else system
    if ask.tools:
        body["tools"] = [_write_tool(tool) for tool in ask.tools]
        choice = _write_choice(ask)
        if choice:
            body["tool_choice"] = choice
    body |= {name: ask.settings[name] for name in ("temperature", "top_p", "top_k") if name in ask.settings}
    if "stop" in ask.settings:
        body["stop_sequences"] = ask.settings["stop"]
    output: Json = {}
    if ask.format is not None:
        output["format"] = {"type": "json_schema", "schema": ask.format.schema}
    if ask.effort == "none":
        body["thinking"] = {"type": "disabled"}
    elif ask.effort is not None and reasoning and ask.effort in EFFORTS:
        output["effort"] = ask.effort
        body["thinking"] = {"type": "adaptive"}
    elif ask.effort is not None:
        dropped.append("reasoning effort")
    if output:
        body["output_config"] = output
    if ask.stream:
        body["stream"] = True
    return body, sorted(set(dropped))


def _block(part: Part, dropped: list[str]) -> Json | None:
    if isinstance(part, Text):
        return {"type": "text", "text": part.text} if part.text else None
    if isinstance(part, Image):
        return _write_image(part)
    if isinstance(part, Call):
        return {"type": "tool_use", "id": tool_id(part.id), "name": part.name, "input": arguments_of(part.arguments)}
    if isinstance(part, Result):
        shown = [one for inner in part.parts if (one := _block(inner, dropped)) is not None]
        content: Any = shown[0]["text"] if len(shown) == 1 and shown[0]["type"] == "text" else shown
        block = {"type": "tool_result", "tool_use_id": tool_id(part.id), "content": content}
        return block | ({"is_error": part.is_error} if part.is_error is not None else {})
    if part.by == NAME and part.seal:
        if part.hidden:
            return {"type": "redacted_thinking", "data": part.seal}
        return {"type": "thinking", "thinking": part.text, "signature": part.seal}
    dropped.append("earlier reasoning")  # unsigned, so this API would refuse it
    return None


def tool_id(id: str) -> str:
    """This API takes letters, digits, `_` and `-`; the same id always becomes the same."""
    return re.sub(r"[^\w-]", "_", id, flags=re.ASCII)


def arguments_of(text: str) -> Json:
    """Arguments as an object; what a limit cut off stays readable under a key of its own."""
    try:
        value = json.loads(text or "{}")
    except ValueError:
        return {"_partial": text}
    return value if isinstance(value, dict) else {"_value": value}


def _write_image(image: Image) -> Json:
    data = re.match(r"data:([\w.+/-]+);base64,", image.url)
    if data:
        source: Json = {"type": "base64", "media_type": data[1], "data": image.url[data.end() :]}
    else:
        source = {"type": "url", "url": image.url}
    return {"type": "image", "source": source}


def _write_tool(tool: Tool) -> Json:
    written: Json = {"name": tool.name, "input_schema": tool.schema or {"type": "object", "properties": {}}}
    if tool.description is not None:
        written["description"] = tool.description
    if tool.strict:
        written["strict"] = True
    return written


def _write_choice(ask: Ask) -> Json:
    choice = ask.tool_choice
    written: Json = {}
    if choice is not None:
        named = choice.startswith("=")
        written = {"type": "tool", "name": choice[1:]} if named else {"type": {"required": "any"}.get(choice, choice)}
    if ask.parallel is False and choice != "none":
        written = (written or {"type": "auto"}) | {"disable_parallel_tool_use": True}
    return written
