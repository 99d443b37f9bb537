"""`POST /v1/chat/completions`."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import JSONResponse, Response

from slipstream.serve.answers import Answer, Ask, Service, Step, collect, content_of
from slipstream.serve.depends import AskingClient, Served, check_model
from slipstream.serve.errors import ApiError, invalid
from slipstream.serve.openai_fields import (
    Fields,
    FunctionSpec,
    ResponseFormat,
    Sampling,
    Text,
    chat_logprobs,
    extension,
    usage_fields,
)
from slipstream.serve.output import Arguments, CallStart, Content, Delta, Reasoning
from slipstream.serve.prompts import text_of
from slipstream.serve.wire import CLIENT_LEFT, EventStream, dumps, event, quote, while_connected

router = APIRouter(tags=["OpenAI"])


class FunctionCall(Fields):
    name: Annotated[str, Field(min_length=1)]
    arguments: Text = ""


class ToolCall(Fields):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class Message(Fields):
    """content: a string, or text parts. What the assistant said comes back with the fields it had."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None

    def as_template(self, param: str) -> dict[str, Any]:
        message: dict[str, Any] = {"role": self.role, "content": text_of(self.content, f"{param}.content")}
        if self.role == "tool" and not self.tool_call_id:
            raise invalid("a tool message needs tool_call_id", f"{param}.tool_call_id")
        if self.tool_calls:
            message["tool_calls"] = [call.model_dump(exclude={"index"}) for call in self.tool_calls]
        for name in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(self, name)) is not None:
                message[name] = value
        return message


class FunctionTool(Fields):
    type: Literal["function"]
    function: FunctionSpec


class NamedFunction(Fields):
    name: str


class NamedChoice(Fields):
    type: Literal["function"]
    function: NamedFunction


class ChatRequest(Sampling):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = True
    response_format: ResponseFormat | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    # accepted, without effect here
    metadata: dict[str, str] | None = None
    store: bool | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    safety_identifier: str | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    modalities: list[Literal["text"]] | None = None
    prediction: dict[str, Any] | None = None
    # Slipstream's own
    chat_template_kwargs: dict[str, Any] | None = None

    def ask(self, service: Service) -> Ask:
        """Raises ApiError 400."""
        limits, tools = service.config.limits, [tool.function.tool() for tool in self.tools or ()]
        if len(self.messages) > limits.messages:
            raise invalid(f"at most {limits.messages} messages are allowed, got {len(self.messages)}", "messages")
        if len(tools) > limits.tools:
            raise invalid(f"at most {limits.tools} tools are allowed, got {len(tools)}", "tools")
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid("top_logprobs needs logprobs to be true", "top_logprobs")
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        template = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            template["reasoning_effort"] = self.reasoning_effort
        return Ask(
            params=self.params(service.config, service.llm.context, logprobs, self.max_completion_tokens),
            messages=[message.as_template(f"messages[{i}]") for i, message in enumerate(self.messages)],
            choices=self.choices(service.config),
            tools=tools,
            tool_choice=tool_choice(self.tool_choice, [tool.name for tool in tools]),
            parallel_calls=self.parallel_tool_calls is not False,
            schema=self.response_format.schema_or_none() if self.response_format else None,
            template=template,
            tier=self.service_tier,
            tier_fallback=self.service_tier_fallback,
        )


def tool_choice(choice: str | NamedChoice | None, names: list[str]) -> str:
    """auto, none, required or a name. Raises ApiError 400."""
    wanted = choice.function.name if isinstance(choice, NamedChoice) else choice or "auto"
    if isinstance(choice, NamedChoice) and wanted not in names:
        raise invalid(f"tool_choice names {wanted!r}, which is no tool of this request", "tool_choice")
    if wanted not in ("auto", "none") and not names:
        raise invalid("tool_choice needs tools", "tool_choice")
    return wanted


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatRequest, request: Request, service: Served, client: AskingClient) -> Response:
    """Answer a conversation."""
    check_model(service, body.model)
    answer = await service.start(body.ask(service), client)
    reply = ChatReply(answer, service, body)
    if body.stream:
        return EventStream(reply.stream(), answer.cancel, service.config.limits.request_s)
    whole = await while_connected(request, reply.whole())
    return Response(status_code=CLIENT_LEFT) if whole is None else JSONResponse(whole)


class ChatReply:
    """An answer in the JSON of chat completions."""

    def __init__(self, answer: Answer, service: Service, body: ChatRequest) -> None:
        self._answer, self._service, self._body = answer, service, body
        self._head = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": service.model,
            "service_tier": answer.served.name,
            "system_fingerprint": f"slipstream-{service.llm.backend.name}",
        }

    async def whole(self) -> dict[str, Any]:
        choices = []
        for i, (deltas, logprobs, outcome) in enumerate(await collect(self._answer)):
            choices.append(
                {
                    "index": i,
                    "message": message_of(deltas),
                    "logprobs": chat_logprobs(self._service.llm.tokenizer, logprobs) if self._body.logprobs else None,
                    "finish_reason": outcome.reason,
                }
            )
        usage = self._answer.usage()
        return self._head | {
            "choices": choices,
            "usage": usage_fields(usage),
            "slipstream": extension(self._answer, usage),
        }

    async def stream(self) -> AsyncIterator[bytes]:
        """An event a round, which may hold several tokens; then what finished; then the usage, where asked for."""
        wants_usage = bool(self._body.stream_options and self._body.stream_options.include_usage)
        head = dumps(self._head | {"object": "chat.completion.chunk"} | ({"usage": None} if wants_usage else {}))[:-1]
        begun: set[int] = set()
        held = dict.fromkeys(range(len(self._answer.jobs)), 0)
        try:
            async for steps in self._answer.steps():  # one write for each
                yield b"".join(part for step in steps for part in self._events(step, head, begun, held))
            if wants_usage:
                usage = self._answer.usage()
                last = {"choices": [], "usage": usage_fields(usage), "slipstream": extension(self._answer, usage)}
                yield event(self._head | {"object": "chat.completion.chunk"} | last)
            yield b"data: [DONE]\n\n"
        except ApiError as error:
            yield event(error.openai())

    def _events(self, step: Step, head: str, begun: set[int], held: dict[int, int]) -> Iterator[bytes]:
        """held: tokens of each choice that no event has told of yet, since their text was held back."""
        index = step.index
        held[index] += step.tokens
        logprobs = "null"
        if self._body.logprobs:
            logprobs = dumps(chat_logprobs(self._service.llm.tokenizer, step.logprobs))
        if index not in begun:
            begun.add(index)
            yield _chunk(head, index, '{"role":"assistant","content":""}')
        guessed = step.guessed
        deltas = step.deltas or ([Content("")] if self._body.logprobs and step.logprobs else [])
        for i, delta in enumerate(deltas):
            tokens = held[index] if i == len(deltas) - 1 else 0
            mine = min(guessed, len(delta.text)) if isinstance(delta, Content | Reasoning) else 0
            guessed -= mine
            own = (
                f'{{"tokens":{tokens},"drafted":{step.drafted},"accepted":{step.accepted},"guessed_characters":{mine}}}'
            )
            yield _chunk(head, index, _delta(delta), logprobs if i == 0 else "null", own=own)
        if deltas:
            held[index] = 0
        if step.outcome:
            own = dumps(extension(self._answer) | {"tokens": held[index]})
            yield _chunk(head, index, "{}", finish=f'"{step.outcome.reason}"', own=own)


def _chunk(head: str, index: int, delta: str, logprobs: str = "null", finish: str = "null", own: str = "") -> bytes:
    """One event, joined from JSON texts: the encoder is not run over what does not change."""
    own = f',"slipstream":{own}' if own else ""
    choice = f'{{"index":{index},"delta":{delta},"logprobs":{logprobs},"finish_reason":{finish}}}'
    return f'data: {head},"choices":[{choice}]{own}}}\n\n'.encode()


def _delta(delta: Delta) -> str:
    if isinstance(delta, Content):
        return f'{{"content":{quote(delta.text)}}}'
    if isinstance(delta, Reasoning):
        return f'{{"reasoning_content":{quote(delta.text)}}}'
    if isinstance(delta, CallStart):
        call = {
            "index": delta.index,
            "id": delta.id,
            "type": "function",
            "function": {"name": delta.name, "arguments": ""},
        }
        return dumps({"tool_calls": [call]})
    return dumps({"tool_calls": [{"index": delta.index, "function": {"arguments": delta.text}}]})


def message_of(deltas: list[Delta]) -> dict[str, Any]:
    """The assistant's message that `deltas` add up to."""
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        if isinstance(delta, CallStart):
            calls.append({"id": delta.id, "type": "function", "function": {"name": delta.name, "arguments": ""}})
        elif isinstance(delta, Arguments):
            calls[-1]["function"]["arguments"] += delta.text
    content = content_of(deltas)
    message: dict[str, Any] = {
        "role": "assistant",
        "content": content if content or not calls else None,
        "refusal": None,
    }
    if reasoning := "".join(delta.text for delta in deltas if isinstance(delta, Reasoning)):
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message
