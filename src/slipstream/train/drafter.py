"""What a block drafter computes, and can learn: `models.block_drafter`'s tensors over many anchors at once.

context  (b, n, hidden)           from the taps of every position
blocks   (b, anchors, rows, ...)  row r of the block at anchor p stands at p + r and guesses token p + r + 1
markov   what stood at p + r bends the scores of row r
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.backends.cuda.weights import rotate
from slipstream.models.block_drafter import BlockDrafterConfig


class Drafter(nn.Module):
    """Parameters by the names they have in a drafter's file, dots as underscores."""

    def __init__(self, config: BlockDrafterConfig, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.config = config
        for name, shape in config.tensor_shapes().items():
            if "norm" in name:
                value = torch.ones(shape)
            elif len(shape) == 1:
                value = torch.zeros(shape)
            else:
                value = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
                if name.endswith(("o.weight", "down.weight", "out.weight")):
                    value *= 0.1  # what adds to the stream begins small
            self.register_parameter(name.replace(".", "_"), nn.Parameter(value))

    def tensor(self, name: str) -> Tensor:
        return self.get_parameter(name.replace(".", "_"))

    def context(self, taps: Tensor) -> Tensor:
        """taps (b, n, taps, target hidden) -> (b, n, hidden)."""
        eps = self.config.norm_eps
        x = F.rms_norm(taps, taps.shape[3:], None, eps) * self.tensor("tap_norm.weight")
        x = F.linear(x.flatten(2), self.tensor("fuse.weight"))
        return F.rms_norm(x, x.shape[2:], self.tensor("context_norm.weight"), eps)

    def blocks(self, context: Tensor, at: Tensor, anchors: Tensor) -> Tensor:
        """at (b, anchors): positions; anchors (b, anchors, hidden): their embeddings -> (b, anchors, rows, hidden).

        A row sees the window's positions before its anchor and all rows of its own block.
        """
        c = self.config
        (b, n, _), count, rows, device = context.shape, at.shape[1], c.drafts, context.device
        masks = self.tensor("mask_embedding").expand(b, count, rows - 1, -1)
        x = torch.cat([anchors[:, :, None], masks], 2).flatten(1, 2)  # (b, anchors * rows, hidden)
        positions = (at[:, :, None] + torch.arange(rows, device=device)).flatten(1)
        back = at.repeat_interleave(rows, 1)[:, :, None] - torch.arange(n, device=device)
        unseen = ((back <= 0) | (back > (c.window or n)))[:, None, None]  # (b, 1, 1, anchors * rows, n)
        inverse = c.rope_theta ** (-torch.arange(c.head_dim // 2, device=device) * 2 / c.head_dim)
        turn, context_turn = _angles(positions, inverse), _angles(torch.arange(n, device=device)[None], inverse)
        for i in range(c.layers):
            w = {name: self.tensor(f"layers.{i}.{name}.weight") for name in LAYER}
            a = F.rms_norm(x, x.shape[2:], w["input_norm"], c.norm_eps)
            heads = {s: torch.unflatten(F.linear(a, w[s]), 2, (-1, c.head_dim)) for s in "qkv"}
            far = {s: torch.unflatten(F.linear(context, w[s]), 2, (-1, c.head_dim)) for s in "kv"}
            dtype = heads["v"].dtype
            q, k = (rotate(heads[s], *turn).to(dtype) for s in "qk")
            o = _attention(q, k, heads["v"], rotate(far["k"], *context_turn).to(dtype), far["v"], unseen, rows)
            x = x + F.linear(o, w["o"])
            h = F.rms_norm(x, x.shape[2:], w["post_norm"], c.norm_eps)
            x = x + F.linear(F.silu(F.linear(h, w["gate"])) * F.linear(h, w["up"]), w["down"])
        return F.rms_norm(x, x.shape[2:], self.tensor("norm.weight"), c.norm_eps).view(b, count, rows, -1)

    def markov(self, y: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """y (..., hidden) and the embeddings of the tokens before: what the head's rows are multiplied with, and the
        state (..., rank)."""
        state = F.silu(
            F.linear(before, self.tensor("markov.prev.weight")) + F.linear(y, self.tensor("markov.state.weight"))
        )
        return y + state @ self.tensor("markov.out.weight"), state

    def confidence(self, y: Tensor, state: Tensor, log_share: Tensor) -> Tensor:
        """The logit that a guess of log-probability `log_share` among its candidates is right, all before being so."""
        w = self.tensor
        return y @ w("confidence.y") + state @ w("confidence.m") + w("confidence.p") * log_share + w("confidence.b")


LAYER = ("input_norm", "post_norm", "q", "k", "v", "o", "gate", "up", "down")


def _attention(q: Tensor, k: Tensor, v: Tensor, far_k: Tensor, far_v: Tensor, unseen: Tensor, rows: int) -> Tensor:
    """q (b, m, heads, d), k and v (b, m, kv_heads, d) of blocks of `rows` each; far_k, far_v (b, n, kv_heads, d) of the
    context, of which `unseen` is masked -> (b, m, heads * d). Query heads of a KV head are folded into its rows."""
    kv_heads, d = k.shape[2:]
    q = torch.unflatten(q * d**-0.5, 2, (kv_heads, -1)).permute(0, 2, 3, 1, 4)  # (b, kv, group, m, d)
    distant = q @ far_k.permute(0, 2, 3, 1)[:, :, None]
    own_k, own_v = (torch.unflatten(t, 1, (-1, rows)).permute(0, 3, 1, 2, 4)[:, :, None] for t in (k, v))
    near = torch.unflatten(q, 3, (-1, rows)) @ own_k.transpose(4, 5)  # (b, kv, group, blocks, rows, rows)
    with torch.autocast(q.device.type, enabled=False):
        scores = torch.cat([distant.masked_fill(unseen, -torch.inf), near.flatten(3, 4)], -1).softmax(-1)
    distant, near = torch.split(scores, [far_k.shape[1], rows], -1)
    o = (torch.unflatten(near, 3, (-1, rows)) @ own_v).flatten(3, 4)
    o = o + distant @ far_v.permute(0, 2, 1, 3)[:, :, None]
    return o.permute(0, 3, 1, 2, 4).flatten(2)


def _angles(positions: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    angles = positions[:, :, None, None] * inverse
    return angles.cos(), angles.sin()
