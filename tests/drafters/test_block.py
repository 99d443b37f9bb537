"""The block drafter: what it verifies is what pays, by confidence and cost; beside suffix drafts, the better one."""

from __future__ import annotations

import random
import warnings

import pytest

from slipstream.drafters import Memory, make_drafter
from slipstream.drafters.block import BlockDrafter, Record
from slipstream.drafters.suffix import SuffixDrafter
from slipstream.errors import RequestError


class FixedCost:
    """A machine on which each further row adds `row` and a draft takes `draft`."""

    def __init__(self, row: float = 0.1, draft: float = 0.3) -> None:
        self.row, self.draft, self.one_row_due, self.drafts = row, draft, False, 0

    def __call__(self, rows: int) -> float:
        return 1 + self.row * (rows - 1)

    def record_draft(self, seconds: float) -> None:
        self.drafts += 1


class Model:
    """Guesses what follows in `truth`; each guess is right with chance `right`. `at` is how much has been said."""

    def __init__(self, truth, confidence=0.8, right=1.0):
        self.truth, self.confidence, self.right, self.at = truth, confidence, right, 1
        self.rng = random.Random(0)

    def __call__(self, limit):
        tokens = [token if self.rng.random() < self.right else -1 for token in self.truth[self.at : self.at + limit]]
        return tokens, [self.confidence] * len(tokens)


def follow(drafter, truth, start=1, limit=7, model=None):
    """Decode `truth` from `start`: (drafted, accepted) by round."""
    rounds = []
    while start < len(truth):
        if model:
            model.at = start
        draft = list(drafter.propose(min(limit, len(truth) - start - 1)))
        accepted = 0
        while accepted < len(draft) and draft[accepted] == truth[start + accepted]:
            accepted += 1
        committed = truth[start : start + accepted + 1]
        drafter.observe(committed, len(draft), accepted)
        rounds.append((len(draft), accepted))
        start += len(committed)
    return rounds


def decode(drafter, truth, **model):
    """Follow `truth` with a model attached."""
    asked = Model(truth, **model)
    drafter.attach(asked)
    drafter.begin(truth[:1])
    return follow(drafter, truth, model=asked)


NOVEL = random.Random(1).sample(range(50_000), 3000)


def test_right_guesses_are_all_verified_and_accepted():
    assert set(decode(BlockDrafter(FixedCost()), NOVEL, confidence=0.99)[:-1]) == {(7, 7)}


@pytest.mark.parametrize(("chance", "row", "most"), [(0.9, 0.01, 7), (0.9, 0.3, 6), (0.6, 0.3, 1), (0.2, 0.3, 0)])
def test_a_guess_is_verified_where_its_chance_exceeds_its_price(chance, row, most):
    drafter = BlockDrafter(FixedCost(row))
    drafter.attach(Model(NOVEL, confidence=chance))
    assert len(drafter.propose(7)) == most  # at the rate assumed to begin with, 5 tokens in the time of 3 rows


def test_doubt_inside_a_block_ends_the_draft_there():
    drafter = BlockDrafter(FixedCost(0.1))
    drafter.attach(lambda limit: (NOVEL[:7], [0.95, 0.9, 0.05, 0.99, 0.99, 0.99, 0.99]))
    assert list(drafter.propose(7)) == NOVEL[:2]


def test_a_model_that_does_not_pay_is_hardly_asked():
    cost = FixedCost(row=0.3, draft=0.5)
    rounds = decode(BlockDrafter(cost), NOVEL[:1500], confidence=0.6, right=0.1)
    assert cost.drafts < 0.05 * len(rounds)


def test_a_model_that_pays_again_is_found_again():
    cost, record = FixedCost(row=0.05, draft=0.2), Record()
    decode(BlockDrafter(cost, record), NOVEL[:400], confidence=0.1, right=0.0)
    rounds = decode(BlockDrafter(cost, record), NOVEL, confidence=0.95, right=0.95)
    assert sum(drafted for drafted, _ in rounds[-50:]) > 200


def test_no_draft_while_a_round_of_one_row_is_due():
    cost = FixedCost()
    cost.one_row_due = True
    drafter = BlockDrafter(cost)
    drafter.attach(Model(NOVEL))
    assert list(drafter.propose(7)) == []
    assert cost.drafts == 0


def test_copies_are_left_to_the_suffix_drafter():
    cost = FixedCost()
    text = NOVEL[:200] * 3
    drafter = make_drafter("auto", cost=cost, memory=Memory(), record=Record())
    drafter.attach(lambda limit: ([7] * limit, [0.6] * limit))
    drafter.begin(text[:250])
    rounds = follow(drafter, text, start=250)
    assert sum(accepted for _, accepted in rounds) > 250
    assert cost.drafts < len(rounds) / 2


def test_new_text_is_left_to_the_model():
    drafter = make_drafter("auto", cost=FixedCost(), memory=Memory(), record=Record())
    rounds = decode(drafter, NOVEL, confidence=0.95)
    assert sum(accepted for _, accepted in rounds) > 0.8 * len(NOVEL)


def test_without_a_model_auto_is_suffix():
    assert isinstance(make_drafter("auto", cost=FixedCost()), SuffixDrafter)
    drafter = make_drafter("auto", cost=FixedCost(), record=Record())
    drafter.begin([1, 2, 3] * 8)  # nobody attached one: a backend of its own kind
    assert list(drafter.propose(7))[:3] == [1, 2, 3]


def test_block_without_a_model_is_refused():
    with pytest.raises(RequestError, match="no block drafter is loaded"):
        make_drafter("block", cost=FixedCost())


def test_acceptance_far_below_the_recorded_one_warns_once_with_the_numbers():
    record = Record({"chat": 3.5, "code": 4.5})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(1000):
            record.add(1 + i % 2, 1.0, drafted=7, accepted=i % 2)
    assert len(caught) == 1
    assert "brings 1.50 tokens a round here, 3.50 at its training" in str(caught[0].message)


def test_acceptance_is_judged_as_if_every_guess_had_been_verified():
    record = Record({"chat": 3.0})
    rng = random.Random(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2000):  # each guess holds with 0.7: 3.1 tokens a round, though few are tried
            tried, held = rng.randint(1, 7), 0
            while held < tried and rng.random() < 0.7:
                held += 1
            record.add(1 + held, 1.0, tried, held)
    assert record.acceptance == pytest.approx(sum(0.7**i for i in range(8)), rel=0.05)
