"""The end of a round: reduce the sampled tokens, accept drafts, commit, check stops, tell the host, draft again.

A draft is accepted exactly when it equals the token its predecessor's row sampled, so drafts never change the text.
Drafts are what followed the most recent longest match of the text's suffix, repeated where it runs into the text's
end (prompt-lookup decoding, Saxena 2023; suffix matching as in SuffixDecoding, arXiv:2411.04975).

The host reads `ring` (slots, RING_WORDS) int64 in pinned memory, slot `round % slots`. Every word carries the round
number + 1 in its upper half, so that each is valid on its own and nothing need be ordered or synchronised:
word 0: failed << 25 | done << 24 | committed << 16 | drafted << 8 | accepted; words 1.. the committed tokens. A round
fails, and with it the stream, before the first token that logits decide of which one is not finite.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream.kernels.launch import (
    CAPACITY,
    DRAFTS,
    FIRST_STOP,
    LEFT,
    MATCHED,
    MAX_STOPS,
    ROUND,
    ROWS,
    RUN_ROWS_,
    START_,
    STOPS,
    launch,
)

RING_WORDS = 1 + ROWS
MATCH = 8
"""The longest suffix compared."""
MIN_MATCH = 2
"""The shortest worth drafting from."""
LEFT_: tl.constexpr = tl.constexpr(LEFT)
ROUND_: tl.constexpr = tl.constexpr(ROUND)
MATCHED_: tl.constexpr = tl.constexpr(MATCHED)
DRAFTS_: tl.constexpr = tl.constexpr(DRAFTS)
STOPS_: tl.constexpr = tl.constexpr(STOPS)
CAPACITY_: tl.constexpr = tl.constexpr(CAPACITY)
FIRST_STOP_: tl.constexpr = tl.constexpr(FIRST_STOP)
MAX_STOPS_: tl.constexpr = tl.constexpr(MAX_STOPS)


def propose(text: list[int], limit: int) -> list[int]:
    """Reference of the drafter: at most `limit` tokens guessed to follow `text`."""
    last, best = len(text) - 1, (MIN_MATCH - 1, -1)
    for j in range(last):
        length = 0
        while length < MATCH and j >= length and text[j - length] == text[last - length]:
            length += 1
        best = max(best, (length, j)) if length >= MIN_MATCH else best
    match = best[1]
    return [] if match < 0 else [text[match + 1 + i % (last - match)] for i in range(limit)]


@triton.jit
def draft(tokens, row_tokens, state, start, left, done, R: tl.constexpr, MATCH: tl.constexpr,
          MIN_MATCH: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Fill `row_tokens` with the anchor tokens[start] and drafts, and set how many rows run."""
    limit = tl.minimum(tl.load(state + DRAFTS_), tl.minimum(left, tl.load(state + CAPACITY_) - start) - 1)
    best = tl.full((BLOCK,), 0, tl.int64)
    if limit > 0:
        for i in range(0, start, BLOCK):
            j = i + tl.arange(0, BLOCK)
            same = j < start
            length = tl.zeros((BLOCK,), tl.int64)
            for k in tl.static_range(MATCH):
                same = same & (j >= k)
                same &= tl.load(tokens + j - k, mask=same, other=-1) == tl.load(tokens + tl.maximum(start - k, 0))
                length += same.to(tl.int64)
            best = tl.maximum(best, (length << 32) | j)
    found = tl.max(best, 0)
    match = (found & 0xFFFFFFFF).to(tl.int32)
    tl.store(state + MATCHED_, (found >> 32).to(tl.int32))
    limit = tl.where((found >> 32) >= MIN_MATCH, tl.maximum(limit, 0), 0)
    i = tl.arange(0, R)
    source = match + 1 + (i - 1) % tl.maximum(start - match, 1)
    guess = tl.load(tokens + tl.where(i == 0, start, source), mask=i <= limit, other=0)
    tl.store(row_tokens + i, guess, mask=i <= limit)
    tl.store(state + RUN_ROWS_, tl.where(done, 0, 1 + limit))


@triton.jit
def begin_kernel(tokens, row_tokens, state, R: tl.constexpr, MATCH: tl.constexpr, MIN_MATCH: tl.constexpr,
                 BLOCK: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    left = tl.load(state + LEFT_)
    draft(tokens, row_tokens, state, tl.load(state + START_), left, left <= 0, R, MATCH, MIN_MATCH, BLOCK)


@triton.jit
def advance_kernel(scores, best, tokens, row_tokens, ring, cancel, state, blocks, slots, R: tl.constexpr,
                   MAX_BLOCKS: tl.constexpr, MATCH: tl.constexpr, MIN_MATCH: tl.constexpr, BLOCK: tl.constexpr,
                   PDL: tl.constexpr):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    rows = tl.load(state + RUN_ROWS_)
    if rows > 0:
        i, b = tl.arange(0, R), tl.arange(0, MAX_BLOCKS)
        at = i[:, None] * blocks + b[None, :]
        real = (i < rows)[:, None] & (b < blocks)[None, :]
        score = tl.load(scores + at, mask=real, other=float("-inf"))
        token = tl.load(best + at, mask=real, other=2147483647)
        sampled = tl.min(tl.where(score == tl.max(score, 1)[:, None], token, 2147483647), 1)

        guess = tl.load(row_tokens + i + 1, mask=i + 1 < rows, other=-1)
        accepted = tl.min(tl.where((i + 1 < rows) & (sampled == guess), R, i), 0)
        start, left = tl.load(state + START_), tl.load(state + LEFT_)
        committed = tl.minimum(accepted + 1, left)
        s = tl.arange(0, MAX_STOPS_)
        stops = tl.load(state + FIRST_STOP_ + s, mask=s < tl.load(state + STOPS_), other=-1)
        is_stop = tl.max((sampled[:, None] == stops[None, :]).to(tl.int32), 1) > 0
        stop = tl.min(tl.where(is_stop & (i < committed), i, R), 0)
        committed = tl.minimum(committed, stop + 1)
        failed = tl.min(tl.where((sampled < 0) & (i < committed), i, R), 0)
        committed = tl.minimum(committed, failed)
        left -= committed
        done = (stop < failed) | (failed < R) | (left <= 0) | (tl.load(cancel, volatile=True) != 0)

        kept = i < committed
        tl.store(tokens + start + 1 + i, sampled, mask=kept)
        round = tl.load(state + ROUND_)
        tag = (round + 1).to(tl.int64) << 32
        slot = ring + (round % slots) * (R + 1)
        tl.store(slot + 1 + i, tag | sampled, mask=kept)
        head = (failed < R).to(tl.int64) << 25 | done.to(tl.int64) << 24
        tl.store(slot, tag | head | (committed << 16) | ((rows - 1) << 8) | tl.minimum(accepted, failed))
        tl.store(state + START_, start + committed)
        tl.store(state + LEFT_, left)
        tl.store(state + ROUND_, round + 1)
        tl.debug_barrier()  # the committed tokens are read below by other threads
        draft(tokens, row_tokens, state, start + committed, left, done, R, MATCH, MIN_MATCH, BLOCK)


def begin(tokens: torch.Tensor, row_tokens: torch.Tensor, state: torch.Tensor, pdl: bool = False) -> None:
    """tokens (capacity + ROWS,) int32, the text; draft the first round's rows behind tokens[state[START]]."""
    launch(begin_kernel, (1,), tokens, row_tokens, state, pdl=pdl, R=ROWS, MATCH=MATCH, MIN_MATCH=MIN_MATCH,
           BLOCK=2048)  # fmt: skip


def advance(
    scores: torch.Tensor, best: torch.Tensor, tokens: torch.Tensor, row_tokens: torch.Tensor, ring: torch.Tensor,
    cancel: torch.Tensor, state: torch.Tensor, pdl: bool = False,
) -> None:  # fmt: skip
    """scores and best (ROWS, blocks) from `sample.best`; all else is carried on to the next round. No-op once done."""
    blocks = scores.shape[1]
    launch(advance_kernel, (1,), scores, best, tokens, row_tokens, ring, cancel, state, blocks, ring.shape[0], pdl=pdl,
           R=ROWS, MAX_BLOCKS=triton.next_power_of_2(blocks), MATCH=MATCH, MIN_MATCH=MIN_MATCH, BLOCK=2048)  # fmt: skip
