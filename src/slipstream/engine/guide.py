"""Who a guided drafter asks: a block drafter in the target's own backend, or a smaller model beside it.

A guide is opened once for a model. Each session opens a stream of it, which answers `guess` about the session's text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import numpy as np

from slipstream.backends.base import Backend, BlockDrafting
from slipstream.engine.kv import StreamKV
from slipstream.engine.sampling import sample
from slipstream.errors import CheckpointError

if TYPE_CHECKING:
    from slipstream.models.checkpoint import Checkpoint

Guesses = tuple[list[int], list[float]]
"""Tokens, and of each the chance that it is right if all before it are."""

_DOUBT = 0.3  # a smaller model guesses on while its guesses all hold with this chance


class GuideStream(Protocol):
    """on_device: whether a target that runs its rounds on the device asks it there, without the host."""

    on_device: bool

    def guess(self, text: StreamKV, limit: int, temperature: float, seed: int) -> Guesses:
        """At most `limit` tokens to follow the target's `text`, whose last token its cache does not hold yet."""
        ...

    def close(self) -> None: ...


class Guide(Protocol):
    """recorded: acceptance length by task, where it is known."""

    recorded: Mapping[str, float]

    def open(self) -> GuideStream: ...

    def close(self) -> None: ...


class BlockGuide:
    """The block drafter that was loaded into `backend`; all it remembers of a text lies in the target's KV cache."""

    on_device = True

    def __init__(self, backend: BlockDrafting, recorded: Mapping[str, float]) -> None:
        self._backend, self.recorded = backend, recorded

    def open(self) -> BlockGuide:
        return self

    def guess(self, text: StreamKV, limit: int, temperature: float, seed: int) -> Guesses:
        tokens, chances = self._backend.draft(
            text.cache, text.tokens[-1], temperature=temperature, seed=seed, limit=limit
        )
        return tokens.tolist(), chances.tolist()

    def close(self) -> None:
        """Its weights go with the backend."""


class DraftModel:
    """A smaller model of the same tokenizer, which guesses token by token (Leviathan et al. 2023, arXiv:2211.17192).

    Raises CheckpointError where the tokenizers differ.
    """

    recorded: Mapping[str, float] = {}

    def __init__(self, checkpoint: Checkpoint, target: Checkpoint, backend: Backend) -> None:
        mine, theirs = checkpoint.tokenizer, target.tokenizer
        ids = range(0, target.spec.vocab, 97)
        if checkpoint.spec.vocab != target.spec.vocab or any(mine.token_bytes(i) != theirs.token_bytes(i) for i in ids):
            raise CheckpointError(
                f"{checkpoint.name} has another vocabulary than {target.name}, so it cannot draft for it; "
                "choose a smaller model of the same family"
            )
        self.backend = backend

    def open(self) -> DraftStream:
        return DraftStream(self.backend)

    def close(self) -> None:
        close = getattr(self.backend, "close", None)
        if close is not None:
            close()


class DraftStream:
    """The smaller model's side of one stream: a KV cache that follows the text."""

    on_device = False

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._kv = StreamKV(backend, backend.spec.context)

    def guess(self, text: StreamKV, limit: int, temperature: float, seed: int) -> Guesses:
        room = self._backend.spec.context - len(text.tokens)
        tokens: list[int] = []
        chances: list[float] = []
        survival = 1.0
        if room > 0:
            self._kv.prepare(text.tokens)
        while len(tokens) < min(limit, room) and survival > _DOUBT:
            position = len(self._kv.tokens)
            logits = self._backend.verify(self._kv.cache, np.array(self._kv.tokens[-1:], np.int32))[0]
            token = sample(logits, temperature, 0, 1.0, 0.0, seed, position)
            scaled = (logits.astype(np.float64) - logits.max()) / (temperature or 1.0)
            chances.append(float(np.exp(scaled[token]) / np.exp(scaled).sum()))
            survival *= chances[-1]
            tokens.append(token)
            self._kv.tokens.append(token)
        return tokens, chances

    def close(self) -> None:
        self._kv.close()
