"""Fixtures for every test: tiny models, written once a session."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import write_tiny_checkpoint, write_tiny_gguf


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama: a directory with config.json, safetensors and a byte-level tokenizer."""
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model as a Q4_1 GGUF file."""
    return write_tiny_gguf(tmp_path_factory.mktemp("tiny") / "llama.gguf")
