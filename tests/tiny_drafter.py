"""Writes tiny random block drafters, and computes what they draft: the definition in numpy, naively, in float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiny import encode_floats

from slipstream.engine.sampling import gumbel
from slipstream.models.block_drafter import BlockDrafterWeights, fingerprint, read_drafter_config
from slipstream.models.reference import Reference
from slipstream.models.reference.attention import attend, rms_norm
from slipstream.models.reference.feed_forward import feed_forward

DTYPES = {"float32": "F32", "float16": "F16", "int8": "I8", "int32": "I32", "uint16": "BF16"}


def tiny_drafter_config(**changes: Any) -> dict[str, Any]:
    """config.json of a drafter for `tiny_config(layers=4)`: three taps, two layers of its own, seven drafts."""
    return {
        "model_type": "slipstream_block_drafter",
        "target": "tiny",
        "vocab_size": 288,
        "target_hidden_size": 64,
        "num_target_layers": 4,
        "target_layer_ids": [0, 2, 3],
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "block_size": 8,
        "sliding_window": 20,
        "draft_vocab_size": 200,
        "markov_rank": 32,
        "markov_candidates": 8,
        "confidence_head": True,
    } | changes


def write_tiny_drafter(path: Path, tensors: Any = None, stored: str = "int8", seed: int = 0, **changes: Any) -> Path:
    """A drafter's folder. tensors: of the target, whose fingerprint is recorded. stored: int8, F32 or BF16 matrices."""
    config = tiny_drafter_config(**changes)
    if tensors:
        config.setdefault("target_fingerprint", fingerprint(tensors))
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(seed)
    out: dict[str, np.ndarray] = {}
    for name, shape in read_drafter_config(path).tensor_shapes().items():
        values = rng.normal(0, shape[-1] ** -0.5 if len(shape) == 2 else 0.3, shape).astype(np.float32)
        if "norm" in name:
            out[name] = 1 + 0.3 * values
        elif len(shape) == 2 and stored == "int8":
            blocks = values.reshape(shape[0], -1, 32)
            scale = (np.abs(blocks).max(-1) / 127).astype(np.float16)
            out[name] = np.rint(blocks / scale[..., None].astype(np.float32)).clip(-127, 127).astype(np.int8)
            out[name] = out[name].reshape(shape)
            out[f"{name}.scale"] = scale
        else:
            out[name] = encode_floats(values, stored) if len(shape) == 2 else values
    size = config["draft_vocab_size"]
    out["draft_vocab"] = np.sort(rng.permutation(config["vocab_size"])[:size]).astype(np.int32)
    write_tensors(path / "model.safetensors", out)
    return path


def write_tensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    header, at = {}, 0
    for name, values in tensors.items():
        dtype = DTYPES[values.dtype.name]
        header[name] = {"dtype": dtype, "shape": values.shape, "data_offsets": [at, at + values.nbytes]}
        at += values.nbytes
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(v.tobytes() for v in tensors.values()))


class Oracle:
    """What a drafter says about a text: the mathematics of `train.drafter`, said again naively."""

    def __init__(self, drafter: BlockDrafterWeights, target: Reference) -> None:
        self.config, self.tokens, self.target = drafter.config, drafter.tokens, target
        self.w = {name: tensor.float32().astype(np.float64) for name, tensor in drafter.tensors.items()}
        self.embed, self.head = (target.weights[name].numpy().astype(np.float64) for name in ("embed", "head"))

    def draft(self, text: np.ndarray, temperature: float = 0.0, seed: int = 0) -> tuple[np.ndarray, ...]:
        """Of `text`, the anchor last: tokens (rows,), confidence (rows,), scores and candidates (rows, candidates)."""
        c, w, p, anchor = self.config, self.w, len(text) - 1, int(text[-1])
        context = self._context(text[:-1])[max(0, p - c.window) if c.window else 0 :]
        x = np.stack([self.embed[anchor], *[w["mask_embedding"]] * (c.drafts - 1)])
        for i in range(c.layers):
            x = self._layer(x, context, {n: w[f"layers.{i}.{n}.weight"] for n in LAYER}, p)
        rows = []
        before = anchor
        for r, y in enumerate(norm(x, w["norm.weight"], c.norm_eps)):
            best = np.argsort(-(self.head[self.tokens] @ y), kind="stable")[: c.candidates]
            ids = self.tokens[best]
            state = silu(w["markov.prev.weight"] @ self.embed[before] + w["markov.state.weight"] @ y)
            scores = self.head[ids] @ (y + w["markov.out.weight"].T @ state)
            drawn = scores / temperature + gumbel(seed, p + r + 1, ids) if temperature else scores
            chosen = int(drawn.argmax())
            log_share = scores[chosen] - np.log(np.exp(scores).sum())
            evidence = w["confidence.y"] @ y + w["confidence.m"] @ state + w["confidence.p"] * log_share
            before = int(ids[chosen])
            rows.append((before, 1 / (1 + np.exp(-evidence - w["confidence.b"]))[0], scores, ids))
        return tuple(map(np.array, zip(*rows, strict=True)))

    def _context(self, text: np.ndarray) -> np.ndarray:
        """What the drafter remembers of each position of `text` (n, hidden)."""
        c, w = self.config, self.w
        taps = layer_outputs(self.target, text)[:, list(c.taps)]
        fused = norm(taps, w["tap_norm.weight"], c.norm_eps).reshape(len(text), -1) @ w["fuse.weight"].T
        return norm(fused, w["context_norm.weight"], c.norm_eps)

    def _layer(self, x: np.ndarray, context: np.ndarray, w: dict[str, np.ndarray], p: int) -> np.ndarray:
        c, rows = self.config, len(x)
        a = norm(x, w["input_norm"], c.norm_eps)
        seen = np.concatenate((context, a))
        positions = np.arange(p - len(context), p + rows)
        q = turn((a @ w["q"].T).reshape(rows, c.heads, -1), positions[-rows:], c.rope_theta)
        group = c.heads // c.kv_heads
        k = turn((seen @ w["k"].T).reshape(len(seen), c.kv_heads, -1), positions, c.rope_theta).repeat(group, 1)
        v = (seen @ w["v"].T).reshape(len(seen), c.kv_heads, -1).repeat(group, 1)
        weights = np.exp(np.einsum("qhd,khd->hqk", q, k) * c.head_dim**-0.5)
        weights /= weights.sum(-1, keepdims=True)
        x = x + np.einsum("hqk,khd->qhd", weights, v).reshape(rows, -1) @ w["o"].T
        b = norm(x, w["post_norm"], c.norm_eps)
        return np.asarray(x + (silu(b @ w["gate"].T) * (b @ w["up"].T)) @ w["down"].T)


@torch.inference_mode()
def layer_outputs(target: Reference, text: np.ndarray) -> np.ndarray:
    """The residual stream after each layer (n, layers, hidden), as `Reference.hidden` computes it."""
    positions, memory, eps = torch.arange(len(text)), target.memory(len(text)), target.spec.norm_eps
    x, out = target.weights["embed"][torch.from_numpy(text)], []
    for i, (layer, w) in enumerate(zip(target.spec.layers, target.layers, strict=True)):
        normed = rms_norm(x, w["attention_norm"], eps)
        x = x + attend(layer.attention, w, normed, positions, memory, i, None, eps)[0]
        x = x + feed_forward(layer.feed_forward, w, rms_norm(x, w["ffn_norm"], eps))
        out.append(x.numpy().astype(np.float64))
    return np.stack(out, axis=1)


LAYER = ("input_norm", "post_norm", "q", "k", "v", "o", "gate", "up", "down")


def norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return np.asarray(x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight)


def silu(x: np.ndarray) -> np.ndarray:
    return np.asarray(x / (1 + np.exp(-x)))


def turn(x: np.ndarray, positions: np.ndarray, theta: float) -> np.ndarray:
    """RoPE in halves; x (n, heads, dim)."""
    half = x.shape[-1] // 2
    angle = positions[:, None, None] * theta ** (-np.arange(half) / half)
    u, v = x[..., :half], x[..., half:]
    return np.concatenate((u * np.cos(angle) - v * np.sin(angle), v * np.cos(angle) + u * np.sin(angle)), -1)
