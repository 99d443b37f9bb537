"""The prompt sets: enough prompts, distinct names, texts long enough to measure with."""

from typing import get_args

import pytest

from slipstream.bench.workloads import PromptSet, long_text, prompts
from slipstream.errors import RequestError


@pytest.mark.parametrize(("name", "at_least"), [("chat", 8), ("code", 6), ("copy", 3)])
def test_sets_are_large_enough_and_end_with_a_question(name, at_least):
    chosen = prompts(name)
    assert len(chosen) >= at_least
    assert len({prompt.id for prompt in chosen}) == len(chosen)
    assert all(prompt.messages[-1]["role"] == "user" and prompt.max_tokens >= 100 for prompt in chosen)


def test_copy_prompts_already_hold_the_text_they_ask_for():
    for prompt in prompts("copy"):
        shown = prompt.messages[1]["content"]
        assert shown in prompt.messages[0]["content"]
        assert len(shown) > 3000


def test_every_set_is_known_by_its_name():
    for name in get_args(PromptSet):
        assert prompts(name)
    with pytest.raises(RequestError, match="chat, code, copy"):
        prompts("poems")


def test_long_text_is_long_enough_for_the_accuracy_row():
    assert len(long_text()) > 2000 * 4
