"""The native CPU backend against the reference, and the bits it promises."""

from __future__ import annotations

import os
import signal
import time
from threading import Thread

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import GGUF_FORMATS, TINY_FAMILIES, write_tiny_checkpoint, write_tiny_gguf

from slipstream.backends import open_backend
from slipstream.backends.cpu import backend as cpu
from slipstream.backends.cpu import library
from slipstream.backends.cpu.backend import CpuBackend
from slipstream.backends.reference import ReferenceBackend
from slipstream.engine.sampling import sample
from slipstream.errors import BackendError, SlipstreamError
from slipstream.models.checkpoint import load_checkpoint

pytestmark = pytest.mark.skipif(library.library_path() is None, reason="installed without a C++ compiler")
ISAS = library.instruction_sets() if library.library_path() else []


def tokens_of(vocab, n, seed=0):
    return np.random.default_rng(seed).integers(0, vocab, n).astype(np.int32)


def logits_of(backend, tokens, rows=8, prefilled=0, chunk=None):
    """Logits of every token after `prefilled`, verified `rows` at a time."""
    cache = backend.new_cache(len(tokens))
    for at in range(0, prefilled, chunk or prefilled or 1):
        backend.prefill(cache, tokens[at : min(at + (chunk or prefilled), prefilled)])
    out = [backend.verify(cache, tokens[i : i + rows]).copy() for i in range(prefilled, len(tokens), rows)]
    cache.close()
    return np.concatenate(out)


def relative_error(got, want):
    return np.linalg.norm(got - want) / np.linalg.norm(want)


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_logits_match_the_reference_in_every_family(tmp_path, family):
    checkpoint = load_checkpoint(write_tiny_checkpoint(tmp_path, family, layers=3))
    tokens = tokens_of(checkpoint.spec.vocab, 100)
    want = logits_of(ReferenceBackend(checkpoint), tokens)
    got = logits_of(CpuBackend(checkpoint.spec, checkpoint.tensors), tokens)
    assert relative_error(got, want) < 1e-3  # keys and values are kept in half precision


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", GGUF_FORMATS)
def test_logits_match_the_dequantised_reference_in_every_format(tmp_path, format, isa):
    checkpoint = load_checkpoint(write_tiny_gguf(tmp_path / "m.gguf", format=format))
    tokens = tokens_of(checkpoint.spec.vocab, 24)
    want = logits_of(ReferenceBackend(checkpoint), tokens)
    got = logits_of(CpuBackend(checkpoint.spec, checkpoint.tensors, isa=isa), tokens)
    assert relative_error(got, want) < 2e-3


@pytest.mark.parametrize("format", GGUF_FORMATS)
def test_packing_keeps_every_weight_of_the_file(tmp_path, format):
    checkpoint = load_checkpoint(write_tiny_gguf(tmp_path / "m.gguf", format=format))
    backend = CpuBackend(checkpoint.spec, checkpoint.tensors)
    for name in ("embed", "layers.0.q", "layers.0.down", "layers.1.gate"):
        want = checkpoint.tensors[name].float32()
        got = np.stack([backend.row(name, i) for i in range(len(want))])
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", GGUF_FORMATS)
def test_a_row_has_the_same_bits_in_any_company(tmp_path, format, isa):
    checkpoint = load_checkpoint(write_tiny_gguf(tmp_path / "m.gguf", format=format))
    tokens = tokens_of(checkpoint.spec.vocab, 64)
    backend = CpuBackend(checkpoint.spec, checkpoint.tensors, threads=2, isa=isa)
    alone = logits_of(backend, tokens, rows=1)
    for rows in (2, 3, 5, 7, 8, 13, 16):
        assert np.array_equal(logits_of(backend, tokens, rows), alone), rows


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_prefill_chunks_and_threads_change_no_bit(tmp_path, family):
    checkpoint = load_checkpoint(write_tiny_checkpoint(tmp_path, family, max_position_embeddings=1024))
    tokens = tokens_of(checkpoint.spec.vocab, 600)
    backend = CpuBackend(checkpoint.spec, checkpoint.tensors, threads=1)
    whole = logits_of(backend, tokens, prefilled=590)
    assert np.isfinite(whole).all()
    for chunk in (1, 7, 64, 128):
        assert np.array_equal(logits_of(backend, tokens, prefilled=590, chunk=chunk), whole), chunk
    for threads in (2, 3, 5):
        other = CpuBackend(checkpoint.spec, checkpoint.tensors, threads=threads)
        assert np.array_equal(logits_of(other, tokens, prefilled=590), whole), threads


def test_a_sliding_window_ring_agrees_with_the_whole_history(tmp_path):
    window, length = 100, 1500
    path = write_tiny_checkpoint(tmp_path, "mistral", sliding_window=window, max_position_embeddings=4096)
    checkpoint = load_checkpoint(path)
    tokens = tokens_of(checkpoint.spec.vocab, length)
    backend = CpuBackend(checkpoint.spec, checkpoint.tensors)
    want = logits_of(ReferenceBackend(checkpoint), tokens, prefilled=length - 8)
    assert relative_error(logits_of(backend, tokens, prefilled=length - 8), want) < 1e-3


def test_rejected_drafts_leave_no_trace(tmp_path):
    path = write_tiny_checkpoint(tmp_path, "mistral", sliding_window=100, max_position_embeddings=4096)
    checkpoint = load_checkpoint(path)
    tokens = tokens_of(checkpoint.spec.vocab, 900)
    wrong = tokens_of(checkpoint.spec.vocab, 900, seed=1)
    backend = CpuBackend(checkpoint.spec, checkpoint.tensors)
    clean, disturbed = backend.new_cache(1000), backend.new_cache(1000)
    for i in range(0, 896, 4):
        want = backend.verify(clean, tokens[i : i + 4]).copy()
        got = backend.verify(disturbed, np.concatenate([tokens[i : i + 4], wrong[i : i + 12]]))[:4].copy()
        disturbed.rewind(i + 4)
        assert np.array_equal(got, want), i


def test_a_ring_refuses_to_rewind_past_what_it_holds(tmp_path):
    path = write_tiny_checkpoint(tmp_path, "mistral", sliding_window=100, max_position_embeddings=4096)
    checkpoint = load_checkpoint(path)
    backend = CpuBackend(checkpoint.spec, checkpoint.tensors)
    tokens = tokens_of(checkpoint.spec.vocab, 2000)
    cache = backend.new_cache(3000)
    backend.prefill(cache, tokens)
    assert cache.can_rewind(1990)
    assert not cache.can_rewind(1000)
    with pytest.raises(ValueError, match="cannot rewind"):
        cache.rewind(1000)
    # Rewinding as far as it allows still gives the bits of a text that never went further.
    furthest = min(n for n in range(1, 2000) if cache.can_rewind(n))
    cache.rewind(furthest)
    got = backend.verify(cache, tokens[furthest : furthest + 4]).copy()
    fresh = backend.new_cache(3000)
    backend.prefill(fresh, tokens[:furthest])
    assert np.array_equal(backend.verify(fresh, tokens[furthest : furthest + 4]), got)
    cache.rewind(0)
    assert cache.length == 0
    with pytest.raises(ValueError, match="cannot rewind"):
        cache.rewind(1)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_an_exported_cache_goes_on_with_the_same_bits(tmp_path, family):
    path = write_tiny_checkpoint(tmp_path, family, max_position_embeddings=4096)
    checkpoint = load_checkpoint(path)
    backend = CpuBackend(checkpoint.spec, checkpoint.tensors)
    tokens = tokens_of(checkpoint.spec.vocab, 700)
    first = backend.new_cache(1000)
    backend.prefill(first, tokens[:600])
    first.rewind(590)
    second = CpuBackend(checkpoint.spec, checkpoint.tensors).new_cache(2000)
    second.import_state(first.export_state())
    assert second.length == 590
    want = backend.verify(first, tokens[590:600]).copy()
    assert np.array_equal(second.backend.verify(second, tokens[590:600]), want)


def test_a_damaged_state_is_refused(tmp_path):
    checkpoint = load_checkpoint(write_tiny_checkpoint(tmp_path))
    backend = CpuBackend(checkpoint.spec, checkpoint.tensors)
    cache = backend.new_cache(100)
    backend.prefill(cache, tokens_of(checkpoint.spec.vocab, 50))
    state = cache.export_state()
    for data in (b"", state[:10], state[:-1], state + b"x", b"y" + state[1:], state[:8] + b"\xff" * 16 + state[24:]):
        with pytest.raises(ValueError, match="not the state"):
            backend.new_cache(100).import_state(data)
    with pytest.raises(ValueError, match="fits this capacity"):
        backend.new_cache(49).import_state(state)


@pytest.fixture(scope="module")
def backend(tiny_checkpoint):
    checkpoint = load_checkpoint(tiny_checkpoint)
    return CpuBackend(checkpoint.spec, checkpoint.tensors)


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**33),
    vocab=st.integers(1, 3000),
    spread=st.sampled_from([0.01, 1.0, 5.0, 30.0]),
    temperature=st.sampled_from([0.0, 0.1, 0.8, 1.2, 5.0]),
    top_k=st.sampled_from([0, 1, 5, 40, 10_000]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.3, 0.01]),
    min_p=st.sampled_from([0.0, 0.001, 0.1, 0.9]),
    ties=st.booleans(),
)
def test_native_sampling_follows_the_rule(
    backend, seed, position, vocab, spread, temperature, top_k, top_p, min_p, ties
):
    logits = (spread * np.random.default_rng(seed % 2**32).standard_normal(vocab)).astype(np.float32)
    if ties:
        logits = np.round(logits)
    want = sample(logits, temperature, top_k, top_p, min_p, seed, position)
    assert backend.sample(logits, temperature, top_k, top_p, min_p, seed, position) == want


def test_instruction_sets_agree(tiny_checkpoint):
    checkpoint = load_checkpoint(tiny_checkpoint)
    tokens = tokens_of(checkpoint.spec.vocab, 64)
    logits = [logits_of(CpuBackend(checkpoint.spec, checkpoint.tensors, isa=isa), tokens) for isa in ISAS]
    for other in logits[1:]:
        assert relative_error(other, logits[0]) < 1e-4


def test_bad_calls_are_refused_before_they_reach_native_code(backend):
    cache = backend.new_cache(10)
    with pytest.raises(ValueError, match="do not fit a cache of 10"):
        backend.prefill(cache, np.zeros(11, np.int32))
    with pytest.raises(ValueError, match="token ids"):
        backend.verify(cache, np.array([backend.spec.vocab], np.int32))
    with pytest.raises(ValueError, match="1 to 16 rows"):
        backend.verify(cache, np.zeros(0, np.int32))
    cache.close()
    cache.close()
    with pytest.raises(ValueError, match="closed"):
        backend.verify(cache, np.zeros(1, np.int32))


def test_a_closed_model_or_cache_is_refused_not_read(tiny_checkpoint):
    checkpoint = load_checkpoint(tiny_checkpoint)
    backend = CpuBackend(checkpoint.spec, checkpoint.tensors)
    cache = backend.new_cache(10)
    backend.close()
    backend.close()
    for call in (
        lambda: backend.verify(cache, np.zeros(1, np.int32)),
        lambda: backend.prefill(cache, np.zeros(1, np.int32)),
        lambda: backend.sample(np.zeros(8, np.float32), 1.0, 0, 1.0, 0.0, 0, 0),
        lambda: backend.new_cache(10),
    ):
        with pytest.raises(BackendError, match="closed"):
            call()
    cache.close()


def test_closing_under_a_pass_of_another_thread_waits_for_it(tiny_checkpoint):
    checkpoint = load_checkpoint(tiny_checkpoint)
    tokens = tokens_of(checkpoint.spec.vocab, 500)
    for what in ("cache", "backend") * 5:
        backend = CpuBackend(checkpoint.spec, checkpoint.tensors, threads=2)
        cache = backend.new_cache(500)

        errors = []

        def run(backend=backend, cache=cache, errors=errors):
            try:
                while True:
                    cache.rewind(0)
                    backend.prefill(cache, tokens)
            except SlipstreamError as error:
                errors.append(str(error))

        thread = Thread(target=run)
        thread.start()
        time.sleep(0.01)
        {"cache": cache, "backend": backend}[what].close()
        thread.join(10)
        assert len(errors) == 1
        assert "closed" in errors[0]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_process_is_told_to_open_its_own_model(tiny_checkpoint):
    checkpoint = load_checkpoint(tiny_checkpoint)
    backend = CpuBackend(checkpoint.spec, checkpoint.tensors, threads=2)
    cache = backend.new_cache(10)
    backend.prefill(cache, np.zeros(4, np.int32))
    child = os.fork()
    if not child:
        signal.alarm(10)  # a child that hangs dies of it
        try:
            backend.verify(cache, np.zeros(1, np.int32))
        except BackendError as error:
            cache.close()
            backend.close()
            os._exit(0 if "forked" in str(error) else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0


class Values:
    """A vector that a test made up."""

    format = "F32"

    def __init__(self, values):
        self.values = np.asarray(values, np.float32)
        self.shape = self.values.shape

    def float32(self):
        return self.values


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("size", [1e-44, 1e-38, 1e-30, 1e30])
def test_tiny_and_huge_activations_stay_numbers(tmp_path, size, isa):
    checkpoint = load_checkpoint(write_tiny_gguf(tmp_path / "m.gguf", format="Q4_1"))
    tensors = {**checkpoint.tensors}
    for name, tensor in checkpoint.tensors.items():
        if name.endswith("attention_norm"):
            tensors[name] = Values(np.full(tensor.shape, size))
    logits = logits_of(CpuBackend(checkpoint.spec, tensors, isa=isa), tokens_of(checkpoint.spec.vocab, 24))
    assert np.isfinite(logits).all()


@pytest.mark.parametrize("filters", [(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (1.0, 5, 0.9, 0.1), (1.0, 0, 0.5, 0.0)])
@pytest.mark.parametrize("logit", [np.nan, -np.inf])
def test_a_row_without_a_finite_logit_yields_no_wild_token(backend, filters, logit):
    row = np.full(300, logit, np.float32)
    for token in (backend.sample(row, *filters, 1, 2), sample(row, *filters, 1, 2)):
        assert -1 <= token < 300


def test_windows_and_contexts_beyond_32_bits_are_no_trap(tmp_path):
    path = write_tiny_checkpoint(tmp_path, "mistral", sliding_window=2**31 - 1, max_position_embeddings=2**32)
    checkpoint = load_checkpoint(path)
    backend = CpuBackend(checkpoint.spec, checkpoint.tensors)
    for capacity in (2**31 - 1, 2**32):
        with pytest.raises(BackendError, match="smaller context"):
            backend.new_cache(capacity)
    tokens = tokens_of(checkpoint.spec.vocab, 40)
    want = logits_of(ReferenceBackend(checkpoint), tokens)
    assert relative_error(logits_of(backend, tokens), want) < 1e-3


def test_unfit_shapes_say_why_and_auto_falls_back_to_the_reference(tmp_path):
    checkpoint = load_checkpoint(write_tiny_checkpoint(tmp_path, hidden=40, intermediate_size=96))
    with pytest.raises(BackendError, match=r"multiples of 16.*--backend reference"):
        CpuBackend(checkpoint.spec, checkpoint.tensors)
    assert open_backend(checkpoint).name == "reference"


def test_a_missing_library_says_how_to_get_it(monkeypatch, tiny_checkpoint):
    library.library.cache_clear()
    monkeypatch.setattr(library, "library_path", lambda: None)
    with pytest.raises(BackendError, match="C\\+\\+ compiler"):
        open_backend(load_checkpoint(tiny_checkpoint), "cpu")
    assert open_backend(load_checkpoint(tiny_checkpoint)).name == "reference"


def test_without_kernels_and_pytorch_the_error_names_both(monkeypatch, tiny_checkpoint):
    monkeypatch.setattr("slipstream.backends.why_not_native", lambda checkpoint: "no C++ compiler at install time")
    monkeypatch.setattr("slipstream.backends.find_spec", lambda name: None)
    with pytest.raises(BackendError, match=r"no C\+\+ compiler.*PyTorch"):
        open_backend(load_checkpoint(tiny_checkpoint))


def test_auto_takes_the_gpu_where_there_is_one(monkeypatch, tiny_checkpoint):
    checkpoint = load_checkpoint(tiny_checkpoint)
    assert open_backend(checkpoint).name == "cpu"
    monkeypatch.setattr("slipstream.backends._gpu_ready", lambda: True)
    monkeypatch.setattr("slipstream.backends.find_spec", lambda name: None)
    with pytest.raises(BackendError, match="pip install"):
        open_backend(checkpoint)


def test_bad_options_name_the_choices(tiny_checkpoint):
    checkpoint = load_checkpoint(tiny_checkpoint)
    with pytest.raises(BackendError, match="portable"):
        CpuBackend(checkpoint.spec, checkpoint.tensors, isa="mmx")
    for threads in (0, 10**6, 10**10):
        with pytest.raises(BackendError, match="threads must be in"):
            CpuBackend(checkpoint.spec, checkpoint.tensors, threads=threads)
    with pytest.raises(BackendError, match="auto, cpu"):
        open_backend(checkpoint, "abacus")


def test_default_threads_follow_the_affinity_of_the_process():
    assert cpu.default_threads() >= 1
