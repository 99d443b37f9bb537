"""The drafters that know the answer are always right, or always wrong, from whatever point they begin."""

from __future__ import annotations

import pytest

from slipstream.drafters.testing import ScriptedDrafter

SCRIPT = [3, 1, 4, 1, 5]


@pytest.mark.parametrize("known", range(5))
def test_right_drafter_guesses_the_script_and_wrong_one_never_does(known):
    right, wrong = ScriptedDrafter(2, SCRIPT), ScriptedDrafter(2, SCRIPT, vocab=6)
    for drafter in (right, wrong):
        drafter.begin([0, 0, *SCRIPT[:known]])
    assert right.propose(3) == SCRIPT[known : known + 3]
    assert all(a != b for a, b in zip(wrong.propose(3), SCRIPT[known:], strict=False))
    right.observe(SCRIPT[known : known + 1], 3, 0)
    assert right.propose(9) == SCRIPT[known + 1 :]
