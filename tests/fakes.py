"""A fake model that runs in microseconds: a row's logits are a hash of the tokens before it, bit for bit.

`FakeBackend` reads what is in its cache and nothing else, so a token too many, too few or out of place in the KV cache
changes everything after it. `fault` breaks it on purpose, in the ways a gate must notice.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from slipstream.backends.base import MAX_DRAFTS
from slipstream.engine.engine import LLM
from slipstream.models.spec import Attention, FeedForward, Layer, ModelSpec, Rope

EOS, START, END = 256, 257, 258
VOCAB = 260
MARKS = {"<s>": START, "</s>": END}
NAMES = {id: name for name, id in MARKS.items()}


def fake_spec(context: int = 4096, window: int | None = None) -> ModelSpec:
    attention = Attention(1, 1, 2, Rope((1.0,)), 1.0, window)
    return ModelSpec("fake", VOCAB, 2, (Layer(attention, FeedForward(2)),), 1e-5, context, True)


class FakeCache:
    """The fed tokens themselves; with a window, a ring of window + MAX_DRAFTS + 1 slots that forgets."""

    def __init__(self, capacity: int, window: int | None) -> None:
        self.tokens: list[int] = []
        self.capacity, self.window = capacity, window
        self.longest = 0
        self.closed = False

    @property
    def length(self) -> int:
        return len(self.tokens)

    def append(self, tokens: np.ndarray) -> None:
        assert not self.closed
        assert tokens.dtype == np.int32
        assert self.length + len(tokens) <= self.capacity
        self.tokens += tokens.tolist()
        self.longest = max(self.longest, self.length)

    def can_rewind(self, length: int) -> bool:
        forgot = self.window is not None and self.longest - length > MAX_DRAFTS + 1
        return length <= self.length and (length == 0 or not forgot)

    def rewind(self, length: int) -> None:
        if not self.can_rewind(length):
            raise ValueError(f"cannot rewind from {self.length} to {length}")
        del self.tokens[length:]
        if length == 0:
            self.longest = 0

    def close(self) -> None:
        self.closed = True


class FakeBackend:
    """order: how many last tokens a row's logits depend on; None is all of them. small orders repeat themselves.

    fault: None; `rows`, logits that depend on the number of rows; `chunks`, on how prefill was cut; `rewind`, a cache
    that keeps a rejected draft.
    """

    name = "fake"
    row_invariant = True

    def __init__(self, order: int | None = None, fault: str | None = None, **spec: int | None) -> None:
        self.spec = fake_spec(**spec)
        self.order, self.fault = order, fault
        self.prefilled: list[int] = []  # tokens of each prefill call
        self.row_counts: list[int] = []  # rows of each verify call
        self.caches: list[FakeCache] = []
        rng = np.random.default_rng(0)
        self._table = rng.normal(0, 2.5, (1021, VOCAB)).astype(np.float32)
        self._table[:, [START, END]] -= 20
        self._table[:, EOS] -= 3

    def new_cache(self, capacity: int) -> FakeCache:
        cache = FakeCache(capacity, self.spec.layers[0].attention.window)
        if self.fault == "rewind":
            cache.rewind = lambda length: cache.tokens.__delitem__(slice(length + 1, None))  # type: ignore[method-assign]
        self.caches.append(cache)
        return cache

    def prefill(self, cache: FakeCache, tokens: np.ndarray) -> None:
        self.prefilled.append(len(tokens))
        if self.fault == "chunks" and len(tokens) % 7 == 0:
            tokens = np.concatenate([tokens[:-1], [0]]).astype(np.int32)
        cache.append(tokens)

    def verify(self, cache: FakeCache, tokens: np.ndarray) -> np.ndarray:
        assert 1 <= len(tokens) <= 1 + MAX_DRAFTS
        self.row_counts.append(len(tokens))
        cache.append(tokens)
        end = cache.length
        logits = np.stack([self.row(cache.tokens[: end - len(tokens) + 1 + i]) for i in range(len(tokens))])
        if self.fault == "rows" and len(tokens) > 1:
            logits = logits[:, ::-1] * np.float32(0.5) + logits * np.float32(0.5)
        return logits

    def row(self, tokens: Sequence[int]) -> np.ndarray:
        """The logits after `tokens`."""
        seen = tokens if self.order is None else tokens[-self.order :]
        return self._table[hash(tuple(seen)) % len(self._table)]

    def memory_bytes(self) -> int:
        return 1


class ByteTokenizer:
    """A token a byte; a chat template of one start and one end token a message."""

    chat_template = "bytes"
    eos_token_ids = (EOS,)

    strips_first_space = False

    def encode(self, text: str, special: bool = True, bos: bool = False) -> list[int]:
        ids: list[int] = []
        for part in re.split("(</?s>)", text):
            ids += [MARKS[part]] if part in MARKS else list(part.encode())
        return ids

    def token_bytes(self, id: int) -> bytes:
        return bytes([id]) if id < 256 else NAMES.get(id, "").encode()

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(map(self.token_bytes, ids)).decode(errors="replace")

    def render_chat(self, messages, add_generation_prompt=True, **variables) -> str:
        text = "".join(f"<s>{m['role']}\n{m['content']}</s>" for m in messages)
        return text + "<s>assistant\n" * add_generation_prompt


@dataclass
class FakeCheckpoint:
    spec: ModelSpec
    name: str = "fake"
    eos_token_ids: tuple[int, ...] = (EOS,)
    tokenizer: ByteTokenizer = field(default_factory=ByteTokenizer)


def fake_llm(backend: FakeBackend | None = None, **options) -> LLM:
    """An LLM on a fake backend; options as in LLM."""
    backend = backend or FakeBackend()
    return LLM(FakeCheckpoint(backend.spec), backend=backend, **options)
