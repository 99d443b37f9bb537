"""`LLM`: a model opened on a backend, and the sessions that run on it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from slipstream.backends.base import MAX_DRAFTS, Backend
from slipstream.drafters import Drafter, Memory, make_drafter
from slipstream.engine.cost import RoundCost
from slipstream.engine.request import Chunk, SamplingParams
from slipstream.engine.sampling import LogitMask
from slipstream.engine.session import Generates, Message, Request, Session, user_message
from slipstream.engine.turns import Turns
from slipstream.errors import RequestError

if TYPE_CHECKING:
    from slipstream.models.checkpoint import Checkpoint


class LLM(Generates):
    """An open-weight language model, ready to answer.

    model: `smollm2`, a .gguf file, a directory with config.json and safetensors, a hub id, or a loaded `Checkpoint`.
    backend: `auto`, `cpu`, `cuda`, `reference`, or a `Backend` that has the weights already.
    drafter: `auto` (now `suffix`), `none`, `suffix`, or a `Drafter`, which serves one stream at a time.
    drafts: most tokens guessed a round, 0 to 15. context: longest text in tokens, at most the model's own.
    prefill_chunk: most prompt tokens of one pass; None leaves it to the backend. threads: of the CPU backend.
    Raises CheckpointError, BackendError, or RequestError for a senseless option.

    `generate` and `chat` are stateless in what they return, yet reuse the KV cache of the last call where the prompts
    share a prefix. `session()` keeps a conversation of its own. Streams of several sessions, and threads, take turns
    round by round.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | Checkpoint = "smollm2",
        *,
        backend: str | Backend = "auto",
        drafter: str | Drafter = "auto",
        drafts: int = 7,
        context: int | None = None,
        prefill_chunk: int | None = None,
        threads: int | None = None,
    ) -> None:
        started = time.perf_counter()
        self.cost = RoundCost()
        self.lock = threading.Lock()
        self.turns = Turns()
        self.memory = Memory()
        self._options = self._check_options(drafter, drafts, prefill_chunk)
        self._idle: Session | None = None
        if isinstance(model, str | os.PathLike):
            from slipstream.models.checkpoint import load_checkpoint  # readers of weight files are slow to import

            model = load_checkpoint(model)
        self.checkpoint = model
        self.spec = model.spec
        self.eos_token_ids = tuple(model.eos_token_ids)
        self.context = self._check_context(context)
        if isinstance(backend, str):
            from slipstream.backends import open_backend

            backend = open_backend(model, backend, threads)
        self.backend = backend
        self.tokenizer = model.tokenizer
        self.load_s = time.perf_counter() - started

    def _check_options(
        self, drafter: str | Drafter, drafts: int, prefill_chunk: int | None
    ) -> tuple[str | Drafter, int, int | None]:
        if not 0 <= drafts <= MAX_DRAFTS:
            raise RequestError(f"drafts must be in [0, {MAX_DRAFTS}], got {drafts}")
        if prefill_chunk is not None and prefill_chunk < 1:
            raise RequestError(f"prefill_chunk must be at least 1, got {prefill_chunk}")
        if isinstance(drafter, str):
            make_drafter(drafter)  # an unknown name is refused now, not at the first answer
        return drafter, drafts, prefill_chunk

    def _check_context(self, context: int | None) -> int:
        if context is None:
            return self.spec.context
        if not 2 <= context <= self.spec.context:
            raise RequestError(f"context must be in [2, {self.spec.context}], the model's own, got {context}")
        return context

    @property
    def has_chat_template(self) -> bool:
        return self.tokenizer.chat_template is not None

    def chat_tokens(self, messages: Sequence[Message], **template: Any) -> list[int]:
        """The prompt of `messages`, up to where the assistant speaks. The template itself writes what starts a text."""
        if not messages:
            raise RequestError("there are no messages to answer; give at least one")
        return self.tokenizer.encode(self.tokenizer.render_chat(messages, add_generation_prompt=True, **template))

    def session(
        self,
        *,
        drafter: str | Drafter | None = None,
        drafts: int | None = None,
        prefill_chunk: int | None = None,
    ) -> Session:
        """A conversation with its own KV cache. What is left out is as in the LLM."""
        mine = self._options
        drafter, drafts, prefill_chunk = self._check_options(
            mine[0] if drafter is None else drafter,
            mine[1] if drafts is None else drafts,
            mine[2] if prefill_chunk is None else prefill_chunk,
        )
        if isinstance(drafter, str):
            drafter = make_drafter(drafter, cost=self.cost, memory=self.memory)
        return Session(self, drafter, drafts, prefill_chunk)

    def stream(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, *, mask: LogitMask | None = None
    ) -> Iterator[Chunk]:
        return self._run(Request.check(self, prompt, params, mask))

    def stream_chat(
        self,
        messages: str | Sequence[Message],
        params: SamplingParams | None = None,
        *,
        mask: LogitMask | None = None,
        **template: Any,
    ) -> Iterator[Chunk]:
        if isinstance(messages, str):
            messages = user_message(messages)
        return self._run(Request.check(self, self.chat_tokens(messages, **template), params, mask))

    def _run(self, request: Request) -> Iterator[Chunk]:
        """On the idle session, whose cache may share a prefix; on a new one where that is busy."""
        session, self._idle = self._idle or self.session(), None
        try:
            for chunk in session.run(request):
                if chunk.completion:
                    break
                yield chunk
        finally:
            if self._idle is None:
                self._idle = session
            else:
                session.close()
        yield chunk

    def close(self) -> None:
        """Free the KV cache kept between calls, and the backend where it can be closed."""
        if self._idle is not None:
            self._idle.close()
            self._idle = None
        close = getattr(self.backend, "close", None)
        if close is not None:
            close()
