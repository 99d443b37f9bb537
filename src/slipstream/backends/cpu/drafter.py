"""A block drafter in the native library: its weights go there, and one call from here is one draft."""

from __future__ import annotations

import ctypes as c
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from slipstream.backends.base import FloatArray, IntArray
from slipstream.backends.cpu.library import DrafterShape, LayerShape
from slipstream.models.block_drafter import BlockDrafterConfig, BlockDrafterWeights

OWN = -2
"""The "layer" of tensors that only a drafter has; -1 are a model's outside its layers."""

_OWN_NAMES = {"fuse.weight": "fuse", "tap_norm.weight": "tap_norm", "context_norm.weight": "context_norm"}
_LAYER_NAMES = {"input_norm": "attention_norm", "post_norm": "ffn_norm"}
_MAX_HEAD_DIM = 256  # csrc/model.h


class Guesses(NamedTuple):
    """One draft. tokens, confidence: (rows,). scores, candidates: (rows, candidates), what each row chose among."""

    tokens: IntArray
    confidence: FloatArray
    scores: FloatArray
    candidates: IntArray


def unsupported(config: BlockDrafterConfig) -> str | None:
    """Why the native kernels cannot run this drafter, or None."""
    if config.head_dim % 16 or config.head_dim > _MAX_HEAD_DIM:
        return f"it has heads of {config.head_dim}; native heads are multiples of 16 up to {_MAX_HEAD_DIM}"
    for what, n, step in (
        ("hidden size", config.hidden, 32),
        ("attention width", config.heads * config.head_dim, 32),
        ("inner size", config.inner, 32),
        ("Markov rank", config.markov_rank, 16),
    ):
        if n % step:
            return f"its {what} is {n}, not a multiple of {step}"
    return None


def shapes(drafter: BlockDrafterWeights, coarse: bool) -> tuple[DrafterShape, c.Array[LayerShape], c.Array[c.c_float]]:
    """The shape of the drafter, of its layers, and the frequencies they turn with, for the C ABI."""
    config = drafter.config
    layer = LayerShape(
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        value_dim=config.head_dim,
        value_scale=1.0,
        window=config.window + 1 if config.window else 0,  # there a position sees itself, too
        inner=config.inner,
        rotary_pairs=config.head_dim // 2,
        softmax_scale=config.head_dim**-0.5,
        rope_scale=1.0,
    )
    shape = DrafterShape(
        hidden=config.hidden,
        rows=config.drafts,
        taps=len(config.taps),
        draft_vocab=config.draft_vocab,
        rank=config.markov_rank,
        candidates=config.candidates,
        coarse=coarse,
        eps=config.norm_eps,
    )
    inv_freq = config.rope_theta ** (-np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim)
    return shape, (LayerShape * config.layers)(*[layer] * config.layers), (c.c_float * len(inv_freq))(*inv_freq)


def native_names(drafter: BlockDrafterWeights) -> Iterator[tuple[str, int, str, bool]]:
    """(name in the file, layer, native name, whether it is a matrix) of every tensor."""
    for name in drafter.tensors:
        if name.startswith("layers."):
            _, layer, short, _ = name.split(".")
            yield name, int(layer), _LAYER_NAMES.get(short, short), not short.endswith("norm")
        elif name == "norm.weight":
            yield name, -1, "final_norm", False
        else:
            short = _OWN_NAMES.get(name) or name.removesuffix(".weight")
            yield name, OWN, short, short == "fuse" or short.startswith("markov.")
