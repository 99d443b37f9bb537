"""The fields of OpenAI's text APIs that requests share: which are taken, and what becomes of them.

A field that is not listed is refused by name. Fields that change nothing about the text here, and that the official API
takes as well, are accepted and have no effect.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from slipstream.engine.request import SamplingParams, TokenLogprob
from slipstream.errors import RequestError
from slipstream.models.tokenizer import Tokenizer
from slipstream.serve.answers import Answer, Usage
from slipstream.serve.config import Config
from slipstream.serve.errors import invalid
from slipstream.serve.prompts import Tool

Text = Annotated[str, Field(max_length=16_000_000)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
MAX_TOP_P_OFF = 1e-9


class Fields(BaseModel):
    """Refuses what it does not know."""

    model_config = ConfigDict(extra="forbid")


class StreamOptions(Fields):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Sampling(Fields):
    """What /v1/chat/completions and /v1/completions have in common."""

    model: str
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = 1
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    frequency_penalty: Penalty | None = 0.0
    presence_penalty: Penalty | None = 0.0
    logit_bias: dict[str, Bias] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: Annotated[str, Field(max_length=1000)] | list[Annotated[str, Field(max_length=1000)]] | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    service_tier: str | None = None
    user: str | None = None
    # Slipstream's own
    service_tier_fallback: bool = False
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, lt=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    min_tokens: Annotated[int, Field(ge=0)] | None = None

    def params(self, config: Config, context: int, logprobs: int | None, longest: int | None = None) -> SamplingParams:
        """Raises ApiError 400 where values do not fit the settings or each other."""
        return sampling_params(
            config, context,
            temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, min_p=self.min_p, seed=self.seed,
            stop=self.stop, max_tokens=longest or self.max_tokens, logprobs=logprobs, logit_bias=self.logit_bias,
            frequency_penalty=self.frequency_penalty, presence_penalty=self.presence_penalty,
            repetition_penalty=self.repetition_penalty, stop_token_ids=self.stop_token_ids, ignore_eos=self.ignore_eos,
        )  # fmt: skip

    def choices(self, config: Config) -> int:
        if self.min_tokens and not self.ignore_eos:
            raise invalid("min_tokens needs ignore_eos here", "min_tokens", "unsupported_parameter")
        n = self.n or 1
        if n > config.limits.choices:
            raise invalid(f"n may be at most {config.limits.choices} here, got {n}", "n")
        return n


def sampling_params(config: Config, context: int, **given: Any) -> SamplingParams:
    """Checked parameters, None meaning the API's default. Raises ApiError 400."""
    limits = config.limits
    longest = given.pop("max_tokens") or limits.max_tokens or context
    if limits.max_tokens is not None and longest > limits.max_tokens:
        raise invalid(f"at most {limits.max_tokens} tokens may be asked for here, got {longest}", "max_tokens")
    stop = given.pop("stop", None)
    stops = [stop] if isinstance(stop, str) else list(stop or ())
    if len(stops) > limits.stops:
        raise invalid(f"at most {limits.stops} stop sequences are allowed, got {len(stops)}", "stop")
    if not all(stops):
        raise invalid("a stop sequence is empty", "stop")
    temperature = given.pop("temperature", None)
    top_p = given.pop("top_p", None)
    seed = given.pop("seed", None)
    bias = given.pop("logit_bias", None)
    values = {name: value for name, value in given.items() if value is not None}
    try:
        return SamplingParams(
            max_tokens=min(longest, context),
            temperature=_cool(config.temperature if temperature is None else temperature),
            top_p=1.0 if top_p is None else max(top_p, MAX_TOP_P_OFF),
            seed=None if seed is None else seed % 2**64,
            stop=tuple(stops),
            logit_bias=token_bias(bias) if bias else {},
            **values,
        )
    except RequestError as error:
        raise invalid(str(error), str(error).split()[0]) from error


def _cool(temperature: float) -> float:
    return 0.0 if temperature < 1e-6 else temperature


def token_bias(bias: Mapping[str, float]) -> dict[int, float]:
    """Token ids to biases; -100 bans, as it does in the official API. Raises ApiError 400 for a key that is no id."""
    try:
        ids = {int(key): value for key, value in bias.items()}
    except ValueError:
        raise invalid("logit_bias maps token ids, as strings, to numbers", "logit_bias") from None
    if min(ids) < 0:
        raise invalid("logit_bias names a negative token id", "logit_bias")
    return {token: -math.inf if value <= -100 else value for token, value in ids.items()}


class FunctionSpec(Fields):
    name: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[\w.-]+$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def tool(self) -> Tool:
        schema = self.parameters or {"type": "object", "properties": {}}
        return Tool(self.name, self.description or "", schema, bool(self.strict))


class JsonSchema(Fields):
    name: Annotated[str, Field(min_length=1, max_length=128)]
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Fields):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def schema_or_none(self) -> dict[str, Any] | None:
        """The schema of a JSON answer; {} is any object; None is plain text."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return {}
        if self.json_schema is None:
            raise invalid("response_format json_schema needs `json_schema`", "response_format.json_schema")
        return self.json_schema.schema_ or {}


def usage_fields(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
        "cost": usage.cost_usd,
    }


def extension(answer: Answer, usage: Usage | None = None) -> dict[str, Any]:
    """The `slipstream` field: counts over the whole answer."""
    usage = usage or answer.usage()
    return {
        "rounds": usage.rounds,
        "drafted": usage.drafted,
        "accepted": usage.accepted,
        "tokens_per_s": usage.tokens_per_s,
        "ttft_s": usage.ttft_s,
        "queue_s": usage.queue_s,
        "seed": answer.jobs[0].request.params.seed,
    }


def chat_logprobs(tokenizer: Tokenizer, found: list[TokenLogprob]) -> dict[str, Any]:
    def one(token: int, logprob: float) -> dict[str, Any]:
        raw = tokenizer.token_bytes(token)
        return {"token": raw.decode("utf-8", "replace"), "logprob": max(logprob, -9999.0), "bytes": list(raw)}

    content = [
        one(t.token_id, t.logprob) | {"top_logprobs": [one(*alternative) for alternative in t.top]} for t in found
    ]
    return {"content": content, "refusal": None}
