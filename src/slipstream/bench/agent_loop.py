"""A small agent that reads, edits and tests code in a scratch directory, for the trace it leaves.

    create -> answer -> tool calls -> Workspace -> results -> create ...   until the tests pass or a limit is reached

The task is real, the tools are real, and a small model will mostly fail; what counts is that prompts grow, tools take
time and every call depends on the one before. `create` is that of any OpenAI-style client, so a `Recorder` fits around
it. Tests run what a model wrote, so they run in a `sandbox`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from slipstream.bench import sandbox
from slipstream.bench.stream_clock import EndpointError, exchange

SHOWN_CHARS = 1000
TEST_S = 20

FILES = {
    "basket.py": '''"""Prices of a shopping basket, in cents."""


def total(prices, discount=0):
    """The sum of `prices`, less `discount` percent of it, rounded down."""
    amount = 0
    for price in prices[1:]:
        amount += price
    return amount - amount * discount


def cheapest(prices):
    """The lowest price; None for an empty basket."""
    return max(prices)
''',
    "test_basket.py": """import unittest

from basket import cheapest, total


class Basket(unittest.TestCase):
    def test_total_counts_every_price(self):
        self.assertEqual(total([100, 250, 50]), 400)

    def test_discount_is_in_percent(self):
        self.assertEqual(total([100, 101], discount=10), 180)

    def test_cheapest_is_the_lowest(self):
        self.assertEqual(cheapest([30, 10, 20]), 10)

    def test_an_empty_basket_has_no_cheapest(self):
        self.assertIsNone(cheapest([]))
""",
}

TASK = (
    "The tests in test_basket.py fail. Read basket.py, correct it, and run the tests. "
    "Use the tools: read a file before you edit it, and run the tests after each edit."
)


def _tool(name: str, description: str, **parameters: str) -> dict[str, Any]:
    properties: dict[str, Any] = {key: {"type": "string", "description": text} for key, text in parameters.items()}
    if "path" in properties:
        properties["path"]["enum"] = list(FILES)
    schema = {"type": "object", "properties": properties, "required": list(parameters), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS = [
    _tool("read", "Read a file.", path="File name"),
    _tool("edit", "Replace a passage of a file.", path="File name", old="Text to replace, exactly", new="New text"),
    _tool("run_tests", "Run all tests and show what failed."),
]


@dataclass
class Workspace:
    """The scratch directory, and the three tools; each returns what the model is told, errors included."""

    root: Path

    def __post_init__(self) -> None:
        self.root = self.root.resolve()
        self.passed = False
        for name, text in FILES.items():
            (self.root / name).write_text(text, encoding="utf-8")

    def call(self, name: str, arguments: str) -> str:
        """The result of a tool call as a model makes it: a name, and arguments in JSON."""
        try:
            given = json.loads(arguments or "{}")
            if name not in ("read", "edit", "run_tests") or not isinstance(given, dict):
                return "error: there are the tools read(path), edit(path, old, new) and run_tests()"
            return str(getattr(self, name)(**given))[:SHOWN_CHARS]
        except (ValueError, TypeError, OSError) as error:
            return f"error: {error}"[:SHOWN_CHARS]

    def read(self, path: str) -> str:
        return self._inside(path).read_text(encoding="utf-8")

    def edit(self, path: str, old: str, new: str) -> str:
        file = self._inside(path)
        text = file.read_text(encoding="utf-8")
        if text.count(old) != 1 or not old:
            return f"error: the old text occurs {text.count(old) if old else 0} times in {path}; it must occur once"
        changed = text.replace(old, new)
        if len(changed) > sandbox.FILE_BYTES:
            return "error: the file would be too large"
        file.write_text(changed, encoding="utf-8")
        return f"edited {path}"

    def run_tests(self) -> str:
        command = [sandbox.PYTHON, "-E", "-s", "-S", "-B", "-m", "unittest", "-q"]
        done = sandbox.run(self.root, command, seconds=TEST_S, chars=SHOWN_CHARS)  # the verdict stands at the end
        self.passed = done.code == 0
        return done.said if done.code is not None else f"error: the tests did not end within {TEST_S} s"

    def _inside(self, path: str) -> Path:
        file = (self.root / path).resolve()
        if not file.is_relative_to(self.root) or not file.is_file():
            raise ValueError(f"there is no file {path!r}; there are {', '.join(FILES)}")
        return file


@dataclass(frozen=True)
class Work:
    """What an agent did. calls: of the model; tools: of each tool, those that named none as `none`."""

    passed: bool
    calls: int
    tools: Mapping[str, int]
    wall_s: float


def run_agent(
    create: Callable[..., Any],
    root: Path,
    *,
    model: str,
    turns: int = 12,
    max_tokens: int = 256,
    most_prompt_tokens: int = 6000,
    deadline_s: float = 300.0,
    guided: bool = True,
    temperature: float = 0.7,
    progress: Callable[[str], None] = lambda line: None,
) -> Work:
    """Work on the task in the empty directory `root`.

    At most `turns` calls, and none after `deadline_s` seconds or a prompt of `most_prompt_tokens`.

    guided: name the tool of each turn (read, edit, run the tests, again), as a small model needs. Otherwise it chooses.
    Seeds are the turn's number: a small model at temperature 0 would repeat itself for ever. Where an answer calls no
    tool, the tests are run and shown.
    """
    workspace, started, used = Workspace(root), time.monotonic(), dict[str, int]()
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You are a programmer who works with tools."},
        {"role": "user", "content": TASK},
    ]
    names, calls, prompt_tokens = [tool["function"]["name"] for tool in TOOLS], 0, 0
    while (
        calls < turns
        and not workspace.passed
        and prompt_tokens < most_prompt_tokens
        and time.monotonic() - started < deadline_s
    ):
        named = {"type": "function", "function": {"name": names[calls % len(names)]}}
        answer = create(
            model=model,
            messages=messages,
            tools=TOOLS,
            tool_choice=named if guided else "auto",
            parallel_tool_calls=False,
            max_tokens=max_tokens,
            temperature=temperature,
            seed=calls,
        )
        calls += 1
        prompt_tokens = answer.usage.prompt_tokens
        message = answer.choices[0].message
        asked = getattr(message, "tool_calls", None) or []
        made = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": call.function.arguments},
            }
            for call in asked
        ]
        messages.append(
            {"role": "assistant", "content": message.content or ""} | ({"tool_calls": made} if made else {})
        )
        for call in asked:
            result = workspace.call(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            used[call.function.name] = used.get(call.function.name, 0) + 1
            last = result.strip().splitlines()[-1:] or [""]
            progress(f"{calls}: {call.function.name}({call.function.arguments[:60]}) -> {last[0][:80]}")
        if not asked:
            messages.append({"role": "user", "content": f"The tests say:\n{workspace.call('run_tests', '')}"})
            used["none"] = used.get("none", 0) + 1
            progress(f"{calls}: no tool; the tests were run")
    return Work(workspace.passed, calls, used, time.monotonic() - started)


def http_create(url: str, key: str | None = None, timeout_s: float = 120.0) -> Callable[..., Any]:
    """`create` of the server at `url` (ending in /v1), without streaming. Raises EndpointError where it refuses."""

    def create(**body: Any) -> Any:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        done = exchange(f"{url}/chat/completions", json.dumps(body).encode(), headers, timeout_s=timeout_s)
        if done.status != 200:
            raise EndpointError(f"{url} answered {done.status}: {done.body.decode('utf-8', 'replace')[:300]}")
        try:
            return json.loads(done.body, object_hook=lambda fields: SimpleNamespace(**fields))
        except ValueError:
            raise EndpointError(f"{url} answered what is no JSON") from None

    return create
