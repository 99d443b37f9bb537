"""GGUF files of sparse models hold the model that the directory of the same weights holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import write_tiny_checkpoint, write_tiny_gguf

from slipstream.errors import CheckpointError
from slipstream.models.checkpoint import load_checkpoint

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "truncate": False}
CASES: list[tuple[str, dict[str, Any]]] = [("qwen3_moe", {}), ("gpt_oss", {"rope_scaling": YARN}), ("gpt_oss", {})]


@pytest.mark.parametrize(("family", "changes"), CASES)
def test_gguf_is_the_model_of_the_directory(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    directory = load_checkpoint(write_tiny_checkpoint(tmp_path / "d", family, layers=3, **changes))
    file = load_checkpoint(write_tiny_gguf(tmp_path / "x.gguf", family, format="F32", layers=3, **changes))
    a, b = directory.spec, file.spec
    for mine, theirs in zip(a.layers, b.layers, strict=True):
        assert mine.feed_forward == theirs.feed_forward
        np.testing.assert_allclose(mine.attention.rope.inv_freq, theirs.attention.rope.inv_freq, rtol=1e-6)
        assert mine.attention.rope.scale == pytest.approx(theirs.attention.rope.scale)
        assert (mine.attention.window, mine.attention.sinks) == (theirs.attention.window, theirs.attention.sinks)
    assert a.tensor_shapes() == b.tensor_shapes()
    for name, tensor in directory.tensors.items():
        np.testing.assert_array_equal(tensor.float32(), file.tensors[name].float32())


@pytest.mark.parametrize("format", ["MXFP4", "Q8_0", "Q4_K"])
def test_experts_stay_packed_and_are_slices_of_the_stack(tmp_path: Path, format: str) -> None:
    path = write_tiny_gguf(tmp_path / "x.gguf", "gpt_oss", format=format, intermediate_size=256, head_dim=64)
    tensor = load_checkpoint(path).tensors["layers.1.experts.7.down"]
    assert tensor.format == format
    assert np.isfinite(tensor.float32()).all()
    assert tensor.float32().std() > 0.01


def test_a_stack_of_another_count_is_named(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "x.gguf", "qwen3_moe", format="F32")
    data = path.read_bytes()
    key = b"qwen3moe.expert_count" + (4).to_bytes(4, "little")
    path.write_bytes(data.replace(key + (8).to_bytes(4, "little"), key + (7).to_bytes(4, "little")))
    with pytest.raises(CheckpointError, match="is not of 7 experts"):
        load_checkpoint(path)


def test_an_architecture_that_is_not_known_names_those_that_are(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "x.gguf", "qwen3_moe", format="F32")
    path.write_bytes(path.read_bytes().replace(b"qwen3moe", b"mimo_moe"))
    with pytest.raises(CheckpointError, match="model family 'mimo_moe' is not supported; supported are gpt-oss, llama"):
        load_checkpoint(path)
