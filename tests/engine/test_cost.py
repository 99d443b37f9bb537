"""What rounds cost, from what rounds took."""

from __future__ import annotations

import pytest
from fakes import FakeBackend

from slipstream.engine.cost import PRIOR_DRAFT_COST, RoundCost


def measured(**rows: float) -> RoundCost:
    """After a few rounds each, in milliseconds: `measured(r1=1, r4=2)`."""
    cost = RoundCost()
    for name, ms in rows.items():
        for _ in range(4):
            cost.record(int(name[1:]), ms / 1e3)
    return cost


def test_what_was_not_measured_lies_on_the_line_through_what_was():
    cost = measured(r1=1.0, r4=1.6, r8=3.2)
    assert [cost(rows) for rows in (1, 2, 3, 4, 6, 8, 10)] == pytest.approx([1, 1.2, 1.4, 1.6, 2.4, 3.2, 4.0])


def test_one_round_is_enough_to_correct_the_first_guess():
    cost = measured(r1=1.0)
    cost.record(4, 2e-3)
    assert cost(4) == pytest.approx(2)


def test_one_interrupted_round_is_not_the_rule():
    cost = measured(r1=1.0, r4=1.6)
    cost.record(4, 1.0)
    assert cost(4) < 2.5


def test_a_round_of_one_row_is_due_at_first_and_now_and_then():
    cost = RoundCost()
    assert cost.one_row_due
    for _ in range(3):
        cost.record(1, 1e-3)
    assert not cost.one_row_due
    for _ in range(64):
        cost.record(4, 2e-3)
    assert cost.one_row_due


def test_a_machine_that_slowed_down_does_not_look_like_costly_rows():
    cost = measured(r1=1.0, r4=1.6)
    for _ in range(800):
        cost.record(1 if cost.one_row_due else 4, 2e-3 if cost.one_row_due else 3.2e-3)
    assert cost(4) == pytest.approx(1.6, rel=0.1)


def test_drafts_are_timed_too():
    cost = measured(r1=1.0)
    assert cost.draft == PRIOR_DRAFT_COST
    for _ in range(20):
        cost.record_draft(0.5e-3)
    assert cost.draft == pytest.approx(0.5, rel=0.1)


def test_calibration_leaves_nothing_due_and_no_cache_behind():
    backend, cost = FakeBackend(), RoundCost()
    cost.calibrate(backend)
    assert not cost.one_row_due
    assert all(cache.closed for cache in backend.caches)
