"""Signals of an agent's work: errors that are errors, tests, edits, repetition."""

import pytest

from slipstream.route.decision import Conversation, Message, SessionState, ToolCall
from slipstream.route.trajectory import exit_code, signals

USER = Message("user", "mend the parser")


def after(*steps, start=USER, **more):
    messages = [start]
    for i, (name, arguments, result, is_error) in enumerate(steps):
        messages.append(Message("assistant", "", (ToolCall(str(i), name, arguments),)))
        messages.append(Message("tool", result, tool_call_id=str(i), is_error=is_error))
    return signals(Conversation(tuple(messages), **more))


TRACEBACK = "Traceback (most recent call last):\nValueError: error: failed\nexit code: 1"


def test_errors_in_a_file_that_was_read_are_no_errors():
    assert after(("read_file", "{}", TRACEBACK, None)).errors == 0
    assert after(("bash", '{"command": "cat log.txt"}', TRACEBACK, None)).errors == 0
    assert after(("bash", '{"command": "make"}', TRACEBACK, None)).errors == 1


def test_what_the_client_says_comes_before_any_text():
    assert after(("bash", "{}", TRACEBACK, False)).errors == 0
    assert after(("read_file", "{}", "no such file", True)).errors == 1


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ('{"exit_code": 2, "output": "x"}', 2),
        ('{"output": "x", "metadata": {"exit_code": 0}}', 0),
        ("[exit code: 1]", 1),
        ("Exit code 127\nbash: foo: not found", 127),
        ("done\nProcess exited with code 3", 3),
        ("the exit code: 1 is documented\nin the manual", None),
        ('{"exit_code": "1"}', None),
        ("[1, 2]", None),
        ("{broken}", None),
        ("", None),
    ],
)
def test_exit_codes_count_where_a_tool_states_them(text, code):
    assert exit_code(text) == code


@pytest.mark.parametrize(
    ("text", "passed"),
    [
        ("..F\n=== 1 failed, 2 passed in 0.12s ===", False),
        ("...\n3 passed in 0.10s", True),
        ("Ran 4 tests in 0.001s\n\nFAILED (failures=3)", False),
        ("Ran 4 tests in 0.001s\n\nOK", True),
        ("Tests:       1 failed, 3 passed, 4 total", False),
        ("Tests:       3 passed, 3 total\nTime: 2 s", True),
        ("test result: FAILED. 1 passed; 1 failed; 0 ignored", False),
        ("test result: ok. 2 passed; 0 failed; 0 ignored", True),
        ("ok  \tpkg/parse\t0.012s", True),
        ("FAIL\tpkg/parse\t0.012s", False),
        ("something else", None),
    ],
)
def test_the_closing_lines_of_test_runners_are_read(text, passed):
    assert after(("bash", '{"command": "pytest -q"}', text, None)).tests_passed is passed


def test_a_file_about_tests_is_no_test_run():
    assert after(("read_file", '{"path": "pytest.log"}', "1 failed in 1s", None)).tests_passed is None


def test_failing_tests_are_trouble_until_something_works():
    test = ("run_tests", "{}", "FAILED (failures=1)", None)
    edit = ("edit", "{}", "edited", None)
    assert after(test).errors_in_row == 1
    assert after(test, edit).errors_in_row == 0
    assert after(edit, edit).edits_untested == 2
    assert after(edit, test).edits_untested == 0


def test_the_same_call_with_the_same_result_is_repetition():
    same, other = ("bash", '{"command": "make"}', "x", None), ("bash", '{"command": "make"}', "y", None)
    assert [after(same, same, same).repeats, after(same, other).repeats] == [2, 0]


def test_a_new_turn_forgets_the_trouble_of_the_old_one():
    messages = (
        USER,
        Message("assistant", "", (ToolCall("1", "bash", "{}"),)),
        Message("tool", "no", tool_call_id="1", is_error=True),
        Message("user", "never mind"),
    )
    found = signals(Conversation(messages))
    assert (found.errors, found.new_turn, found.turns, found.steps) == (0, True, 2, 0)


def test_a_history_that_shrank_was_compacted():
    conversation = Conversation((USER,), prompt_tokens=4_000)
    assert signals(conversation, SessionState("s", cached={"big": 90_000})).compacted
    assert not signals(conversation, SessionState("s", cached={"big": 3_000})).compacted
    assert after(start=Message("user", "<summary>we mended it</summary> go on")).compacted


def test_who_asks_is_known():
    assert not after(agent="scout").main
