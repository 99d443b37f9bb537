"""The native block drafter against its definition, through rewinds, chunks, windows and other streams."""

from __future__ import annotations

import numpy as np
import pytest
from tiny import write_tiny_checkpoint, write_tiny_gguf
from tiny_drafter import Oracle, write_tiny_drafter

from slipstream.backends.base import BlockDrafting
from slipstream.backends.cpu import library
from slipstream.backends.cpu.backend import CpuBackend
from slipstream.errors import BackendError
from slipstream.models.block_drafter import load_block_drafter
from slipstream.models.checkpoint import load_checkpoint
from slipstream.models.reference import Reference

pytestmark = pytest.mark.skipif(library.library_path() is None, reason="installed without a C++ compiler")
ISAS = library.instruction_sets() if library.library_path() else []


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_checkpoint(write_tiny_checkpoint(tmp_path_factory.mktemp("target"), layers=4))


def opened(target, path, threads=2, isa=None, coarse=False, **changes):
    """(backend with a tiny drafter, its oracle)."""
    drafter = load_block_drafter(write_tiny_drafter(path, **changes), target.spec, target.tensors)
    backend = CpuBackend(target.spec, target.tensors, threads, isa)
    backend.load_drafter(drafter, coarse=coarse)
    return backend, Oracle(drafter, Reference(target.spec, target.tensors))


def text_of(n, seed=0):
    return np.random.default_rng(seed).integers(0, 288, n).astype(np.int32)


def cache_of(backend, text, chunk=None):
    cache = backend.new_cache(400)
    for at in range(0, len(text) - 1, chunk or len(text)):
        backend.prefill(cache, text[at : min(len(text) - 1, at + (chunk or len(text)))])
    return cache


def same(a, b):
    return all((x == y).all() for x, y in zip(a, b, strict=True))


def agree(got, want, error=1e-3):
    """The same tokens; numbers to `error` of their size."""
    tokens, confidence, scores, candidates = want
    assert got.tokens.tolist() == tokens.tolist()
    assert np.abs(got.confidence - confidence).max() < 2 * error
    mine, theirs = [], []
    for r in range(len(tokens)):
        both = set(got.candidates[r].tolist()) & set(candidates[r].tolist())
        assert len(both) >= len(candidates[r]) - 1  # the last place may be a tie
        mine += [got.scores[r][got.candidates[r] == token][0] for token in both]
        theirs += [scores[r][candidates[r] == token][0] for token in both]
    assert np.linalg.norm(np.subtract(mine, theirs)) < error * np.linalg.norm(theirs)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("stored", ["int8", "F32", "BF16"])
def test_drafts_match_the_definition(target, tmp_path, stored, isa):
    backend, oracle = opened(target, tmp_path, isa=isa, stored=stored)
    assert isinstance(backend, BlockDrafting)
    for n in (1, 2, 9, 70):
        text = text_of(n + 1, seed=n)
        cache = cache_of(backend, text)
        agree(backend.guess(cache, int(text[-1]), 0.0, 0), oracle.draft(text))
        cache.close()


@pytest.mark.parametrize("isa", ISAS)
def test_coarse_drafts_are_nearly_the_same(target, tmp_path, isa):
    backend, oracle = opened(target, tmp_path, isa=isa, coarse=True)
    for n in (9, 70):
        text = text_of(n + 1, seed=n)
        agree(backend.guess(cache_of(backend, text), int(text[-1]), 0.0, 0), oracle.draft(text), error=2e-2)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(
    "changes",
    [{"sliding_window": None}, {"sliding_window": 300, "block_size": 16}, {"block_size": 2}, {"target_layer_ids": [1]}],
    ids=str,
)
def test_every_shape_matches_the_definition(target, tmp_path, changes, threads):
    backend, oracle = opened(target, tmp_path, threads, **changes)
    text = text_of(330)  # two splits of attention, five chunks of prefill
    agree(backend.guess(cache_of(backend, text), int(text[-1]), 0.0, 0), oracle.draft(text))


def test_drafts_at_a_temperature_share_the_noise_of_their_positions(target, tmp_path):
    backend, oracle = opened(target, tmp_path)
    text = text_of(40)
    cache = cache_of(backend, text)
    drawn = [backend.guess(cache, int(text[-1]), 0.8, seed) for seed in (1, 2, 2**40 + 3)]
    for got, seed in zip(drawn, (1, 2, 2**40 + 3), strict=True):
        agree(got, oracle.draft(text, 0.8, seed))
    assert not same(drawn[0], drawn[1])


@pytest.mark.parametrize("format", ["Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K", "F16"])
def test_the_head_is_that_of_the_target_in_every_format(tmp_path, format):
    hidden = 256 if format.endswith("_K") else 64
    target = load_checkpoint(write_tiny_gguf(tmp_path / "m.gguf", format=format, layers=4, hidden=hidden))
    backend, oracle = opened(target, tmp_path / "drafter", hidden_size=hidden, target_hidden_size=hidden)
    text = text_of(12)
    agree(backend.guess(cache_of(backend, text), int(text[-1]), 0.0, 0), oracle.draft(text))


def test_drafts_do_not_depend_on_how_the_text_came_into_the_cache(target, tmp_path):
    backend, _ = opened(target, tmp_path)
    text = text_of(150)
    anchor = int(text[-1])
    plain = backend.guess(cache_of(backend, text), anchor, 0.0, 0)
    for chunk in (1, 7, 64, 100):
        assert same(backend.guess(cache_of(backend, text, chunk), anchor, 0.0, 0), plain)
    cache = cache_of(backend, text[:60])  # rounds: drafts, rejected rows, and drafting now and then
    for at in range(59, 149, 3):
        if at % 2:
            backend.guess(cache, int(text[at]), 0.0, 0)
        backend.verify(cache, np.array([*text[at : at + 3], 5, 6, 7], np.int32))
        cache.rewind(at + 3)
    assert same(backend.guess(cache, anchor, 0.0, 0), plain)


def test_a_rewound_text_drafts_as_if_it_had_never_been_longer(target, tmp_path):
    backend, _ = opened(target, tmp_path)
    text, other = text_of(100), text_of(120, seed=1)
    cache = cache_of(backend, text)
    backend.guess(cache, int(text[-1]), 0.0, 0)
    for keep in (70, 30, 0):
        cache.rewind(keep)
        branch = np.concatenate((text[:keep], other))
        backend.prefill(cache, other[:-1])
        fresh = backend.guess(cache_of(backend, branch), int(branch[-1]), 0.0, 0)
        assert same(backend.guess(cache, int(branch[-1]), 0.0, 0), fresh)
        cache.rewind(keep)
        backend.prefill(cache, text[keep:-1])


def test_a_drafter_changes_no_bit_of_the_target(target, tmp_path):
    plain = CpuBackend(target.spec, target.tensors, 2)
    backend, _ = opened(target, tmp_path)
    text = text_of(90)
    caches = [cache_of(b, text) for b in (plain, backend)]
    for rows in (1, 4, 16):
        backend.guess(caches[1], int(text[-1]), 0.8, 3)
        want, got = (b.verify(c, text[:rows]).copy() for b, c in zip((plain, backend), caches, strict=True))
        assert (got.view(np.uint32) == want.view(np.uint32)).all()


def test_two_streams_do_not_mix(target, tmp_path):
    backend, _ = opened(target, tmp_path)
    texts = [text_of(50, seed) for seed in (1, 2)]
    alone = [backend.guess(cache_of(backend, text), int(text[-1]), 0.0, 0) for text in texts]
    caches = [backend.new_cache(60) for _ in texts]
    for at in range(49):
        for cache, text in zip(caches, texts, strict=True):
            backend.verify(cache, text[at : at + 1])
    for cache, text, want in zip(caches, texts, alone, strict=True):
        assert same(backend.guess(cache, int(text[-1]), 0.0, 0), want)


def test_a_restored_cache_drafts_as_the_one_that_was_saved(target, tmp_path):
    backend, _ = opened(target, tmp_path)
    text, last = text_of(150), 7
    cache = cache_of(backend, text)
    backend.verify(cache, text[:5])
    cache.rewind(147)
    restored = backend.new_cache(500)
    restored.import_state(cache.export_state())
    assert same(backend.guess(restored, last, 0.0, 0), backend.guess(cache, last, 0.0, 0))
    for each in (restored, cache):
        each.rewind(60)
        backend.prefill(each, text[:30])
    assert same(backend.guess(restored, last, 0.0, 0), backend.guess(cache, last, 0.0, 0))


def test_a_cache_saved_without_a_drafter_drafts_from_what_came_since(target, tmp_path):
    backend, _ = opened(target, tmp_path)
    plain = CpuBackend(target.spec, target.tensors, 1)
    text, last = text_of(60), 7
    cache, restored = cache_of(backend, text), backend.new_cache(100)
    restored.import_state(cache_of(plain, text[:31]).export_state())
    assert np.isfinite(backend.guess(restored, last, 0.0, 0).scores).all()  # sees nothing but itself
    backend.prefill(restored, text[30:-1])
    # A window of 20 has forgotten the restored part by now.
    assert same(backend.guess(restored, last, 0.0, 0), backend.guess(cache, last, 0.0, 0))
    with pytest.raises(ValueError, match="not the state"):
        plain.new_cache(100).import_state(cache.export_state())


def test_a_draft_at_the_end_of_a_full_cache_is_safe(target, tmp_path):
    backend, oracle = opened(target, tmp_path)
    text = text_of(65)
    cache = backend.new_cache(64)
    backend.prefill(cache, text[:-2])
    agree(backend.guess(cache, int(text[-2]), 0.0, 0), oracle.draft(text[:-1]))
    backend.verify(cache, text[-2:-1])
    with pytest.raises(ValueError, match="do not fit"):
        backend.guess(cache, int(text[-1]), 0.0, 0)


def test_limits_cut_the_draft(target, tmp_path):
    backend, _ = opened(target, tmp_path)
    text = text_of(20)
    cache = cache_of(backend, text)
    whole = backend.guess(cache, int(text[-1]), 0.0, 0)
    tokens, confidence = backend.draft(cache, int(text[-1]), temperature=0.0, seed=0, limit=3)
    assert tokens.tolist() == whole.tokens[:3].tolist()
    assert len(confidence) == 3


def test_a_drafter_that_the_kernels_cannot_run_is_refused(target, tmp_path):
    with pytest.raises(BackendError, match="Markov rank is 24, not a multiple of 16"):
        opened(target, tmp_path, markov_rank=24, stored="F32")
    backend = CpuBackend(target.spec, target.tensors, 1)
    cache = backend.new_cache(10)
    with pytest.raises(ValueError, match="no drafter was loaded"):
        backend.draft(cache, 1, temperature=0.0, seed=0, limit=7)
