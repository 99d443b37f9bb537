"""The fields of Anthropic's Messages API, and the same request in OpenAI's form, which chat templates read."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field

from slipstream.serve.answers import Ask, Service
from slipstream.serve.errors import invalid
from slipstream.serve.openai_fields import Fields, Text, sampling_params
from slipstream.serve.prompts import Tool

Block = dict[str, Any]


class Turn(Fields):
    role: Literal["user", "assistant", "system"]
    content: Text | list[Block]


class ToolSpec(Fields):
    """A client's own tool; tools that Anthropic's servers run are refused."""

    name: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[\w.-]+$")]
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None
    defer_loading: bool | None = None
    eager_input_streaming: bool | None = None
    input_examples: list[Any] | None = None
    allowed_callers: list[str] | None = None


class ToolChoice(Fields):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(Fields):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=0)] | None = None
    display: str | None = None


class OutputFormat(Fields):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Fields):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountRequest(Fields):
    model: str
    messages: Annotated[list[Turn], Field(min_length=1)]
    system: Text | list[Block] | None = None
    tools: list[ToolSpec] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = None
    speed: Literal["standard", "fast"] | None = None

    def ask(self, service: Service) -> Ask:
        """Raises ApiError 400."""
        return self._ask(service, 1)

    def _ask(self, service: Service, max_tokens: int, **sampling: Any) -> Ask:
        limits = service.config.limits
        if len(self.messages) > limits.messages:
            raise invalid(f"at most {limits.messages} messages are allowed", "messages")
        if len(self.tools or ()) > limits.tools:
            raise invalid(f"at most {limits.tools} tools are allowed", "tools")
        turns: list[dict[str, Any]] = []
        if system := _text(self.system or "", "system"):
            turns.append({"role": "system", "content": system})
        for i, turn in enumerate(self.messages):
            turns += _turns(turn, f"messages[{i}]")
        prefill = ""
        if turns and turns[-1]["role"] == "assistant":  # the answer goes on from where this message ends
            last = turns.pop()
            if "tool_calls" in last:
                raise invalid("the last message calls tools; give their results", "messages")
            prefill = last["content"]
        tools = [Tool(t.name, t.description or "", t.input_schema, bool(t.strict)) for t in self.tools or ()]
        template: dict[str, Any] = {}
        if self.thinking is not None:
            template["enable_thinking"] = self.thinking.type != "disabled"
        if self.output_config and self.output_config.effort:
            template["reasoning_effort"] = self.output_config.effort
        format = self.output_config.format if self.output_config else None
        choice = self.tool_choice or ToolChoice(type="auto")
        return Ask(
            params=sampling_params(service.config, service.llm.context, max_tokens=max_tokens, **sampling),
            messages=turns,
            prefill=prefill,
            tools=tools,
            tool_choice=_choice(choice, [tool.name for tool in tools]),
            parallel_calls=not choice.disable_parallel_tool_use,
            schema=format.schema_ if format else None,
            schema_param="output_config.format.schema",
            template=template,
        )


class MessagesRequest(CountRequest):
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)]
    stream: bool = False
    stop_sequences: list[Annotated[str, Field(max_length=1000)]] | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    # accepted, without effect here
    metadata: dict[str, Any] | None = None
    diagnostics: dict[str, Any] | None = None
    inference_geo: str | None = None
    # Slipstream's own
    service_tier_fallback: bool = False
    seed: Annotated[int, Field(ge=0, lt=2**64)] | None = None

    def ask(self, service: Service) -> Ask:
        """Raises ApiError 400."""
        ask = self._ask(
            service, self.max_tokens, stop=self.stop_sequences, temperature=self.temperature, top_p=self.top_p,
            top_k=self.top_k, seed=self.seed,
        )  # fmt: skip
        if self.speed == "fast":
            if self.service_tier == "standard_only":
                raise invalid("speed fast is not served at the standard tier; ask for one of them", "speed")
            ask.tier = service.config.fast
        elif self.service_tier == "standard_only":
            ask.tier = "default"
        ask.tier_fallback = self.service_tier_fallback
        return ask


def _choice(choice: ToolChoice, names: list[str]) -> str:
    if choice.type == "tool":
        if choice.name not in names:
            raise invalid(f"tool_choice names {choice.name!r}, which is no tool of this request", "tool_choice.name")
        return choice.name or ""
    if choice.type == "any" and not names:
        raise invalid("tool_choice any needs tools", "tool_choice")
    return {"any": "required"}.get(choice.type, choice.type)


def _text(content: str | list[Block], param: str) -> str:
    """A string, or text blocks joined. Raises ApiError 400 for other blocks."""
    if isinstance(content, str):
        return content
    texts = []
    for i, block in enumerate(content):
        text = block.get("text") if block.get("type") == "text" else None
        if not isinstance(text, str):
            raise invalid(f"a block of type {block.get('type')!r} is not supported here", f"{param}[{i}]")
        texts.append(text)
    return "".join(texts)


def _turns(turn: Turn, param: str) -> list[dict[str, Any]]:
    """One message in OpenAI's form: tool results become messages of their own, before the user's text."""
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for i, block in enumerate(turn.content):
        where, kind = f"{param}.content[{i}]", block.get("type")
        if kind == "text":
            texts.append(_text([block], where))
        elif kind == "tool_use" and turn.role == "assistant":
            name = _string(block, "name", where)
            function = {"name": name, "arguments": json.dumps(block.get("input") or {}, ensure_ascii=False)}
            calls.append({"id": _string(block, "id", where), "type": "function", "function": function})
        elif kind == "tool_result" and turn.role == "user":
            content = block.get("content") or ""
            if not isinstance(content, str | list):
                raise invalid("tool_result content must be text or blocks", f"{where}.content")
            called = _string(block, "tool_use_id", where)
            text = _text(content, f"{where}.content")
            results.append({"role": "tool", "tool_call_id": called, "content": text})
        elif kind == "thinking" and turn.role == "assistant":
            thoughts.append(_string(block, "thinking", where))
        elif kind == "redacted_thinking" and turn.role == "assistant":
            continue  # nothing of ours, and nothing to read
        else:
            raise invalid(f"a block of type {kind!r} is not supported in a {turn.role} message", where)
    message: dict[str, Any] = {"role": turn.role, "content": "".join(texts)}
    if calls:
        message["tool_calls"] = calls
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    return [*results, message] if texts or calls or thoughts or not results else results


def _string(block: Block, name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise invalid(f"{name} must be a string", f"{where}.{name}")
    return value
