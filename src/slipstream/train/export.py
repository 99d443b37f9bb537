"""A trained drafter as a folder: int8 matrices with a scale for 32 inputs, its config, and a card."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from slipstream.models.block_drafter import MODEL_TYPE, BlockDrafterConfig
from slipstream.models.safetensors_file import write_safetensors
from slipstream.train.drafter import Drafter


def write_config(path: Path, config: BlockDrafterConfig, acceptance: Mapping[str, float]) -> None:
    c = replace(config, acceptance=dict(acceptance))
    values = {FIELDS.get(name, name): value for name, value in asdict(c).items() if value is not None}
    text = json.dumps({"model_type": MODEL_TYPE, **values, "confidence_head": True}, indent=2)
    (path / "config.json").write_text(text + "\n", encoding="utf-8")


FIELDS = {
    "fingerprint": "target_fingerprint", "vocab": "vocab_size", "target_hidden": "target_hidden_size",
    "target_layers": "num_target_layers", "taps": "target_layer_ids", "hidden": "hidden_size",
    "layers": "num_hidden_layers", "heads": "num_attention_heads", "kv_heads": "num_key_value_heads",
    "inner": "intermediate_size", "norm_eps": "rms_norm_eps", "block": "block_size", "window": "sliding_window",
    "draft_vocab": "draft_vocab_size", "candidates": "markov_candidates",
}  # fmt: skip


def write_weights(path: Path, drafter: Drafter, tokens: npt.NDArray[np.int32]) -> None:
    """model.safetensors of `drafter`; tokens: its draft vocabulary, ascending."""
    out: dict[str, npt.NDArray[np.generic]] = {}
    for name, shape in drafter.config.tensor_shapes().items():
        values = drafter.tensor(name).detach().float().cpu().numpy()
        if len(shape) == 2 and "norm" not in name and shape[1] % 32 == 0:
            out[name], out[f"{name}.scale"] = _int8(values)
        else:
            out[name] = values
    out["draft_vocab"] = tokens
    write_safetensors(path / "model.safetensors", out)


def _int8(values: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float16]]:
    blocks = values.reshape(len(values), -1, 32)
    scale = np.maximum(np.abs(blocks).max(-1) / 127, np.finfo(np.float16).tiny).astype(np.float16)
    whole = np.rint(blocks / scale[..., None].astype(np.float32)).clip(-127, 127)
    return whole.astype(np.int8).reshape(values.shape), scale


def write_card(path: Path, config: BlockDrafterConfig, facts: Mapping[str, str]) -> None:
    """README.md: for which model, how it was trained, what it brings."""
    title = f"# Block drafter for {config.target}"
    about = "Made by `slipstream train-drafter`; it guesses what this model says and changes nothing of it."
    lines = [title, "", about, "", *(f"- {name}: {value}" for name, value in facts.items())]
    if config.acceptance:
        lines += ["", "| task | tokens a round, greedy |", "|---|---|"]
        lines += [f"| {task} | {length:.2f} |" for task, length in config.acceptance.items()]
    (path / "README.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
