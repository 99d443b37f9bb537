"""Sparse models in the native CPU core: experts, sinks, windows, narrow values; against the reference, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tiny import write_tiny_checkpoint

from slipstream.backends.cpu import backend as cpu_backend
from slipstream.backends.cpu import library
from slipstream.backends.cpu.backend import CpuBackend
from slipstream.backends.cpu.loading import weight_bytes
from slipstream.backends.reference import ReferenceBackend
from slipstream.bench.verify import verify
from slipstream.engine.engine import LLM
from slipstream.errors import BackendError, CheckpointError
from slipstream.models.checkpoint import Checkpoint, load_checkpoint
from slipstream.models.spec import WeightTensor
from slipstream.models.tensors import BlockScaled, PackedMXFP4, e4m3_values

pytestmark = pytest.mark.skipif(library.library_path() is None, reason="installed without a C++ compiler")
pytest.importorskip("torch")

ISAS = library.instruction_sets() if library.library_path() else []
FAMILIES = ("qwen3_moe", "gpt_oss", "mimo_v2_flash", "glm4_moe")
Floats = npt.NDArray[np.float32]


class Given(WeightTensor):
    """Bytes that a test made up."""

    def __init__(self, stored: npt.NDArray[Any], format: str) -> None:
        self.stored, self.format, self.shape = stored, format, stored.shape

    def raw(self) -> npt.NDArray[np.uint8]:
        return np.ascontiguousarray(self.stored).view(np.uint8).reshape(len(self.stored), -1)

    def float32(self) -> Floats:
        return self.stored.astype(np.float32)


def tokens_of(vocab: int, n: int) -> npt.NDArray[np.int32]:
    return np.random.default_rng(0).integers(0, vocab, n).astype(np.int32)


def logits_of(backend: Any, tokens: npt.NDArray[np.int32], rows: int = 8, prefilled: int = 0) -> Floats:
    cache = backend.new_cache(len(tokens))
    backend.prefill(cache, tokens[:prefilled])
    out = [backend.verify(cache, tokens[i : i + rows]).copy() for i in range(prefilled, len(tokens), rows)]
    cache.close()
    return np.concatenate(out)


def relative_error(got: Floats, want: Floats) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def mxfp4(rng: np.random.Generator, rows: int, columns: int) -> PackedMXFP4:
    blocks = rng.integers(0, 256, (rows, columns // 32, 16), np.uint8)
    return PackedMXFP4(Given(blocks, "U8"), Given(rng.integers(120, 126, (rows, columns // 32), np.uint8), "U8"))


def fp8(rng: np.random.Generator, rows: int, columns: int) -> BlockScaled:
    stored = rng.integers(0, 256, (rows, columns), np.uint8)
    stored[np.isnan(e4m3_values()[stored])] = 0
    scales = rng.uniform(0.0005, 0.002, (-(-rows // 128), -(-columns // 128))).astype(np.float32)
    return BlockScaled(Given(stored, "F8_E4M3"), Given(scales, "F32"))


def packed_experts(checkpoint: Checkpoint, kind: str) -> Checkpoint:
    """The same model, the matrices of its experts random in MXFP4 or FP8."""
    rng, make = np.random.default_rng(1), {"MXFP4": mxfp4, "FP8": fp8}[kind]
    tensors = {
        name: make(rng, *tensor.shape) if ".experts." in name and len(tensor.shape) == 2 else tensor
        for name, tensor in checkpoint.tensors.items()
    }
    return replace(checkpoint, tensors=tensors)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_a_sparse_model_match_the_reference(tmp_path: Path, family: str) -> None:
    checkpoint = load_checkpoint(write_tiny_checkpoint(tmp_path, family, layers=3))
    tokens = tokens_of(checkpoint.spec.vocab, 100)
    want = logits_of(ReferenceBackend(checkpoint), tokens)
    backend = CpuBackend(checkpoint.spec, checkpoint.tensors)
    assert relative_error(logits_of(backend, tokens), want) < 1e-3  # keys and values are kept in half precision
    assert relative_error(logits_of(backend, tokens, rows=1, prefilled=90), want[90:]) < 1e-3


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", ["MXFP4", "FP8"])
@pytest.mark.parametrize(("family", "width"), [("gpt_oss", 96), ("mimo_v2_flash", 160)])
def test_packed_experts_match_their_dequantised_values(
    tmp_path: Path, family: str, width: int, kind: str, isa: str
) -> None:
    sizes = {"moe_intermediate_size": width, "intermediate_size": width}
    checkpoint = packed_experts(load_checkpoint(write_tiny_checkpoint(tmp_path, family, hidden=160, **sizes)), kind)
    tokens = tokens_of(checkpoint.spec.vocab, 48)
    want = logits_of(ReferenceBackend(checkpoint), tokens)
    backend = CpuBackend(checkpoint.spec, checkpoint.tensors, isa=isa)
    assert relative_error(logits_of(backend, tokens), want) < 2e-3
    assert np.array_equal(logits_of(backend, tokens, rows=1), logits_of(backend, tokens, rows=8))
    name = next(name for name in checkpoint.tensors if name.endswith("experts.3.down"))
    values = checkpoint.tensors[name].float32()
    np.testing.assert_allclose(np.stack([backend.row(name, i) for i in range(len(values))]), values, rtol=1e-6)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_of_a_sparse_model_has_the_same_bits_in_any_company(tmp_path: Path, family: str, isa: str) -> None:
    checkpoint = load_checkpoint(write_tiny_checkpoint(tmp_path, family, layers=3, format="BF16"))
    tokens = tokens_of(checkpoint.spec.vocab, 80)
    backend = CpuBackend(checkpoint.spec, checkpoint.tensors, threads=2, isa=isa)
    alone = logits_of(backend, tokens, rows=1)
    for rows in (2, 3, 5, 8, 16):
        assert np.array_equal(logits_of(backend, tokens, rows), alone), rows
    assert np.array_equal(logits_of(backend, tokens, rows=8, prefilled=72), alone[72:])
    for threads in (1, 3, 5):
        other = CpuBackend(checkpoint.spec, checkpoint.tensors, threads=threads, isa=isa)
        assert np.array_equal(logits_of(other, tokens, rows=8), alone), threads


@pytest.mark.parametrize("family", FAMILIES)
def test_no_drafter_changes_a_token_of_a_sparse_model_in_native_code(tmp_path: Path, family: str) -> None:
    write_tiny_checkpoint(tmp_path, family, max_position_embeddings=4096)
    with LLM(tmp_path, backend="cpu") as llm:
        assert [check for check in verify(llm, quick=True) if not check.passed] == []


def test_an_exported_sparse_cache_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    checkpoint = load_checkpoint(write_tiny_checkpoint(tmp_path, "mimo_v2_flash", layers=3))
    backend = CpuBackend(checkpoint.spec, checkpoint.tensors)
    tokens = tokens_of(checkpoint.spec.vocab, 60)
    first, second = backend.new_cache(100), backend.new_cache(200)
    backend.prefill(first, tokens[:50])
    second.import_state(first.export_state())
    want = backend.verify(first, tokens[50:58]).copy()
    assert np.array_equal(backend.verify(second, tokens[50:58]), want)


def test_a_pass_counts_the_experts_of_one_row(tmp_path: Path) -> None:
    checkpoint = load_checkpoint(write_tiny_checkpoint(tmp_path, "qwen3_moe"))
    native = CpuBackend(checkpoint.spec, checkpoint.tensors).memory_bytes()
    norms = sum(4 * shape[0] for shape in checkpoint.spec.tensor_shapes().values() if len(shape) == 1)
    assert native == ReferenceBackend(checkpoint).memory_bytes() - norms


@pytest.mark.parametrize("kind", ["MXFP4", "FP8"])
def test_scales_that_are_no_numbers_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    checkpoint = packed_experts(load_checkpoint(write_tiny_checkpoint(tmp_path, "qwen3_moe")), kind)
    tensor: Any = checkpoint.tensors["layers.1.experts.2.up"]
    tensor.scales.stored[0, 0] = 255 if kind == "MXFP4" else np.nan
    with pytest.raises(CheckpointError, match=r"experts.2.up of layer 1 has an (MXFP4|FP8) scale"):
        CpuBackend(checkpoint.spec, checkpoint.tensors)


def test_an_fp8_value_that_is_no_number_is_refused_by_name(tmp_path: Path) -> None:
    checkpoint = packed_experts(load_checkpoint(write_tiny_checkpoint(tmp_path, "qwen3_moe")), "FP8")
    tensor: Any = checkpoint.tensors["layers.1.experts.2.up"]
    tensor.weight.stored[3, 5] = 0xFF
    with pytest.raises(CheckpointError, match=r"experts.2.up of layer 1 has an FP8 value"):
        CpuBackend(checkpoint.spec, checkpoint.tensors)


def test_a_row_never_chooses_an_expert_twice_whatever_its_scores(tmp_path: Path) -> None:
    """Where no score tells experts apart, the first ones are chosen, as when the correction prefers them."""
    checkpoint = load_checkpoint(write_tiny_checkpoint(tmp_path, "glm4_moe", layers=3))
    tokens = tokens_of(checkpoint.spec.vocab, 64)

    def with_correction(values: Floats) -> Floats:
        given = {n: Given(values, "F32") if n.endswith(".correction") else t for n, t in checkpoint.tensors.items()}
        return logits_of(CpuBackend(checkpoint.spec, given), tokens, prefilled=56)

    first = with_correction(np.arange(8, 0, -1, dtype=np.float32) * 100)
    assert np.isfinite(first).all()
    for number in (-np.inf, np.nan):
        assert np.array_equal(with_correction(np.full(8, number, np.float32)), first), number


def test_a_model_larger_than_memory_is_refused_before_a_weight_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = load_checkpoint(write_tiny_checkpoint(tmp_path, "qwen3_moe", format="BF16"))
    needed = weight_bytes(checkpoint.tensors)
    assert needed == 2 * sum(int(np.prod(shape)) for shape in checkpoint.spec.tensor_shapes().values())
    monkeypatch.setattr(cpu_backend, "load", lambda *_: pytest.fail("a tensor was read"))
    monkeypatch.setattr(cpu_backend, "available_bytes", lambda: needed - 1)
    with pytest.raises(BackendError, match=r"the weights need 0.0 GB and 0.0 GB of memory are free"):
        CpuBackend(checkpoint.spec, checkpoint.tensors)
    monkeypatch.undo()
    monkeypatch.setattr(cpu_backend, "available_bytes", lambda: needed)
    CpuBackend(checkpoint.spec, checkpoint.tensors)
