"""Sampling: the best token of every row by the rule of `engine.sampling`, filters and Gumbel noise included.

`cut` finds where a row's order (logit descending, id ascending) ends after top-k, top-p and min-p; `best` takes the
argmax of each block of the vocabulary; `advance` reduces the blocks. Noise and scores are float64, as in the rule.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream.kernels.launch import (
    ROWS,
    RUN_ROWS,
    RUN_ROWS_,
    START,
    START_,
    STATE_SIZE,
    TOP_K,
    Case,
    Cost,
    launch,
    nbytes,
)

BLOCK = 2048
TEMPERATURE, TOP_P, MIN_P = range(3)
"""Slots of `knobs` (float64)."""
TOP_K_: tl.constexpr = tl.constexpr(TOP_K)
NAN_: tl.constexpr = tl.constexpr(-1)
"""The token of a block with a logit that is NaN or infinite; it is the best and the least there is."""


def reference(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float, noise: torch.Tensor
) -> torch.Tensor:
    """logits and noise (rows, vocab) -> tokens (rows,)."""
    if temperature == 0:
        return logits.argmax(-1)
    x = logits.double()
    order = x.sort(stable=True, dim=-1, descending=True)
    w = ((order.values - order.values[:, :1]) / temperature).exp()
    place = torch.arange(x.shape[1], device=x.device)
    w = w * (place < (top_k or x.shape[1]))
    if top_p < 1:
        mass = w.cumsum(-1)
        w = w * (mass - w < top_p * mass[:, -1:])
    dropped = (w < min_p) | (w == 0)
    scores = x / temperature + noise
    return scores.masked_fill(torch.zeros_like(dropped).scatter(1, order.indices, dropped), -torch.inf).argmax(-1)


@triton.jit
def gumbel_of(word):
    """Noise from random 32-bit words."""
    v = (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10  # 2^-32; 1 - v is exact, so log(1 - v) is log1p(-v)
    return -tl.log(-tl.log(1.0 - v))


@triton.jit
def gumbel(seed, position, first, N: tl.constexpr):
    """Noise (N,) of token ids first..first + N - 1 at `position`: Philox4x32-10, four ids a counter."""
    quad = (first // 4 + tl.arange(0, N // 4)).to(tl.uint32)
    zero = quad * 0
    w0, w1, w2, w3 = tl.philox(seed, quad, zero, zero + position.to(tl.uint32), zero)
    w = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (N,))
    return gumbel_of(w)


@triton.jit
def ordered(x):
    """float32 as int32 in the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def weight_above(logits, V, cut_key, cut_id, key, id, top, temperature, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Sum over ids at or before (key, id) in the order, and at or before the cut (cut_key, cut_id), of 1 or exp."""
    total = tl.zeros((BLOCK,), tl.float64)
    for i in range(0, V, BLOCK):
        ids = i + tl.arange(0, BLOCK)
        x = tl.load(logits + ids, mask=ids < V, other=float("-inf"))
        k = ordered(x)
        inside = ((k > cut_key) | ((k == cut_key) & (ids <= cut_id))) & (ids < V)
        inside &= (k > key) | ((k == key) & (ids <= id))
        if COUNT:
            w = tl.where(inside, 1.0, 0.0).to(tl.float64)
        else:
            w = tl.where(inside, tl.exp((x.to(tl.float64) - top) / temperature), 0.0)
        total += w
    return tl.sum(total, 0)


@triton.jit
def shortest_prefix(logits, V, cut_key, cut_id, target, top, temperature, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """(key, id) of the last member of the shortest prefix of the order whose weight reaches `target`."""
    low, high = tl.full((), -2147483648, tl.int64), tl.full((), 2147483647, tl.int64)
    while low < high:  # the greatest key at which the weight of keys >= key reaches the target
        middle = (low + high + 1) >> 1
        reached = weight_above(logits, V, cut_key, cut_id, middle.to(tl.int32), V, top, temperature, COUNT, BLOCK)
        enough = reached >= target
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    key = low.to(tl.int32)
    first, last = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32) + V - 1
    while first < last:  # among equal logits, the lowest id at which it does
        middle = (first + last) >> 1
        reached = weight_above(logits, V, cut_key, cut_id, key, middle, top, temperature, COUNT, BLOCK)
        enough = reached >= target
        last = tl.where(enough, middle, last)
        first = tl.where(enough, first, middle + 1)
    return key, first


@triton.jit
def min_p_prefix(logits, V, cut_key, cut_id, min_p, top, temperature, BLOCK: tl.constexpr):
    """The cut moved up to the last id whose weight is at least `min_p`."""
    lowest = tl.full((BLOCK,), 2147483647, tl.int32)
    for i in range(0, V, BLOCK):
        ids = i + tl.arange(0, BLOCK)
        x = tl.load(logits + ids, mask=ids < V, other=float("-inf"))
        enough = tl.exp((x.to(tl.float64) - top) / temperature) >= min_p
        lowest = tl.minimum(lowest, tl.where(enough, ordered(x), 2147483647))
    key = tl.min(lowest, 0)
    return tl.maximum(key, cut_key), tl.where(key > cut_key, V, cut_id)


@triton.jit
def cut_kernel(logits, knobs, cuts, state, V, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    temperature, top_p, min_p = tl.load(knobs), tl.load(knobs + 1), tl.load(knobs + 2)
    top_k = tl.load(state + TOP_K_)
    if (row < tl.load(state + RUN_ROWS_)) & (temperature > 0):
        logits += row.to(tl.int64) * V
        best = tl.full((BLOCK,), float("-inf"), tl.float32)
        for i in range(0, V, BLOCK):
            ids = i + tl.arange(0, BLOCK)
            best = tl.maximum(best, tl.load(logits + ids, mask=ids < V, other=float("-inf")))
        top = tl.max(best, 0).to(tl.float64)
        key, id = tl.full((), -2147483648, tl.int32), tl.full((), 0, tl.int32) + V
        if (top_k > 0) & (top_k < V):
            key, id = shortest_prefix(logits, V, key, id, top_k.to(tl.float64), top, temperature, True, BLOCK)
        if top_p < 1:
            mass = weight_above(logits, V, key, id, key, id, top, temperature, False, BLOCK)
            key, id = shortest_prefix(logits, V, key, id, mass * top_p, top, temperature, False, BLOCK)
        if min_p > 0:
            key, id = min_p_prefix(logits, V, key, id, min_p, top, temperature, BLOCK)
        tl.store(cuts + row * 2, key)
        tl.store(cuts + row * 2 + 1, id)


@triton.jit
def best_kernel(logits, knobs, seed, cuts, scores, tokens, state, V, blocks, FILTER: tl.constexpr,
                BLOCK: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, block = tl.program_id(0), tl.program_id(1)
    if row < tl.load(state + RUN_ROWS_):
        ids = block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits + row.to(tl.int64) * V + ids, mask=ids < V, other=float("-inf"))
        temperature = tl.load(knobs)
        score = x.to(tl.float64)
        if temperature > 0:
            position = tl.load(state + START_) + row + 1  # of the token this row decides
            score = score / temperature + gumbel(tl.load(seed), position, block * BLOCK, BLOCK)
            if FILTER:
                key = tl.load(cuts + row * 2)
                k = ordered(x)
                kept = (k > key) | ((k == key) & (ids <= tl.load(cuts + row * 2 + 1)))
                score = tl.where(kept, score, float("-inf"))
        top = tl.max(score, 0)
        token = tl.min(tl.where((score == top) & (ids < V), ids, V - 1), 0)
        if tl.max(((x != x) | (x == float("inf"))).to(tl.int32), 0) > 0:
            top, token = tl.full((), float("inf"), tl.float64), tl.full((), NAN_, tl.int32)
        tl.store(scores + row * blocks + block, top)
        tl.store(tokens + row * blocks + block, token)


def blocks(vocab: int) -> int:
    return -(-vocab // BLOCK)


def best(
    logits: torch.Tensor,
    knobs: torch.Tensor,
    seed: torch.Tensor,
    cuts: torch.Tensor,
    scores: torch.Tensor,
    tokens: torch.Tensor,
    state: torch.Tensor,
    filtered: bool,
    pdl: bool = False,
) -> None:
    """logits (ROWS, vocab) float32, knobs (3,) float64, seed (1,) int64 -> the best score (ROWS, blocks) float64 and
    token (ROWS, blocks) int32 of each block, -1 where a logit is not finite. cuts: scratch (ROWS, 2) int32, used where
    `filtered`."""
    vocab = logits.shape[1]
    if filtered:
        launch(
            cut_kernel,
            (ROWS,),
            logits,
            knobs,
            cuts,
            state,
            vocab,
            pdl=pdl,
            num_warps=16,
            BLOCK=min(8192, triton.next_power_of_2(vocab)),
        )
    launch(best_kernel, (ROWS, blocks(vocab)), logits, knobs, seed, cuts, scores, tokens, state, vocab,
           blocks(vocab), pdl=pdl, FILTER=filtered, BLOCK=BLOCK)  # fmt: skip


def case(
    vocab: int,
    device: torch.device,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    start: int = 7,
    noise: torch.Tensor | None = None,
) -> Case:
    """noise: (ROWS, vocab) float64 of positions start + 1 on, which the reference adds."""
    logits = torch.randn(ROWS, vocab, device=device) * 3
    logits[:, 3:9] = logits[:, 2:3]  # equal logits, which the lowest id wins
    state = torch.zeros(STATE_SIZE, dtype=torch.int32, device=device)
    state[START], state[RUN_ROWS], state[TOP_K] = start, ROWS, top_k
    knobs = torch.tensor([temperature, top_p, min_p], dtype=torch.float64, device=device)
    seeds = torch.tensor([seed], dtype=torch.int64, device=device)
    cuts = torch.full((ROWS, 2), -1, dtype=torch.int32, device=device)
    scores = torch.full((ROWS, blocks(vocab)), float("nan"), dtype=torch.float64, device=device)
    tokens = torch.full((ROWS, blocks(vocab)), -1, dtype=torch.int32, device=device)
    out = torch.full((ROWS,), -1, dtype=torch.int64, device=device)

    def run() -> None:
        best(logits, knobs, seeds, cuts, scores, tokens, state, 0 < top_k < vocab or top_p < 1 or min_p > 0)
        out.copy_(tokens.gather(1, scores.argmax(-1, keepdim=True))[:, 0])

    def expected() -> dict[str, torch.Tensor]:
        added = torch.zeros_like(logits).double() if noise is None else noise
        return {"token": reference(logits, temperature, top_k, top_p, min_p, added)}

    return Case(run, {"token": out}, expected, Cost(nbytes(logits), ROWS * vocab))
