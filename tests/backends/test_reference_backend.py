"""The reference backend keeps the protocol: chunks, rewinds and closed caches behave as the engine relies on."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import TINY_FAMILIES, write_tiny_checkpoint

from slipstream.backends.base import MAX_DRAFTS
from slipstream.backends.reference import ReferenceBackend
from slipstream.errors import BackendError
from slipstream.models.checkpoint import load_checkpoint

pytest.importorskip("torch")


@pytest.fixture(scope="module", params=TINY_FAMILIES)
def backend(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ReferenceBackend:
    return ReferenceBackend(load_checkpoint(write_tiny_checkpoint(tmp_path_factory.mktemp("m"), request.param)))


TOKENS = np.random.default_rng(0).integers(0, 288, 40).astype(np.int32)


def test_prefill_and_verify_equal_one_pass(backend: ReferenceBackend) -> None:
    whole, parts = backend.new_cache(40), backend.new_cache(40)
    backend.prefill(whole, TOKENS[:24])
    expected = backend.verify(whole, TOKENS[24:40]).copy()
    for cut in (0, 1, 8, 15):
        backend.prefill(parts, TOKENS[parts.length : parts.length + cut])
    assert parts.length == 24
    rows = [backend.verify(parts, TOKENS[i : i + 1]).copy() for i in range(24, 40)]
    np.testing.assert_allclose(np.concatenate(rows), expected, atol=1e-4)
    assert expected.dtype == np.float32
    assert expected.shape == (16, 288)


def test_rewind_forgets_exactly_what_followed(backend: ReferenceBackend) -> None:
    cache = backend.new_cache(40)
    backend.prefill(cache, TOKENS[:20])
    expected = backend.verify(cache, TOKENS[20:22]).copy()
    backend.verify(cache, TOKENS[:10])
    cache.rewind(20)
    assert cache.length == 20
    np.testing.assert_array_equal(backend.verify(cache, TOKENS[20:22]), expected)


def test_misuse_is_refused(backend: ReferenceBackend) -> None:
    cache = backend.new_cache(4)
    with pytest.raises(ValueError, match="do not fit"):
        backend.prefill(cache, TOKENS[:5])
    with pytest.raises(ValueError, match="rows"):
        backend.verify(cache, TOKENS[:0])
    with pytest.raises(ValueError, match="rows"):
        backend.verify(backend.new_cache(40), TOKENS[: MAX_DRAFTS + 2])
    with pytest.raises(ValueError, match="token ids"):
        backend.verify(cache, np.array([288], np.int32))
    with pytest.raises(ValueError, match="rewind"):
        cache.rewind(1)
    cache.close()
    cache.close()
    with pytest.raises(ValueError, match="closed"):
        backend.prefill(cache, TOKENS[:1])


def test_pass_bytes_count_each_weight_once(tiny_checkpoint: Path) -> None:
    checkpoint = load_checkpoint(tiny_checkpoint)
    expected = sum(4 * int(np.prod(shape)) for shape in checkpoint.spec.tensor_shapes().values())
    assert ReferenceBackend(checkpoint).memory_bytes() == expected
    assert ReferenceBackend(checkpoint, dtype="float64").memory_bytes() == 2 * expected


def test_without_pytorch_the_remedy_is_named(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "torch":
            raise ImportError("No module named 'torch'")
        return real(name, *args, **kwargs)

    checkpoint = load_checkpoint(tiny_checkpoint)
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(BackendError, match=r"pip install 'slipstream-llm\[torch\]'"):
        ReferenceBackend(checkpoint)
