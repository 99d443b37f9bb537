"""The config of a block drafter published beside a model: read and checked, so that a wrong pair is found on loading.

A block drafter (DFlash arXiv:2602.06036, DSpark) is a small model fed by hidden states of some layers of its target; it
drafts a block at once. It lies in the folder `drafter/` of a checkpoint, or its config under the key `drafter`. Its
weights are not read here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.errors import CheckpointError
from slipstream.models.families.common import Fields
from slipstream.models.safetensors_file import read_json
from slipstream.models.spec import ModelSpec

FOLDER = "drafter"


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
