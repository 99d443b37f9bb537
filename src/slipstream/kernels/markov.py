"""The sequential end of a block draft: each candidate's score depends on the token chosen before it.

    state_r = silu(before[token_{r-1}] + states[r])         before: the Markov head's part of a token, tabulated
    score   = base logit + bias[candidate] . state_r        bias: its part of a candidate, tabulated
    token_r = argmax(score / T + Gumbel(seed, position))    with the target's own noise
    chance  = sigmoid(confidence head)                      drafts go on while their product is worth a row

token_{r-1} is one of row r - 1's candidates: what each of them would lead to is found for all rows at once, and only
the path through those answers is walked in order. Where the suffix drafter found a match of at least `state[TRUST]`
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
    dot,
    launch,
)
from slipstream.kernels.sample import gumbel_of

LEFT_: tl.constexpr = tl.constexpr(LEFT)
DRAFTS_: tl.constexpr = tl.constexpr(DRAFTS)
CAPACITY_: tl.constexpr = tl.constexpr(CAPACITY)
MATCHED_: tl.constexpr = tl.constexpr(MATCHED)
TRUST_: tl.constexpr = tl.constexpr(TRUST)
NO_TOKEN: tl.constexpr = tl.constexpr(2147483647)


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
def markov_kernel(logits, ids, vocab, before, bias, states, evidence, stride, confidence, head, knobs, seed, tokens,
                  row_tokens, guesses, chances, state, least, R, M, RANK: tl.constexpr, RP: tl.constexpr,
                  MP: tl.constexpr, KB: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    start, temperature = tl.load(state + START_), tl.load(knobs)
    r, m = tl.arange(0, RP), tl.arange(0, MP)
    row = (r < R)[:, None]
    real = row & (m < M)[None, :]
    at = r[:, None] * M + m[None, :]
    id = tl.load(ids + at, mask=real, other=0)
    guess = tl.load(vocab + id, mask=real, other=NO_TOKEN)
    later = real & (r > 0)[:, None]
    last = tl.load(vocab + tl.load(ids + at - M, mask=later, other=0), mask=later, other=0)
    last = tl.where((r > 0)[:, None], last, tl.load(tokens + start))  # (rows, which it was), before each row

    score = tl.zeros((RP, MP, MP), tl.float32)  # (rows, which token was before, candidates)
    said = tl.zeros((RP, MP), tl.float32)
    for k0 in range(0, RANK, KB):
        k = k0 + tl.arange(0, KB)
        inside = k < RANK
        x = tl.load(before + last.to(tl.int64)[:, :, None] * RANK + k[None, None, :], mask=inside[None, None, :],
                    other=0.0).to(tl.float32)  # fmt: skip
        x += tl.load(states + r[:, None] * stride + k[None, :], mask=row & inside[None, :], other=0.0)[:, None, :]
        x = x / (1.0 + tl.exp(-x))
        said += tl.sum(x * tl.load(head + k, mask=inside, other=0.0)[None, None, :], 2)
        part = tl.load(bias + id.to(tl.int64)[:, None, :] * RANK + k[None, :, None], mask=inside[None, :, None],
                       other=0.0)  # fmt: skip
        score = dot(x.to(bias.dtype.element_ty), part, score)
    score += tl.load(logits + at, mask=real, other=-1e30)[:, None, :]

    drawn = score.to(tl.float64)
    if temperature > 0:
        drawn = drawn / temperature + noise(tl.load(seed), (start + r + 1)[:, None], guess)[:, None, :]
    best = (drawn == tl.max(drawn, 2)[:, :, None]) & real[:, None, :]
    token = tl.min(tl.where(best, guess[:, None, :], NO_TOKEN), 2)  # (rows, which token was before)
    best &= guess[:, None, :] == token[:, :, None]
    choice = tl.sum(tl.where(best, m[None, None, :], 0), 2)
    top = tl.max(score, 2)
    share = tl.sum(tl.where(best, score, 0.0), 2) - top - tl.log(tl.sum(tl.exp(score - top[:, :, None]), 2))
    said += tl.load(evidence + r * stride, mask=r < R, other=0.0)[:, None]
    said += share * tl.load(confidence) + tl.load(confidence + 1)
    chance = 1.0 / (1.0 + tl.exp(-said))

    limit = tl.minimum(tl.load(state + LEFT_), tl.load(state + CAPACITY_) - start) - 1
    limit = tl.minimum(tl.load(state + DRAFTS_), limit)
    mine = (tl.load(state + RUN_ROWS_) > 0) & (tl.load(state + MATCHED_) < tl.load(state + TRUST_))
    survival, count = tl.full((), 1.0, tl.float32), tl.full((), 0, tl.int32)
    place = tl.full((), 0, tl.int32)
    for i in range(R):
        here = (r == i)[:, None] & (m == place)[None, :]
        guessed = tl.sum(tl.where(here, token, 0))
        likely = tl.sum(tl.where(here, chance, 0.0))
        place = tl.sum(tl.where(here, choice, 0))
        survival *= likely
        tl.store(guesses + i, guessed)
        tl.store(chances + i, likely)
        if (count == i) & (survival >= least) & (i < limit):
            count += 1
            if mine:
                tl.store(row_tokens + count, guessed)
    if mine:
        tl.store(state + RUN_ROWS_, 1 + count)


def markov(
    logits: torch.Tensor, ids: torch.Tensor, vocab: torch.Tensor, before: torch.Tensor, bias: torch.Tensor,
    states: torch.Tensor, evidence: torch.Tensor, confidence: torch.Tensor, head: torch.Tensor, knobs: torch.Tensor,
    seed: torch.Tensor, tokens: torch.Tensor, row_tokens: torch.Tensor, guesses: torch.Tensor, chances: torch.Tensor,
    state: torch.Tensor, least: float, pdl: bool = False,
) -> None:  # fmt: skip
    """logits float32 and ids int32 (rows, candidates), as `candidates` leaves them; vocab (draft_vocab,) int32 ->
    token; before (vocab, rank), bias (draft_vocab, rank); states (.., rank) and evidence (..,), float32 and of one
    stride between rows; head (rank,) and confidence (2,) float32: the log-probability's weight and the constant.

    Writes all guesses (rows,) int32 and chances (rows,), and the next round's rows, which end before the first whose
    survival is below `least`.
    """
    rows, candidates = logits.shape
    rank = before.shape[1]
    launch(markov_kernel, (1,), logits, ids, vocab, before, bias, states, evidence, states.stride(0), confidence, head,
           knobs, seed, tokens, row_tokens, guesses, chances, state, least, rows, candidates, pdl=pdl, num_warps=8,
           RANK=rank, RP=triton.next_power_of_2(rows), MP=max(16, triton.next_power_of_2(candidates)),
           KB=max(16, min(128, triton.next_power_of_2(rank))))  # fmt: skip
