"""The native CPU backend on whole models: its logits against the fp32 reference, and the exactness gate bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from tiny import write_tiny_checkpoint, write_tiny_gguf

from slipstream import LLM
from slipstream.backends.cpu.backend import CpuBackend
from slipstream.backends.cpu.library import library_path
from slipstream.backends.reference import ReferenceBackend
from slipstream.bench.verify import verify
from slipstream.engine.sampling import log_softmax
from slipstream.models.checkpoint import list_models, load_checkpoint

built_in = pytest.mark.skipif(list_models()[0].path is None, reason="the built-in model is not installed")
pytestmark = pytest.mark.skipif(library_path() is None, reason="installed without a C++ compiler")

TEXT = """A slipstream is the region behind a moving body in which the air is carried along. Cyclists ride in it to save
effort, geese fly in it on long journeys, and racing drivers wait in it for a chance to pass. def mean(values): return
sum(values) / len(values). Whoever leads does the work of parting the air; whoever follows needs a third less power.
1, 2, 3, 5, 8, 13, 21: each number is the sum of the two before it. Der Wind dreht auf West, und das Meer wird ruhig."""


@pytest.mark.parametrize("write", ["llama", "mistral", "Q4_K"])
def test_the_whole_gate_passes_on_tiny_models(tmp_path, write):
    if write == "Q4_K":
        path = write_tiny_gguf(tmp_path / "tiny.gguf", format=write, max_position_embeddings=4096)
    else:
        path = write_tiny_checkpoint(tmp_path, write, max_position_embeddings=4096)
    failed = [check for check in verify(LLM(path, backend="cpu"), quick=True) if not check.passed]
    assert not failed


@built_in
def test_native_logits_of_smollm2_are_those_of_the_fp32_reference():
    checkpoint = load_checkpoint("smollm2")
    tokens = np.array(checkpoint.tokenizer.encode(TEXT), np.int32)

    def log_probabilities(backend):
        cache = backend.new_cache(len(tokens))
        rows = [backend.verify(cache, tokens[i : i + 16]).copy() for i in range(0, len(tokens), 16)]
        return np.stack([log_softmax(row) for row in np.concatenate(rows)]).astype(np.float64)

    want = log_probabilities(ReferenceBackend(checkpoint))
    got = log_probabilities(CpuBackend(checkpoint.spec, checkpoint.tensors))
    kl = (np.exp(want) * (want - got)).sum(axis=1)
    assert kl.mean() < 1e-5  # the promise is 1e-3; two planes of activations give 1e-6
    assert (want.argmax(axis=1) == got.argmax(axis=1)).mean() >= 0.98


@built_in
def test_the_gate_passes_on_smollm2():
    checks = verify(LLM("smollm2", backend="cpu"), quick=True)
    assert [check for check in checks if not check.passed] == []
