"""Kernels run in Triton's interpreter where there is no GPU."""

import importlib.util

import pytest

if importlib.util.find_spec("torch") and importlib.util.find_spec("triton"):
    from interpreter import DEVICE, torch
else:
    collect_ignore_glob = ["test_*"]


@pytest.fixture
def device():
    return torch.device(DEVICE)
