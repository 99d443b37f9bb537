"""Block drafters as files: read and checked against their target, so that a wrong pair is found on loading.

A block drafter (DFlash arXiv:2602.06036, DSpark) is a small model fed by hidden states of some layers of its target; it
drafts a block at once. Two kinds of file:

    read_block_drafter    one published beside a model, in the folder `drafter/` of a checkpoint or under that key of
                          its config: the config alone
    load_block_drafter    one of our own kind, a folder with config.json and model.safetensors: config and weights

Nothing here computes: `train/drafter.py` says what the weights mean.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.errors import CheckpointError
from slipstream.models.families.common import Fields
from slipstream.models.safetensors_file import read_json, read_safetensors
from slipstream.models.spec import ModelSpec, WeightTensor
from slipstream.models.tensors import FileTensor

FOLDER = "drafter"
FLOATS = ("F32", "F16", "BF16")
MODEL_TYPE = "slipstream_block_drafter"
MAX_RANK = 1024


@dataclass(frozen=True)
class BlockDrafter:
    """taps: layers of the target whose outputs it reads, ascending. block: tokens a block, the anchor included.

    window: positions its attention sees. markov_rank: rank of the head that conditions a token on the one before it,
    0 is none. confidence: whether a head says how likely each draft is to be accepted.
    """

    hidden: int
    layers: int
    window: int | None
    taps: tuple[int, ...]
    block: int
    markov_rank: int
    confidence: bool


def read_block_drafter(path: Path, config: dict[str, Any], spec: ModelSpec) -> BlockDrafter | None:
    """The drafter of the checkpoint directory `path`, or None. Raises CheckpointError where it does not fit `spec`."""
    file = path / FOLDER / "config.json"
    if file.is_file():
        fields = Fields(str(file), read_json(file))
    elif FOLDER in config:
        fields = Fields(str(path / "config.json"), config).sub(FOLDER)
    else:
        return None
    inner = fields.sub("dflash_config")  # where DFlash keeps the taps
    at = inner if "target_layer_ids" in inner else fields
    taps = tuple(at.integers("target_layer_ids", limit=len(spec.layers)))
    if not taps or list(taps) != sorted(set(taps)):
        raise CheckpointError(f"{fields.source}: 'target_layer_ids' {taps} do not ascend; choose the drafter's release")
    for key, expected in (("vocab_size", spec.vocab), ("num_target_layers", len(spec.layers))):
        if fields.integer(key, expected) != expected:
            raise CheckpointError(
                f"{fields.source}: {key!r} is {fields.integer(key)}, the target has {expected}; "
                "choose the drafter of this model"
            )
    return BlockDrafter(
        hidden=fields.integer("hidden_size"),
        layers=fields.integer("num_hidden_layers", limit=1 << 10),
        window=fields.integer("sliding_window", limit=1 << 32) if "sliding_window" in fields else None,
        taps=taps,
        block=fields.integer("block_size", limit=256),
        markov_rank=fields.integer("markov_rank") if fields.values.get("markov_rank") else 0,
        confidence=fields.flag("confidence_head", False),
    )


@dataclass(frozen=True)
class BlockDrafterConfig:
    """config.json of a drafter of our own kind, checked by itself. `train/drafter.py` is what it computes.

    target: name of the model it was trained for. fingerprint: that model's `fingerprint`, or None where not recorded.
    vocab, target_hidden, target_layers: of the target. taps: its layers (from 0) whose outputs are read, ascending.
    block: rows of a block with the anchor's, so `drafts` is one less. window: positions before the anchor that a row
    sees, None is all. draft_vocab: tokens it guesses among. candidates: tokens a row leaves to the Markov head.
    acceptance: tokens a round by task, as recorded at training.
    """

    target: str
    fingerprint: str | None
    vocab: int
    target_hidden: int
    target_layers: int
    taps: tuple[int, ...]
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    rope_theta: float
    norm_eps: float
    block: int
    window: int | None
    draft_vocab: int
    markov_rank: int
    candidates: int
    acceptance: Mapping[str, float] = field(default_factory=dict)

    @property
    def drafts(self) -> int:
        return self.block - 1

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor but `draft_vocab`, by the name it has in the file."""
        h, kv, rank = self.hidden, self.kv_heads * self.head_dim, self.markov_rank
        q = self.heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "tap_norm.weight": (len(self.taps), self.target_hidden),
            "fuse.weight": (h, len(self.taps) * self.target_hidden),
            "context_norm.weight": (h,),
            "mask_embedding": (h,),
            "norm.weight": (h,),
            "markov.prev.weight": (rank, self.target_hidden),
            "markov.state.weight": (rank, h),
            "markov.out.weight": (rank, h),
            "confidence.y": (h,),
            "confidence.m": (rank,),
            "confidence.p": (1,),
            "confidence.b": (1,),
        }
        for i in range(self.layers):
            for name, shape in (("q", (q, h)), ("k", (kv, h)), ("v", (kv, h)), ("o", (h, q))):
                shapes[f"layers.{i}.{name}.weight"] = shape
            for name, shape in (("gate", (self.inner, h)), ("up", (self.inner, h)), ("down", (h, self.inner))):
                shapes[f"layers.{i}.{name}.weight"] = shape
            shapes[f"layers.{i}.input_norm.weight"] = shapes[f"layers.{i}.post_norm.weight"] = (h,)
        return shapes


@dataclass(frozen=True)
class BlockDrafterWeights:
    """A drafter that fits its target: `tensors` has exactly the names and shapes of `config.tensor_shapes()`.

    tokens: the draft vocabulary, (draft_vocab,) int32 ids of the target, ascending.
    """

    path: Path
    config: BlockDrafterConfig
    tensors: Mapping[str, WeightTensor]
    tokens: npt.NDArray[np.int32]


@dataclass(frozen=True)
class Int8Blocks(WeightTensor):
    """int8 values (rows, columns), a half-precision scale for every 32 columns: the numbers of Q8_0 in two tensors."""

    values: WeightTensor
    scales: WeightTensor

    format = "Q8_0"

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.values.shape

    def raw(self) -> npt.NDArray[np.uint8]:
        rows, columns = self.shape
        blocks = np.empty((rows, columns // 32, 34), np.uint8)
        blocks[..., :2] = self.scales.raw().reshape(rows, -1, 2)
        blocks[..., 2:] = self.values.raw().reshape(rows, -1, 32)
        return blocks.reshape(rows, -1)

    def float32(self) -> npt.NDArray[np.float32]:
        values = self.values.raw().view(np.int8).reshape(len(self.scales.raw()), -1, 32)
        return np.asarray(values * self.scales.float32()[..., None], np.float32).reshape(self.shape)


def fingerprint(tensors: Mapping[str, WeightTensor]) -> str:
    """Which model this is, whatever its weights were quantised to: a digest of its final norm, which never is."""
    return hashlib.sha256(tensors["final_norm"].float32().tobytes()).hexdigest()[:16]


def is_drafter(path: Path) -> bool:
    """Whether `path` is a folder of a drafter of our own kind."""
    config = path / "config.json"
    return config.is_file() and read_json(config).get("model_type") == MODEL_TYPE


def read_drafter_config(path: Path) -> BlockDrafterConfig:
    """The config of a drafter's folder. Raises CheckpointError where it makes no sense, whatever the target."""
    fields = Fields(str(path / "config.json"), read_json(path / "config.json"))
    if fields.text("model_type", "") != MODEL_TYPE:
        raise CheckpointError(f"{fields.source}: not a drafter of Slipstream ('model_type' is not {MODEL_TYPE!r})")
    target_layers = fields.integer("num_target_layers", limit=1 << 16)
    acceptance = fields.sub("acceptance")
    config = BlockDrafterConfig(
        target=fields.text("target"),
        fingerprint=fields.text("target_fingerprint") if "target_fingerprint" in fields else None,
        vocab=fields.integer("vocab_size"),
        target_hidden=fields.integer("target_hidden_size"),
        target_layers=target_layers,
        taps=tuple(fields.integers("target_layer_ids", limit=target_layers)),
        hidden=fields.integer("hidden_size"),
        layers=fields.integer("num_hidden_layers", limit=64),
        heads=fields.integer("num_attention_heads", limit=1 << 16),
        kv_heads=fields.integer("num_key_value_heads", limit=1 << 16),
        head_dim=fields.integer("head_dim", limit=1 << 16),
        inner=fields.integer("intermediate_size"),
        rope_theta=fields.number("rope_theta"),
        norm_eps=fields.number("rms_norm_eps"),
        block=fields.integer("block_size", limit=16),
        window=fields.integer("sliding_window", limit=1 << 30) if "sliding_window" in fields else None,
        draft_vocab=fields.integer("draft_vocab_size"),
        markov_rank=fields.integer("markov_rank", limit=MAX_RANK),
        candidates=fields.integer("markov_candidates", limit=64),
        acceptance={task: acceptance.number(task) for task in acceptance.values},
    )

    def need(ok: bool, what: str) -> None:
        if not ok:
            raise CheckpointError(f"{fields.source}: {what}; train the drafter again or choose another")

    need(bool(config.taps) and list(config.taps) == sorted(set(config.taps)), f"taps {config.taps} do not ascend")
    need(config.block >= 2, "'block_size' counts the anchor, so it is at least 2")
    need(config.hidden == config.target_hidden, "'hidden_size' is not that of the target, whose head it shares")
    need(config.heads % config.kv_heads == 0, "query heads are not a multiple of KV heads")
    need(config.head_dim % 2 == 0, "'head_dim' is odd, so it cannot turn")
    need(
        config.candidates <= config.draft_vocab <= config.vocab,
        "candidates, draft vocabulary and vocabulary do not nest",
    )
    need(fields.flag("confidence_head", True), "it has no confidence head")
    return config


def load_block_drafter(path: Path, spec: ModelSpec, tensors: Mapping[str, WeightTensor]) -> BlockDrafterWeights:
    """The drafter in the folder `path` for the target of `spec` and `tensors`.

    Raises CheckpointError where it does not fit the target, or a tensor is missing, damaged or of another shape.
    """
    config = read_drafter_config(path)
    source = path / "config.json"
    theirs = {"vocabulary": config.vocab, "hidden size": config.target_hidden, "layers": config.target_layers}
    for (what, expected), actual in zip(theirs.items(), (spec.vocab, spec.hidden, len(spec.layers)), strict=True):
        if expected != actual:
            raise CheckpointError(
                f"{source}: made for {config.target}, whose {what} is {expected}; this model has {actual}; "
                "choose the drafter of this model"
            )
    if config.fingerprint not in (None, fingerprint(tensors)):
        raise CheckpointError(
            f"{source}: made for {config.target}; this model has the same shape but other weights; "
            "choose the drafter of this model"
        )
    stored = read_safetensors(path / "model.safetensors")
    found = {name: _stored(path, stored, name, shape) for name, shape in config.tensor_shapes().items()}
    tokens = _draft_vocabulary(path, stored, config)
    known = {*found, "draft_vocab", *(f"{name}.scale" for name in found)}
    if unknown := sorted(set(stored) - known):
        raise CheckpointError(f"{path}: tensor {unknown[0][:80]!r} belongs to no drafter; train it again")
    return BlockDrafterWeights(path, config, found, tokens)


def _stored(path: Path, stored: Mapping[str, FileTensor], name: str, shape: tuple[int, ...]) -> WeightTensor:
    def refuse(why: str) -> CheckpointError:
        return CheckpointError(f"{path}: tensor {name!r} {why}; train the drafter again or choose another")

    tensor = stored.get(name)
    if tensor is None:
        raise refuse("is missing")
    if tensor.shape != shape:
        raise refuse(f"has shape {tensor.shape}, its config says {shape}")
    if tensor.format in FLOATS:
        return tensor
    scales = stored.get(f"{name}.scale")
    if tensor.format != "I8" or len(shape) != 2:
        raise refuse(f"is stored as {tensor.format}")
    if shape[1] % 32:
        raise refuse(f"has {shape[1]} columns, which do not divide into blocks of 32")
    if scales is None or scales.format != "F16" or scales.shape != (shape[0], shape[1] // 32):
        raise refuse(f"is int8, but its scales are not F16 of shape {(shape[0], shape[1] // 32)}")
    return Int8Blocks(tensor, scales)


def _draft_vocabulary(
    path: Path, stored: Mapping[str, FileTensor], config: BlockDrafterConfig
) -> npt.NDArray[np.int32]:
    tensor = stored.get("draft_vocab")
    if tensor is None or tensor.format != "I32" or tensor.shape != (config.draft_vocab,):
        raise CheckpointError(
            f"{path}: 'draft_vocab' is not {config.draft_vocab} int32 numbers; train the drafter again"
        )
    tokens = tensor.raw().reshape(-1).view(np.int32)
    if not (tokens[0] >= 0 and tokens[-1] < config.vocab and bool((np.diff(tokens) > 0).all())):
        raise CheckpointError(f"{path}: 'draft_vocab' does not ascend within the vocabulary; train the drafter again")
    return tokens
