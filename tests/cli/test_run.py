"""`slipstream run`: one prompt in, one answer out, bad input refused."""

import json
import sys

import pytest

from slipstream.cli.text import printable


def test_answer_goes_to_stdout_and_speed_to_stderr(cli):
    done = cli("run", "fake", "Hello", "--max-tokens", "40")
    assert done.code == 0
    assert len(done.out) > 10
    assert "tok/s" not in done.out
    assert "40 tokens" in done.err
    assert "tok/s" in done.err
    assert "cut at the token limit" in done.err


def test_json_is_one_object_with_the_documented_keys(cli):
    done = cli("run", "fake", "Hello", "--max-tokens", "20", "--json")
    answer = json.loads(done.out)
    assert list(answer) == [
        "text", "token_ids", "finish_reason", "usage", "timing", "speculation", "model", "backend",
    ]  # fmt: skip
    assert list(answer["usage"]) == ["prompt_tokens", "completion_tokens"]
    assert list(answer["timing"]) == ["load_s", "ttft_s", "decode_s", "tokens_per_s"]
    assert list(answer["speculation"]) == ["drafter", "rounds", "drafted", "accepted", "tokens_per_round"]
    assert answer["usage"]["completion_tokens"] == len(answer["token_ids"]) == 20
    assert (answer["finish_reason"], answer["model"], answer["backend"]) == ("length", "fake", "fake")
    assert done.err == ""


def test_streamed_text_is_the_text_of_the_json(cli):
    sampled = ("run", "fake", "Hello", "--max-tokens", "60", "--temperature", "0.7", "--seed", "3")
    assert cli(*sampled).out == json.loads(cli(*sampled, "--json").out)["text"] + "\n"


@pytest.mark.parametrize("drafter", ["none", "suffix"])
def test_drafter_never_changes_the_answer(cli, drafter):
    one = json.loads(cli("run", "fake", "abcabcabc", "--max-tokens", "64", "--drafter", drafter, "--json").out)
    two = json.loads(cli("run", "fake", "abcabcabc", "--max-tokens", "64", "--drafts", "0", "--json").out)
    assert one["token_ids"] == two["token_ids"]


@pytest.mark.parametrize("args", [("-",), ()])
def test_prompt_comes_from_stdin_where_it_is_a_dash_or_absent(cli, args):
    piped = cli("run", "fake", *args, "--max-tokens", "16", stdin="Grüße".encode())
    assert piped.out == cli("run", "fake", "Grüße", "--max-tokens", "16").out


def test_raw_leaves_the_chat_template_out(cli):
    raw, chat = (json.loads(cli("run", "fake", "abc", *more, "--json").out) for more in (["--raw"], []))
    assert raw["usage"]["prompt_tokens"] == 3
    assert chat["usage"]["prompt_tokens"] > 3


def test_system_message_comes_before_the_prompt(cli):
    plain, system = (
        json.loads(cli("run", "fake", "abc", *more, "--json").out) for more in ([], ["--system", "Be brief."])
    )
    assert system["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"] + len("Be brief.")


def test_stop_text_is_not_printed(cli):
    whole = cli("run", "fake", "Hello", "--max-tokens", "40").out
    stop = whole[5:8]
    done = json.loads(cli("run", "fake", "Hello", "--max-tokens", "40", "--stop", stop, "--json").out)
    assert done["text"] == whole[: whole.index(stop)]
    assert done["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("args", "cause"),
    [
        (["run", "fake", ""], "prompt is empty"),
        (["run", "fake", " \n"], "prompt is empty"),
        (["run", "fake", "-"], "prompt is empty"),
        (["run", "fake", "hi", "--max-tokens", "0"], "max_tokens"),
        (["run", "fake", "hi", "--max-tokens", "-3"], "max_tokens"),
        (["run", "fake", "hi", "--temperature", "nan"], "temperature"),
        (["run", "fake", "hi", "--temperature", "-1"], "temperature"),
        (["run", "fake", "hi", "--top-p", "0"], "top_p"),
        (["run", "fake", "hi", "--seed", "-1"], "seed"),
        (["run", "fake", "hi", "--stop", ""], "stop"),
        (["run", "fake", "hi", "--drafter", "crystal-ball"], "crystal-ball"),
        (["run", "fake", "hi", "--drafts", "99"], "drafts"),
        (["run", "fake", "hi", "--context", "100000"], "context"),
        (["run", "fake", "x" * 5000], "4096"),
    ],
)
def test_bad_input_is_one_line_with_its_cause_and_exit_code_2(cli, args, cause):
    done = cli(*args)
    assert done.code == 2
    assert done.out == ""
    assert done.err.count("\n") == 1
    assert done.err.startswith("slipstream: ")
    assert cause in done.err


@pytest.mark.parametrize(
    "args",
    [["run"], ["run", "fake", "hi", "--max-tokens", "many"], ["run", "fake", "hi", "--nope"], ["nope"],
     ["run", "fake", "hi", "--raw", "--system", "x"]],
)  # fmt: skip
def test_wrong_usage_exits_2_and_points_to_help(cli, args):
    done = cli(*args)
    assert done.code == 2
    assert done.out == ""
    assert "Usage:" in done.err


def test_stdin_that_is_not_text_is_refused(cli):
    done = cli("run", "fake", stdin=b"caf\xe9")
    assert done.code == 2
    assert "UTF-8" in done.err


def test_no_prompt_at_a_terminal_is_refused_without_waiting(cli, monkeypatch):
    class Terminal:
        @staticmethod
        def isatty() -> bool:
            return True

    from slipstream.cli.run import answer_once

    monkeypatch.setattr(sys, "stdin", Terminal())
    options = dict.fromkeys(("top_k", "min_p", "temperature"), 0) | {"max_tokens": 1, "top_p": 1, "seed": 0, "stop": ()}
    with pytest.raises(Exception, match="no prompt"):
        answer_once("fake", None, system=None, raw=False, as_json=False, **options)


def test_an_answer_cannot_steer_the_terminal():
    assert printable("a\x1b[2Jb\x07\r\x9b") == "a\ufffd[2Jb\ufffd\ufffd\ufffd"
    assert printable("tab\tand\nline, é 漢字 😀") == "tab\tand\nline, é 漢字 😀"


def test_the_slow_backend_is_announced_with_the_reason(cli, monkeypatch):
    monkeypatch.setattr("fakes.FakeBackend.name", "reference")
    monkeypatch.setattr("slipstream.backends.why_not_native", lambda checkpoint: "no compiler")
    assert "slow reference backend: no compiler" in cli("run", "fake", "hi", "--max-tokens", "4").err
    assert "slow" not in cli("run", "fake", "hi", "--max-tokens", "4", "--backend", "reference").err
