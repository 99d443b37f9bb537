"""The agent's tools stay in their directory and their limits, and a run leaves a trace that replays."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from slipstream.bench import agent_loop
from slipstream.bench.agent_loop import FILES, Workspace, run_agent
from slipstream.bench.recorder import Recorder
from slipstream.bench.sandbox import FILE_BYTES
from slipstream.bench.trace import Speed, read_trace, replay
from slipstream.cli.agent import command


def calls(*made: tuple[str, dict[str, str]]) -> Any:
    """An answer that calls tools, as an OpenAI client returns it."""
    asked = [
        SimpleNamespace(id=f"call-{i}", function=SimpleNamespace(name=name, arguments=json.dumps(arguments)))
        for i, (name, arguments) in enumerate(made)
    ]
    message = SimpleNamespace(content=None if asked else "I am done.", tool_calls=asked or None)
    usage = SimpleNamespace(prompt_tokens=100, completion_tokens=20, prompt_tokens_details=None)
    return SimpleNamespace(choices=[SimpleNamespace(message=message)], usage=usage)


class Programmer:
    """A model that knows the answer."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        edits = [
            ("in prices[1:]", "in prices"),
            ("amount - amount * discount", "amount * (100 - discount) // 100"),
            ("return max(prices)", "return min(prices, default=None)"),
        ]
        self.answers = [calls(("read", {"path": "basket.py"})), calls()]
        self.answers += [calls(("edit", {"path": "basket.py", "old": old, "new": new})) for old, new in edits]
        self.answers += [calls(("run_tests", {}))]

    def create(self, **body: Any) -> Any:
        self.bodies.append(json.loads(json.dumps(body)))
        return self.answers[len(self.bodies) - 1]


def test_a_good_programmer_passes_the_tests_and_leaves_a_trace_with_tool_time(tmp_path: Path) -> None:
    programmer, path = Programmer(), tmp_path / "trace.jsonl"
    (tmp_path / "scratch").mkdir()
    with Recorder(programmer.create, path) as create:
        work = run_agent(create, tmp_path / "scratch", model="m")
    assert work.passed
    assert work.calls == 6
    assert work.tools == {"read": 1, "none": 1, "edit": 3, "run_tests": 1}
    turns = read_trace(path)
    assert len(turns) == 6
    assert turns[1].tool_s > 0.01  # the tests ran, since no tool was called
    assert replay(turns, Speed(100)).tool_s == pytest.approx(sum(turn.tool_s for turn in turns))
    said = programmer.bodies[1]["messages"]
    assert [message["role"] for message in said] == ["system", "user", "assistant", "tool"]
    assert said[-1]["content"] == FILES["basket.py"]
    assert "FAILED" in programmer.bodies[2]["messages"][-1]["content"]


def test_an_agent_that_gets_nowhere_stops_at_its_limits(tmp_path: Path) -> None:
    work = run_agent(lambda **_: calls(("read", {"path": "basket.py"})), tmp_path, model="m", turns=4)
    assert (work.passed, work.calls) == (False, 4)
    assert run_agent(lambda **_: calls(), tmp_path, model="m", deadline_s=0).calls == 0
    assert run_agent(lambda **_: calls(("read", {})), tmp_path, model="m", most_prompt_tokens=100).calls == 1


def test_guidance_names_each_turns_tool_and_freedom_none(tmp_path: Path) -> None:
    asked: list[Any] = []

    def create(**body: Any) -> Any:
        asked.append(body["tool_choice"])
        return calls(("read", {"path": "basket.py"}))

    run_agent(create, tmp_path, model="m", turns=4)
    assert [choice["function"]["name"] for choice in asked] == ["read", "edit", "run_tests", "read"]
    run_agent(create, tmp_path, model="m", turns=1, guided=False)
    assert asked[-1] == "auto"


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("read", '{"path": "../secret.txt"}', "error: there is no file '../secret.txt'"),
        ("read", '{"path": "/etc/passwd"}', "error: there is no file"),
        ("read", '{"path": "link"}', "error: there is no file"),
        ("edit", '{"path": "../secret.txt", "old": "x", "new": "y"}', "error: there is no file"),
        ("edit", '{"path": "basket.py", "old": "", "new": "y"}', "error: the old text occurs 0 times"),
        ("edit", '{"path": "basket.py", "old": "amount", "new": "y"}', "error: the old text occurs"),
        ("read", '{"file": "basket.py"}', "error:"),
        ("read", '{"path": ["basket.py"]}', "error:"),
        ("read", "{", "error:"),
        ("read", "[]", "error: there are the tools"),
        ("call", '{"name": "read", "arguments": ""}', "error: there are the tools"),
        ("__init__", "{}", "error: there are the tools"),
    ],
)
def test_no_tool_call_leaves_the_directory_or_breaks_the_loop(
    tmp_path: Path, name: str, arguments: str, said: str
) -> None:
    root = tmp_path / "scratch"
    root.mkdir()
    (tmp_path / "secret.txt").write_text("x")
    (root / "link").symlink_to(tmp_path / "secret.txt")
    workspace = Workspace(root)
    assert workspace.call(name, arguments).startswith(said)
    assert (tmp_path / "secret.txt").read_text() == "x"


def write_test(root: Path, body: str) -> Workspace:
    workspace = Workspace(root)
    (root / "test_basket.py").write_text(body)
    return workspace


def test_tests_that_never_end_are_ended_with_all_they_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_loop, "TEST_S", 2)
    child = "import subprocess, time\nsubprocess.Popen(['sleep', '60'])\nwhile True: time.sleep(1)\n"
    workspace, start = write_test(tmp_path, child), time.monotonic()
    assert "did not end within 2 s" in workspace.run_tests()
    assert time.monotonic() - start < 20
    assert not workspace.passed


@pytest.mark.skipif(sys.platform != "linux", reason="limits are tested where the tests usually run")
@pytest.mark.parametrize(
    "body",
    [
        "x = bytearray(4 << 30)",
        "open('big', 'wb').write(b'x' * (64 << 20))",
        "import os; assert 'SECRET' not in os.environ; raise MemoryError",
    ],
)
def test_tests_have_little_memory_small_files_and_no_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str
) -> None:
    monkeypatch.setenv("SECRET", "1")
    workspace = write_test(tmp_path, body)
    said = workspace.run_tests()
    assert not workspace.passed
    assert "AssertionError" not in said
    assert not (tmp_path / "big").exists() or (tmp_path / "big").stat().st_size <= FILE_BYTES


def test_recording_and_replaying_at_once_is_refused(tmp_path: Path) -> None:
    shown = CliRunner().invoke(command, [str(tmp_path / "a"), "--record", str(tmp_path / "b")])
    assert shown.exit_code == 2
    assert "not both" in shown.output


def test_the_committed_trace_replays_and_shows_that_its_history_was_reused() -> None:
    turns = read_trace(Path(__file__).parents[2] / "benchmarks" / "traces" / "smollm2_agent.jsonl")
    assert replay(turns, Speed(1000)).total_s < replay(turns, Speed(100)).total_s
    assert all(turn.cached_tokens > 0.5 * turn.prompt_tokens for turn in turns[1:])
    assert sum(turn.tool_s > 0.05 for turn in turns) >= 3
