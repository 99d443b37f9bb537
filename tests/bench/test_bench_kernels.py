"""The kernel bench refuses what it cannot measure."""

import importlib.util

import pytest

from slipstream.bench.kernels import KernelReport, KernelTime, bench_kernels
from slipstream.cli.bench_kernels import in_words
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


def test_the_table_gives_rates_and_their_share_of_what_memory_gives():
    report = KernelReport(
        "int4", 4e12, [KernelTime("head", 2.0, 4_000_000, 0), KernelTime("gate_up", 8.0, 8_000_000, 0)]
    )
    lines = in_words("m", report).splitlines()
    assert lines[0] == "m, int4 weights; memory reads 4.00 TB/s"
    assert lines[2].split() == ["head", "2.0", "us", "4.0", "MB", "2.00", "TB/s", "50%"]
    assert lines[3].split() == ["gate_up", "8.0", "us", "8.0", "MB", "1.00", "TB/s", "25%"]
