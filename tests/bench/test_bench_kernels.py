"""The kernel bench refuses what it cannot measure."""

import importlib.util

import pytest

from slipstream.bench.kernels import KernelTime, bench_kernels
from slipstream.errors import BackendError
from slipstream.models.spec import Attention, FeedForward, Layer, ModelSpec, Rope

SPEC = ModelSpec(
    "llama", 64, 64, (Layer(Attention(2, 1, 32, Rope((1.0,) * 16), 0.2), FeedForward(64)),), 1e-5, 64, True
)


def test_rate_is_bytes_over_time():
    assert KernelTime("x", 2.0, 4_000_000, 0).bytes_per_s == 2e12


def test_without_a_gpu_the_error_says_so():
    if importlib.util.find_spec("torch"):
        import torch

        if torch.cuda.is_available():
            pytest.skip("there is a GPU")
    with pytest.raises(BackendError, match=r"needs (an NVIDIA GPU|torch)"):
        bench_kernels(SPEC)
