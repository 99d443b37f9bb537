"""What a backend is: it owns the weights and KV caches of one model on one device and runs passes over them.

It knows nothing about text, requests, drafters or stops. The engine drives it:

    cache = backend.new_cache(capacity)
    backend.prefill(cache, prompt[:-1])             # keys and values only
    logits = backend.verify(cache, [anchor, *drafts])   # (rows, vocab); the rows are now in the cache
    cache.rewind(committed)                         # drop the rejected ones

The anchor, the newest token of the text, is never in the cache between rounds: every round feeds it first.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from slipstream.models.block_drafter import BlockDrafterWeights
from slipstream.models.spec import ModelSpec

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int32]

MAX_DRAFTS = 15
"""The most drafts one round may verify; every backend takes 1 + MAX_DRAFTS rows."""


class KVCache(Protocol):
    """Keys and values of one stream. `length` positions are valid; `capacity` fit."""

    @property
    def length(self) -> int: ...

    @property
    def capacity(self) -> int: ...

    def can_rewind(self, length: int) -> bool:
        """Whether positions from `length` on can be dropped exactly (a sliding-window ring forgets old positions)."""
        ...

    def rewind(self, length: int) -> None:
        """Keep the first `length` positions. Raises ValueError where `can_rewind` is false or length grows."""
        ...

    def close(self) -> None:
        """Free the memory; the cache is unusable afterwards. Closing twice is allowed."""
        ...


class Backend(Protocol):
    """Runs one model on one device.

    row_invariant: whether a row's logits have the same bits in any company and any prefill chunking. True of every
    native backend, and tested; false of the reference, which stands on library matrix products.
    """

    name: str
    spec: ModelSpec
    row_invariant: bool

    def new_cache(self, capacity: int) -> KVCache:
        """An empty cache for up to `capacity` positions."""
        ...

    def prefill(self, cache: KVCache, tokens: IntArray) -> None:
        """Append `tokens` (n,) to the cache without computing logits. Any n that fits; the backend may chunk it."""
        ...

    def verify(self, cache: KVCache, tokens: IntArray) -> FloatArray:
        """Append `tokens` (rows,) and return their next-token logits (rows, vocab), valid until the next call.

        1 <= rows <= 1 + MAX_DRAFTS. Row i sees the cache and rows 0..i.
        """
        ...

    def memory_bytes(self) -> int:
        """Bytes of weights that one pass reads."""
        ...


@runtime_checkable
class NativeSampler(Protocol):
    """A backend that also samples, by the rule of `engine.sampling`, faster than numpy."""

    def sample(
        self, logits: FloatArray, temperature: float, top_k: int, top_p: float, min_p: float, seed: int, position: int
    ) -> int:
        """The token of one row (vocab,), penalties and bias already applied."""
        ...


@runtime_checkable
class BlockDrafting(Protocol):
    """A backend that also runs a block drafter of its model (`train.drafter` says what that computes).

    The drafter's keys and values live in the backend's own KV caches and follow every prefill, pass and rewind.
    """

    def load_drafter(self, drafter: BlockDrafterWeights) -> None:
        """Make `draft` work. To be called once, before any cache is made; raises BackendError where it does not fit."""
        ...

    def draft(
        self, cache: KVCache, anchor: int, *, temperature: float, seed: int, limit: int
    ) -> tuple[IntArray, FloatArray]:
        """Guess what follows `anchor`, the newest token, which `cache` does not hold yet.

        Returns at most `limit` tokens (n,) and, of each, the chance that it is right if all before it are (n,). At a
        temperature they are drawn with the target's own noise for `seed` and their positions.
        """
        ...


class Round(NamedTuple):
    """What one round committed: `accepted` drafts and the target's own next token, cut at a stop token or limit."""

    tokens: list[int]
    drafted: int
    accepted: int


@runtime_checkable
class DeviceRounds(Protocol):
    """A backend whose rounds run without the host: it drafts, verifies, samples, accepts and stops on the device."""

    def rounds(
        self,
        cache: KVCache,
        tokens: IntArray,
        *,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        seed: int,
        drafts: int,
        limit: int,
        stop_token_ids: tuple[int, ...],
        drafter: str = "suffix",
    ) -> Iterator[Round]:
        """Decode on from `tokens`, the whole text so far, its last token the anchor and the rest in the cache.

        Ends after `limit` tokens or the first stop token, which is yielded too. Closing the iterator cancels within
        two rounds; the cache then holds exactly the yielded tokens but the last. drafts: 0 is no speculation.
        drafter: who may guess, `suffix`, `block` or `auto`, which is both; the last two need a loaded block drafter.
        """
        ...


def available_bytes() -> int | None:
    """Memory that could be taken without swapping, where the system tells."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None
