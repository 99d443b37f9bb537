"""Sparse checkpoints: what is skipped, what is read one at a time, and what is refused in words."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import (
    TINY_FAMILIES,
    TINY_SPARSE_FAMILIES,
    tiny_config,
    tiny_spec,
    write_safetensors,
    write_tiny_checkpoint,
)

from slipstream.errors import CheckpointError
from slipstream.models import safetensors_file, tensors
from slipstream.models.block_drafter import BlockDrafter
from slipstream.models.checkpoint import load_checkpoint
from slipstream.models.spec import Attention, Experts, Indexer, Latent, Rope


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path)
    text = str(caught.value)
    assert "\n" not in text
    return text


def stored_values(path: Path) -> dict[str, np.ndarray]:
    return {name: t.float32() for name, t in safetensors_file.read_safetensors(path / "model.safetensors").items()}


@pytest.mark.parametrize("family", TINY_SPARSE_FAMILIES)
def test_every_sparse_family_loads(tmp_path: Path, family: str) -> None:
    checkpoint = load_checkpoint(write_tiny_checkpoint(tmp_path, family, layers=3))
    assert checkpoint.spec.family == family
    assert not checkpoint.spec.dense
    assert {name: t.shape for name, t in checkpoint.tensors.items()} == checkpoint.spec.tensor_shapes()


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_dense_families_are_called_dense(family: str) -> None:
    assert tiny_spec(tiny_config(family)).dense


def test_one_expert_is_read_without_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = load_checkpoint(write_tiny_checkpoint(tmp_path, "qwen3_moe"))
    reads: list[int] = []
    real = np.fromfile
    monkeypatch.setattr(tensors.np, "fromfile", lambda *a, **k: reads.append(a[2]) or real(*a, **k))
    checkpoint.tensors["layers.1.experts.5.gate"].float32()
    assert reads == [4 * 32 * 64]


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32", "glm4_moe", "glm_moe_dsa"])
def test_a_prediction_layer_after_the_last_is_skipped(tmp_path: Path, family: str) -> None:
    write_tiny_checkpoint(tmp_path, family)
    before = load_checkpoint(tmp_path).tensors.keys()
    extra = {"enorm.weight": np.ones(64), "eh_proj.weight": np.ones((64, 128)), "mlp.gate.weight": np.ones((8, 64))}
    more = {f"model.layers.2.{name}": values.astype(np.float32) for name, values in extra.items()}
    write_safetensors(tmp_path / "model.safetensors", stored_values(tmp_path) | more)
    assert load_checkpoint(tmp_path).tensors.keys() == before
    more.pop("model.layers.2.eh_proj.weight")
    write_safetensors(tmp_path / "model.safetensors", stored_values(tmp_path) | {"model.layers.3.x": np.ones(1)})
    assert "'model.layers.3.x' is no part of" in refusal(tmp_path)


def test_a_layer_that_the_config_leaves_out_is_not_taken_for_prediction(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, "deepseek_v3", layers=3)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    assert "'model.layers.2." in refusal(tmp_path)


@pytest.mark.parametrize("family", ["mimo_v2_flash", "naive_n05_flash"])
def test_mimo_prediction_layers_are_skipped(tmp_path: Path, family: str) -> None:
    write_tiny_checkpoint(tmp_path, family)
    more = {"model.mtp.layers.0.eh_proj.weight": np.ones((64, 128), np.float32)}
    write_safetensors(tmp_path / "model.safetensors", stored_values(tmp_path) | more)
    assert load_checkpoint(tmp_path).spec.family == family


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("qwen3_moe", {"num_experts": 9}, "mlp.gate.weight' has shape (8, 64), not (9, 64)"),
        ("qwen3_moe", {"num_experts": 7}, "mlp.gate.weight' has shape (8, 64), not (7, 64)"),
        ("qwen3_moe", {"num_experts": 10**9}, "'num_experts' must be an integer in"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "9 experts a token cannot be chosen from 8"),
        ("qwen3_moe", {"moe_intermediate_size": 16}, "has shape"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "'model.layers.0.mlp.gate_proj.weight' is missing"),
        ("qwen3_moe", {"mlp_only_layers": "x"}, "must be a list of"),
        ("glm4_moe", {"n_group": 3}, "8 experts cannot be routed by 1 of 3 groups"),
        ("glm4_moe", {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
        ("glm4_moe", {"partial_rotary_factor": 1e8}, "'partial_rotary_factor' is 100000000.0, at most 1 can be"),
        ("glm4_moe", {"use_qk_norm": True}, "q_norm.weight' is missing"),
        ("deepseek_v3", {"kv_lora_rank": 16}, "has shape"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave False is not supported"),
        ("deepseek_v32", {"index_n_heads": 8}, "has shape"),
        ("deepseek_v32", {"index_head_dim": 8}, "rotary embedding of 16 elements is wider than a head"),
        ("glm_moe_dsa", {"indexer_types": ["shared", "full"]}, "layer 0 shares a selection that no layer before it"),
        ("glm_moe_dsa", {"indexer_types": ["full", "half"]}, "must be a list of full or shared"),
        ("mimo_v2_flash", {"hybrid_layer_pattern": [0]}, "'hybrid_layer_pattern' must be a list of 2 integers"),
        ("mimo_v2_flash", {"sliding_window": 0}, "'sliding_window' must be an integer"),
        ("naive_n05_flash", {"index_topk": -1}, "'index_topk' must be an integer"),
    ],
)
def test_a_config_that_disagrees_with_its_tensors_is_named(
    tmp_path: Path, family: str, changes: dict[str, Any], said: str
) -> None:
    write_tiny_checkpoint(tmp_path, family)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    assert said in refusal(tmp_path)


def test_a_missing_expert_and_a_missing_shard_are_named(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, "mimo_v2_flash", shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    assert "model-00002-of-00003.safetensors: missing, though the index names it" in refusal(tmp_path)
    write_tiny_checkpoint(tmp_path / "b", "mimo_v2_flash")
    values = stored_values(tmp_path / "b")
    del values["model.layers.1.mlp.experts.6.up_proj.weight"]
    write_safetensors(tmp_path / "b" / "model.safetensors", values)
    assert "'model.layers.1.mlp.experts.6.up_proj.weight' is missing" in refusal(tmp_path / "b")


DRAFTER = {"hidden_size": 64, "num_hidden_layers": 5, "sliding_window": 1024, "block_size": 8, "vocab_size": 288}
DRAFTER |= {"target_layer_ids": [0, 1], "markov_rank": 16, "confidence_head": True}


@pytest.mark.parametrize("folder", [True, False])
def test_a_block_drafter_beside_the_model_is_read(tmp_path: Path, folder: bool) -> None:
    write_tiny_checkpoint(tmp_path, "naive_n05_flash", **({} if folder else {"drafter": DRAFTER}))
    assert load_checkpoint(tmp_path).block_drafter == (
        None if folder else BlockDrafter(64, 5, 1024, (0, 1), 8, 16, True)
    )
    if folder:
        (tmp_path / "drafter").mkdir()
        config = {key: value for key, value in DRAFTER.items() if key != "target_layer_ids"}
        config["dflash_config"] = {"target_layer_ids": [0, 1]}
        (tmp_path / "drafter" / "config.json").write_text(json.dumps(config))
    assert load_checkpoint(tmp_path).block_drafter == BlockDrafter(64, 5, 1024, (0, 1), 8, 16, True)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"target_layer_ids": [1, 2]}, "'target_layer_ids' must be a list of integers in"),
        ({"target_layer_ids": [1, 0]}, "'target_layer_ids' (1, 0) do not ascend"),
        ({"target_layer_ids": []}, "do not ascend"),
        ({"vocab_size": 97}, "'vocab_size' is 97, the target has 288"),
        ({"block_size": 0}, "'block_size' must be an integer"),
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"confidence_head": 3}, "'confidence_head' must be true or false"),
    ],
)
def test_a_block_drafter_of_another_model_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    assert said in refusal(write_tiny_checkpoint(tmp_path, "naive_n05_flash", drafter=DRAFTER | changes))


JSON = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
JSON |= st.sampled_from([10**30, 2**63, 1e308, 0, 1, "FS", "yarn"])
JSON = st.recursive(JSON, lambda inner: st.lists(inner, max_size=3), max_leaves=4)
SCALING = "factor rope_theta original_max_position_embeddings mscale mscale_all_dim beta_fast beta_slow truncate"
SCALING += " attention_factor partial_rotary_factor full_attention"
KINDS = st.sampled_from(["yarn", "linear", "default"])
ROPE = st.fixed_dictionaries({"rope_type": KINDS}, optional=dict.fromkeys(SCALING.split(), JSON))
OPTIONAL = ("layer_types", "mlp_layer_types", "indexer_types", "index_topk_pattern", "index_topk_freq", "drafter")
OPTIONAL += ("mlp_only_layers", "decoder_sparse_step", "quantization_config", "swa_rope_theta", "sliding_window_size")


@settings(max_examples=60, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("family", TINY_SPARSE_FAMILIES)
def test_any_sparse_config_loads_or_is_refused(
    tmp_path_factory: pytest.TempPathFactory, family: str, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / f"any-{family}"
    if not path.exists():
        write_tiny_checkpoint(path, family)
    keys = st.sampled_from([*tiny_config(family), *OPTIONAL])
    changes = data.draw(st.dictionaries(keys, JSON, max_size=3))
    if data.draw(st.booleans()):
        changes["rope_parameters"] = data.draw(ROPE | JSON)
    (path / "config.json").write_text(json.dumps(tiny_config(family) | changes))
    with suppress(CheckpointError):  # and nothing else
        load_checkpoint(path)


def test_a_spec_that_makes_no_sense_is_refused() -> None:
    rope = Rope((1.0, 0.5))
    for bad in (
        lambda: Attention(4, 2, 2, rope, 1.0),
        lambda: Attention(4, 2, 8, rope, 1.0, window=4, indexer=Indexer(2, 8, 4)),
        lambda: Attention(4, 4, 8, rope, 1.0, latent=Latent(8, 5)),
        lambda: Indexer(2, 8, 0),
        lambda: Latent(0, 4),
        lambda: Experts(8, 0),
        lambda: Experts(8, 5, groups=2, top_groups=1),
        lambda: Experts(4, 1, groups=4, top_groups=1),
    ):
        with pytest.raises(ValueError, match=r"."):
            bad()


def test_cache_width_counts_what_a_position_keeps() -> None:
    rope = Rope((1.0, 0.5))
    assert Attention(4, 2, 8, rope, 1.0).cache_width == 2 * 2 * 8
    assert Attention(4, 2, 8, rope, 1.0, v_head_dim=6, indexer=Indexer(2, 8, 4)).cache_width == 2 * 14 + 8
    assert Attention(4, 4, 8, rope, 1.0, latent=Latent(16, 4), indexer=Indexer(2, 8, 4)).cache_width == 16 + 4 + 8
