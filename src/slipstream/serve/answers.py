"""One request of any API as it passes through the server: asked, queued, streamed as steps, counted, priced.

The APIs make an `Ask` and read an `Answer`, an asynchronous stream of `Step`s; they know nothing of the scheduler, and
this file nothing of their JSON.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from slipstream.engine.engine import LLM
from slipstream.engine.request import Chunk, Completion, Piece, SamplingParams, TokenLogprob
from slipstream.engine.sampling import LogitMask
from slipstream.engine.session import Request
from slipstream.errors import RequestError
from slipstream.serve import trace
from slipstream.serve.auth import Client
from slipstream.serve.config import Config
from slipstream.serve.errors import ApiError, invalid
from slipstream.serve.grammar import Grammar, GrammarCompiler, check_schema, json_rule
from slipstream.serve.metrics import Metrics
from slipstream.serve.output import Content, Delta, OutputParser, Reasoning, Style, detect_style, merged
from slipstream.serve.prompts import Tool, chat_prompt, strict_grammar, tool_grammar
from slipstream.serve.scheduler import Ended, Job, Scheduler
from slipstream.serve.sessions import SessionPool
from slipstream.serve.tiers import Served, choose_tier, cost_usd

SEED_LIMIT = 2**64


@dataclass
class Ask:
    """What a client wants. prompt: text or tokens to continue, instead of messages.

    prefill: what the answer starts with, as part of the prompt. tool_choice: auto, none, required, or a function's
    name. schema: of a JSON answer; {} is any object.
    """

    params: SamplingParams
    messages: Sequence[Mapping[str, Any]] = ()
    prompt: str | Sequence[int] | None = None
    prefill: str = ""
    choices: int = 1
    tools: Sequence[Tool] = ()
    tool_choice: str = "auto"
    parallel_calls: bool = True
    schema: Mapping[str, Any] | None = None
    schema_param: str = "response_format"
    template: Mapping[str, Any] = field(default_factory=dict)
    tier: str | None = None
    tier_fallback: bool = False


@dataclass(frozen=True)
class Outcome:
    """How a choice ended. stop_sequence: the stop string that did it, if one did."""

    reason: Literal["stop", "length", "tool_calls"]
    stop_sequence: str | None


@dataclass(slots=True)
class Step:
    """What one round adds to choice `index`: whole deltas, and the tokens they and held-back text took.

    guessed: how many characters of the deltas' text, from the first on, accepted drafts wrote.
    """

    index: int
    deltas: list[Delta]
    tokens: int
    drafted: int
    accepted: int
    logprobs: list[TokenLogprob]
    outcome: Outcome | None = None
    guessed: int = 0


@dataclass
class Counts:
    """Of one choice, up to where its client's answer ends."""

    tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True)
class Usage:
    """Exact counts over all choices; the prompt counts once."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    cost_usd: float
    rounds: int
    drafted: int
    accepted: int
    tokens_per_s: float
    ttft_s: float
    queue_s: float


class Mailbox:
    """From the device thread to one reader on the event loop: `put` what is new, `wake` the reader when it is time."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._items: deque[tuple[int, Chunk | Ended]] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: tuple[int, Chunk | Ended]) -> None:
        self._items.append(item)

    def wake(self) -> None:
        with suppress(RuntimeError):  # the loop is closed, so nobody listens
            self._loop.call_soon_threadsafe(self._woken)

    def _woken(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[tuple[int, Chunk | Ended]]:
        """All there is, once there is something."""
        while not self._items:
            self._waiter = self._loop.create_future()
            await self._waiter
        return [self._items.popleft() for _ in range(len(self._items))]


class Answer:
    """The stream of a request. Iterate once; `cancel` frees the machine, whenever it is called."""

    def __init__(
        self,
        service: Service,
        served: Served,
        requests: list[Request],
        parsers: list[OutputParser],
        grammars: list[Grammar | None],
        client: Client,
    ) -> None:
        self.served, self._service, self._client = served, service, client
        self._traceparent = trace.parent.get()
        self._mail = Mailbox()
        self._parsers = parsers
        self._reasoning = 0
        self._told = [Counts() for _ in requests]
        self._cut: set[int] = set()  # choices that ended before their streams
        self.jobs: list[Job] = []
        for i, (request, grammar) in enumerate(zip(requests, grammars, strict=True)):
            self.jobs.append(
                Job(
                    served, request, self._teller(i), self._mail.wake, grammar, client.name,
                    after=self.jobs[0] if i else None, deadline_s=service.config.limits.request_s,
                )
            )  # fmt: skip

    def _teller(self, index: int) -> Any:
        mail, most = self._mail, self._service.config.limits.unread

        def tell(item: Chunk | Ended) -> None:
            if len(mail) > most and self.jobs[index].error is None:  # what nobody reads is not piled up
                self.jobs[index].error = ApiError(
                    408, f"the answer is {most} rounds ahead of its reader; read faster", code="slow_reader"
                )
            mail.put((index, item))

        return tell

    def cancel(self) -> None:
        for job in self.jobs:
            if not job.ended:
                self._service.scheduler.cancel(job)

    async def steps(self) -> AsyncIterator[list[Step]]:
        """The steps of each delivery. Raises ApiError where a choice fails. Leaving the loop early cancels."""
        left = len(self.jobs)
        error = None
        try:
            while left and error is None:
                steps = []
                for index, item in await self._mail.take():
                    if isinstance(item, Ended):
                        left -= 1
                        error = error or (item.error if index not in self._cut else None)
                    elif index not in self._cut:
                        steps.append(self._step(index, item))
                if steps:
                    yield steps
            if error is not None:
                raise error
        finally:
            self.cancel()
            self._bill()

    def _step(self, index: int, chunk: Chunk) -> Step:
        parser, told = self._parsers[index], self._told[index]
        deltas: list[Delta] = []
        taken: list[Piece] = []
        guessed, leading = 0, True
        for piece in chunk.pieces:
            self._reasoning += parser.reasoning
            new = parser.push(piece.text)
            deltas += new
            taken.append(piece)
            leading = leading and piece.drafted
            if leading:
                guessed += sum(len(delta.text) for delta in new if isinstance(delta, Content | Reasoning))
            if parser.full:
                break
        told.tokens += len(taken)
        told.rounds, told.drafted, told.accepted = (
            told.rounds + 1, told.drafted + chunk.drafted, told.accepted + chunk.accepted,
        )  # fmt: skip
        outcome = None
        if parser.full:  # the one call allowed is made; what the model would say next is neither told nor billed
            self._cut.add(index)
            self._service.scheduler.finish(self.jobs[index])
            outcome = Outcome("tool_calls", None)
        elif chunk.completion:
            deltas += parser.finish()
            outcome = self._outcome(parser, chunk.completion)
        logprobs = [piece.logprob for piece in taken if piece.logprob is not None]
        return Step(index, merged(deltas), len(taken), chunk.drafted, chunk.accepted, logprobs, outcome, guessed)

    def _outcome(self, parser: OutputParser, completion: Completion) -> Outcome:
        llm = self._service.llm
        if parser.calls and completion.finish_reason == "stop":
            return Outcome("tool_calls", None)
        stops = self.jobs[0].request.params.stop
        stop = None
        if completion.finish_reason == "stop" and stops:
            rest = llm.tokenizer.decode(completion.token_ids)[len(completion.text) :]
            stop = next((s for s in sorted(stops, key=len, reverse=True) if rest.startswith(s)), None)
        return Outcome(completion.finish_reason, stop)

    def usage(self) -> Usage:
        """True at any time, for what was produced so far."""
        first = self.jobs[0]
        counts = [self._told[i] if i in self._cut else job for i, job in enumerate(self.jobs)]
        prompt, tokens = len(first.request.tokens), sum(count.tokens for count in counts)
        return Usage(
            prompt_tokens=prompt,
            cached_tokens=first.cached_tokens,
            completion_tokens=tokens,
            reasoning_tokens=min(self._reasoning, tokens),
            cost_usd=cost_usd(self._service.config, self.served.tier, prompt, first.cached_tokens, tokens),
            rounds=sum(count.rounds for count in counts),
            drafted=sum(count.drafted for count in counts),
            accepted=sum(count.accepted for count in counts),
            tokens_per_s=round(first.tokens_per_s, 2),
            ttft_s=round(first.ttft_s, 6),
            queue_s=round(first.queue_s, 6),
        )

    def _bill(self) -> None:
        usage = self.usage()
        self._client.spend_tokens(usage.prompt_tokens + usage.completion_tokens)
        self._service.metrics.cost_usd.labels(self.served.name).inc(usage.cost_usd)
        trace.record(self, self._service.model, self._traceparent)


class Service:
    """The engine with everything that serves it; one a process."""

    def __init__(self, llm: LLM, config: Config, pool: SessionPool, scheduler: Scheduler, metrics: Metrics) -> None:
        self.llm, self.config, self.pool, self.scheduler, self.metrics = llm, config, pool, scheduler, metrics
        self.style: Style = detect_style(llm.tokenizer.chat_template)
        self.model = config.model_name or _public_name(llm.checkpoint.name)
        self.started = int(time.time())
        self._compiler: GrammarCompiler | None = None

    async def start(self, ask: Ask, client: Client) -> Answer:
        """Check, render, queue. Raises ApiError where the request cannot be served."""
        served = choose_tier(self.config, ask.tier, client, ask.tier_fallback)
        requests, thinking, grammars = await asyncio.to_thread(self._prepare, ask)
        tools = {tool.name: tool.parameters for tool in ask.tools} if ask.tools and ask.tool_choice != "none" else None
        most = None if ask.parallel_calls else 1
        style = self.style if ask.prompt is None else Style()
        parsers = [OutputParser(style, tools, thinking=thinking, most_calls=most) for _ in requests]
        answer = Answer(self, served, requests, parsers, grammars, client)
        client.admit()
        self.scheduler.submit(answer.jobs)
        return answer

    def tokens(self, ask: Ask) -> tuple[list[int], str]:
        """The prompt of `ask`: tokens and, where it has one, text."""
        try:
            if ask.prompt is None:
                tools = ask.tools if ask.tool_choice != "none" else ()
                return chat_prompt(self.llm, ask.messages, tools, self._variables(ask.template), ask.prefill)
            if isinstance(ask.prompt, str):
                return self.llm.tokenizer.encode(ask.prompt, bos=True), ask.prompt
            return list(ask.prompt), ""
        except RequestError as error:
            raise invalid(str(error), "messages") from error

    def _variables(self, template: Mapping[str, Any]) -> dict[str, Any]:
        effort = template.get("reasoning_effort")
        variables = dict(template)
        if effort is not None and "enable_thinking" not in variables:
            variables["enable_thinking"] = effort not in ("none", "minimal")
        return variables

    def _prepare(self, ask: Ask) -> tuple[list[Request], bool, list[Grammar | None]]:
        tokens, text = self.tokens(ask)
        if not tokens:
            raise invalid("the prompt is empty; give some text to answer", "prompt")
        if len(tokens) >= self.llm.context:
            raise invalid(
                f"the prompt has {len(tokens)} tokens and the context {self.llm.context}, an answer included; "
                "shorten the prompt",
                "messages" if ask.prompt is None else "prompt", "context_length_exceeded",
            )  # fmt: skip
        thinking = self.style.think is not None and ask.prompt is None and text.rstrip().endswith(self.style.think[0])
        grammar = self._grammar(ask, thinking)
        requests, grammars = [], []
        for i in range(ask.choices):
            mask: LogitMask | None = None
            own = None
            if grammar is not None:
                own = grammar if i == 0 else grammar.fresh()
                mask = own
            seed = ask.params.seed
            params = ask.params if seed is None else replace(ask.params, seed=(seed + i) % SEED_LIMIT)
            try:
                requests.append(Request.check(self.llm, tokens, params, mask))
                if params.logit_bias and max(params.logit_bias) >= self.llm.spec.vocab:
                    raise invalid(
                        f"logit_bias names a token outside the vocabulary of {self.llm.spec.vocab}", "logit_bias"
                    )
            except RequestError as error:
                raise invalid(str(error)) from error
            grammars.append(own)
        return requests, thinking, grammars

    def _grammar(self, ask: Ask, thinking: bool) -> Grammar | None:
        """What the answer must keep to: tool calls that are demanded, strict tools, or a JSON schema."""
        limits, source, param, trigger = self.config.limits, None, ask.schema_param, ""
        format = self.style.tools or "hermes"
        after = self.style.think[1] if thinking and self.style.think else ""
        for i, tool in enumerate(ask.tools):
            check_schema(tool.parameters, limits.schema_depth, limits.schema_bytes, f"tools[{i}].function.parameters")
        if ask.tools and ask.tool_choice not in ("auto", "none"):
            chosen = [tool for tool in ask.tools if ask.tool_choice in ("required", tool.name)]
            several = ask.parallel_calls and ask.tool_choice == "required"
            source, param = tool_grammar(format, chosen, several, json_rule), "tools"
        elif ask.schema is not None:
            check_schema(ask.schema, limits.schema_depth, limits.schema_bytes, param)
            answer = json_rule(ask.schema or {"type": "object"})
            source = "start: " + answer
            if format == "harmony":
                after = "<|channel|>final<|message|>"
            elif ask.tools and ask.tool_choice == "auto":  # either calls, or the answer that they lead to
                calls = tool_grammar(format, ask.tools, ask.parallel_calls, json_rule)
                source = calls.replace("start: ", "start: answer | ", 1) + f"\nanswer: {answer}"
        elif ask.tool_choice == "auto" and any(tool.strict for tool in ask.tools):
            trigger, source = strict_grammar(format, ask.tools, json_rule)
            param = "tools"
        if source is None:
            return None
        if self._compiler is None:
            self._compiler = GrammarCompiler(self.llm)
        return self._compiler.lark(source, param, after, trigger)


def _public_name(name: str) -> str:
    """A model's name without the folder that it lies in."""
    path = Path(name)
    return path.stem if path.is_file() else path.name if path.is_dir() else name


async def collect(answer: Answer) -> list[tuple[list[Delta], list[TokenLogprob], Outcome]]:
    """All choices whole: (merged deltas, log-probabilities, outcome) of each."""
    deltas: list[list[Delta]] = [[] for _ in answer.jobs]
    logprobs: list[list[TokenLogprob]] = [[] for _ in answer.jobs]
    outcomes: dict[int, Outcome] = {}
    async for steps in answer.steps():
        for step in steps:
            deltas[step.index] += step.deltas
            logprobs[step.index] += step.logprobs
            if step.outcome:
                outcomes[step.index] = step.outcome
    return [(merged(deltas[i]), logprobs[i], outcomes[i]) for i in range(len(deltas))]


def content_of(deltas: Sequence[Delta]) -> str:
    return "".join(delta.text for delta in deltas if isinstance(delta, Content))
