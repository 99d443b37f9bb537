"""Sparse models behind the backend protocol: drafting changes nothing; what cannot run is refused before loading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny import TINY_SPARSE_FAMILIES, write_tiny_checkpoint

from slipstream.backends import reference
from slipstream.backends.cpu.loading import unsupported
from slipstream.backends.cuda.weights import check
from slipstream.backends.reference import ReferenceBackend, weight_bytes
from slipstream.bench.verify import verify
from slipstream.engine.engine import LLM
from slipstream.errors import BackendError
from slipstream.models.checkpoint import Checkpoint, load_checkpoint

pytest.importorskip("torch")


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "naive_n05_flash", "deepseek_v3", "glm_moe_dsa"])
def test_no_drafter_changes_a_token_of_a_sparse_model(tmp_path: Path, family: str) -> None:
    write_tiny_checkpoint(tmp_path, family)
    with LLM(str(tmp_path), backend="reference") as llm:
        checks = verify(llm)
    assert [check for check in checks if not check.passed] == []
    assert sum(check.name.startswith("drafter") for check in checks) >= 9


@pytest.mark.parametrize("family", ["naive_n05_flash", "deepseek_v3", "deepseek_v32", "glm_moe_dsa"])
def test_native_kernels_refuse_what_they_do_not_know(tmp_path: Path, family: str) -> None:
    checkpoint = load_checkpoint(write_tiny_checkpoint(tmp_path, family))
    assert "which native kernels do not" in (unsupported(checkpoint.spec, checkpoint.tensors) or "")


@pytest.mark.parametrize("family", TINY_SPARSE_FAMILIES)
def test_the_gpu_engine_refuses_sparse_models(tmp_path: Path, family: str) -> None:
    with pytest.raises(BackendError, match="dense models"):
        check(load_checkpoint(write_tiny_checkpoint(tmp_path, family)).spec)


def test_a_model_larger_than_memory_is_refused_before_a_weight_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = load_checkpoint(write_tiny_checkpoint(tmp_path, "qwen3_moe"))
    needed = weight_bytes(checkpoint.spec, 4)

    def refuse(*args: Any) -> Any:
        raise AssertionError("a tensor was read")

    unread = Checkpoint(**vars(checkpoint) | {"tensors": dict.fromkeys(checkpoint.tensors, refuse)})
    monkeypatch.setattr(reference, "available_bytes", lambda: needed - 1)
    with pytest.raises(BackendError, match=r"the weights need 0.0 GB in float32 and 0.0 GB of memory are free; choose"):
        ReferenceBackend(unread)
    monkeypatch.setattr(reference, "available_bytes", lambda: needed)
    ReferenceBackend(checkpoint)
    with pytest.raises(BackendError, match="in float64"):
        ReferenceBackend(unread, dtype="float64")


def test_a_pass_reads_the_experts_of_one_row(tmp_path: Path) -> None:
    checkpoint = load_checkpoint(write_tiny_checkpoint(tmp_path, "qwen3_moe"))
    shapes = checkpoint.spec.tensor_shapes()
    experts = sum(4 * a * b for name, (a, b) in ((n, s) for n, s in shapes.items() if ".experts." in n))
    assert ReferenceBackend(checkpoint).memory_bytes() == weight_bytes(checkpoint.spec, 4) - experts * 6 // 8
