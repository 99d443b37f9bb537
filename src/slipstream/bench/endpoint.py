"""One question to an OpenAI-compatible endpoint, and the answer as stamped chunks: what was said, when, at what count.

    Question -> `HttpEndpoint.ask` -> `stream_clock.exchange` -> `read_answer` -> Answer

`Endpoint` is the protocol; the in-process engine is another one (`endpoint_engine`). What an answer's stamps mean in
tok/s is `endpoint_figures`' business; nothing here computes a rate. Chunks and usage as in OpenAI's API reference for
`chat.completions`, with the fields other servers add: `reasoning_content` or `reasoning`, running usage (vLLM),
`timings` (llama.cpp), `slipstream`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any, Literal, Protocol

from slipstream.bench.stream_clock import EndpointError, Exchange, events, exchange

Stops = Literal["natural", "forced"]


@dataclass(frozen=True)
class Question:
    """What is asked of every endpoint alike. natural: the model stops where it will; forced: at max_tokens exactly."""

    id: str
    messages: Sequence[Mapping[str, str]]
    max_tokens: int
    stops: Stops = "natural"
    seed: int = 0
    temperature: float = 0.0


@dataclass(frozen=True)
class Usage:
    """Token counts as the server gives them; None where it says nothing."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    total_tokens: int | None = None
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


@dataclass(frozen=True)
class Speculation:
    """A server's own counts: a round commits one token more than it accepts."""

    rounds: int
    drafted: int | None
    accepted: int

    @property
    def tokens_per_round(self) -> float | None:
        """Acceptance length."""
        return (self.rounds + self.accepted) / self.rounds if self.rounds else None


@dataclass(frozen=True)
class TokenChunk:
    """A chunk that carries at least one token, at_s after the request was sent.

    tool: names and arguments of tool calls, as they came. tokens: how many it carries, where the server says.
    """

    at_s: float
    content: str = ""
    reasoning: str = ""
    tool: str = ""
    tokens: int | None = None


@dataclass(frozen=True)
class Answer:
    """One answer. tier: the one the server says it served. usd: its bill, where it sends one.

    connect_s is not part of any other time. reads: how many reads of the socket brought the body.
    """

    chunks: Sequence[TokenChunk]
    usage: Usage | None = None
    finish_reason: str | None = None
    tier: str | None = None
    speculation: Speculation | None = None
    usd: float | None = None
    connect_s: float = 0.0
    reads: int = 0


@dataclass(frozen=True)
class Counters:
    """Totals of a server since its start, from its metrics: rounds and tokens of everyone it served."""

    rounds: float | None = None
    accepted: float | None = None
    cached_tokens: float | None = None

    def since(self, before: Counters) -> Counters:
        pairs = zip(astuple(self), astuple(before), strict=True)
        return Counters(*(None if now is None or then is None else now - then for now, then in pairs))

    @property
    def tokens_per_round(self) -> float | None:
        return 1 + self.accepted / self.rounds if self.rounds and self.accepted is not None else None


class Tokenizer(Protocol):
    """What is asked of a tokenizer: `slipstream.models.tokenizer.Tokenizer` has it."""

    def encode(self, text: str) -> list[int]: ...

    def token_bytes(self, id: int) -> bytes: ...


class Endpoint(Protocol):
    """Whatever answers questions in chunks.

    name: for tables. server: what may share a cache with others of the same. tier: the one asked for. tokenizer: the
    model's, where there is one to check counts with. count_locally: with it, where the server sends no usage.
    parameters: of the model, where they are known.
    """

    name: str
    server: str
    tier: str | None
    tokenizer: Tokenizer | None
    count_locally: bool
    parameters: int | None

    def ask(self, question: Question) -> Answer:
        """Raises EndpointError where no whole answer comes."""

    def counters(self) -> Counters:
        """Empty where the endpoint shows none."""


@dataclass
class HttpEndpoint:
    """An OpenAI-compatible server. url: with or without /v1. body: more fields of the request; null removes one.

    model: None takes the first that the server lists. The key is never written anywhere.
    """

    url: str
    model: str | None = None
    key: str | None = field(default=None, repr=False)
    tier: str | None = None
    body: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = 120.0
    name: str = ""
    tokenizer: Tokenizer | None = field(default=None, repr=False)
    count_locally: bool = False
    parameters: int | None = None

    def __post_init__(self) -> None:
        self.url = self.url.rstrip("/")
        if re.fullmatch(r"https?://[^/]+", self.url):
            self.url += "/v1"
        self.model = self.model or self._first_model()
        self.server = self.url
        self.name = self.name or f"{self.model} at {re.sub(r'^https?://(?:[^/@]*@)?', '', self.url)}"

    def ask(self, question: Question) -> Answer:
        body = json.dumps(self._body(question)).encode()
        done = exchange(
            f"{self.url}/chat/completions", body, self._headers(), timeout_s=self.timeout_s, end=b"data: [DONE]"
        )
        self._check(done, "text/event-stream")
        return read_answer(events(done.reads), done.sent_ns, connect_s=done.connect_s, reads=len(done.reads))

    def counters(self) -> Counters:
        try:
            done = exchange(re.sub(r"/v1$", "", self.url) + "/metrics", headers=self._headers(), timeout_s=5)
        except EndpointError:
            return Counters()  # metrics are an extra that most endpoints keep to themselves
        return read_counters(done.body.decode("utf-8", "replace")) if done.status == 200 else Counters()

    def _body(self, question: Question) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": list(question.messages),
            "max_tokens": question.max_tokens,
            "temperature": question.temperature,
            "seed": question.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if question.stops == "forced":
            body |= {"ignore_eos": True, "min_tokens": question.max_tokens}
        if self.tier is not None:
            body["service_tier"] = self.tier
        return {name: value for name, value in (body | dict(self.body)).items() if value is not None}

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    def _first_model(self) -> str:
        done = exchange(f"{self.url}/models", headers=self._headers(), timeout_s=self.timeout_s)
        self._check(done, "json")
        try:
            return str(json.loads(done.body)["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            raise EndpointError(f"{self.url} lists no models; name one with --model") from None

    def _check(self, done: Exchange, kind: str) -> None:
        if done.status != 200:
            raise EndpointError(f"{self.url} answered {done.status}: {_error_text(done.body)}")
        if kind not in done.headers.get("content-type", ""):
            raise EndpointError(f"{self.url} answered {done.headers.get('content-type', 'untyped data')}, not {kind}")


def read_answer(
    stream: Iterable[tuple[int, str]], sent_ns: int = 0, *, connect_s: float = 0.0, reads: int = 0
) -> Answer:
    """The answer in a stream of (stamp, data). Raises EndpointError for an error or what is no chunk in the stream."""
    chunks: list[TokenChunk] = []
    usage, finish, tier, speculation, usd, counted = None, None, None, None, None, 0
    for at_ns, data in stream:
        if data.strip() == "[DONE]":
            break
        try:
            chunk = json.loads(data)
            if chunk.get("error"):
                raise EndpointError(f"the stream broke off with an error: {_error_text(data.encode())}")
            said = _usage(chunk.get("usage"))
            usage = said or usage
            usd = (chunk.get("usage") or {}).get("cost", usd)
            tier = chunk.get("service_tier") or tier
            speculation = _speculation(chunk) or speculation
            for choice in chunk.get("choices") or []:
                if choice.get("index", 0) != 0:
                    continue
                finish = choice.get("finish_reason") or finish
                content, reasoning, tool = _texts(choice)
                if content or reasoning or tool:
                    tokens, counted = _count(chunk, choice, said, counted)
                    chunks.append(TokenChunk((at_ns - sent_ns) / 1e9, content, reasoning, tool, tokens))
        except (ValueError, AttributeError, TypeError, LookupError):
            raise EndpointError(f"the stream holds what is no chunk of an answer: {data[:100]!r}") from None
    return Answer(chunks, usage, finish, tier, speculation, usd, connect_s, reads)


def _texts(choice: Mapping[str, Any]) -> tuple[str, str, str]:
    """(content, reasoning, tool) of a choice: all empty in a role-only or finish chunk."""
    delta = choice.get("delta") or {}
    calls = [call.get("function") or {} for call in delta.get("tool_calls") or []]
    return (
        delta.get("content") or delta.get("refusal") or choice.get("text") or "",
        delta.get("reasoning_content") or delta.get("reasoning") or "",
        "".join((call.get("name") or "") + (call.get("arguments") or "") for call in calls),
    )


def _count(
    chunk: Mapping[str, Any], choice: Mapping[str, Any], usage: Usage | None, counted: int
) -> tuple[int | None, int]:
    """Tokens of a chunk where the server says: its own field, running usage, or logprobs; and the running count."""
    own = (chunk.get("slipstream") or {}).get("tokens")
    if isinstance(own, int):
        return own, counted + own
    if usage is not None and usage.completion_tokens is not None:
        return usage.completion_tokens - counted, usage.completion_tokens
    listed = (choice.get("logprobs") or {}).get("content")
    return (len(listed), counted + len(listed)) if listed else (None, counted)


def _usage(fields: Mapping[str, Any] | None) -> Usage | None:
    if not fields:
        return None
    return Usage(
        prompt_tokens=fields.get("prompt_tokens"),
        completion_tokens=fields.get("completion_tokens"),
        total_tokens=fields.get("total_tokens"),
        cached_tokens=(fields.get("prompt_tokens_details") or {}).get("cached_tokens"),
        reasoning_tokens=(fields.get("completion_tokens_details") or {}).get("reasoning_tokens"),
    )


def _speculation(chunk: Mapping[str, Any]) -> Speculation | None:
    own = chunk.get("slipstream") or {}
    if "rounds" in own:
        return Speculation(own["rounds"], own.get("drafted"), own.get("accepted", 0))
    timings = chunk.get("timings") or {}
    if "draft_n_accepted" in timings:
        accepted = timings["draft_n_accepted"]
        return Speculation(timings["predicted_n"] - accepted, timings.get("draft_n"), accepted)
    return None


def _error_text(body: bytes) -> str:
    """What an error says, in one line."""
    text = body.decode("utf-8", "replace")
    try:
        found = json.loads(text)
        found = found.get("error", found)
        text = found if isinstance(found, str) else found.get("message") or found.get("detail") or text
    except (ValueError, AttributeError):
        pass  # not JSON: the text itself is the message
    return " ".join(str(text).split())[:300] or "nothing"


COUNTERS = {
    "rounds": ("slipstream_rounds_total", "vllm:spec_decode_num_drafts_total"),
    "accepted": ("slipstream_accepted_tokens_total", "vllm:spec_decode_num_accepted_tokens_total"),
    "cached_tokens": ("slipstream_cached_tokens_total", "vllm:prefix_cache_hits_total", "sglang:cached_tokens_total"),
}


def read_counters(text: str) -> Counters:
    """Totals from metrics in Prometheus' text format, summed over labels."""
    sums: dict[str, float] = {}
    for name, value in re.findall(r"^([\w:]+)(?:\{.*\})? ([0-9.eE+-]+)", text, re.M):
        sums[name] = sums.get(name, 0.0) + float(value)
    return Counters(**{key: next((sums[n] for n in names if n in sums), None) for key, names in COUNTERS.items()})
