"""Streams that take turns on a backend whose rounds run ahead on the device, where one loop runs at a time.

When another stream takes its turn, the loop of the last one is closed, which drops the rounds that ran ahead and leaves
its cache with exactly the tokens it has yielded. At its next turn it starts a new loop from there. As the token at a
position depends on the text, the seed and the position alone, the stream is the same bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from slipstream.backends.base import IntArray, Round

Begin = Callable[[IntArray, int], Iterator[Round]]
"""(the whole text so far, tokens left) -> its rounds, as `DeviceRounds.rounds`."""


class Turns:
    """Who has the device. Used under the engine's lock, as every round is."""

    def __init__(self) -> None:
        self._holder: Iterator[Round] | None = None

    def take(self, begin: Begin, tokens: Sequence[int], limit: int) -> Iterator[Round]:
        """The rounds of one stream, each at a turn of its own."""
        text = list(tokens)
        loop: Iterator[Round] | None = None
        try:
            while limit > 0:
                if loop is None or self._holder is not loop:
                    self._release(self._holder)
                    loop = self._holder = begin(np.array(text, np.int32), limit)
                round = next(loop, None)
                if round is None:
                    return
                text += round.tokens
                limit -= len(round.tokens)
                yield round
        finally:
            if loop is not None and self._holder is loop:
                self._release(loop)

    def _release(self, loop: Iterator[Round] | None) -> None:
        close = getattr(loop, "close", None)
        if close is not None:
            close()
        self._holder = None
