"""A block drafter in the engine: it is loaded for its own model, it guesses, and no token depends on it."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from fakes import FakeBackend, fake_llm
from tiny import write_tiny_checkpoint
from tiny_drafter import write_tiny_drafter

from slipstream import LLM, SamplingParams
from slipstream.backends.cpu import library
from slipstream.bench.drafter_eval import Judged
from slipstream.bench.verify import verify
from slipstream.drafters import shipped
from slipstream.drafters.block import Record
from slipstream.engine.guide import BlockGuide
from slipstream.errors import CheckpointError, RequestError
from slipstream.models.block_drafter import load_block_drafter
from slipstream.models.checkpoint import load_checkpoint

native = pytest.mark.skipif(library.library_path() is None, reason="installed without a C++ compiler")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_checkpoint(write_tiny_checkpoint(tmp_path_factory.mktemp("target"), layers=4))


@pytest.fixture(scope="module")
def folder(target, tmp_path_factory):
    return write_tiny_drafter(tmp_path_factory.mktemp("weights") / "tiny", target.tensors)


class DraftingBackend(FakeBackend):
    """Drafts what it will say, by its own logits, with every `wrong`th guess off by one."""

    def __init__(self, wrong: int = 0, **options):
        super().__init__(**options)
        self.wrong, self.asked = wrong, []

    def load_drafter(self, drafter):
        """Nothing to load."""

    def draft(self, cache, anchor, *, temperature, seed, limit):
        self.asked.append((cache.length, anchor, temperature, seed))
        text, guesses = [*cache.tokens, anchor], []
        for i in range(limit):
            token = int(self.row(text).argmax())
            guesses.append((token + 1) % 256 if self.wrong and (cache.length + i) % self.wrong == 0 else token)
            text.append(guesses[-1])
        return np.array(guesses, np.int32), np.full(len(guesses), 0.9, np.float32)


def drafting_llm(backend, **options):
    llm = fake_llm(backend, **options)
    llm.guide, llm.record = BlockGuide(backend, {}), Record()
    for _ in range(4):
        llm.cost.record(1, 1e-3)
    return llm


def test_guesses_that_are_right_make_rounds_longer():
    llm = drafting_llm(DraftingBackend())
    plain = llm.session(drafter="none").generate("Hello", SamplingParams(max_tokens=64, ignore_eos=True))
    drafted = llm.session(drafter="block").generate("Hello", SamplingParams(max_tokens=64, ignore_eos=True))
    assert drafted.token_ids == plain.token_ids
    assert drafted.speculation.drafter == "block"
    assert drafted.speculation.rounds < 20


@pytest.mark.parametrize("drafter", ["block", "auto"])
@pytest.mark.parametrize("wrong", [1, 2, 5])
@pytest.mark.parametrize("params", [{}, {"temperature": 0.9, "seed": 3}, {"frequency_penalty": 1.0}], ids=str)
def test_no_token_depends_on_the_drafter(drafter, wrong, params):
    params = SamplingParams(max_tokens=50, ignore_eos=True, **params)
    llm = drafting_llm(DraftingBackend(wrong))
    plain = llm.session(drafter="none").generate("Hello", params).token_ids
    for drafts in (1, 4, 7, 15):
        assert llm.session(drafter=drafter, drafts=drafts).generate("Hello", params).token_ids == plain


def test_the_model_is_asked_about_the_newest_token_at_its_place():
    backend = DraftingBackend(wrong=3)
    llm = drafting_llm(backend)
    done = llm.session(drafter="block").generate("Hello", SamplingParams(max_tokens=30, ignore_eos=True, seed=9))
    text = [*b"Hello", *done.token_ids]
    assert backend.asked
    assert all(text[at] == anchor and seed == 9 for at, anchor, _, seed in backend.asked)


@native
def test_a_real_drafter_passes_the_gate(target, folder):
    with LLM(target, backend="cpu", drafter=str(folder), threads=2) as llm:
        checks = verify(llm, quick=True)
    assert [check for check in checks if not check.passed] == []
    assert {f"drafter block, drafts {n}" for n in (1, 3, 7)} <= {check.name for check in checks}


@native
def test_sessions_branch_and_return_with_the_drafter_on(target, folder):
    modes = [SamplingParams(max_tokens=24, ignore_eos=True, temperature=t, seed=5) for t in (0.0, 0.8)]
    asked = list(product(("Hello there", "Hello you", "Hello there, my", "He"), modes))
    said = {}
    with LLM(target, backend="cpu", drafter=str(folder), threads=2) as llm:
        for name in ("none", "block", "auto"):
            with llm.session(drafter=name) as session:
                said[name] = [session.generate(prompt, params).token_ids for prompt, params in asked]
    assert said["block"] == said["auto"] == said["none"]


@native
def test_a_named_drafter_serves_sessions_under_its_name_and_as_auto(target, folder):
    with LLM(target, backend="cpu", drafter=str(folder)) as llm:
        for name in (None, "auto", str(folder)):
            assert llm.session(drafter=name)._drafter.name == "auto"
        with pytest.raises(RequestError, match="no drafter"):
            llm.session(drafter=f"{folder}/other")


@native
def test_the_drafter_that_ships_for_a_model_is_found_by_its_weights(target, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(shipped, "FOLDER", folder.parent)
    assert shipped.shipped_drafter(target.tensors) == folder
    other = load_checkpoint(write_tiny_checkpoint(tmp_path, layers=4, seed=1))
    assert shipped.shipped_drafter(other.tensors) is None
    assert LLM(target, backend="cpu").session()._drafter.name == "auto"
    assert LLM(other, backend="cpu").session()._drafter.name == "suffix"
    assert LLM(target, backend="cpu", drafter="suffix").record is None
    assert LLM(target, backend="cpu", drafter="block").session()._drafter.name == "block"
    with pytest.raises(RequestError, match="no block drafter for this model"):
        LLM(other, backend="cpu", drafter="block")
    with pytest.raises(CheckpointError, match="same shape but other weights"):
        LLM(other, backend="cpu", drafter=str(folder))


def test_what_cannot_draft_is_refused_in_words(target, folder):
    pytest.importorskip("torch")
    with pytest.raises(RequestError, match="the reference backend runs no block drafter; use --drafter suffix"):
        LLM(target, backend="reference", drafter=str(folder))
    with pytest.raises(RequestError, match="no drafter 'blok'; known are auto, none, suffix, block, or the folder"):
        LLM(target, backend="reference", drafter="blok")
    with pytest.raises(RequestError, match="no block drafter is loaded"):
        LLM(target, backend="reference").session(drafter="block")


def test_shipped_drafters_fit_their_models():
    folders = [config.parent for config in shipped.FOLDER.glob("*/config.json")]
    if not folders:
        pytest.skip("no drafter ships yet")
    checkpoint = load_checkpoint("smollm2")
    drafter = load_block_drafter(shipped.FOLDER / "smollm2-135m", checkpoint.spec, checkpoint.tensors)
    assert shipped.shipped_drafter(checkpoint.tensors) == drafter.path
    assert sum(file.stat().st_size for file in drafter.path.iterdir()) <= 16e6
    assert drafter.config.acceptance


@native
def test_a_smaller_model_drafts_for_a_larger_one(target, tmp_path):
    """Here the model itself, so that every guess is right, at any temperature and after any rewind."""
    modes = [SamplingParams(max_tokens=24, ignore_eos=True, temperature=t, seed=5) for t in (0.0, 0.8)]
    with LLM(target, backend="cpu", drafter=str(target.path)) as llm, llm.session(drafter=Judged()) as session:
        for prompt, params in product(("Hello there", "Hello you", "He"), modes):
            plain = llm.session(drafter="none").generate(prompt, params)
            drafted = session.generate(prompt, params)
            assert drafted.token_ids == plain.token_ids
            assert drafted.speculation.accepted == drafted.speculation.drafted > 0


def test_a_model_of_another_vocabulary_cannot_draft(target, tmp_path):
    pytest.importorskip("torch")
    other = write_tiny_checkpoint(tmp_path, layers=1, vocab=320)
    with pytest.raises(CheckpointError, match="has another vocabulary than"):
        LLM(target, backend="reference", drafter=str(other))
