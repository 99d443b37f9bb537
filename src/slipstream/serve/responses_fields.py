"""The fields of OpenAI's Responses API, and the same request as a chat."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from slipstream.serve.answers import Ask, Service
from slipstream.serve.errors import invalid
from slipstream.serve.openai_fields import Fields, StreamOptions, Text, sampling_params
from slipstream.serve.prompts import Tool, text_of

Item = dict[str, Any]


class FunctionTool(Fields):
    type: Literal["function"]
    name: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[\w.-]+$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def tool(self) -> Tool:
        schema = self.parameters or {"type": "object", "properties": {}}
        return Tool(self.name, self.description or "", schema, bool(self.strict))


class NamedChoice(Fields):
    type: Literal["function"]
    name: str


class Format(Fields):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextConfig(Fields):
    format: Format | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(Fields):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesRequest(Fields):
    model: str
    input: Text | list[Item]
    instructions: Text | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    previous_response_id: str | None = None
    store: bool | None = True
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    include: list[str] | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = True
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["auto", "disabled"] | None = None
    service_tier: str | None = None
    background: Literal[False] | None = None
    # accepted, without effect here
    metadata: dict[str, str] | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    safety_identifier: str | None = None
    # Slipstream's own
    service_tier_fallback: bool = False
    seed: Annotated[int, Field(ge=0, lt=2**64)] | None = None

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or ())

    def items(self) -> list[Item]:
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": self.input}]
        return self.input

    def ask(self, service: Service, earlier: list[Item]) -> Ask:
        """earlier: the items that the previous response continued, and its own. Raises ApiError 400."""
        limits = service.config.limits
        tools = [tool.tool() for tool in self.tools or ()]
        if len(tools) > limits.tools:
            raise invalid(f"at most {limits.tools} tools are allowed, got {len(tools)}", "tools")
        items = [*earlier, *self.items()]
        if len(items) > limits.messages:
            raise invalid(f"at most {limits.messages} items are allowed, got {len(items)}", "input")
        turns = [{"role": "system", "content": self.instructions}] if self.instructions else []
        turns += messages_of(items, len(earlier))
        if not turns:
            raise invalid("there is no input to answer", "input")
        format = self.text.format if self.text else None
        schema = None
        if format is not None and format.type != "text":
            schema = (format.schema_ or {}) if format.type == "json_schema" else {}
        template = {"reasoning_effort": self.reasoning.effort} if self.reasoning and self.reasoning.effort else {}
        return Ask(
            params=sampling_params(
                service.config, service.llm.context,
                temperature=self.temperature, top_p=self.top_p, seed=self.seed, max_tokens=self.max_output_tokens,
                logprobs=(self.top_logprobs or 0) if self.wants_logprobs else None,
            ),
            messages=turns,
            tools=tools,
            tool_choice=self._choice([tool.name for tool in tools]),
            parallel_calls=self.parallel_tool_calls is not False,
            schema=schema,
            schema_param="text.format.schema",
            template=template,
            tier=self.service_tier,
            tier_fallback=self.service_tier_fallback,
        )  # fmt: skip

    def _choice(self, names: list[str]) -> str:
        choice = self.tool_choice
        wanted = choice.name if isinstance(choice, NamedChoice) else choice or "auto"
        if isinstance(choice, NamedChoice) and wanted not in names:
            raise invalid(f"tool_choice names {wanted!r}, which is no tool of this request", "tool_choice")
        if wanted not in ("auto", "none") and not names:
            raise invalid("tool_choice needs tools", "tool_choice")
        return wanted


def messages_of(items: list[Item], offset: int = 0) -> list[dict[str, Any]]:
    """Input items as chat messages. offset: how many of them are not of this request. Raises ApiError 400."""
    turns: list[dict[str, Any]] = []
    for i, item in enumerate(items):
        where = f"input[{i - offset}]"
        kind = item.get("type", "message")
        if kind == "message":
            role, content = item.get("role"), item.get("content")
            if role not in ("user", "assistant", "system", "developer"):
                raise invalid(f"no role {role!r}; there are user, assistant, system and developer", f"{where}.role")
            if not isinstance(content, str | list):
                raise invalid("content must be text or a list of parts", f"{where}.content")
            turns.append({"role": role, "content": text_of(content, f"{where}.content")})
        elif kind == "function_call":
            function = {"name": _string(item, "name", where), "arguments": _string(item, "arguments", where)}
            call = {"id": _string(item, "call_id", where), "type": "function", "function": function}
            if turns and turns[-1]["role"] == "assistant":
                turns[-1].setdefault("tool_calls", []).append(call)
            else:
                turns.append({"role": "assistant", "content": "", "tool_calls": [call]})
        elif kind == "function_call_output":
            output = item.get("output")
            if not isinstance(output, str | list):
                raise invalid("output must be text or a list of parts", f"{where}.output")
            called = _string(item, "call_id", where)
            turns.append({"role": "tool", "tool_call_id": called, "content": text_of(output, f"{where}.output")})
        elif kind != "reasoning":  # thoughts of earlier turns are left out, as templates do
            raise invalid(f"items of type {kind!r} are not supported here", f"{where}.type")
    return turns


def _string(item: Item, name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise invalid(f"{name} must be a string", f"{where}.{name}")
    return value
