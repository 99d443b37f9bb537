"""Percentiles, intervals and ratios of many answers, and no rate where one answer cannot be believed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from slipstream.bench.endpoint import Answer, Counters, Question, Speculation, TokenChunk, Usage
from slipstream.bench.endpoint_questions import Plan, pool
from slipstream.bench.endpoint_run import Run, measure
from slipstream.bench.endpoint_summary import Estimate, compare, percentiles, summarize
from slipstream.bench.trace import Price


class Fake:
    """Answers with ten tokens, a gap apart; gaps are taken in turn."""

    tier: str | None = None
    tokenizer = None
    count_locally = False
    parameters = None

    def __init__(self, name: str, gaps_s: Sequence[float], **answer: object) -> None:
        self.name = self.server = name
        self.gaps_s, self.more = gaps_s, answer
        self.asked: list[Question] = []

    def ask(self, question: Question) -> Answer:
        gap_s = self.gaps_s[len(self.asked) % len(self.gaps_s)]
        self.asked.append(question)
        chunks = [TokenChunk(0.5 + i * gap_s, content="a ") for i in range(10)]
        answer = Answer(chunks, Usage(20, 10, 30, cached_tokens=5), "stop")
        return replace(answer, **self.more)

    def counters(self) -> Counters:
        return Counters(rounds=10.0 * len(self.asked), accepted=15.0 * len(self.asked))


PLAN = Plan(requests=20, warmup=1, stops=("natural",))


def run(*endpoints: Fake, plan: Plan = PLAN) -> Run:
    return measure(endpoints, plan)


def test_percentiles_are_of_times_so_that_p99_is_the_slow_end_of_rates_too() -> None:
    (summary,) = summarize(run(Fake("a", [0.1] * 19 + [0.4])))
    assert summary.tpot_s is not None
    assert summary.decode_tokens_per_s is not None
    assert summary.tpot_s.p50.value == pytest.approx(0.1)
    assert summary.decode_tokens_per_s.p50.value == pytest.approx(10)
    assert summary.decode_tokens_per_s.p99.value < summary.decode_tokens_per_s.p50.value
    assert summary.end_to_end_tokens_per_s is not None
    assert summary.end_to_end_tokens_per_s.p50.value == pytest.approx(10 / 1.4)


def test_intervals_hold_the_true_median_about_as_often_as_they_say() -> None:
    rng = np.random.default_rng(1)
    held = 0
    for _ in range(60):
        spread = percentiles([[x] for x in rng.exponential(1.0, 30)], resamples=200)
        assert spread is not None
        held += spread.p50.low <= np.log(2) <= spread.p50.high
    assert 50 <= held <= 60


def test_gaps_are_drawn_by_answer_since_those_of_one_answer_belong_together() -> None:
    """Two answers, all fast or all slow: as if 200 gaps were independent, the median would look certain."""
    spread = percentiles([[0.1] * 100, [0.9] * 100])
    assert spread is not None
    assert (spread.p50.low, spread.p50.high) == pytest.approx((0.1, 0.9))


def test_one_answer_without_usage_refuses_the_rate_of_its_group_and_of_no_other() -> None:
    bad = run(Fake("a", [0.1], usage=None), Fake("b", [0.1]))
    without, good = summarize(bad)
    assert without.refusals == {"the server sent no usage": 20}
    assert without.decode_tokens_per_s is without.end_to_end_tokens_per_s is without.token_gap_s is None
    assert without.ttft_s is not None
    assert without.chunk_gap_s is not None
    assert good.decode_tokens_per_s is not None
    (ratio,) = compare(bad)
    assert (ratio.decode, ratio.end_to_end) == (None, None)
    assert ratio.ttft is not None


def test_the_ratio_is_paired_by_question_and_its_interval_shrinks_when_pairs_agree() -> None:
    """Questions differ tenfold, the two endpoints always by 2: the ratio is certain though neither median is."""
    slow, fast = [0.02, 0.2, 0.08, 0.04], [0.01, 0.1, 0.04, 0.02]
    plan = replace(PLAN, warmup=4)
    (ratio,) = compare(run(Fake("fast", fast), Fake("slow", slow), plan=plan))
    assert ratio.decode == Estimate(*[pytest.approx(2.0)] * 3)
    (back,) = compare(run(Fake("slow", slow), Fake("fast", fast), plan=plan))
    assert back.decode is not None
    assert back.decode.value == pytest.approx(0.5)


def test_acceptance_is_of_the_answers_or_else_of_the_counters() -> None:
    (spoken,) = summarize(run(Fake("a", [0.1], speculation=Speculation(4, 8, 6))))
    assert (spoken.tokens_per_round, spoken.acceptance_from) == (2.5, "the answers")
    (counted,) = summarize(run(Fake("a", [0.1])))
    assert (counted.tokens_per_round, counted.acceptance_from) == (2.5, "server counters")


def test_counts_cover_the_measured_part_and_the_warm_up_apart() -> None:
    (summary,) = summarize(run(Fake("a", [0.1])), Price(input=1, cached=0.1, output=4))
    assert (summary.prompt_tokens, summary.output_tokens, summary.cached_tokens) == (400, 200, 100)
    assert summary.cached_tokens_warmup == 5
    assert summary.usd == pytest.approx((300 * 1 + 100 * 0.1 + 200 * 4) / 1e6)
    (billed,) = summarize(run(Fake("a", [0.1], usd=0.5)), Price(1, 1, 1))
    assert billed.usd == 10  # the server's bill, not ours


@pytest.mark.parametrize("question_set", ["mixed", "chat", "code", "copy"])
def test_the_seed_fixes_all_questions_and_another_changes_them(question_set: str) -> None:
    def texts(seed: int) -> list[str]:
        plan = Plan(question_set, requests=6, warmup=2, seed=seed)  # type: ignore[arg-type]
        asked = [*plan.warmups(), *plan.questions("natural"), *plan.questions("forced"), *plan.questions("forced", 1)]
        return [q.messages[0]["content"] for q in asked]

    assert texts(3) == texts(3)
    assert not set(texts(3)) & set(texts(4))
    assert len(set(texts(3))) == 20


def test_mixed_questions_differ_in_more_than_their_number() -> None:
    plan = Plan(requests=100, warmup=5)
    asked = [*plan.warmups(), *plan.questions("natural"), *plan.questions("forced")]
    assert len({q.messages[0]["content"].partition(". ")[2] for q in asked}) == 205
    assert not plan.repeats
    assert Plan("chat", requests=6).repeats
    assert len(pool("mixed", 0)) == 300
