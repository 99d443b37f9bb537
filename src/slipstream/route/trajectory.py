"""What the messages of an agent say about how its work is going.

An error is what the client called an error (`is_error`) or a program that ended with another exit code than 0; never a
word in a file that was read. Where the client says nothing, an exit code counts in three places alone: a JSON field of
the whole result, its first line or its last line, and never in what a reading tool returned.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields

from slipstream.route.decision import Conversation, Message, SessionState, ToolCall

READS = re.compile(r"(?:^|[_.])(?:read|view|cat|open|get|list|ls|glob|grep|find|search|fetch)", re.I)
EDITS = re.compile(r"(?:^|[_.])(?:edit|multiedit|write|create|replace|str_replace|apply_patch|patch|insert)", re.I)
TESTS = re.compile(
    r"run_?tests?\b|\bpytest\b|\bunittest\b|\b(?:npm|pnpm|yarn|bun|go|cargo|dotnet|mix|swift|make|gradle|mvn)\b[^|;&]*\btest\b"
    r"|\b(?:jest|vitest|rspec|phpunit|ctest|tox)\b",
    re.I,
)
_SHOWS = re.compile(
    r'"(?:command|cmd)"\s*:\s*(?:\[\s*)?"(?:cat|head|tail|less|sed -n|grep|rg|ls|find|git (?:show|diff|log))\b'
)
_EXIT = re.compile(
    r"[\[(<]?(?:(?:process |command )?(?:exited|failed) with (?:exit )?|exit(?:ed)?[ _])(?:code|status)"
    r"[:= ]+(-?\d+)[\])>.]?",
    re.I,
)
_CODES = ("exit_code", "exitCode", "returncode", "exit_status")
_COUNTED = re.compile(r"\b(\d+) (?:failed|errors?|failures?)\b|\((?:failures|errors)=\d", re.I)
_VERDICT = re.compile(
    r"=*\s*(?:\d+ (?:passed|failed|errors?|skipped|xfailed|warnings?|deselected)(?:, | |$))+(?:in .*)?=*"  # pytest
    r"|FAILED \(.*\)|OK(?: \(.*\))?"  # unittest
    r"|Tests?:\s+.*\d+ total|test result: \w+\..*"  # jest, cargo
    r"|(?:ok|FAIL)\s+\S+\s+[\d.]+s"  # go
    r"|\d+ passed, \d+ failed.*|\d+ examples?, \d+ failures?.*"
)
_COMPACTED = re.compile(
    r"\s*(?:<(?:conversation_)?summary>|This session is being continued from a previous conversation)", re.I
)


@dataclass(frozen=True)
class Signals:
    """Counts reach back to the last message of a person, errors_in_row to the last result without an error.

    steps: answers of the model. repeats: how often the newest call was made before, with the same result.
    tests_passed: the verdict of the last run of tests; None where none ran. edits_untested: since then.
    just_passed: they passed, and that is the newest result.
    compacted: the history was cut or replaced by a summary. new_turn: a person spoke last.
    """

    new_turn: bool = True
    main: bool = True
    turns: int = 0
    steps: int = 0
    reads: int = 0
    edits: int = 0
    edits_untested: int = 0
    errors: int = 0
    errors_in_row: int = 0
    repeats: int = 0
    tests_passed: bool | None = None
    just_passed: bool = False
    compacted: bool = False

    def numbers(self) -> list[float]:
        """As features of a classifier; tests_passed is 1, -1, or 0 where none ran."""
        values = [getattr(self, field.name) for field in fields(self) if field.name != "tests_passed"]
        return [*map(float, values), 0.0 if self.tests_passed is None else 1.0 if self.tests_passed else -1.0]


def signals(conversation: Conversation, state: SessionState | None = None) -> Signals:
    """Read the conversation once. With `state`, a prompt far shorter than what was cached counts as compacted."""
    messages = conversation.messages
    start = max((i for i, message in enumerate(messages) if message.role == "user"), default=0)
    calls = {call.id: call for message in messages for call in message.tool_calls}
    results = [message for message in messages[start:] if message.role == "tool"]
    reads = edits = untested = errors = in_row = 0
    passed: bool | None = None
    newest: bool | None = None
    for result in results:
        call = calls.get(result.tool_call_id or "", ToolCall("", "", ""))
        wrong = is_error(result, call)
        verdict = newest = tests_verdict(result, call)
        errors, in_row = errors + wrong, in_row + 1 if wrong else 0
        if verdict is not None:
            passed, untested = verdict, 0
            if not verdict and not wrong:
                in_row += 1  # failing tests are no success
        elif EDITS.search(call.name) and not wrong:
            edits, untested = edits + 1, untested + 1
        elif _shows(call):
            reads += 1
    held = max(state.cached.values(), default=0) if state else 0
    return Signals(
        new_turn=bool(messages) and messages[-1].role == "user",
        main=conversation.agent == "main",
        turns=sum(message.role == "user" for message in messages),
        steps=sum(message.role == "assistant" for message in messages[start:]),
        reads=reads,
        edits=edits,
        edits_untested=untested,
        errors=errors,
        errors_in_row=in_row,
        repeats=_repeats(results, calls),
        tests_passed=passed,
        just_passed=newest is True,
        compacted=any(_COMPACTED.match(message.text) for message in messages[:2] if message.role == "user")
        or (conversation.prompt_tokens > 0 and held > 1.5 * conversation.prompt_tokens),
    )


def is_error(result: Message, call: ToolCall) -> bool:
    """Whether a tool's result is an error."""
    if result.is_error is not None:
        return result.is_error
    if _shows(call):
        return False
    code = exit_code(result.text)
    return code is not None and code != 0


def exit_code(text: str) -> int | None:
    """The exit code that a tool's result states of itself; None where it states none."""
    stripped = text.strip()
    if stripped.startswith("{") and stripped.endswith("}"):
        if not any(key in stripped for key in _CODES):
            return None
        try:
            said = json.loads(stripped)
        except ValueError:
            said = {}
        nested = said.get("metadata") if isinstance(said.get("metadata"), dict) else {}
        for key in _CODES:
            code = said.get(key, nested.get(key))
            if isinstance(code, int) and not isinstance(code, bool):
                return code
        return None
    for line in (stripped.partition("\n")[0], stripped.rpartition("\n")[2]):
        if found := _EXIT.fullmatch(line.strip()[:100]):
            return int(found[1])
    return None


def tests_verdict(result: Message, call: ToolCall) -> bool | None:
    """Whether tests passed, where the call ran tests; by their closing lines, else by the exit code."""
    if _shows(call) or not TESTS.search(f"{call.name} {call.arguments}"):
        return None
    for line in reversed(result.text[-4000:].strip().splitlines()[-8:]):
        line = line.strip()[:300]
        if _VERDICT.fullmatch(line):
            counts = [count for count in _COUNTED.findall(line) if count != "0"]
            return not counts and not line.startswith("FAIL") and "result: FAILED" not in line
    code = exit_code(result.text)
    if code is not None:
        return code == 0
    return None if result.is_error is None else not result.is_error


def _shows(call: ToolCall) -> bool:
    """Whether the call shows what is written somewhere, so that its result says nothing of success."""
    return bool(READS.search(call.name) or _SHOWS.search(call.arguments))


def _repeats(results: Sequence[Message], calls: dict[str, ToolCall]) -> int:
    def key(result: Message) -> tuple[str, str]:
        call = calls.get(result.tool_call_id or "", ToolCall("", "", ""))
        return call.name, "".join(call.arguments.split())

    return sum(one.text == results[-1].text and key(one) == key(results[-1]) for one in results[:-1])
