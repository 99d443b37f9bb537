"""The native CPU core against transformers: sparse models loaded from what transformers wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from hf_models import GLM, MIMO, OSS, QWEN, YARN, logits_of, saved  # noqa: E402 - needs both

from slipstream.backends.cpu.backend import CpuBackend  # noqa: E402
from slipstream.backends.cpu.library import library_path  # noqa: E402
from slipstream.models.checkpoint import load_checkpoint  # noqa: E402

pytestmark = pytest.mark.skipif(library_path() is None, reason="installed without a C++ compiler")

WIDTH = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32}  # what native vectors divide
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3Moe", QWEN | WIDTH),
    "gpt_oss": ("GptOss", OSS | WIDTH | {"rope_parameters": YARN}),
    "mimo_v2_flash": ("MiMoV2Flash", MIMO | WIDTH | {"head_dim": 32}),
    "glm4_moe": ("Glm4Moe", GLM | WIDTH | {"head_dim": 16}),
}


@pytest.mark.parametrize("case", CASES)
def test_native_logits_are_those_of_transformers(tmp_path: Path, case: str) -> None:
    model = saved(tmp_path, *CASES[case])
    checkpoint = load_checkpoint(tmp_path)
    tokens = np.random.default_rng(1).integers(0, checkpoint.spec.vocab, 48).astype(np.int32)
    want = logits_of(model, tokens.tolist()).numpy()
    backend = CpuBackend(checkpoint.spec, checkpoint.tensors)
    cache = backend.new_cache(len(tokens) + 8)
    got = []
    for at in range(0, len(tokens), 4):  # four right rows and four wrong ones that are dropped
        wrong = (tokens[at : at + 4] + 1) % checkpoint.spec.vocab
        got.append(backend.verify(cache, np.concatenate((tokens[at : at + 4], wrong)))[:4].copy())
        cache.rewind(at + 4)
    error = np.linalg.norm(np.concatenate(got) - want) / np.linalg.norm(want)
    assert error < 1e-3  # keys and values are kept in half precision
