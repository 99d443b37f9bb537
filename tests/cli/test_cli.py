"""The command group: help, completion, exit codes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.bench.verify import Check
from slipstream.cli import COMMANDS
from slipstream.cli.bench import BENCHES

PATHS = [*((name,) for name in COMMANDS), *(("bench", name) for name in BENCHES)]


def test_help_lists_every_command(cli):
    done = cli("--help")
    assert done.code == 0
    for name, (_, summary) in COMMANDS.items():
        assert name in done.out
        assert summary in done.out


@pytest.mark.parametrize("path", PATHS, ids=" ".join)
def test_every_command_explains_itself(cli, path):
    done = cli(*path, "--help")
    assert done.code == 0
    assert "Usage: slipstream" in done.out


def test_version(cli):
    assert cli("--version").out.startswith("slipstream 0.")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script(cli, shell):
    done = cli("completion", shell)
    assert done.code == 0
    assert "_SLIPSTREAM_COMPLETE" in done.out


def test_shell_completes_commands_and_models(cli, monkeypatch):
    for words, expected in (
        ("slipstream ver", "verify"),
        ("slipstream run smo", "smollm2"),
        ("slipstream run x --drafter su", "suffix"),
    ):
        monkeypatch.setenv("_SLIPSTREAM_COMPLETE", "fish_complete")
        monkeypatch.setenv("COMP_WORDS", words.rpartition(" ")[0])
        monkeypatch.setenv("COMP_CWORD", words.rpartition(" ")[2])
        assert expected in cli().out


def test_models_names_the_built_in_and_where_it_lies(cli):
    assert "smollm2" in cli("models").out
    assert json.loads(cli("models", "--json").out)[0]["name"] == "smollm2"


@pytest.mark.parametrize(("passed", "code"), [(True, 0), (False, 1)])
def test_verify_exits_1_on_any_mismatch(cli, monkeypatch, passed, code):
    checks = [Check("drafter suffix", True, "20 prompts"), Check("prefill chunks", passed, "token 3 differs")]
    monkeypatch.setattr("slipstream.bench.verify.verify", lambda model, **options: checks)
    done = cli("verify", "fake")
    assert done.code == code
    assert f"{1 + passed} of 2 checks passed" in done.out
    done = cli("verify", "fake", "--json")
    assert done.code == code
    assert [check["passed"] for check in json.loads(done.out)] == [True, passed]


def test_interrupt_exits_130(cli, monkeypatch):
    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("slipstream.LLM", interrupted)
    assert cli("run", "fake", "hi").code == 130


@pytest.mark.parametrize(
    ("streams", "code", "says"),
    [
        (">&-", 0, ""),
        ("<&- >&- 2>&-", 0, ""),
        pytest.param(
            ">/dev/full", 2, "disk is full", marks=pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux")
        ),
    ],
)
def test_closed_or_full_streams_are_no_crash(streams, code, says):
    done = subprocess.run(
        f"{sys.executable} -m slipstream models {streams}", shell=True, capture_output=True, text=True
    )
    assert done.returncode == code
    assert says in done.stderr
    assert "Traceback" not in done.stderr
