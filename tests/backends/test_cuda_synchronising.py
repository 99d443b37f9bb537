"""The host never waits for the device between rounds: what the profiler sees it call. Needs a GPU."""

import numpy as np
import pytest
from interpreter import GPU, torch

from slipstream.backends.cuda.backend import CudaBackend
from slipstream.backends.cuda.weights import load
from slipstream.models.spec import Attention, FeedForward, Layer, ModelSpec, Rope

pytestmark = pytest.mark.skipif(not GPU, reason="needs a GPU")
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
"""Calls that return when the device has done something; an asynchronous copy has a name of its own."""


def calls(run):
    """How often each function of the CUDA runtime was called in `run`, without the profiler's own calls."""
    own, all_ = profiled(lambda: None), profiled(run)
    return {name: count - own.get(name, 0) for name, count in all_.items()}


def profiled(run):
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run()
    return {event.key: event.count for event in profile.key_averages()}


def backend(engine):
    a = Attention(4, 2, 64, Rope(tuple(1e4 ** (-i / 32) for i in range(32))), 0.125)
    spec = ModelSpec("llama", 512, 256, (Layer(a, FeedForward(512)),) * 4, 1e-5, 4096, True)
    return CudaBackend(spec, weights=load(spec, None, torch.device("cuda")), engine=engine)


def test_the_count_sees_one_that_waits():
    x = torch.ones(8, device="cuda")

    def run():
        x.sum().item()
        torch.cuda.synchronize()

    seen = calls(run)
    assert sum(seen.get(name, 0) for name in WAITS) >= 2, seen


@pytest.mark.parametrize("engine", ["auto", "chain"])
@pytest.mark.parametrize("drafts", [0, 7])
def test_no_call_between_rounds_waits_for_the_device(engine, drafts):
    b, prompt = backend(engine), np.arange(20, dtype=np.int32)

    def rounds():
        cache = b.new_cache(2048)
        b.prefill(cache, prompt[:-1])
        return b.rounds(cache, prompt, temperature=0.8, top_k=0, top_p=1.0, min_p=0.0, seed=1, drafts=drafts,
                        limit=1000, stop_token_ids=())  # fmt: skip

    for _, _ in zip(rounds(), range(40), strict=False):  # compiles and captures
        pass
    stream = rounds()
    next(stream)
    seen = calls(lambda: [next(stream) for _ in range(100)])
    stream.close()
    assert seen.get("cudaGraphLaunch", 0) >= 20, seen
    assert {name: seen[name] for name in WAITS if seen.get(name)} == {}
