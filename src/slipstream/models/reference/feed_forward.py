"""The feed-forward half of a layer: dense, or a mixture of experts with its router.

x -> router -> top-k experts and their weights -> sum of weight * expert(x), and of the shared expert
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.models.spec import Experts, FeedForward

Weights = Mapping[str, Tensor]


def feed_forward(f: FeedForward, w: Weights, x: Tensor) -> Tensor:
    """Feed-forward of a layer whose weights are w: x (n, hidden) -> (n, hidden)."""
    if not f.experts:
        return gated(f, x, w)
    chosen, weights = route(f.experts, w, x)
    y = torch.zeros_like(x)
    for expert in sorted(set(chosen.flatten().tolist())):
        rows, at = (chosen == expert).nonzero(as_tuple=True)
        y[rows] += weights[rows, at].unsqueeze(1) * gated(f, x[rows], w, f"experts.{expert}.")
    return y + gated(f, x, w, "shared_") if f.experts.shared_inner else y


def route(experts: Experts, w: Weights, x: Tensor) -> tuple[Tensor, Tensor]:
    """The experts of each row and their weights, both (n, top_k). Of equal scores, the lower number is chosen."""
    logits = F.linear(x, w["router"], w.get("router_bias"))
    scores = logits.softmax(-1) if experts.scoring == "softmax" else logits.sigmoid()  # (n, experts)
    ranked = scores + w["correction"] if experts.correction else scores
    if experts.groups > 1:
        grouped = ranked.view(len(x), experts.groups, -1)
        best = top(grouped.topk(2, dim=-1).values.sum(-1), experts.top_groups)
        allowed = torch.zeros_like(grouped[..., 0]).scatter(1, best, 1).bool()
        ranked = grouped.masked_fill(~allowed.unsqueeze(-1), float("-inf")).flatten(1)
    chosen = top(ranked, experts.top_k)
    weights = scores.gather(1, chosen)
    if experts.normalise:
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-20)
    return chosen, weights * experts.scale


def top(scores: Tensor, k: int) -> Tensor:
    """Indices of the k highest scores of each row, (n, k)."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :k]


def gated(f: FeedForward, x: Tensor, w: Weights, at: str = "") -> Tensor:
    """down(activation(gate(x)) * up(x)) with the weights at `at`."""
    gate, up = (F.linear(x, w[f"{at}{name}"], w.get(f"{at}{name}_bias")) for name in ("gate", "up"))
    if f.activation == "clamped":
        gate, up = gate.clamp(max=f.limit), up.clamp(-f.limit, f.limit)
        inner = gate * torch.sigmoid(f.alpha * gate) * (up + 1)
    else:
        inner = F.silu(gate) * up
    return F.linear(inner, w[f"{at}down"], w.get(f"{at}down_bias"))
