"""What a drafter learns from: the target's own distribution, at the temperature it will be sampled with.

Under the coupled noise of the engine a draft is kept about as often as two distributions overlap, 1 - TV; cross-entropy
learns faster from the start (DistillSpec, arXiv:2310.08461), so both are added. A guess counts only where all before it
hold, so later places weigh less.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor

from slipstream.train.drafter import Drafter

TEMPERATURE, DECAY = 0.8, 0.8


def distillation(guessed: Tensor, target: Tensor, head: Tensor, weight: Tensor) -> Tensor:
    """The weighted sum. guessed, target (rows, hidden): logits, with head (draft_vocab, hidden); weight (rows,)."""
    log_q = F.log_softmax((guessed @ head.T).float() / TEMPERATURE, -1)
    p = F.softmax((target @ head.T).float() / TEMPERATURE, -1)
    cross, distance = -(p * log_q).sum(-1), 0.5 * (p - log_q.exp()).abs().sum(-1)
    return ((cross + distance) * weight).sum()


class Distillation(torch.autograd.Function):
    """`distillation` whose gradient is made on the way there; the head does not learn. For GPUs."""

    @staticmethod
    def forward(ctx: Any, guessed: Tensor, target: Tensor, head: Tensor, weight: Tensor, rows: int) -> Tensor:
        from slipstream.kernels.distillation import distil

        slope, total = torch.empty_like(guessed), torch.zeros((), device=guessed.device)
        for g, t, w, s in zip(*(torch.split(x, rows) for x in (guessed, target, weight, slope)), strict=True):
            logits = g.to(head.dtype) @ head.T
            total += distil(logits, t @ head.T, w, TEMPERATURE).sum()
            s.copy_(logits @ head)
        ctx.save_for_backward(slope)
        return total

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        (slope,) = ctx.saved_tensors
        return slope * slopes[0], None, None, None, None


def mean_distillation(guessed: Tensor, target: Tensor, head: Tensor, weight: Tensor, rows: int = 8192) -> Tensor:
    """`distillation` for a weight of one, `rows` at a time, whose logits are not kept."""
    if guessed.device.type == "cuda":
        total = cast(Tensor, Distillation.apply(guessed, target, head, weight, rows))  # type: ignore[no-untyped-call]
        return total / weight.sum()
    pieces = zip(*(torch.split(x, rows) for x in (guessed, target, weight)), strict=True)
    sums = [torch.utils.checkpoint.checkpoint(distillation, g, t, head, w, use_reentrant=False) for g, t, w in pieces]
    return torch.stack(sums).sum() / weight.sum()


def places(rows: int, device: torch.device) -> Tensor:
    """Weights (rows,) of the places of a block."""
    return DECAY ** torch.arange(rows, device=device, dtype=torch.float32)


def calibration(drafter: Drafter, y: Tensor, before: Tensor, target: Tensor, vocab: Tensor, head: Tensor,
                hot: Tensor, weight: Tensor,
                generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The confidence head's loss over rows (n, ...), and the share of right guesses; nothing else learns from it.

    Each row, of `weight` (n,), drafts as the engine does: candidates, scores, and where `hot` (n,) the noise that the
    target shares.
    """
    y, before = y.detach(), before.detach()
    with torch.no_grad():
        bent, state = drafter.markov(y, before)
        small = head[vocab]
        ids = (y @ small.T).topk(drafter.config.candidates).indices  # of the draft vocabulary
        scores = torch.einsum("nch,nh->nc", small[ids], bent.to(small.dtype)).float()
        logits = (target @ head.T).float()
        noise = -torch.empty_like(logits).exponential_(generator=generator).log()
        truth = torch.where(hot, (logits / TEMPERATURE + noise).argmax(-1), logits.argmax(-1))
        guesses = vocab[ids]
        drawn = torch.where(hot[:, None], scores / TEMPERATURE + noise.gather(1, guesses), scores).argmax(
            -1, keepdim=True
        )
        share = scores.log_softmax(-1).gather(1, drawn)[:, 0]
        right = (guesses.gather(1, drawn)[:, 0] == truth).float()
    said = drafter.confidence(y, state, share)
    loss = F.binary_cross_entropy_with_logits(said, right, weight, reduction="sum") / weight.sum().clamp_min(1)
    return loss, right.mean()
