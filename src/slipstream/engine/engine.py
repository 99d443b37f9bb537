"""`LLM`: a model opened on a backend, and the sessions that run on it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.backends.base import MAX_DRAFTS, Backend, BlockDrafting
from slipstream.drafters import DRAFTERS, Drafter, Memory, Record, make_drafter
from slipstream.engine.cost import RoundCost
from slipstream.engine.guide import BlockGuide, DraftModel, Guide
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
    drafter: `none`; `suffix`; `block`, a model trained to guess what this one says; `auto`, each round the better one
    of the two; for `auto` with another one, the folder of a block drafter, or a smaller model of the same tokenizer,
    named as `model` is; or a `Drafter`, which serves one stream at a time. Where none is named, the block drafter is
    the one that comes with the package for this model, if there is one.
    drafts: most tokens guessed a round, 0 to 15. context: longest text in tokens, at most the model's own.
    prefill_chunk: most prompt tokens of one pass; None leaves it to the backend. threads: of the CPU backend.
    weights: format of the linear layers on a GPU: `auto` (16 bits), `bf16`, `fp8`, `int4`, `int4-128` or `mxfp4`.
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
        weights: str = "auto",
    ) -> None:
        started = time.perf_counter()
        self.cost = RoundCost()
        self.lock = threading.Lock()
        self.turns = Turns()
        self.memory = Memory()
        self.guide: Guide | None = None  # whom drafters may ask
        self.record: Record | None = None  # and how well it did
        self._named = str(drafter) if isinstance(drafter, str) and _is_model(drafter) else None
        self._options = self._check_options(drafter, drafts, prefill_chunk)
        self._idle: Session | None = None
        if isinstance(model, str | os.PathLike):
            from slipstream.models.checkpoint import load_checkpoint  # readers of weight files are slow to import

            model = load_checkpoint(model)
        self.checkpoint = model
        self.spec = model.spec
        self.eos_token_ids = tuple(model.eos_token_ids)
        self.context = self._check_context(context)
        self.tokenizer = model.tokenizer  # before the weights, which take up the memory that building it leaves behind
        if isinstance(backend, str):
            from slipstream.backends import open_backend

            backend = open_backend(model, backend, threads, weights)
        self.backend = backend
        if self._named or drafter in ("auto", "block"):
            self.guide = self._open_guide(str(drafter), threads)
        if self.guide:
            self.record = Record(self.guide.recorded)
            self.cost.calibrate(backend)
        self.load_s = time.perf_counter() - started

    def _check_options(
        self, drafter: str | Drafter, drafts: int, prefill_chunk: int | None
    ) -> tuple[str | Drafter, int, int | None]:
        if not 0 <= drafts <= MAX_DRAFTS:
            raise RequestError(f"drafts must be in [0, {MAX_DRAFTS}], got {drafts}")
        if prefill_chunk is not None and prefill_chunk < 1:
            raise RequestError(f"prefill_chunk must be at least 1, got {prefill_chunk}")
        if isinstance(drafter, str) and drafter not in (*DRAFTERS, self._named):
            make_drafter(drafter)  # refused now, not at the first answer
        return drafter, drafts, prefill_chunk

    def _open_guide(self, drafter: str, threads: int | None) -> Guide | None:
        """The model that `drafter` says is to be asked for guesses: by name, in a folder, or a smaller one.

        `auto` takes what comes with the package for this model, and does without where there is nothing.
        """
        from slipstream.drafters.shipped import shipped_drafter
        from slipstream.models.block_drafter import is_drafter, load_block_drafter

        backend, tensors = self.backend, getattr(self.checkpoint, "tensors", None)
        folder = None if drafter in DRAFTERS else Path(drafter).expanduser()
        if folder and not is_drafter(folder):
            from slipstream.backends import open_backend
            from slipstream.models.checkpoint import load_checkpoint

            smaller = load_checkpoint(drafter)
            return DraftModel(smaller, self.checkpoint, open_backend(smaller, backend.name, threads))
        if not isinstance(backend, BlockDrafting):
            if drafter != "auto":
                raise RequestError(f"the {backend.name} backend runs no block drafter; use --drafter suffix")
            return None
        folder = folder or (shipped_drafter(tensors) if tensors else None)
        if folder is None:
            if drafter != "auto":
                raise RequestError(
                    "there is no block drafter for this model; name the folder of one, or use --drafter suffix"
                )
            return None
        weights = load_block_drafter(folder, self.spec, tensors or {})
        backend.load_drafter(weights)
        return BlockGuide(backend, weights.config.acceptance)

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

    def make_drafter(self, name: str = "auto", memory: Memory | None = None) -> Drafter:
        """A drafter for one stream of this model, by name, or by what it was opened with.

        memory: earlier texts; None is those of all streams.
        """
        name = "auto" if name == self._named else name
        return make_drafter(name, cost=self.cost, memory=memory or self.memory, record=self.record)

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
            drafter = self.make_drafter(drafter)
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
        if self.guide is not None:
            self.guide.close()
        close = getattr(self.backend, "close", None)
        if close is not None:
            close()


def _is_model(drafter: str) -> bool:
    """Whether `drafter` says where a model lies, rather than how to draft."""
    return drafter not in DRAFTERS and (drafter == "smollm2" or "/" in drafter or Path(drafter).exists())
