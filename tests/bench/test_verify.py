"""The exactness gate passes an exact engine and fails every kind of broken one."""

from __future__ import annotations

import numpy as np
import pytest
from fakes import FakeBackend, fake_llm

from slipstream.bench import verify as gate
from slipstream.bench.verify import Check, Tally, verify
from slipstream.engine import kv, sampling
from slipstream.errors import BackendError


def failed(checks):
    return {check.name for check in checks if not check.passed}


def test_exact_backend_passes_every_check():
    lines = []
    checks = verify(fake_llm(FakeBackend(order=32)), progress=lines.append)
    assert failed(checks) == set()
    assert len(checks) >= 19
    assert len(lines) == 21  # 20 prompts and the draws


@pytest.mark.parametrize("window", [None, 8])
def test_quick_gate_is_shorter_and_checks_the_same_things(window):
    lines = []
    quick = verify(fake_llm(FakeBackend(order=2, window=window)), quick=True, progress=lines.append)
    assert failed(quick) == set()
    assert len(lines) == 5
    assert len(quick) >= 19


def test_rows_that_depend_on_their_company_fail():
    names = failed(verify(fake_llm(FakeBackend(fault="rows")), quick=True))
    assert "a row alone or among 16 has the same bits" in names
    assert "drafter always right, drafts 7" in names


def test_prefill_that_depends_on_chunks_fails():
    names = failed(verify(fake_llm(FakeBackend(fault="chunks")), quick=True))
    assert "fresh session, prefill in chunks of 7" in names
    assert "prefill chunks leave the same bits" in names


def test_cache_that_keeps_a_rejected_draft_fails():
    names = failed(verify(fake_llm(FakeBackend(fault="rewind")), quick=True))
    assert "drafter always wrong, drafts 1" in names
    assert "reused prefix" in names


def test_a_prefix_reused_one_token_too_far_fails(monkeypatch):
    exact = kv.common_prefix
    monkeypatch.setattr(kv, "common_prefix", lambda a, b: min(exact(a, b) + 1, len(a), len(b)))
    assert "a reused prefix leaves the same bits" in failed(verify(fake_llm(FakeBackend()), quick=True))


def test_one_bit_is_enough_to_fail():
    class OneBit(FakeBackend):
        def verify(self, cache, tokens):
            logits = super().verify(cache, tokens)
            if len(tokens) == 5:
                logits.view(np.uint32)[0, 259] ^= 1
            return logits

    assert failed(verify(fake_llm(OneBit()), quick=True)) == {"a row alone or among 16 has the same bits"}


def test_state_that_outlives_a_generation_fails():
    class Tired(FakeBackend):
        def verify(self, cache, tokens):
            return super().verify(cache, tokens) * np.float32(1 if len(self.row_counts) < 400 else -1)

    assert "repeated" in failed(verify(fake_llm(Tired()), quick=True))


class Sampling(FakeBackend):
    """Samples by itself: by the rule, or with noise that forgets the position or is too small."""

    def __init__(self, noise=None):
        super().__init__()
        self.noise = noise

    def sample(self, logits, temperature, top_k, top_p, min_p, seed, position):
        if self.noise == "position":
            position = 0
        if self.noise == "temperature":
            temperature *= 0.8
        return sampling.sample(logits, temperature, top_k, top_p, min_p, seed, position)


@pytest.fixture
def few_draws(monkeypatch):
    monkeypatch.setattr(gate, "DRAWS", 4000)


@pytest.mark.usefixtures("few_draws")
def test_native_sampler_by_the_rule_passes():
    assert failed(verify(fake_llm(Sampling()), quick=True)) == set()


@pytest.mark.usefixtures("few_draws")
@pytest.mark.parametrize("noise", ["position", "temperature"])
def test_native_sampler_that_bends_the_rule_fails(noise):
    names = failed(verify(fake_llm(Sampling(noise)), quick=True))
    assert "the backend samples by the rule" in names
    assert "distribution at temperature 0.8" in names


def test_backend_that_is_not_row_invariant_is_held_to_the_drafter_part():
    class Library(FakeBackend):
        row_invariant = False

    checks = verify(fake_llm(Library()))
    assert failed(checks) == set()
    assert not any("chunk" in check.name or "bits" in check.name for check in checks)
    assert any("always wrong" in check.name for check in checks)


def test_what_was_never_compared_has_not_passed():
    assert Tally("nothing").check() == Check("nothing", False, "nothing was compared")


def test_a_check_names_the_first_difference():
    tally = Tally("x")
    tally.same("here", [1, 2, 3], [1, 2, 4])
    assert tally.check().detail == "1 of 1 differ; here: token 2 is [3], not [4]"
    tally.same("there", [1, 2], [1, 2, 4])
    assert len(tally.failures) == 2


def test_prompts_cover_every_kind():
    names = [text.name for text in gate._texts(fake_llm())]
    assert len(names) == 20
    assert {name.split("-")[0] for name in names} == {"chat", "code", "copy", "unicode", "long"}


def test_native_kernels_pass_on_a_tiny_model(tiny_checkpoint):
    try:
        checks = verify(str(tiny_checkpoint), backend="cpu", threads=1, quick=True)
    except BackendError as error:
        pytest.skip(str(error))
    assert failed(checks) == set()
    assert {"the backend samples by the rule", "prefill chunks leave the same bits"} <= {check.name for check in checks}
