"""The suffix drafter: it finds what followed before, drafts where that pays, and is never confused by edits."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.drafters import Memory, make_drafter
from slipstream.drafters.suffix import LADDER, Odds, SuffixDrafter, TextIndex
from slipstream.errors import RequestError

TOKENS = st.lists(st.integers(0, 5), max_size=120)


def free(rows: int) -> float:
    return 1.0 + 1e-6 * rows


def novel(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).sample(range(1000, 50_000), count)


def follow(drafter, truth, limit=7):
    """Decode `truth`: the rounds' (drafted, accepted)."""
    at, rounds = 0, []
    while at < len(truth):
        draft = list(drafter.propose(min(limit, len(truth) - at - 1)))
        accepted = 0
        while accepted < len(draft) and draft[accepted] == truth[at + accepted]:
            accepted += 1
        committed = truth[at : at + accepted + 1]
        drafter.observe(committed, len(draft), accepted)
        rounds.append((len(draft), accepted))
        at += len(committed)
    return rounds


def longest_match(tokens: list[int], known: list[int], rungs=LADDER) -> int:
    """By brute force: the longest rung whose newest n-gram stands earlier in `known`, followed by something."""
    for n in rungs:
        gram = tokens[-n:]
        if len(gram) == n and any(known[i : i + n] == gram for i in range(len(known) - n)):
            return n
    return 0


@settings(max_examples=150, deadline=None)
@given(TOKENS, st.lists(st.integers(1, 80), max_size=4))
def test_index_finds_the_longest_rung_and_the_most_recent_place(tokens, cuts):
    index, start = TextIndex(), 0
    for cut in [*cuts, len(tokens)]:  # in pieces, so that the loop and numpy both fill the tables
        index.extend(tokens[start : start + cut])
        start = min(start + cut, len(tokens))
    found = 0
    for rung, n in enumerate(LADDER):
        gram = tokens[-n:]
        if at := index.find(rung, gram, hash(tuple(gram))):
            assert tokens[at - n : at] == gram
            found = found or n
            later = [i + n for i in range(len(tokens) - n) if tokens[i : i + n] == gram]
            assert at == max(later)
    if len(tokens) > 1:
        assert found == longest_match(tokens, tokens) or found == 0  # a slot may have forgotten it
    assert index.tokens == tokens


def test_repeated_text_is_drafted_in_full():
    text = novel(60)
    drafter = SuffixDrafter(free)
    drafter.begin([*text, *text[:20]])
    rounds = follow(drafter, text[20:])
    assert sum(accepted for _, accepted in rounds) >= 30
    assert all(drafted == accepted for drafted, accepted in rounds)
    assert max(drafted for drafted, _ in rounds) == 7


def test_loop_is_drafted_past_the_end_of_the_text():
    drafter = SuffixDrafter(free)
    drafter.begin([1, 2, 3] * 8)
    assert list(drafter.propose(7)) == [1, 2, 3, 1, 2, 3, 1]


def test_most_recent_match_is_preferred():
    drafter = SuffixDrafter(free)
    drafter.begin([7, 8, 9, 1, 7, 8, 9, 2, 7, 8, 9])
    assert drafter.propose(1) == [2]


def test_new_text_is_not_drafted():
    drafter = SuffixDrafter(free)
    drafter.begin(novel(200))
    assert sum(drafted for drafted, _ in follow(drafter, novel(100, seed=1))) == 0


def misleading(rounds: int) -> list[int]:
    """Text in which a known token is always followed by something new."""
    text: list[int] = []
    for i in range(rounds):
        text += [1, 1000 + i]
    return text


def test_speculation_switches_itself_off_and_on_again():
    drafter = SuffixDrafter(lambda rows: 1 + 0.1 * (rows - 1))
    drafter.begin(misleading(4))
    follow(drafter, misleading(200)[8:])
    assert sum(drafted for drafted, _ in follow(drafter, misleading(400)[400:])) == 0  # off
    copy = novel(30) * 4
    rounds = follow(drafter, copy)
    assert sum(accepted for _, accepted in rounds[-20:]) > 60  # on


def test_no_draft_costs_more_than_it_is_expected_to_gain():
    drafter = SuffixDrafter(lambda rows: float(rows * 2))
    drafter.begin(novel(30) * 3)
    assert list(drafter.propose(7)) == []


def test_edit_in_a_copy_is_caught_up_within_a_few_tokens():
    text = novel(100)
    edited = [*text[:50], 5, 6, *text[52:]]
    drafter = SuffixDrafter(free)
    drafter.begin([*text, *edited[:10]])
    rounds = follow(drafter, edited[10:])
    assert len(rounds) < 25


def test_earlier_conversation_is_remembered_and_bounded():
    memory = Memory(texts=3, tokens=250)
    text = novel(100)
    first = SuffixDrafter(free, memory)
    first.begin(text)
    first.begin(())
    second = SuffixDrafter(free, memory)
    second.begin(text[:30])
    assert list(second.propose(3)) == text[30:33]
    for seed in range(5):
        second.begin(novel(90, seed=2 + seed))
    assert len(memory.texts) <= 3
    assert sum(len(kept.tokens) for kept in memory.texts) <= 250


def test_end_of_an_earlier_text_ends_the_draft():
    memory = Memory()
    earlier = TextIndex()
    earlier.extend([1, 2, 3, 4, 5])
    memory.add(earlier)
    drafter = SuffixDrafter(free, memory)
    drafter.begin([9, 2, 3])
    assert list(drafter.propose(7)) == [4, 5]
    drafter.observe([4, 5, 6], 2, 2)
    assert list(drafter.propose(7)) == []


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(TOKENS, st.integers(0, 15)), min_size=1, max_size=6))
def test_any_sequence_of_texts_gives_valid_drafts(turns):
    drafter, text = SuffixDrafter(free, Memory(texts=2, tokens=100)), []
    for new, keep in turns:
        text = text[: len(text) - keep] + new
        drafter.begin(text)
        draft = list(drafter.propose(7))
        assert len(draft) <= 7
        assert set(draft) <= set(range(6))
        drafter.observe([3], len(draft), int(draft[:1] == [3]))
        text = [*text, 3]


def test_odds_follow_what_happens():
    odds = Odds()
    before = list(odds.chance)
    for _ in range(100):
        odds.update(2, 3, missed=True)
    assert odds.chance[2] > 0.9  # matches of 2 and 3 held
    assert odds.chance[3] == pytest.approx(0.5, abs=0.05)  # of 4 held, of 5 missed
    assert odds.chance[4:] == before[4:]


def test_unknown_drafter_is_refused_with_the_known_names():
    with pytest.raises(RequestError, match="auto, none, suffix"):
        make_drafter("oracle")
