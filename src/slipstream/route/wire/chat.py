"""Requests of OpenAI's Chat Completions API, read and written."""

from __future__ import annotations

from typing import Any

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

NAME = "openai-chat"
PATH = "/chat/completions"

SETTINGS = (
    "temperature", "top_p", "seed", "presence_penalty", "frequency_penalty", "logit_bias", "logprobs", "top_logprobs",
    "n", "verbosity", "top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids",
    "chat_template_kwargs",
)  # fmt: skip
"""Settings that this wire writes under the names it reads them by. The last six are vLLM's, SGLang's and ours."""

DEFAULTS: Json = {
    "n": 1, "logprobs": False, "presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {}, "top_logprobs": 0,
    "verbosity": "medium", "min_p": 0, "top_k": 0, "repetition_penalty": 1, "min_tokens": 0, "ignore_eos": False,
    "stop_token_ids": [], "chat_template_kwargs": {},
}  # fmt: skip
"""Values that say no more than leaving the setting out."""

HINTS = (
    "user", "store", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "safety_identifier",
    "prediction", "service_tier", "service_tier_fallback", "stream_options", "metadata",
)  # fmt: skip


def parse(body: Json) -> Ask:
    """Raises ApiError 400 where the request makes no sense in its own API."""
    fields = Fields(body)
    ask = Ask(NAME, body, as_text(fields.take("model")), stream=fields.take("stream") is True)
    for i, message in enumerate(read_list(fields.take("messages"), "messages", needed=True)):
        ask.turns.append(_turn(ask, message, f"messages[{i}]"))
    for i, tool in enumerate(read_list(fields.take("tools"), "tools")):
        if tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
            ask.only_here.append(f"tools[{i}]")
            continue
        ask.tools.append(_tool(ask, tool["function"], f"tools[{i}].function"))
    choice = fields.take("tool_choice")
    if isinstance(choice, dict):
        name = as_dict(choice.get("function")).get("name")
        if choice.get("type") != "function" or not isinstance(name, str):
            ask.only_here.append("tool_choice")
        else:
            ask.tool_choice = f"={name}"
    else:
        ask.tool_choice = choice
    ask.parallel = fields.take("parallel_tool_calls")
    ask.format = _format(ask, fields.take("response_format"))
    ask.effort = fields.take("reasoning_effort")
    longest = fields.take("max_completion_tokens"), fields.take("max_tokens")
    if (most := next((value for value in longest if value is not None), None)) is not None:
        ask.settings["max_tokens"] = read_count(most, "max_tokens")
    if (stop := fields.take("stop")) is not None:
        ask.settings["stop"] = [stop] if isinstance(stop, str) else stop
    for name in SETTINGS:
        if (value := fields.take(name)) is not None and DEFAULTS.get(name) != value:
            ask.settings[name] = value
    if fields.take("modalities") not in (None, ["text"]):
        ask.only_here.append("modalities")
    ask.wants_usage = as_dict(body.get("stream_options")).get("include_usage") is True
    key, metadata = body.get("prompt_cache_key"), as_dict(body.get("metadata"))
    ask.session = key if isinstance(key, str) else None
    ask.metadata = {str(name): str(value) for name, value in metadata.items()}
    only_here, hints = fields.left(*HINTS)
    ask.only_here += only_here
    ask.hints += [hint for hint in hints if hint != "stream_options"]
    return ask


def read_list(value: Any, where: str, needed: bool = False) -> list[Json]:
    """A list of objects. Raises ApiError 400."""
    if value is None and not needed:
        return []
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value) or (needed and not value):
        raise invalid(f"{where} must be a list of objects" + (", and not empty" if needed else ""), where)
    return value


def read_count(value: Any, where: str) -> int:
    """A positive integer. Raises ApiError 400."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
        raise invalid(f"{where} must be a positive integer", where)
    return value


def _turn(ask: Ask, message: Json, where: str) -> Turn:
    fields = Fields(message, where)
    role = fields.take("role")
    if role not in ("system", "developer", "user", "assistant", "tool"):
        raise invalid(f"no role {role!r}; there are system, developer, user, assistant and tool", f"{where}.role")
    parts: list[Part] = []
    thought = next((t for name in ("reasoning_content", "reasoning") if (t := fields.take(name))), None)
    details = as_list(fields.take("reasoning_details"))
    if details or thought:
        parts += _thoughts(ask, details, as_text(thought), where)
    content = _content(ask, fields.take("content"), f"{where}.content")
    if role == "tool":
        id = fields.take("tool_call_id")
        if not isinstance(id, str):
            raise invalid("a tool message needs tool_call_id", f"{where}.tool_call_id")
        parts.append(Result(id, tuple(p for p in content if isinstance(p, Text | Image))))
    else:
        parts += content
    if refusal := fields.take("refusal"):
        parts.append(Text(as_text(refusal)))
    for i, call in enumerate(read_list(fields.take("tool_calls"), f"{where}.tool_calls")):
        function = as_dict(call.get("function"))
        if call.get("type", "function") != "function" or not isinstance(function.get("name"), str):
            ask.only_here.append(f"{where}.tool_calls[{i}]")
            continue
        parts.append(Call(as_text(call.get("id")), function["name"], as_text(function.get("arguments"))))
    if fields.take("annotations"):
        ask.hints.append(f"{where}.annotations")
    only_here, hints = fields.left("name")
    ask.only_here += only_here
    ask.hints += hints
    speaker = {"developer": "system", "tool": "user"}.get(role, role)
    return Turn(speaker, tuple(parts))


def _thoughts(ask: Ask, details: list[Any], text: str, where: str) -> list[Part]:
    """`reasoning_details` is how OpenRouter, and our own answers, carry what lets an API read its thoughts again."""
    found: list[Part] = []
    for one in map(as_dict, details):
        if one.get("type") == "reasoning.encrypted":
            found.append(Thought("", as_text(one.get("data")), one.get("format"), hidden=True))
        elif one.get("type") == "reasoning.text":
            found.append(Thought(as_text(one.get("text")), one.get("signature"), one.get("format")))
        else:
            ask.hints.append(f"{where}.reasoning_details")
    return found or [Thought(text)]


def _content(ask: Ask, content: Any, where: str) -> list[Part]:
    if content is None:
        return []
    if isinstance(content, str):
        return [Text(content)] if content else []
    parts: list[Part] = []
    for i, part in enumerate(read_list(content, where)):
        fields = Fields(part, f"{where}[{i}]")
        kind = fields.take("type")
        if kind == "text" and isinstance(part.get("text"), str):
            parts.append(Text(fields.take("text")))
        elif kind == "refusal":
            parts.append(Text(as_text(fields.take("refusal"))))
        elif kind == "image_url" and isinstance(as_dict(part.get("image_url")).get("url"), str):
            image = fields.take("image_url")
            parts.append(Image(image["url"], image.get("detail")))
        else:
            ask.only_here.append(f"{where}[{i}]")
            continue
        only_here, hints = fields.left("cache_control")
        ask.only_here += only_here
        ask.hints += hints
    return parts


def _tool(ask: Ask, function: Json, where: str) -> Tool:
    fields = Fields(function, where)
    name = fields.take("name")
    if not isinstance(name, str):
        raise invalid("a function needs a name", f"{where}.name")
    tool = Tool(name, fields.take("description"), fields.take("parameters"), fields.take("strict"))
    ask.only_here += fields.left()[0]
    return tool


def _format(ask: Ask, format: Any) -> Format | None:
    kind = as_dict(format).get("type")
    if format is None or kind == "text":
        return None
    if kind == "json_object":
        return Format()
    schema = as_dict(as_dict(format).get("json_schema"))
    if kind != "json_schema" or not schema:
        ask.only_here.append("response_format")
        return None
    return Format(schema.get("schema") or {}, schema.get("name"), schema.get("strict"), schema.get("description"))


def write(ask: Ask, reasoning: bool) -> tuple[Json, list[str]]:
    """`ask` of another wire as a request of this one, without its model, and what was left out.

    reasoning: the target reads `reasoning_content` and `reasoning_effort`. Raises NotCarried.
    """
    if ask.only_here:
        raise NotCarried(ask.only_here)
    dropped = list(ask.hints)
    messages: list[Json] = []
    for turn in ask.turns:
        messages += _messages(turn, reasoning, dropped)
    body: Json = {"messages": messages}
    if ask.tools:
        body["tools"] = [{"type": "function", "function": _function(tool)} for tool in ask.tools]
    if ask.tool_choice is not None:
        named = ask.tool_choice.startswith("=")
        choice = {"type": "function", "function": {"name": ask.tool_choice[1:]}}
        body["tool_choice"] = choice if named else ask.tool_choice
    if ask.parallel is not None and ask.tools:
        body["parallel_tool_calls"] = ask.parallel
    if ask.format is not None:
        body["response_format"] = _response_format(ask.format)
    if ask.effort is not None:
        if reasoning:
            body["reasoning_effort"] = ask.effort
        else:
            dropped.append("reasoning effort")
    settings = dict(ask.settings)
    if "max_tokens" in settings:  # the name that every server knows; OpenAI's own reasoning models ask for the other
        body["max_completion_tokens" if reasoning else "max_tokens"] = settings.pop("max_tokens")
    body |= settings
    if ask.stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body, sorted(set(dropped))


def _messages(turn: Turn, reasoning: bool, dropped: list[str]) -> list[Json]:
    """Tool results are messages of their own; their images follow as the user's, since a tool message holds text."""
    out: list[Json] = []
    content: list[Json] = []
    calls: list[Json] = []
    thoughts: list[str] = []
    for part in turn.parts:
        if isinstance(part, Result):
            texts = [{"type": "text", "text": one.text} for one in part.parts if isinstance(one, Text)]
            out.append({"role": "tool", "tool_call_id": part.id, "content": _plain(texts)})
            if images := [_image(one) for one in part.parts if isinstance(one, Image)]:
                dropped.append("place of images in tool results")
                content += images
            if part.is_error is not None:
                dropped.append("is_error")
        elif isinstance(part, Text):
            content.append({"type": "text", "text": part.text})
        elif isinstance(part, Image):
            content.append(_image(part))
        elif isinstance(part, Call):
            function = {"name": part.name, "arguments": part.arguments}
            calls.append({"id": part.id, "type": "function", "function": function})
        elif reasoning and part.text:
            thoughts.append(part.text)
        else:
            dropped.append("earlier reasoning")
    if content or calls or thoughts or not out:
        message: Json = {"role": turn.role, "content": _plain(content) if content or not calls else None}
        if calls:
            message["tool_calls"] = calls
        if thoughts:
            message["reasoning_content"] = "".join(thoughts)
        out.append(message)
    return out


def _plain(parts: list[Json]) -> str | list[Json]:
    """One text, or none, as the string that every server takes."""
    if not parts:
        return ""
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def _image(image: Image) -> Json:
    return {"type": "image_url", "image_url": {"url": image.url} | ({"detail": image.detail} if image.detail else {})}


def _function(tool: Tool) -> Json:
    function: Json = {"name": tool.name, "parameters": tool.schema or {"type": "object", "properties": {}}}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return function


def _response_format(format: Format) -> Json:
    if format.schema is None:
        return {"type": "json_object"}
    schema: Json = {"name": format.name or "answer", "schema": format.schema}
    if format.strict is not None:
        schema["strict"] = format.strict
    if format.description is not None:
        schema["description"] = format.description
    return {"type": "json_schema", "json_schema": schema}
