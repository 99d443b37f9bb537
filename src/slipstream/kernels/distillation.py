"""What a drafter's logits should have been: cross-entropy and total variation to the target's, and their gradient.

    q = softmax(guessed / T), p = softmax(wanted / T)
    loss = -sum p log q + 1/2 sum |p - q|
    d loss / d guessed = ((q - p) + 1/2 q (s - q . s)) / T          s = sign(q - p)

One program a row. The gradient takes the place of the logits, so that neither they nor their softmax are kept for the
way back, as in fused losses over large vocabularies (Liger Kernel, arXiv:2410.10989).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def kernel(guessed, wanted, weight, loss, V, inverse, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    a, b, scale = guessed + row * V, wanted + row * V, tl.load(weight + row)
    lane = tl.arange(0, BLOCK)
    q_top, p_top = tl.full((BLOCK,), -1e30, tl.float32), tl.full((BLOCK,), -1e30, tl.float32)
    for v in range(0, V, BLOCK):
        there = v + lane < V
        q_top = tl.maximum(q_top, tl.load(a + v + lane, mask=there, other=-1e30).to(tl.float32))
        p_top = tl.maximum(p_top, tl.load(b + v + lane, mask=there, other=-1e30).to(tl.float32))
    q_most, p_most = tl.max(q_top, 0), tl.max(p_top, 0)
    q_sums, p_sums = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for v in range(0, V, BLOCK):
        there = v + lane < V
        q_sums += tl.exp((tl.load(a + v + lane, mask=there, other=-1e30).to(tl.float32) - q_most) * inverse)
        p_sums += tl.exp((tl.load(b + v + lane, mask=there, other=-1e30).to(tl.float32) - p_most) * inverse)
    q_total, p_total = tl.sum(q_sums, 0), tl.sum(p_sums, 0)
    q_log = tl.log(q_total)
    losses, signed = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for v in range(0, V, BLOCK):
        there = v + lane < V
        log_q = (tl.load(a + v + lane, mask=there, other=-1e30).to(tl.float32) - q_most) * inverse - q_log
        p = tl.exp((tl.load(b + v + lane, mask=there, other=-1e30).to(tl.float32) - p_most) * inverse) / p_total
        q = tl.exp(log_q)
        losses += tl.where(there, 0.5 * tl.abs(p - q) - p * log_q, 0.0)
        signed += tl.where(q > p, q, tl.where(q < p, -q, 0.0))
    tl.store(loss + row, tl.sum(losses, 0) * scale)
    mean = tl.sum(signed, 0)
    for v in range(0, V, BLOCK):
        there = v + lane < V
        q = tl.exp((tl.load(a + v + lane, mask=there, other=-1e30).to(tl.float32) - q_most) * inverse - q_log)
        p = tl.exp((tl.load(b + v + lane, mask=there, other=-1e30).to(tl.float32) - p_most) * inverse) / p_total
        sign = tl.where(q > p, 1.0, tl.where(q < p, -1.0, 0.0))
        slope = (q - p + 0.5 * q * (sign - mean)) * inverse * scale
        tl.store(a + v + lane, slope.to(guessed.dtype.element_ty), mask=there)


def distil(guessed: torch.Tensor, wanted: torch.Tensor, weight: torch.Tensor, temperature: float) -> torch.Tensor:
    """guessed, wanted (rows, vocab): logits; weight (rows,) float32 -> weighted losses (rows,) float32.

    `guessed` is overwritten by the gradient of their sum.
    """
    loss = torch.empty_like(weight)
    kernel[(len(weight),)](guessed, wanted, weight, loss, guessed.shape[1], 1 / temperature, BLOCK=4096, num_warps=8)
    return loss
