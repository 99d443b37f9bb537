"""`make run`: the prompt reaches the program unharmed, whatever is in it. Set-up is replaced by stamps."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


@pytest.fixture
def checkout(tmp_path):
    """A folder where everything is installed, and `slipstream` writes down its arguments."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("pyproject.toml", "constraints.txt", "CMakeLists.txt"):
        (tmp_path / name).touch()
    (tmp_path / "src").mkdir()
    bin = tmp_path / ".venv" / "bin"
    bin.mkdir(parents=True)
    (bin / "python").touch()
    for stamp in (".package", ".model", ".torch"):
        (tmp_path / ".venv" / stamp).touch()
    script = bin / "slipstream"
    script.write_text('#!/bin/sh\nprintf "%s\\0" "$@" > arguments\n')
    script.chmod(0o755)
    return tmp_path


def arguments(checkout: Path, *make: str, stdin: str = "", **env: str) -> list[str]:
    done = subprocess.run(
        ["make", "run", *make], cwd=checkout, input=stdin, capture_output=True, text=True, env=os.environ | env
    )
    assert done.returncode == 0, done.stderr
    return (checkout / "arguments").read_text().split("\0")[:-1]


PROMPTS = ("Why is the sky blue?", 'it\'s "quoted"', "$HOME $(whoami) `id` ${PATH} $$", "$(shell touch harm)")
PROMPTS += ("two\nlines", "--help", "a; touch harm #")


@pytest.mark.parametrize("prompt", PROMPTS)
def test_any_prompt_arrives_as_it_was_given(checkout, prompt):
    assert arguments(checkout, f"PROMPT={prompt}") == ["run", "smollm2", "--", prompt]
    assert not (checkout / "harm").exists()


def test_piped_text_is_answered_once(checkout):
    assert arguments(checkout, stdin="Hello $USER\n") == ["run", "smollm2", "--", "Hello $USER"]


def test_without_a_terminal_or_text_it_still_answers(checkout):
    *command, prompt = arguments(checkout)
    assert command == ["run", "smollm2", "--"]
    assert prompt.endswith(".")


def test_a_shells_own_prompt_variable_is_not_a_question(checkout):
    assert "%~ $" not in arguments(checkout, stdin="Hello", PROMPT="%~ $")


def test_an_old_python_is_refused_with_the_remedy(checkout):
    shutil.rmtree(checkout / ".venv")
    tools = checkout / "tools"  # all that is on this PATH, so that no newer Python is
    tools.mkdir()
    for tool in ("find", "rm", "touch"):
        (tools / tool).symlink_to(shutil.which(tool))
    old = tools / "python3"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.8.1"\nexit 1\n')
    old.chmod(0o755)
    done = subprocess.run(
        [shutil.which("make"), "run"], cwd=checkout, capture_output=True, text=True, env={"PATH": str(tools)}
    )
    assert done.returncode
    assert "Python 3.11 or newer, and python3 is Python 3.8.1" in done.stderr
    assert not (checkout / ".venv").exists()
