"""Block drafters that come with the package, in `weights/`, each for one model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from slipstream.models.block_drafter import fingerprint, read_drafter_config
from slipstream.models.spec import WeightTensor

FOLDER = Path(__file__).parent / "weights"


def shipped_drafter(tensors: Mapping[str, WeightTensor]) -> Path | None:
    """The folder of the drafter trained for the model with these weights, however quantised, or None."""
    mine = fingerprint(tensors)
    for config in sorted(FOLDER.glob("*/config.json")):
        if read_drafter_config(config.parent).fingerprint == mine:
            return config.parent
    return None
