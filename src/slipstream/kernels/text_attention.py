"""Attention of many texts that each grow by one token: RoPE, its key and value written, and all of its text read.

One program a text and KV head; the query heads on it are folded into one tile, so keys and values are read once. For
throughput over hundreds of texts: nothing is split, and unlike `attention` it serves no single stream.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream.kernels.launch import dot


@triton.jit
def kernel(qkv, table, positions, keys, values, out, capacity, scale, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
           GROUP_PAD: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    text, kv = tl.program_id(0), tl.program_id(1)
    at = tl.load(positions + text)
    half = tl.arange(0, D // 2)
    cos, sin = tl.load(table + at * D + half), tl.load(table + at * D + D // 2 + half)
    group: tl.constexpr = HEADS // KV_HEADS
    row = qkv + text.to(tl.int64) * (HEADS + 2 * KV_HEADS) * D
    base = (text.to(tl.int64) * KV_HEADS + kv) * capacity * D
    k = row + (HEADS + kv) * D
    low, high = tl.load(k + half).to(tl.float32), tl.load(k + D // 2 + half).to(tl.float32)
    mine = keys + base + at.to(tl.int64) * D
    tl.store(mine + half, (low * cos - high * sin).to(keys.dtype.element_ty))
    tl.store(mine + D // 2 + half, (high * cos + low * sin).to(keys.dtype.element_ty))
    d = tl.arange(0, D)
    tl.store(values + base + at.to(tl.int64) * D + d, tl.load(row + (HEADS + KV_HEADS + kv) * D + d))
    tl.debug_barrier()  # the loop below reads what other threads have just written
    member = tl.arange(0, GROUP_PAD)
    real = (member < group)[:, None]
    q = row + (kv * group + member)[:, None] * D + half[None, :]
    low, high = (
        tl.load(q, mask=real, other=0.0).to(tl.float32),
        tl.load(q + D // 2, mask=real, other=0.0).to(tl.float32),
    )
    q_low = (low * cos[None, :] - high * sin[None, :]).to(keys.dtype.element_ty)
    q_high = (high * cos[None, :] + low * sin[None, :]).to(keys.dtype.element_ty)
    top = tl.full((GROUP_PAD,), -1e30, tl.float32)
    total = tl.zeros((GROUP_PAD,), tl.float32)
    acc = tl.zeros((GROUP_PAD, D), tl.float32)
    for n0 in range(0, at + 1, BLOCK):
        n = n0 + tl.arange(0, BLOCK)
        there = n <= at
        key = keys + base + n[None, :] * D + half[:, None]  # (D / 2, BLOCK)
        s = dot(q_low, tl.load(key, mask=there[None, :], other=0.0))
        s = dot(q_high, tl.load(key + D // 2, mask=there[None, :], other=0.0), s) * scale
        s = tl.where(there[None, :], s, -1e30)
        new_top = tl.maximum(top, tl.max(s, 1))
        p = tl.exp(s - new_top[:, None])
        fade = tl.exp(top - new_top)
        total = total * fade + tl.sum(p, 1)
        v = tl.load(values + base + n[:, None] * D + d[None, :], mask=there[:, None], other=0.0)
        acc = acc * fade[:, None]
        acc = dot(p.to(v.dtype), v, acc)
        top = new_top
    to = out + (text.to(tl.int64) * HEADS + kv * group + member)[:, None] * D + d[None, :]
    tl.store(to, (acc / total[:, None]).to(out.dtype.element_ty), mask=real)


def text_attention(qkv: torch.Tensor, table: torch.Tensor, positions: torch.Tensor, keys: torch.Tensor,
                   values: torch.Tensor, scale: float) -> torch.Tensor:  # fmt: skip
    """qkv (texts, (heads + 2 kv_heads) d); table (positions, 2, d / 2) float32: cosines and sines; positions (texts,)
    int32; keys, values (texts, kv_heads, capacity, d), written at `positions` -> (texts, heads d)."""
    texts, kv_heads, capacity, d = keys.shape
    heads = qkv.shape[1] // d - 2 * kv_heads
    out = torch.empty(texts, heads * d, dtype=qkv.dtype, device=qkv.device)
    kernel[(texts, kv_heads)](qkv, table, positions, keys, values, out, capacity, scale, HEADS=heads, KV_HEADS=kv_heads,
                              GROUP_PAD=max(16, triton.next_power_of_2(heads // kv_heads)), D=d, BLOCK=64,
                              num_warps=4)  # fmt: skip
    return out
