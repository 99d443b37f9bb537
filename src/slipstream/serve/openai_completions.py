"""`POST /v1/completions`: continue text or tokens as they are."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import JSONResponse, Response

from slipstream.engine.request import TokenLogprob
from slipstream.models.tokenizer import Tokenizer
from slipstream.serve.answers import Answer, Ask, Service, Step, Usage, collect, content_of
from slipstream.serve.auth import Client
from slipstream.serve.depends import AskingClient, Served, check_model
from slipstream.serve.errors import ApiError, invalid
from slipstream.serve.openai_fields import Sampling, Text, extension, usage_fields
from slipstream.serve.wire import CLIENT_LEFT, EventStream, event, while_connected

router = APIRouter(tags=["OpenAI"])
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class CompletionRequest(Sampling):
    prompt: Text | list[Text] | list[TokenId] | list[list[TokenId]]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = False
    best_of: Annotated[int, Field(ge=1)] | None = None
    suffix: str | None = None

    def prompts(self) -> list[str | list[int]]:
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if prompt and isinstance(prompt[0], int):
            return [[t for t in prompt if isinstance(t, int)]]
        return [p for p in prompt if not isinstance(p, int)]

    def asks(self, service: Service) -> list[Ask]:
        """One a prompt. Raises ApiError 400."""
        if self.suffix is not None:
            raise invalid("suffix is not supported", "suffix", "unsupported_parameter")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise invalid("best_of is not supported beyond n", "best_of", "unsupported_parameter")
        prompts, choices = self.prompts(), self.choices(service.config)
        if not 1 <= len(prompts) * choices <= service.config.limits.choices:
            raise invalid(f"a request may ask for 1 to {service.config.limits.choices} texts", "prompt")
        longest = self.max_tokens or 16  # the official default
        params = self.params(service.config, service.llm.context, self.logprobs, longest)
        return [
            Ask(
                params=params,
                prompt=prompt,
                choices=choices,
                tier=self.service_tier,
                tier_fallback=self.service_tier_fallback,
            )
            for prompt in prompts
        ]


@router.post("/v1/completions")
async def completions(body: CompletionRequest, request: Request, service: Served, client: AskingClient) -> Response:
    """Continue prompts."""
    check_model(service, body.model)
    reply = await TextReply.start(body.asks(service), service, client, body)
    if body.stream:
        return EventStream(reply.stream(), reply.cancel, service.config.limits.request_s)
    whole = await while_connected(request, reply.whole())
    return Response(status_code=CLIENT_LEFT) if whole is None else JSONResponse(whole)


class TextReply:
    """Answers, one a prompt and served in order, in the JSON of text completions."""

    def __init__(self, answers: list[Answer], asks: list[Ask], service: Service, body: CompletionRequest) -> None:
        self._answers, self._asks, self._service, self._body = answers, asks, service, body
        self._head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.model,
            "service_tier": answers[0].served.name,
            "system_fingerprint": f"slipstream-{service.llm.backend.name}",
        }

    @classmethod
    async def start(cls, asks: list[Ask], service: Service, client: Client, body: CompletionRequest) -> TextReply:
        answers: list[Answer] = []
        try:
            for ask in asks:
                answers.append(await service.start(ask, client))
        except BaseException:
            for answer in answers:
                answer.cancel()
            raise
        return cls(answers, asks, service, body)

    def cancel(self) -> None:
        for answer in self._answers:
            answer.cancel()

    async def whole(self) -> dict[str, Any]:
        choices: list[dict[str, Any]] = []
        try:
            for answer, ask in zip(self._answers, self._asks, strict=True):
                for deltas, logprobs, outcome in await collect(answer):
                    text = self._echo(ask) + content_of(deltas)
                    choices.append(
                        {
                            "index": len(choices),
                            "text": text,
                            "logprobs": self._logprobs(logprobs),
                            "finish_reason": outcome.reason,
                        }
                    )
        finally:
            self.cancel()
        return self._head | {"choices": choices, "usage": self._usage(), "slipstream": extension(self._answers[0])}

    async def stream(self) -> AsyncIterator[bytes]:
        wants_usage = bool(self._body.stream_options and self._body.stream_options.include_usage)
        first = 0
        try:
            for answer, ask in zip(self._answers, self._asks, strict=True):
                echo = dict.fromkeys(range(len(answer.jobs)), self._echo(ask))
                async for steps in answer.steps():
                    yield b"".join(part for step in steps for part in self._events(step, answer, first, echo))
                first += len(answer.jobs)
            if wants_usage:
                yield event(self._head | {"choices": [], "usage": self._usage()})
            yield b"data: [DONE]\n\n"
        except ApiError as error:
            yield event(error.openai())
        finally:
            self.cancel()

    def _events(self, step: Step, answer: Answer, first: int, echo: dict[int, str]) -> Iterator[bytes]:
        """first: the number of the answer's first choice. echo: what choices begin with that no event told yet."""
        text = echo.pop(step.index, "") + content_of(step.deltas)
        choice = {"index": first + step.index, "text": text, "logprobs": self._logprobs(step.logprobs)}
        if text or step.logprobs:
            own = {"tokens": step.tokens, "drafted": step.drafted, "accepted": step.accepted}
            yield event(self._head | {"choices": [choice | {"finish_reason": None}], "slipstream": own})
        if step.outcome:
            end = {"text": "", "logprobs": None, "finish_reason": step.outcome.reason}
            yield event(self._head | {"choices": [choice | end], "slipstream": extension(answer)})

    def _echo(self, ask: Ask) -> str:
        if not self._body.echo or ask.prompt is None:
            return ""
        return ask.prompt if isinstance(ask.prompt, str) else self._service.llm.tokenizer.decode(ask.prompt)

    def _logprobs(self, found: list[TokenLogprob]) -> dict[str, Any] | None:
        return text_logprobs(self._service.llm.tokenizer, found) if self._body.logprobs is not None else None

    def _usage(self) -> dict[str, Any]:
        parts = [answer.usage() for answer in self._answers]
        first = parts[0]
        names = ("prompt_tokens", "cached_tokens", "completion_tokens", "reasoning_tokens", "cost_usd")
        sums = {name: sum(getattr(part, name) for part in parts) for name in names}
        return usage_fields(Usage(**({f: getattr(first, f) for f in first.__dataclass_fields__} | sums)))


def text_logprobs(tokenizer: Tokenizer, found: list[TokenLogprob]) -> dict[str, Any]:
    def text(token: int) -> str:
        return tokenizer.token_bytes(token).decode("utf-8", "replace")

    offsets, at = [], 0
    for t in found:
        offsets.append(at)
        at += len(text(t.token_id))
    return {
        "tokens": [text(t.token_id) for t in found],
        "token_logprobs": [max(t.logprob, -9999.0) for t in found],
        "top_logprobs": [{text(token): max(value, -9999.0) for token, value in t.top} for t in found],
        "text_offset": offsets,
    }
