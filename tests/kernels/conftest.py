"""Kernels run in Triton's interpreter where there is no GPU; it must be chosen before Triton is imported."""

import importlib.util
import os

import pytest

if importlib.util.find_spec("torch") and importlib.util.find_spec("triton"):
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
else:
    collect_ignore_glob = ["test_*"]


@pytest.fixture
def device():
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
