"""How well a drafter guesses texts it did not learn from, at every position of their answers."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from slipstream.train.drafter import Drafter


@torch.no_grad()
def right(drafter: Drafter, y: Tensor, anchors: Tensor, truth: Tensor, embed: Tensor, vocab: Tensor,
          head: Tensor) -> Tensor:  # fmt: skip
    """y (n, rows, hidden): blocks; anchors (n,), truth (n, rows): tokens of greedy texts; head (draft_vocab, hidden).

    Drafts as the engine does, each guess after the one before; (n, rows) bool: right, and all before it, too.
    """
    before, alive, found = anchors, torch.ones_like(anchors, dtype=torch.bool), []
    for r in range(y.shape[1]):
        row = y[:, r]
        bent, _ = drafter.markov(row, embed[before].float())
        ids = (row.to(head.dtype) @ head.T).topk(drafter.config.candidates).indices
        best = torch.einsum("nch,nh->nc", head[ids], bent.to(head.dtype)).argmax(-1, keepdim=True)
        before = vocab[ids.gather(1, best)[:, 0]]
        alive = alive & (before == truth[:, r])
        found.append(alive)
    return torch.stack(found, 1)


def by_place(found: Iterable[tuple[Tensor, Tensor]]) -> list[float]:
    """Of (right, whole) pairs, the share of whole blocks whose guesses up to each place all hold."""
    held, total = list[Tensor](), 0.0
    for ok, whole in found:
        held.append((ok & whole[:, -1:]).sum(0).double())
        total += float(whole[:, -1].sum())
    return [float(n) / max(1.0, total) for n in torch.stack(held).sum(0)]
