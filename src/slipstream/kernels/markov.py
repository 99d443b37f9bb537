"""The sequential end of a block draft: each candidate's score depends on the token chosen before it.

    state_r = silu(before[token_{r-1}] + states[r])         before: the Markov head's part of a token, tabulated
    score   = base logit + bias[candidate] . state_r        bias: its part of a candidate, tabulated
    token_r = argmax(score / T + Gumbel(seed, position))    with the target's own noise
    chance  = sigmoid(confidence head)                      drafts go on while their product is worth a row

One program, as every step waits for the one before. Where the suffix drafter found a match of at least `state[TRUST]`
tokens its drafts stand. `train.drafter` has the same in PyTorch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream.kernels.launch import (
    CAPACITY,
    DRAFTS,
    LEFT,
    MATCHED,
    RUN_ROWS_,
    START_,
    TRUST,
    launch,
)
from slipstream.kernels.sample import gumbel_of

LEFT_: tl.constexpr = tl.constexpr(LEFT)
DRAFTS_: tl.constexpr = tl.constexpr(DRAFTS)
CAPACITY_: tl.constexpr = tl.constexpr(CAPACITY)
MATCHED_: tl.constexpr = tl.constexpr(MATCHED)
TRUST_: tl.constexpr = tl.constexpr(TRUST)


@triton.jit
def noise(seed, position, ids):
    """As `sample.gumbel`, of single token ids."""
    quad = (ids // 4).to(tl.uint32)
    zero = quad * 0
    w0, w1, w2, w3 = tl.philox(seed, quad, zero, zero + position.to(tl.uint32), zero)
    lane = ids % 4
    w = tl.where(lane == 0, w0, tl.where(lane == 1, w1, tl.where(lane == 2, w2, w3)))
    return gumbel_of(w)


@triton.jit
def markov_kernel(logits, ids, vocab, before, bias, states, confidence, head, evidence, knobs, seed, tokens, row_tokens,
                  guesses, chances, state, least, R, M, RANK: tl.constexpr, MP: tl.constexpr, KP: tl.constexpr,
                  PDL: tl.constexpr):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    start, temperature = tl.load(state + START_), tl.load(knobs)
    limit = tl.minimum(tl.load(state + LEFT_), tl.load(state + CAPACITY_) - start) - 1
    limit = tl.minimum(tl.load(state + DRAFTS_), limit)
    mine = (tl.load(state + RUN_ROWS_) > 0) & (tl.load(state + MATCHED_) < tl.load(state + TRUST_))
    m, k = tl.arange(0, MP), tl.arange(0, KP)
    real, inside = m < M, k < RANK
    weight = tl.load(head + k, mask=inside, other=0.0)
    share, constant = tl.load(confidence), tl.load(confidence + 1)
    token = tl.load(tokens + start)
    survival, count = tl.full((), 1.0, tl.float32), tl.full((), 0, tl.int32)
    for r in range(R):
        x = tl.load(before + token.to(tl.int64) * RANK + k, mask=inside, other=0.0).to(tl.float32)
        x += tl.load(states + r * RANK + k, mask=inside, other=0.0)
        x = x / (1.0 + tl.exp(-x))
        id = tl.load(ids + r * M + m, mask=real, other=0)
        part = tl.load(bias + id[:, None] * RANK + k[None, :], mask=real[:, None] & inside[None, :], other=0.0)
        score = tl.load(logits + r * M + m, mask=real, other=float("-inf")) + tl.sum(
            part.to(tl.float32) * x[None, :], 1
        )
        guess = tl.load(vocab + id, mask=real, other=2147483647)
        drawn = score.to(tl.float64)
        if temperature > 0:
            drawn = drawn / temperature + noise(tl.load(seed), start + r + 1, guess)
        token = tl.min(tl.where((drawn == tl.max(drawn, 0)) & real, guess, 2147483647), 0)
        top = tl.max(score, 0)
        chosen = tl.sum(tl.where((guess == token) & real, score, 0.0), 0)
        said = tl.load(evidence + r) + tl.sum(weight * x, 0) + constant
        said += share * (chosen - top - tl.log(tl.sum(tl.exp(score - top), 0)))
        chance = 1.0 / (1.0 + tl.exp(-said))
        survival *= chance
        tl.store(guesses + r, token)
        tl.store(chances + r, chance)
        if (count == r) & (survival >= least) & (r < limit):
            count += 1
            if mine:
                tl.store(row_tokens + count, token)
    if mine:
        tl.store(state + RUN_ROWS_, 1 + count)


def markov(
    logits: torch.Tensor, ids: torch.Tensor, vocab: torch.Tensor, before: torch.Tensor, bias: torch.Tensor,
    states: torch.Tensor, confidence: torch.Tensor, head: torch.Tensor, evidence: torch.Tensor, knobs: torch.Tensor,
    seed: torch.Tensor, tokens: torch.Tensor, row_tokens: torch.Tensor, guesses: torch.Tensor, chances: torch.Tensor,
    state: torch.Tensor, least: float, pdl: bool = False,
) -> None:  # fmt: skip
    """logits and ids (rows, candidates): base logits float32 and draft ids int64; vocab (draft_vocab,) int32 -> token;
    before (vocab, rank), bias (draft_vocab, rank); states (rows, rank), evidence (rows,) and head (rank,) float32;
    confidence (2,) float32: the log-probability's weight and the constant.

    Writes all guesses (rows,) int32 and chances (rows,), and the next round's rows, which end before the first whose
    survival is below `least`.
    """
    rows, candidates = logits.shape
    rank = before.shape[1]
    launch(markov_kernel, (1,), logits, ids, vocab, before, bias, states, confidence, head, evidence, knobs, seed,
           tokens, row_tokens, guesses, chances, state, least, rows, candidates, pdl=pdl, RANK=rank,
           MP=triton.next_power_of_2(candidates), KP=triton.next_power_of_2(rank))  # fmt: skip
