"""The block drafter of the GPU backend against its definition, in Triton's interpreter where there is no GPU."""

import numpy as np
import pytest
from interpreter import DEVICE, GPU, torch
from tiny import write_tiny_checkpoint
from tiny_drafter import Oracle, write_tiny_drafter

from slipstream.backends.base import BlockDrafting
from slipstream.backends.cuda import drafter as device_drafter
from slipstream.backends.cuda.backend import CudaBackend
from slipstream.backends.cuda.weights import load
from slipstream.errors import RequestError
from slipstream.kernels.launch import START
from slipstream.models.block_drafter import load_block_drafter
from slipstream.models.checkpoint import load_checkpoint
from slipstream.models.reference import Reference

ERROR = 2e-2 if GPU else 1e-3


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_checkpoint(write_tiny_checkpoint(tmp_path_factory.mktemp("target"), layers=4, head_dim=32))


@pytest.fixture(autouse=True)
def short_graphs(monkeypatch):
    """The interpreter takes its time even for rounds after the last."""
    if not GPU:
        monkeypatch.setattr("slipstream.backends.cuda.rounds.UNROLLED", 1)
        monkeypatch.setattr("slipstream.backends.cuda.rounds.AHEAD", 1)


def opened(target, path, loaded=True, **changes):
    """(backend, oracle of its drafter)."""
    changes = {"head_dim": 32} | changes
    drafter = load_block_drafter(write_tiny_drafter(path, **changes), target.spec, target.tensors)
    dtype = torch.float16 if GPU else torch.float32
    weights = load(target.spec, target.tensors, torch.device(DEVICE), dtype)
    backend = CudaBackend(target.spec, weights=weights, device=DEVICE)
    if loaded:
        backend.load_drafter(drafter)
        for poisoned in (backend.drafter.guesses, backend.drafter.chances):
            poisoned.fill_(-1 if poisoned.dtype == torch.int32 else float("nan"))
    return backend, Oracle(drafter, Reference(target.spec, target.tensors))


def text_of(n):
    return np.random.default_rng().integers(0, 288, n).astype(np.int32)


def cache_of(backend, text):
    cache = backend.new_cache(128)
    backend.prefill(cache, text[:-1])
    return cache


def agree(backend, cache, oracle, text, temperature=0.0, seed=0):
    tokens, chances = backend.draft(cache, int(text[-1]), temperature=temperature, seed=seed, limit=15)
    want, confidence, scores, _ = oracle.draft(text, temperature, seed)
    if tokens.tolist() != want.tolist():  # after a tie, all that follows differs
        close = np.sort(scores, 1)[:, -1] - np.sort(scores, 1)[:, -2]
        assert close.min() < 10 * ERROR
        return
    assert np.abs(chances - confidence).max() < ERROR


@pytest.mark.parametrize(
    "changes", [{}, {"sliding_window": None}, {"block_size": 2}, {"target_layer_ids": [1]}], ids=str
)
def test_drafts_match_the_definition(target, tmp_path, changes):
    backend, oracle = opened(target, tmp_path, **changes)
    assert isinstance(backend, BlockDrafting)
    for n in (1, 2, 40):
        text = text_of(n + 1)
        agree(backend, cache_of(backend, text), oracle, text)


def test_drafts_at_a_temperature_share_the_noise_of_their_positions(target, tmp_path):
    backend, oracle = opened(target, tmp_path)
    text = text_of(30)
    cache = cache_of(backend, text)
    for seed in (1, 2**40 + 3, 2**63 + 5):
        agree(backend, cache, oracle, text, 0.8, seed)


def test_rejected_rows_and_rewinds_leave_no_trace(target, tmp_path):
    backend, oracle = opened(target, tmp_path)
    text = text_of(40)
    cache = cache_of(backend, text[:21])
    for at in range(20, 38, 3):
        backend.verify(cache, np.array([*text[at : at + 3], 5, 6, 7], np.int32))
        cache.rewind(at + 3)
    agree(backend, cache, oracle, text[:39])
    cache.rewind(10)
    agree(backend, cache, oracle, text[:11])


def test_a_library_prefill_remembers_what_the_passes_do(target, tmp_path, monkeypatch):
    backend, oracle = opened(target, tmp_path)
    monkeypatch.setattr("slipstream.backends.cuda.backend.SHORT", 4)
    text = text_of(30)
    agree(backend, cache_of(backend, text), oracle, text)


def decode(backend, text, drafter, drafts=7, limit=10, **knobs):
    knobs = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 5} | knobs
    cache = cache_of(backend, text)
    rounds = list(backend.rounds(cache, text, drafts=drafts, limit=limit, stop_token_ids=(), drafter=drafter, **knobs))
    return [token for r in rounds for token in r.tokens], rounds, cache


@pytest.mark.parametrize("knobs", [{}, {"temperature": 0.8}], ids=str)
def test_rounds_verify_the_drafts_of_the_definition_and_change_no_token(target, tmp_path, monkeypatch, knobs):
    monkeypatch.setattr(device_drafter, "LEAST_SURVIVAL", 0.0)
    backend, oracle = opened(target, tmp_path)
    text = text_of(12)
    plain, _, _ = decode(backend, text, "none", 0, **knobs)
    for drafter in ("block", "auto"):
        tokens, rounds, cache = decode(backend, text, drafter, **knobs)
        assert tokens == plain
        assert rounds[0].drafted == min(7, 9)
    whole = np.concatenate([text, np.array(tokens, np.int32)])
    agree(backend, cache, oracle, whole)  # the memory followed the rounds


def test_drafts_that_are_right_are_all_accepted(target, tmp_path, monkeypatch):
    monkeypatch.setattr(device_drafter, "LEAST_SURVIVAL", 0.0)
    backend, _ = opened(target, tmp_path, draft_vocab_size=288, markov_candidates=16)
    text = text_of(12)
    plain, _, _ = decode(backend, text, "none", 0)
    d = backend.drafter
    d.bias.zero_()
    follows = torch.tensor([*plain, *plain], device=DEVICE)
    start = len(text) - 1

    def told(logits, ids, values, vocab, pdl):  # the very tokens that come
        next_ = follows[(d.block[START] - start + torch.arange(7, device=DEVICE)).clamp(0, len(follows) - 1)]
        ids.copy_((next_[:, None] + torch.arange(16, device=DEVICE)) % 288)
        values.copy_(torch.where(torch.arange(16, device=DEVICE) == 0, 5.0, -50.0).expand(7, 16))

    monkeypatch.setattr(device_drafter, "candidates", told)
    tokens, rounds, _ = decode(backend, text, "block")
    assert tokens == plain
    assert [len(r.tokens) for r in rounds] == [8, 2]


def test_unlikely_drafts_are_not_verified(target, tmp_path, monkeypatch):
    monkeypatch.setattr(device_drafter, "LEAST_SURVIVAL", 2.0)
    backend, _ = opened(target, tmp_path)
    _, rounds, _ = decode(backend, text_of(9), "block", limit=3)
    assert [r.drafted for r in rounds] == [0, 0, 0]


def test_a_long_match_goes_before_the_block_drafter_in_auto_alone(target, tmp_path, monkeypatch):
    monkeypatch.setattr(device_drafter, "LEAST_SURVIVAL", 2.0)
    backend, _ = opened(target, tmp_path)
    text = np.tile(text_of(9), 2)
    assert decode(backend, text, "auto", limit=8)[1][0].drafted == 7
    assert decode(backend, text, "block", limit=8)[1][0].drafted == 0


def test_a_text_that_went_on_without_the_drafter_is_seen_from_where_it_came_back(target, tmp_path):
    backend, _ = opened(target, tmp_path)
    text = text_of(12)
    tokens, _, cache = decode(backend, text, "none", 0)
    whole = np.concatenate([text, np.array(tokens, np.int32)])
    backend.draft(cache, int(whole[-1]), temperature=0.0, seed=0, limit=7)
    assert int(cache.drafts.seen_from) == len(whole) - 1


def test_block_rounds_without_a_drafter_are_refused(target, tmp_path):
    backend, _ = opened(target, tmp_path, loaded=False)
    with pytest.raises(RequestError, match="suffix"):
        decode(backend, text_of(5), "block")
    assert decode(backend, text_of(5), "auto", limit=2)[0]
