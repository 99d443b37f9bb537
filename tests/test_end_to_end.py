"""The installed command on the built-in model, as a user runs it: fresh processes, pipes, exit codes."""

import json
import subprocess
import sys

import pytest

from slipstream.models.checkpoint import list_models

pytestmark = pytest.mark.skipif(list_models()[0].path is None, reason="the built-in model is not installed")
QUESTION = "List the days of the week, twice."


def slipstream(*args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "slipstream", *args]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=120)


def answer(*more: str) -> dict:
    done = slipstream("run", "smollm2", QUESTION, "--max-tokens", "48", "--json", *more)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("sampling", [(), ("--temperature", "0.8", "--top-p", "0.9", "--seed", "11")], ids=str)
def test_two_processes_say_the_same_with_and_without_drafts(sampling):
    plain, drafted = answer("--drafter", "none", *sampling), answer("--drafter", "suffix", *sampling)
    assert plain["token_ids"] == drafted["token_ids"]
    assert plain["text"] == drafted["text"] != ""
    assert plain["speculation"]["drafted"] == 0


def test_a_piped_prompt_is_answered_once_in_chat_too():
    done = slipstream("chat", "smollm2", "--max-tokens", "48", stdin=QUESTION)
    assert done.returncode == 0, done.stderr
    assert "Monday" in done.stdout
    assert "tok/s" in done.stderr


def test_a_reader_that_leaves_is_no_error_to_look_at():
    command = f"{sys.executable} -m slipstream run smollm2 '{QUESTION}' --max-tokens 200 | head -c 1"
    done = subprocess.run(
        ["bash", "-c", command], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120
    )
    assert len(done.stdout) == 1
    assert "Error" not in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_model_is_one_line_and_exit_code_2(tmp_path):
    done = slipstream("run", str(tmp_path / "none.gguf"), "Hello")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
