"""Servers for the tests: a tiny random model for speed, the built-in one for sense."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from serving import Running, serving

from slipstream import LLM
from slipstream.models.checkpoint import list_models


@pytest.fixture(scope="session")
def tiny_llm(tiny_checkpoint) -> LLM:
    return LLM(tiny_checkpoint, threads=1)


@pytest.fixture
def slow_llm(tiny_llm, monkeypatch) -> LLM:
    """The tiny model at a pace that leaves time to interfere."""
    verify = tiny_llm.backend.verify
    monkeypatch.setattr(tiny_llm.backend, "verify", lambda *args: (time.sleep(0.003), verify(*args))[1])
    return tiny_llm


@pytest.fixture(scope="session")
def tiny(tiny_llm) -> Iterator[Running]:
    """The tiny model on the default settings, shared by the tests that leave no trace."""
    with serving(tiny_llm) as running:
        yield running


@pytest.fixture(scope="session")
def smollm2_llm() -> LLM:
    if list_models()[0].path is None:
        pytest.skip("the built-in model is not installed")
    return LLM("smollm2", context=4096)


@pytest.fixture(scope="session")
def smollm2(smollm2_llm) -> Iterator[Running]:
    with serving(smollm2_llm) as running:
        yield running
