"""The KV cache of one stream together with the tokens in it, so that a shared prefix is never computed twice.

It knows nothing about text, drafters or sampling. Invariant: the first min(cache.length, len(tokens)) positions of the
cache hold exactly those of `tokens`. It survives an exception or Ctrl-C at any point, because `tokens` changes before
the cache grows, and whatever lies beyond the common part is rewound before use.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slipstream.backends.base import Backend, KVCache


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading tokens two sequences share."""
    low, high = 0, min(len(a), len(b))
    while low < high:  # bisecting on slices compares at C speed
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class StreamKV:
    """A cache for up to `capacity` positions, opened at the first use."""

    def __init__(self, backend: Backend, capacity: int) -> None:
        self.tokens: list[int] = []
        self._backend, self._capacity = backend, capacity
        self._cache: KVCache | None = None

    @property
    def cache(self) -> KVCache:
        if self._cache is None:
            self._cache = self._backend.new_cache(self._capacity)
        return self._cache

    def prepare(self, tokens: list[int], prefill_chunk: int | None = None) -> int:
        """Make the cache hold all of `tokens` but the last, the anchor; returns how many of them were reused.

        Only what differs is computed. A sliding-window ring that has forgotten the branching point starts afresh.
        prefill_chunk: most tokens of one backend call; None leaves the chunks to the backend.
        """
        reused = min(common_prefix(self.tokens, tokens), self.cache.length, len(tokens) - 1)
        if reused < self.cache.length:
            if self.cache.can_rewind(reused):
                self.cache.rewind(reused)
            else:
                self.close()
                reused = 0
        self.tokens = list(tokens)
        new = np.array(tokens[reused:-1], np.int32)
        step = prefill_chunk or max(len(new), 1)
        for start in range(0, len(new), step):
            self._backend.prefill(self.cache, new[start : start + step])
        return reused

    def truncate(self, length: int) -> None:
        """Forget the tokens from `length` on; the cache follows at the next `prepare`."""
        del self.tokens[length:]

    def close(self) -> None:
        """Free the cache and forget the tokens. The next `prepare` opens a new one."""
        if self._cache is not None:
            self._cache.close()
        self._cache, self.tokens = None, []
