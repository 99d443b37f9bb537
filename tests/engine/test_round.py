"""Rounds: the tokens are those of decoding one at a time, whatever is drafted; the cache ends up as if it had been."""

from __future__ import annotations

import numpy as np
import pytest
from fakes import FakeBackend, fake_llm
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.drafters.none import NoDrafter
from slipstream.drafters.testing import ScriptedDrafter
from slipstream.engine.cost import RoundCost
from slipstream.engine.request import SamplingParams
from slipstream.engine.round import host_rounds
from slipstream.engine.sampling import Sampler

GREEDY = SamplingParams()
PROMPT = list(b"The quick brown fox")


class RandomDrafter:
    """Guesses from a list of lists, in turn; some of them may be right."""

    name = "random"

    def __init__(self, guesses):
        self.guesses, self.turn = guesses, 0

    def begin(self, tokens):
        self.turn = 0

    def propose(self, limit):
        self.turn += 1
        return self.guesses[self.turn % len(self.guesses)] if self.guesses else ()

    def observe(self, committed, drafted, accepted):
        assert accepted <= drafted
        assert len(committed) <= accepted + 1


def decode(backend, drafter, *, drafts=7, limit=24, params=GREEDY, stop=()):
    cache = backend.new_cache(200)
    backend.prefill(cache, np.array(PROMPT[:-1], np.int32))
    sampler = Sampler(params, 5, PROMPT, backend.spec.vocab)
    rounds = list(
        host_rounds(
            backend, cache, PROMPT[-1], drafter=drafter, sampler=sampler, drafts=drafts, limit=limit,
            stop_token_ids=stop, cost=RoundCost(),
        )
    )  # fmt: skip
    return [token for round in rounds for token in round.tokens], rounds, cache


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.8, 1.2]),
    top_p=st.sampled_from([1.0, 0.9]),
    top_k=st.sampled_from([0, 5]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    logprobs=st.sampled_from([None, 2]),
)


@settings(max_examples=60, deadline=None)
@given(
    PARAMS,
    st.sampled_from([None, 1, 2]),
    st.integers(0, 15),
    st.lists(st.lists(st.integers(0, 258) | st.none(), max_size=16), max_size=6),
)
def test_drafter_never_changes_tokens(params, order, drafts, guesses):
    plain, _, cache = decode(FakeBackend(order), NoDrafter(), params=params)
    right = iter(plain * 20)
    guesses = [[next(right) if g is None else g for g in guess] for guess in guesses]
    drafted, rounds, drafted_cache = decode(FakeBackend(order), RandomDrafter(guesses), drafts=drafts, params=params)
    assert drafted == plain
    assert drafted_cache.tokens == cache.tokens == PROMPT + plain[:-1]
    assert all(round.drafted <= drafts for round in rounds)


def test_right_drafts_are_all_accepted():
    plain, _, _ = decode(FakeBackend(), NoDrafter(), limit=25)
    same, rounds, _ = decode(FakeBackend(), ScriptedDrafter(0, plain), limit=25)
    assert same == plain
    assert [round.accepted for round in rounds] == [7, 7, 7, 0]
    assert [len(round.tokens) for round in rounds] == [8, 8, 8, 1]


def test_stop_token_inside_an_accepted_block_ends_the_round_there():
    plain, _, _ = decode(FakeBackend(), NoDrafter())
    stop = plain[4]
    tokens, rounds, cache = decode(FakeBackend(), ScriptedDrafter(0, plain), stop=(stop,))
    assert tokens == plain[: plain.index(stop) + 1]
    assert len(rounds) == 1
    assert cache.length == len(PROMPT) + len(tokens) - 1


def test_penalties_count_along_accepted_rows():
    params = SamplingParams(frequency_penalty=1.5, repetition_penalty=1.4)
    plain, _, _ = decode(FakeBackend(1), NoDrafter(), params=params, limit=40)
    assert plain != decode(FakeBackend(1), NoDrafter(), limit=40)[0]
    assert decode(FakeBackend(1), ScriptedDrafter(0, plain), params=params, limit=40)[0] == plain


def test_native_sampler_gets_penalised_rows():
    class Native(FakeBackend):
        calls = 0

        def sample(self, logits, temperature, top_k, top_p, min_p, seed, position):
            Native.calls += 1
            return 7 if logits[7] > 50 else int(logits.argmax())

    llm = fake_llm(Native())
    assert llm.generate("ab", SamplingParams(max_tokens=3, logit_bias={7: 100.0})).token_ids == [7, 7, 7]
    assert Native.calls == 3


def test_round_cost_learns_and_forgets():
    cost = RoundCost()
    for _ in range(50):
        cost.record(1, 1e-3)
        cost.record(8, 4e-3)
    assert cost(8) == pytest.approx(4, rel=0.1)
    for _ in range(4000):
        cost.record(1, 1e-3)
    assert cost(8) < 1.6  # tried again once the evidence is old
