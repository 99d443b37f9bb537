"""FP8 and MXFP4 checkpoints: dequantised bit for bit, and the same logits as transformers with those values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from hf_models import CASES, build, logits_of, saved  # noqa: E402 - needs both
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers.integrations.mxfp4 import convert_moe_packed_tensors  # noqa: E402

from slipstream.errors import CheckpointError  # noqa: E402
from slipstream.models.checkpoint import load_checkpoint  # noqa: E402
from slipstream.models.reference import Reference  # noqa: E402
from slipstream.models.tensors import e4m3_values  # noqa: E402

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
TOKENS = list(range(40))


def configured(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))


def same_logits(path: Path, model: Any) -> None:
    checkpoint = load_checkpoint(path)
    got, expected = Reference(checkpoint.spec, checkpoint.tensors).logits(TOKENS), logits_of(model, TOKENS)
    assert (got - expected).abs().max() / expected.abs().max() < 1e-4


def fp8_checkpoint(path: Path, case: str, changes: dict[str, Any], quantised: tuple[str, ...]) -> Any:
    """A saved model with the matrices named so in FP8, and the transformers model that has their values."""
    name, base = CASES[case]
    model = saved(path, name, base | changes)
    weights = load_file(path / "model.safetensors")
    for key in [key for key in weights if key.endswith(quantised)]:
        rows, columns = weights[key].shape
        scales = torch.rand(-(-rows // 128), -(-columns // 128)) * 0.02 + 0.001
        spread = scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
        stored = (weights[key] / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
        weights[key], weights[key + "_scale_inv"] = stored, scales
    save_file(weights, path / "model.safetensors")
    configured(path, quantization_config=FP8)
    plain = path / "plain"
    model.save_pretrained(plain)
    values = load_file(plain / "model.safetensors")
    for key in values:
        if key + "_scale_inv" in weights:
            rows, columns = values[key].shape
            spread = weights[key + "_scale_inv"].repeat_interleave(128, 0)[:rows]
            values[key] = weights[key].float() * spread.repeat_interleave(128, 1)[:, :columns]
    save_file(values, plain / "model.safetensors", metadata={"format": "pt"})
    return type(model).from_pretrained(plain, attn_implementation="eager").eval()


def test_e4m3_bytes_mean_what_pytorch_says() -> None:
    expected = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(e4m3_values(), expected)


def test_fp8_experts_of_several_blocks_equal_transformers(tmp_path: Path) -> None:
    changes = {"moe_intermediate_size": 200, "hidden_size": 144}
    experts = (".gate_proj.weight", ".up_proj.weight", ".down_proj.weight")
    same_logits(tmp_path, fp8_checkpoint(tmp_path, "mimo_v2_flash", changes, experts))


def test_fp8_latent_projections_are_put_in_rotary_order_with_their_scales(tmp_path: Path) -> None:
    changes = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "kv_lora_rank": 128}
    quantised = ("q_b_proj.weight", "kv_a_proj_with_mqa.weight", "kv_b_proj.weight")
    same_logits(tmp_path, fp8_checkpoint(tmp_path, "deepseek_v3", changes, quantised))


def test_fp8_rotary_rows_across_scales_are_refused(tmp_path: Path) -> None:
    changes = {"qk_nope_head_dim": 120, "qk_rope_head_dim": 64, "kv_lora_rank": 128}
    fp8_checkpoint(tmp_path, "deepseek_v3", changes, ("q_b_proj.weight",))
    with pytest.raises(CheckpointError, match="rotary rows of 64 straddle the 128-row blocks"):
        load_checkpoint(tmp_path)


def mxfp4_checkpoint(path: Path) -> Any:
    """A gpt-oss checkpoint with random packed experts, and the transformers model that has their values."""
    name, changes = CASES["gpt_oss"]
    model = saved(path, name, changes | {"hidden_size": 64, "intermediate_size": 96})
    weights = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    for key in [key for key in weights if key.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = weights.pop(key).shape  # transposed, as transformers keeps it
        shape = (experts, outputs, inputs // 32)
        blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(118, 126, shape, dtype=torch.uint8, generator=generator)
        weights[f"{key}_blocks"], weights[f"{key}_scales"] = blocks, scales
        values = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        model.get_parameter(key).data.copy_(values)
    save_file(weights, path / "model.safetensors")
    configured(path, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return model


def test_packed_mxfp4_experts_equal_transformers_exactly(tmp_path: Path) -> None:
    model = mxfp4_checkpoint(tmp_path)
    checkpoint = load_checkpoint(tmp_path)
    gate_up = model.model.layers[1].mlp.experts.gate_up_proj[2].T  # (2 * inner, hidden)
    down = model.model.layers[1].mlp.experts.down_proj[2].T
    for name, expected in (("gate", gate_up[::2]), ("up", gate_up[1::2]), ("down", down)):
        tensor = checkpoint.tensors[f"layers.1.experts.2.{name}"]
        assert tensor.format == "MXFP4"
        assert tensor.raw().nbytes == expected.numel() * 17 // 32
        np.testing.assert_array_equal(tensor.float32(), expected.detach().numpy())
    same_logits(tmp_path, model)


def test_a_packed_expert_without_scales_is_refused(tmp_path: Path) -> None:
    mxfp4_checkpoint(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.experts.down_proj_scales"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="has no matching scales"):
        load_checkpoint(tmp_path)


def test_an_fp8_tensor_without_scales_is_refused(tmp_path: Path) -> None:
    fp8_checkpoint(tmp_path, "mimo_v2_flash", {}, (".up_proj.weight",))
    configured(tmp_path, quantization_config=None)
    with pytest.raises(CheckpointError, match="F8_E4M3 without scales that the config explains"):
        load_checkpoint(tmp_path)
    configured(tmp_path, quantization_config=FP8)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.0.mlp.up_proj.weight_scale_inv"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"up_proj.weight_scale_inv' is missing"):
        load_checkpoint(tmp_path)


def test_scales_of_a_tensor_that_is_not_fp8_are_refused(tmp_path: Path) -> None:
    fp8_checkpoint(tmp_path, "mimo_v2_flash", {}, (".up_proj.weight",))
    weights = load_file(tmp_path / "model.safetensors")
    key = "model.layers.0.mlp.up_proj.weight"
    weights[key] = weights[key].float()
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"up_proj.weight_scale_inv' is no part of"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "settings", [{"quant_method": "awq"}, FP8 | {"fmt": "e5m2"}, {"quant_method": "fp8"}, {"quant_method": 5}, 7]
)
def test_an_unknown_quantisation_is_named(tmp_path: Path, settings: Any) -> None:
    name, changes = CASES["qwen3_moe"]
    build(name, changes).save_pretrained(tmp_path)
    configured(tmp_path, quantization_config=settings)
    with pytest.raises(CheckpointError, match="quant"):
        load_checkpoint(tmp_path)
