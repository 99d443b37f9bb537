"""One stream of text: its KV cache, its drafter, and the path from a prompt to chunks of the answer.

    prompt -> tokens -> KV cache (the shared prefix is reused) -> rounds -> pieces of text -> chunks

A generation ends at the first of: an end-of-text or stop token, a stop string, max_tokens, the end of the context. A
stop inside a round's accepted block cuts text, tokens and counts exactly where a round of one would have.
"""

from __future__ import annotations

import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from slipstream.backends.base import DeviceRounds, IntArray, NativeSampler, Round
from slipstream.drafters import DRAFTERS, Drafter
from slipstream.drafters.base import Guided
from slipstream.engine.kv import StreamKV
from slipstream.engine.request import Chunk, Completion, FinishReason, Piece, SamplingParams, SpeculationStats, Timing
from slipstream.engine.round import host_rounds
from slipstream.engine.sampling import LogitMask, Sampler, sample
from slipstream.engine.text import TextStream
from slipstream.errors import RequestError
from slipstream.models.tokenizer import StreamDecoder

if TYPE_CHECKING:
    from slipstream.engine.engine import LLM

Message = Mapping[str, Any]
"""A chat message as the model's template takes it: `role`, `content` and what else the template knows."""


class Generates(ABC):
    """The four ways to ask, in terms of the two that stream.

    A stream checks its request at once (RequestError) and works as it is iterated. Closing it cancels.
    """

    @abstractmethod
    def stream(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, *, mask: LogitMask | None = None
    ) -> Iterator[Chunk]:
        """Continue `prompt`, text or token ids, one chunk a round; the last carries the `Completion`.

        mask: called with the output so far and each row's logits before a token is chosen, as a grammar needs.
        """

    @abstractmethod
    def stream_chat(
        self,
        messages: str | Sequence[Message],
        params: SamplingParams | None = None,
        *,
        mask: LogitMask | None = None,
        **template: Any,
    ) -> Iterator[Chunk]:
        """Answer `messages`, or one user message, through the model's chat template.

        template: variables for it, such as `tools`.
        """

    def generate(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, *, mask: LogitMask | None = None
    ) -> Completion:
        """`stream`, all at once."""
        return _finish(self.stream(prompt, params, mask=mask))

    def chat(
        self,
        messages: str | Sequence[Message],
        params: SamplingParams | None = None,
        *,
        mask: LogitMask | None = None,
        **template: Any,
    ) -> Completion:
        """`stream_chat`, all at once."""
        return _finish(self.stream_chat(messages, params, mask=mask, **template))

    @abstractmethod
    def close(self) -> None:
        """Free the memory. Closing twice is allowed."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def user_message(text: str) -> list[Message]:
    """Raises RequestError where the text is empty."""
    if not text:
        raise RequestError("the message is empty; give some text to answer")
    return [{"role": "user", "content": text}]


def _finish(chunks: Iterator[Chunk]) -> Completion:
    for chunk in chunks:
        if chunk.completion:
            return chunk.completion
    raise RuntimeError("a stream ended without its completion")


@dataclass(frozen=True)
class Request:
    """One checked request: `tokens` is the whole prompt, and `params.seed` is drawn."""

    tokens: list[int]
    params: SamplingParams
    mask: LogitMask | None
    started: float

    @classmethod
    def check(
        cls, llm: LLM, prompt: str | Sequence[int], params: SamplingParams | None, mask: LogitMask | None
    ) -> Request:
        """Raises RequestError where the prompt is empty, holds unknown tokens or does not fit the context."""
        started = time.perf_counter()
        params = params or SamplingParams()
        if params.seed is None:
            params = replace(params, seed=secrets.randbits(64))
        if isinstance(prompt, str):
            tokens = llm.tokenizer.encode(prompt, bos=True) if prompt else []
        else:
            tokens = [int(token) for token in prompt]
        if not tokens:
            raise RequestError("the prompt is empty; give at least one token to continue")
        vocab = llm.spec.vocab
        if min(tokens) < 0 or max(tokens) >= vocab:
            wrong = next(token for token in tokens if not 0 <= token < vocab)
            raise RequestError(f"the prompt holds token {wrong}, but the vocabulary has ids 0 to {vocab - 1}")
        if len(tokens) >= llm.context:
            raise RequestError(
                f"the prompt has {len(tokens)} tokens and the context {llm.context}, an answer included; "
                "shorten the prompt"
            )
        return cls(tokens, params, mask, started)


class Session(Generates):
    """A conversation that keeps its KV cache: each call computes only what its tokens do not share with the last.

    `chat` takes either the whole list of messages, or one string: the next user message after `messages`, the
    history. Either way the answer, even one cancelled half-way, is appended to the history.
    """

    def __init__(self, llm: LLM, drafter: Drafter, drafts: int, prefill_chunk: int | None) -> None:
        self.messages: list[Message] = []
        self.kv = StreamKV(llm.backend, llm.context)
        self._llm, self._drafter, self._drafts, self._prefill_chunk = llm, drafter, drafts, prefill_chunk
        self._guide = llm.guide.open() if llm.guide and isinstance(drafter, Guided) else None
        self._streaming = threading.Lock()
        self._closed = False  # since the last stream began

    def stream(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, *, mask: LogitMask | None = None
    ) -> Iterator[Chunk]:
        return self.run(Request.check(self._llm, prompt, params, mask))

    def stream_chat(
        self,
        messages: str | Sequence[Message],
        params: SamplingParams | None = None,
        *,
        mask: LogitMask | None = None,
        **template: Any,
    ) -> Iterator[Chunk]:
        if isinstance(messages, str):
            messages = [*self.messages, *user_message(messages)]
        request = Request.check(self._llm, self._llm.chat_tokens(messages, **template), params, mask)
        return self._converse(list(messages), request)

    def _converse(self, messages: list[Message], request: Request) -> Iterator[Chunk]:
        answer = {"role": "assistant", "content": ""}
        for i, chunk in enumerate(self.run(request)):
            if i == 0:
                self.messages = [*messages, answer]
            answer["content"] += chunk.text  # the history holds what was streamed, whenever that ends
            yield chunk

    def run(self, request: Request) -> Iterator[Chunk]:
        """Serve one checked request."""
        if not self._streaming.acquire(blocking=False):
            raise RequestError("this session is still streaming an answer; finish or close that stream first")
        self._closed = False
        try:
            for chunk in self._run(request):
                if chunk.completion:
                    break
                yield chunk
        finally:
            self._streaming.release()
            if self._closed:
                self.close()
        yield chunk  # free already: a caller may stop listening here and ask for more

    def _run(self, request: Request) -> Iterator[Chunk]:
        llm, tokens, params = self._llm, request.tokens, request.params
        prefill_started = time.perf_counter()
        with llm.lock:
            cached = self.kv.prepare(tokens, self._prefill_chunk)
        first = last = time.perf_counter()
        prefill_s = last - prefill_started

        eos = () if params.ignore_eos else llm.eos_token_ids
        stop_token_ids = frozenset((*eos, *params.stop_token_ids))
        text = TextStream(StreamDecoder(llm.tokenizer), params.stop, stop_token_ids)
        limit = min(params.max_tokens, llm.context - len(tokens))
        sampler = self._sampler(request)
        stats = SpeculationStats(self._drafter.name if self._drafts else "none")
        output: list[Piece] = []
        pushed = first_round = 0
        with closing(self._rounds(request, sampler, limit, stop_token_ids)) as rounds:
            while True:
                with llm.lock:
                    if self._closed:
                        raise RequestError("the session was closed while it streamed this answer; ask again")
                    round = next(rounds)
                for i, token in enumerate(round.tokens):
                    self.kv.tokens.append(token)
                    logprob = sampler.logprobs[pushed] if sampler.logprobs else None
                    text.push(token, i < round.accepted, logprob)
                    pushed += 1
                    if text.stopped:
                        break
                stats.rounds += 1
                stats.drafted += round.drafted
                stats.accepted += round.accepted
                last = time.perf_counter()
                if not first_round:
                    first, first_round = last, pushed
                if done := text.stopped or pushed == limit:
                    text.finish()
                pieces = text.take()
                output += pieces
                if done:
                    break
                yield Chunk(pieces, round.drafted, round.accepted)

        reason: FinishReason = "stop" if text.stopped else "length"
        decode_s = last - first
        timing = Timing(
            load_s=llm.load_s,
            ttft_s=first - request.started,
            prefill_s=prefill_s,
            decode_s=decode_s,
            tokens_per_s=(pushed - first_round) / decode_s if decode_s else 0.0,
        )
        completion = Completion(
            text="".join(piece.text for piece in output),
            token_ids=[piece.token_id for piece in output],
            finish_reason=reason,
            prompt_tokens=len(tokens),
            cached_tokens=cached,
            seed=sampler.seed,
            timing=timing,
            speculation=stats,
            logprobs=sampler.logprobs[:pushed] if params.logprobs is not None else None,
        )
        yield Chunk(pieces, round.drafted, round.accepted, completion)

    def _sampler(self, request: Request) -> Sampler:
        backend, params = self._llm.backend, request.params
        row = backend.sample if isinstance(backend, NativeSampler) else sample
        return Sampler(params, params.seed or 0, request.tokens, backend.spec.vocab, row, request.mask)

    def _rounds(
        self, request: Request, sampler: Sampler, limit: int, stop_token_ids: frozenset[int]
    ) -> Generator[Round, None, None]:
        backend, params, tokens = self._llm.backend, request.params, request.tokens
        drafter, guide = self._drafter.name, self._guide
        here = guide is not None and not guide.on_device
        if isinstance(backend, DeviceRounds) and sampler.plain and drafter in DRAFTERS and not here:
            device = backend
            drafts = self._drafts if drafter != "none" else 0

            def begin(text: IntArray, left: int) -> Iterator[Round]:
                return device.rounds(
                    self.kv.cache,
                    text,
                    temperature=params.temperature,
                    top_k=params.top_k,
                    top_p=params.top_p,
                    min_p=params.min_p,
                    seed=sampler.seed,
                    drafts=drafts,
                    limit=left,
                    stop_token_ids=tuple(stop_token_ids),
                    drafter=drafter,
                )

            yield from self._llm.turns.take(begin, tokens, limit)
            return
        if guide is not None and isinstance(self._drafter, Guided):
            self._drafter.attach(lambda limit: guide.guess(self.kv, limit, params.temperature, sampler.seed))
        self._drafter.begin(tokens)
        yield from host_rounds(
            backend,
            self.kv.cache,
            tokens[-1],
            drafter=self._drafter,
            sampler=sampler,
            drafts=self._drafts,
            limit=limit,
            stop_token_ids=stop_token_ids,
            cost=self._llm.cost,
        )

    def close(self) -> None:
        """Free the memory, once an answer that is still streaming has noticed; it ends with a RequestError."""
        self._closed = True
        if self._streaming.acquire(blocking=False):
            try:
                self.kv.close()
                if self._guide:
                    self._guide.close()
                self._drafter.begin(())
            finally:
                self._closed = False
                self._streaming.release()
