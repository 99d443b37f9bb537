"""The definitions, on answers whose stamps are given: exact figures, and no figure where counts cannot be believed."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.bench.endpoint import Answer, Question, TokenChunk, Usage
from slipstream.bench.endpoint_figures import best_second, figures, local_counts

QUESTION = Question("q", [{"role": "user", "content": "?"}], max_tokens=100)


class Words:
    """A token is a word with the space after it, or eight letters of a longer one."""

    def encode(self, text: str) -> list[int]:
        self.tokens = [word[i : i + 8] for word in text.replace(" ", " \0").split("\0") for i in range(0, len(word), 8)]
        return list(range(len(self.tokens)))

    def token_bytes(self, id: int) -> bytes:
        return self.tokens[id].encode()


def answer(*texts: str, at: list[float], tokens: int, finish: str | None = "stop", **more: Any) -> Answer:
    chunks = [TokenChunk(at_s, content=text) for text, at_s in zip(texts, at, strict=True)]
    return Answer(chunks, Usage(10, tokens, 10 + tokens, **more), finish)


def test_tpot_leaves_out_the_first_chunk_with_all_its_tokens() -> None:
    """3 tokens at 0.5 s, then 2 and 4: 6 tokens in 1.5 s."""
    said = answer("one two three ", "four five ", "six seven ate nine ", at=[0.5, 1.0, 2.0], tokens=9)
    found = figures(said, QUESTION, Words())
    assert (found.ttft_s, found.n_first, found.counted_by) == (0.5, 3, "tokenizer")
    assert found.tpot_s == pytest.approx(1.5 / 6)
    assert found.decode_tokens_per_s == pytest.approx(4)
    assert found.end_to_end_tokens_per_s == pytest.approx(9 / 2)
    assert found.chunk_gaps_s == (0.5, 1.0)
    assert found.token_gaps_s == pytest.approx((0, 0, 0.5, 0, 1.0, 0, 0, 0))


def test_without_a_tokenizer_a_chunk_is_one_token_only_where_the_counts_agree() -> None:
    one_each = answer("a", "b", "c", at=[1.0, 2.0, 3.0], tokens=3)
    found = figures(one_each, QUESTION)
    assert (found.counted_by, found.n_first, found.tpot_s) == ("one a chunk", 1, 1.0)
    several = answer("aaaaaaaa", "bbbb", "cccc", at=[1.0, 2.0, 3.0], tokens=8)
    found = figures(several, QUESTION)
    assert (found.counted_by, found.n_first, found.tpot_s) == ("estimate", 4, 0.5)
    assert found.token_gaps_s is None  # chunk gaps must not pass for token gaps


def test_the_servers_own_count_a_chunk_comes_first() -> None:
    said = answer("a", "b", at=[1.0, 3.0], tokens=7)
    said = replace(said, chunks=[replace(c, tokens=n) for c, n in zip(said.chunks, (5, 2), strict=True)])
    found = figures(said, QUESTION)
    assert (found.counted_by, found.n_first, found.tpot_s) == ("server", 5, 1.0)


def test_chunks_of_the_first_read_belong_to_the_first_token_since_no_time_lies_between_them() -> None:
    """A proxy that joins the first three chunks must not make decoding look faster: 3 tokens in 3 s, not 5 in 3 s."""
    said = answer("a ", "b ", "c ", "d ", "e ", "f ", at=[1, 1, 1, 2, 3, 4], tokens=6)
    assert figures(said, QUESTION).tpot_s == 1.0
    assert figures(said, QUESTION, Words()).n_first == 3


def test_reasoning_ends_ttft_and_only_output_ends_ttfo() -> None:
    chunks = [TokenChunk(0.2, reasoning="hm "), TokenChunk(0.4, reasoning="ok "), TokenChunk(0.9, content="yes ")]
    found = figures(Answer(chunks, Usage(1, 3, 4, reasoning_tokens=2), "stop"), QUESTION)
    assert (found.ttft_s, found.ttfo_s) == (0.2, 0.9)
    tool = figures(Answer([*chunks[:2], TokenChunk(0.7, tool="f{}")], Usage(1, 3, 4), "tool_calls"), QUESTION)
    assert tool.ttfo_s == 0.7


@given(st.text(st.characters(codec="utf-8"), min_size=1), st.lists(st.integers(0, 60)))
def test_the_text_is_tokenised_whole_wherever_chunks_cut_it(text: str, cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(edges)]
    counts = local_counts([TokenChunk(0.0, content=piece) for piece in pieces], Words())
    assert sum(counts) == len(Words().encode(text))


GOOD = answer("one ", "two ", "three ", at=[1.0, 2.0, 3.0], tokens=3)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (replace(GOOD, usage=None), "no usage"),
        (replace(GOOD, usage=Usage(10)), "no usage"),
        (replace(GOOD, finish_reason=None), "without a finish reason"),
        (answer("a", "b", "c", at=[1, 2, 3], tokens=2), "fewer than the 3 reads"),
        (answer("a", "b", "c", at=[1, 2, 3], tokens=101), "101 tokens where 100 were allowed"),
        (answer("a", "b", "c", at=[1, 2, 3], tokens=50, finish="length"), "cut at 100"),
        (answer("a", "b", "c", at=[1, 2, 3], tokens=3, reasoning_tokens=4), "4 reasoning tokens among 3"),
        (answer("a", "b", "c", at=[1, 2, 3], tokens=3, cached_tokens=11), "11 cached tokens in a prompt of 10"),
        (replace(GOOD, usage=Usage(10, 3, 14)), r"10 \+ 3 tokens as 14"),
        (answer("one ", "two ", "three ", at=[1, 2, 3], tokens=12), "usage counts 12 tokens, the tokenizer 3"),
        (Answer([], Usage(10, 0, 10), "stop"), "carries no token"),
    ],
)
def test_no_rate_without_counts_that_can_be_believed(said: Answer, reason: str) -> None:
    found = figures(said, QUESTION, Words())
    assert found.problem is not None
    assert re.search(reason, found.problem)
    assert found.decode_tokens_per_s is None
    assert found.end_to_end_tokens_per_s is None
    assert found.peak_tokens_per_s is None
    assert figures(GOOD, QUESTION, Words()).problem is None


def test_the_tokenizer_stands_in_for_usage_only_when_asked_and_says_so() -> None:
    silent = replace(GOOD, usage=None)
    assert figures(silent, QUESTION, Words()).tpot_s is None
    assert figures(silent, QUESTION, None, count_locally=True).tpot_s is None
    found = figures(silent, QUESTION, Words(), count_locally=True)
    assert (found.tokens, found.tpot_s, found.counted_here) == (3, 1.0, True)
    assert not figures(GOOD, QUESTION, Words(), count_locally=True).counted_here
    cut = figures(replace(silent, finish_reason="length"), replace(QUESTION, max_tokens=4), Words(), count_locally=True)
    assert cut.tokens == 4


def test_a_forced_length_that_was_not_reached_gives_no_rate() -> None:
    forced = replace(QUESTION, stops="forced")
    found = figures(GOOD, forced)
    assert found.problem is not None
    assert "ignore_eos" in found.problem
    assert figures(replace(GOOD, usage=Usage(10, 100, 110), finish_reason="length"), forced).problem is None


def test_a_hidden_stop_token_is_no_contradiction() -> None:
    found = figures(answer("one ", "two ", "three ", at=[1, 2, 3], tokens=4), QUESTION, Words())
    assert found.problem is None
    assert found.local_tokens == 3


def test_an_answer_in_one_piece_has_a_first_token_and_no_decode_rate() -> None:
    found = figures(answer("one two ", at=[1.0], tokens=2), QUESTION, Words())
    assert (found.ttft_s, found.tpot_s, found.decode_tokens_per_s, found.problem) == (1.0, None, None, None)
    assert found.end_to_end_tokens_per_s == 2.0


def test_the_peak_is_the_best_second_and_none_for_less_than_a_second() -> None:
    steady = [i / 10 for i in range(50)]
    assert best_second(steady) == 10
    assert best_second(sorted([*steady, *[2.05] * 30])) == 40
    assert best_second(steady[:9]) is None
