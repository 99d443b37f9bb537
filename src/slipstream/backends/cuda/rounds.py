"""Rounds on the device: what the host enqueues ahead and how it reads what they committed, without synchronising."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

from slipstream.backends.base import Round
from slipstream.backends.cuda.cache import CudaCache
from slipstream.errors import BackendError
from slipstream.kernels import sample
from slipstream.kernels.advance import RING_WORDS, advance
from slipstream.kernels.launch import ROWS

UNROLLED = 4
"""Rounds a graph holds: the gap between two graph launches is paid once for all of them."""
AHEAD = 2 * UNROLLED
"""Rounds enqueued before the host has read their predecessors; those after the last are empty."""
SLOTS = 4 * UNROLLED
STUCK_S = 20.0
NOT_FINITE = (
    "the model computes no finite logits, so its answer ends here: its weights are damaged, or too large for float16; "
    "try --weights bf16"
)


class RoundBuffers:
    """Sampling scratch, the ring and the flags of the rounds of one backend; one generation runs at a time."""

    def __init__(self, vocab: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.logits = torch.zeros(ROWS, vocab, device=device)
        self.knobs = torch.zeros(3, dtype=torch.float64, device=device)
        self.seed = torch.zeros(1, dtype=torch.int64, device=device)
        self.cuts = torch.zeros(ROWS, 2, dtype=torch.int32, device=device)
        self.scores = torch.zeros(ROWS, sample.blocks(vocab), dtype=torch.float64, device=device)
        self.best = torch.zeros(ROWS, sample.blocks(vocab), dtype=torch.int32, device=device)
        self.cancel = torch.zeros(1, dtype=torch.int32, device=device)
        self.ring = torch.zeros(SLOTS, RING_WORDS, dtype=torch.int64, pin_memory=pinned)
        self.host = self.ring.numpy()
        self.next_round = 0
        self.side = torch.cuda.Stream(device) if pinned else None  # type: ignore[no-untyped-call]

    def finish_round(self, cache: CudaCache, filtered: bool, pdl: bool) -> None:
        """Enqueue what follows the pass: sample every row, accept, commit, draft the next."""
        sample.best(self.logits, self.knobs, self.seed, self.cuts, self.scores, self.best, cache.state, filtered, pdl)
        advance(self.scores, self.best, cache.tokens, cache.row_tokens, self.ring, self.cancel, cache.state, pdl)

    def request_cancel(self) -> None:
        """Raise the flag that the next round to end reads; a copy on a stream of its own overtakes the rounds."""
        if self.side is None:
            self.cancel.fill_(1)
        else:
            with torch.cuda.stream(self.side):
                self.cancel.fill_(1)

    def read(self, number: int, alive: Callable[[], None]) -> tuple[Round, bool, bool]:
        """Wait until the host's memory holds round `number`: it, whether it is the last, and whether its logits failed.

        `alive` raises where the device has failed.
        """
        slot, tag = self.host[number % SLOTS], number + 1
        deadline = time.monotonic() + STUCK_S
        spins = 0
        while int(slot[0]) >> 32 != tag:
            spins += 1
            if spins % 4096 == 0:
                alive()
                if time.monotonic() > deadline:
                    raise BackendError(f"the GPU finished no round in {STUCK_S:.0f} s; is another program holding it?")
        head = int(slot[0])
        tokens = []
        for i in range(1, 1 + (head >> 16 & 0xFF)):
            while int(slot[i]) >> 32 != tag:
                pass
            tokens.append(int(slot[i]) & 0xFFFFFFFF)
        return Round(tokens, head >> 8 & 0xFF, head & 0xFF), bool(head >> 24 & 1), bool(head >> 25 & 1)


def stream(buffers: RoundBuffers, replay: Callable[[], None], limit: int, alive: Callable[[], None]) -> Iterator[Round]:
    """Enqueue rounds ahead of the reader and yield them as they arrive. `replay` enqueues UNROLLED rounds.

    Every round commits a token at least, so no more than `limit` rounds are ever enqueued (to the next whole graph).
    Closing the iterator raises the cancel flag; rounds already enqueued then do nothing. Raises BackendError after the
    last token that numbers decided.
    """
    first, enqueued, done = buffers.next_round, 0, False
    number = 0
    try:
        while not done:
            while enqueued < min(number + AHEAD, limit):
                replay()
                enqueued += UNROLLED
            committed, done, failed = buffers.read(first + number, alive)
            number += 1
            if committed.tokens:
                yield committed
            if failed:
                raise BackendError(NOT_FINITE)
    finally:
        buffers.next_round = first + enqueued
        if not done:
            buffers.request_cancel()
