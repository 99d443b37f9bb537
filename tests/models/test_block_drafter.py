"""A drafter's folder is read whole, and refused in words where it is damaged or another model's."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tiny import write_tiny_checkpoint, write_tiny_gguf
from tiny_drafter import write_tensors, write_tiny_drafter

from slipstream.errors import CheckpointError
from slipstream.models.block_drafter import fingerprint, is_drafter, load_block_drafter
from slipstream.models.checkpoint import load_checkpoint
from slipstream.models.safetensors_file import read_safetensors


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_checkpoint(write_tiny_checkpoint(tmp_path_factory.mktemp("target"), layers=4))


def loaded(path, target):
    return load_block_drafter(path, target.spec, target.tensors)


def refusal(path, target) -> str:
    with pytest.raises(CheckpointError) as error:
        loaded(path, target)
    assert "\n" not in str(error.value)
    return str(error.value)


def change_config(path, **changes):
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))
    return path


def change_tensors(path, **changes):
    """Other arrays under names whose dots are written as double underscores; None drops one."""
    file = path / "model.safetensors"
    view = {"F32": np.float32, "F16": np.float16, "I8": np.int8, "I32": np.int32}
    tensors = {n: t.raw().view(view[t.format]).reshape(t.shape) for n, t in read_safetensors(file).items()}
    tensors |= {name.replace("__", "."): values for name, values in changes.items()}
    write_tensors(file, {name: values for name, values in tensors.items() if values is not None})
    return path


def test_a_folder_is_read_whole(target, tmp_path):
    path = write_tiny_drafter(tmp_path, target.tensors, acceptance={"chat": 3.5, "code": 4.0})
    drafter = loaded(path, target)
    assert is_drafter(path)
    assert drafter.config.drafts == 7
    assert drafter.config.taps == (0, 2, 3)
    assert drafter.config.acceptance == {"chat": 3.5, "code": 4.0}
    assert {name: tensor.shape for name, tensor in drafter.tensors.items()} == drafter.config.tensor_shapes()
    assert drafter.tokens.dtype == np.int32
    assert len(drafter.tokens) == 200


def test_int8_blocks_are_the_numbers_of_q8_0(target, tmp_path):
    gguf = pytest.importorskip("gguf")
    tensor = loaded(write_tiny_drafter(tmp_path), target).tensors["fuse.weight"]
    assert tensor.format == "Q8_0"
    values = gguf.quants.dequantize(tensor.raw(), gguf.GGMLQuantizationType.Q8_0)
    assert (values == tensor.float32()).all()


@pytest.mark.parametrize("stored", ["F32", "BF16"])
def test_matrices_may_be_floats(target, tmp_path, stored):
    assert loaded(write_tiny_drafter(tmp_path, stored=stored), target).tensors["layers.1.down.weight"].format == stored


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vocab_size": 300}, "made for tiny, whose vocabulary is 300; this model has 288"),
        ({"target_hidden_size": 96, "hidden_size": 96}, "whose hidden size is 96; this model has 64"),
        ({"num_target_layers": 30}, "whose layers is 30; this model has 4"),
        ({"target_fingerprint": "0123456789abcdef"}, "same shape but other weights"),
        ({"target_layer_ids": [2, 0]}, "taps (2, 0) do not ascend"),
        ({"target_layer_ids": []}, "taps () do not ascend"),
        ({"target_layer_ids": [1, 4]}, "integers in [0, 4)"),
        ({"hidden_size": 32}, "'hidden_size' is not that of the target"),
        ({"block_size": 1}, "'block_size' counts the anchor"),
        ({"markov_candidates": 64, "draft_vocab_size": 32}, "do not nest"),
        ({"num_key_value_heads": 3}, "not a multiple of KV heads"),
        ({"markov_rank": 0}, "'markov_rank' must be an integer in [1, 1024]"),
        ({"confidence_head": False}, "no confidence head"),
        ({"rope_theta": None}, "'rope_theta' is missing"),
        ({"acceptance": {"chat": "many"}}, "'chat' must be a positive number"),
        ({"model_type": "eagle3"}, "not a drafter of Slipstream"),
    ],
    ids=str,
)
def test_a_wrong_config_is_refused_by_name(target, tmp_path, changes, said):
    assert said in refusal(change_config(write_tiny_drafter(tmp_path), **changes), target)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"norm__weight": None}, "'norm.weight' is missing"),
        ({"layers__1__q__weight": None}, "'layers.1.q.weight' is missing"),
        ({"layers__0__k__weight__scale": None}, "its scales are not F16 of shape (32, 2)"),
        ({"norm__weight": np.ones(63, np.float32)}, "has shape (63,), its config says (64,)"),
        ({"norm__weight": np.ones(64, np.int8)}, "is stored as I8"),
        ({"draft_vocab": None}, "'draft_vocab' is not 200 int32 numbers"),
        ({"draft_vocab": np.zeros(200, np.int32)}, "does not ascend"),
        ({"draft_vocab": np.arange(100, 300, dtype=np.int32)}, "does not ascend within the vocabulary"),
        ({"layers__2__q__weight": np.ones((64, 64), np.float32)}, "'layers.2.q.weight' belongs to no drafter"),
    ],
    ids=str,
)
def test_wrong_tensors_are_refused_by_name(target, tmp_path, changes, said):
    assert said in refusal(change_tensors(write_tiny_drafter(tmp_path), **changes), target)


def test_missing_and_cut_files_are_refused(target, tmp_path):
    assert "cannot be read" in refusal(tmp_path, target)
    path = write_tiny_drafter(tmp_path)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    assert "truncated" in refusal(path, target)
    file.unlink()
    assert "cannot be read" in refusal(path, target)


def test_a_fingerprint_names_the_weights_and_not_their_format(tmp_path):
    prints = {
        (format, seed): fingerprint(
            load_checkpoint(write_tiny_gguf(tmp_path / f"{format}{seed}.gguf", format=format, seed=seed)).tensors
        )
        for format, seed in (("Q4_1", 0), ("Q8_0", 0), ("Q4_1", 1))
    }
    assert prints["Q4_1", 0] == prints["Q8_0", 0]
    assert prints["Q4_1", 0] != prints["Q4_1", 1]
