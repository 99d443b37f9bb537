"""The greatest logits of a row, without sorting it.

The M greatest numbers lie in the M groups with the greatest maxima. So large groups, smaller ones within the best of
those, and single logits are ranked in turn: some hundred at once, each by counting those that go before it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream.kernels.launch import ROWS, Case, Cost, launch, nbytes
from slipstream.kernels.sample import ordered

GROUPS = 128
"""The most groups a row is cut in at first."""
SMALL = 8
"""Logits of the smallest groups."""
CHUNK = 32
"""Logits of a group that are read at once."""


@triton.jit
def greatest(scores, places, M: tl.constexpr):
    """Of scores (n,) float32 at `places` (n,) int32, the M greatest ones' places (M,), the greatest first."""
    i, key = tl.arange(0, scores.shape[0]), ordered(scores)
    sooner = (key[None, :] > key[:, None]) | ((key[None, :] == key[:, None]) & (i[None, :] < i[:, None]))
    rank = tl.sum(sooner.to(tl.int32), 1)
    return tl.sum(tl.where(rank[:, None] == tl.arange(0, M)[None, :], places[:, None], 0), 0)


@triton.jit
def members(groups, first, EACH: tl.constexpr, N: tl.constexpr):
    """Members first.. (groups, N) of groups of EACH."""
    return groups[:, None] * EACH + first + tl.arange(0, N)[None, :]


@triton.jit
def kernel(logits, ids, values, stride, V, M, MP: tl.constexpr, COUNT: tl.constexpr, EACH: tl.constexpr,
           SMALL: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    logits += row * stride
    group = tl.arange(0, COUNT)
    top = tl.full((COUNT,), float("-inf"), tl.float32)
    for first in tl.static_range(0, EACH, CHUNK):
        at = members(group, first, EACH, CHUNK)
        top = tl.maximum(top, tl.max(tl.load(logits + at, mask=at < V, other=float("-inf")), 1))
    group = greatest(top, group, MP)
    if EACH > CHUNK:  # to groups of CHUNK
        group = tl.reshape(members(group, 0, EACH // CHUNK, EACH // CHUNK), (MP * EACH // CHUNK,))
        at = members(group, 0, CHUNK, CHUNK)
        group = greatest(tl.max(tl.load(logits + at, mask=at < V, other=float("-inf")), 1), group, MP)
    group = tl.reshape(members(group, 0, CHUNK // SMALL, CHUNK // SMALL), (MP * CHUNK // SMALL,))
    at = members(group, 0, SMALL, SMALL)
    group = greatest(tl.max(tl.load(logits + at, mask=at < V, other=float("-inf")), 1), group, MP)
    at = tl.reshape(members(group, 0, SMALL, SMALL), (MP * SMALL,))
    found = greatest(tl.load(logits + at, mask=at < V, other=float("-inf")), at, MP)
    found = tl.minimum(found, V - 1)  # where logits are not numbers
    m = tl.arange(0, MP)
    tl.store(ids + row * M + m, found, mask=m < M)
    tl.store(values + row * M + m, tl.load(logits + found), mask=m < M)


def candidates(logits: torch.Tensor, ids: torch.Tensor, values: torch.Tensor, vocab: int, pdl: bool = False) -> None:
    """logits (.., features) float32, of which `vocab` count -> ids (rows, candidates) int32 of the greatest and their
    values, float32, the greatest first."""
    rows, count = ids.shape
    padded = triton.next_power_of_2(count)
    groups = max(padded, min(GROUPS, triton.next_power_of_2(triton.cdiv(vocab, CHUNK))))
    each = max(CHUNK, triton.next_power_of_2(triton.cdiv(vocab, groups)))
    launch(kernel, (rows,), logits, ids, values, logits.stride(0), vocab, count, pdl=pdl, num_warps=8, MP=padded,
           COUNT=groups, EACH=each, SMALL=SMALL, CHUNK=CHUNK)  # fmt: skip


def case(vocab: int, count: int, device: torch.device, rows: int = 7) -> Case:
    logits = torch.randn(ROWS, vocab + 5, device=device)
    logits[:, vocab:] = 100  # not the vocabulary's
    logits[:, vocab // 9 :] -= 1  # some groups hold many
    ids = torch.full((rows, count), -1, dtype=torch.int32, device=device)
    values = torch.full((rows, count), float("nan"), device=device)

    def expected() -> dict[str, torch.Tensor]:
        top = logits[:rows, :vocab].double().topk(count)
        return {"ids": top.indices.double(), "values": top.values}

    return Case(lambda: candidates(logits, ids, values, vocab), {"ids": ids, "values": values}, expected,
                Cost(nbytes(logits[:rows]), 0))  # fmt: skip
