"""The first rule whose conditions all hold. Reads as a list of ifs, in the order of the file."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pydantic import Field, field_validator
from pydantic.dataclasses import dataclass

from slipstream.route.decision import Catalogue, Conversation, Decision, SessionState
from slipstream.route.policies.common import OPTIONS, decided, pick
from slipstream.route.trajectory import Signals, signals


@dataclass(frozen=True, config=OPTIONS, kw_only=True)
class Rule:
    """Conditions that are left out always hold. use: `target` or `target/tier`.

    agent: `main`, or a sub-agent's name; `sub` is any of them. prompt_over, prompt_under: tokens. matches: a regular
    expression found in the newest message of a person. metadata: what the request's metadata must say.
    """

    use: str
    agent: str | None = None
    prompt_over: int | None = None
    prompt_under: int | None = None
    matches: str | None = None
    tools: bool | None = None
    images: bool | None = None
    new_turn: bool | None = None
    errors_in_row: int | None = Field(default=None, ge=1)
    repeats: int | None = Field(default=None, ge=1)
    tests_passed: bool | None = None
    compacted: bool | None = None
    metadata: dict[str, str] = Field(default_factory=dict)

    @field_validator("matches")
    @classmethod
    def _compiles(cls, matches: str | None) -> str | None:
        try:
            re.compile(matches or "")
        except re.error as error:
            raise ValueError(f"no regular expression: {error}") from None
        return matches

    def holds(self, conversation: Conversation, found: Signals) -> bool:
        return all(self._checks(conversation, found))

    def _checks(self, conversation: Conversation, found: Signals) -> Iterator[bool]:
        if self.agent is not None:
            yield (not found.main) if self.agent == "sub" else conversation.agent == self.agent
        if self.prompt_over is not None:
            yield conversation.prompt_tokens > self.prompt_over
        if self.prompt_under is not None:
            yield conversation.prompt_tokens < self.prompt_under
        if self.matches is not None:
            said = next((message.text for message in reversed(conversation.messages) if message.role == "user"), "")
            yield re.search(self.matches, said) is not None
        if self.tools is not None:
            yield bool(conversation.tools) == self.tools
        if self.images is not None:
            yield any(message.images for message in conversation.messages) == self.images
        for key in ("new_turn", "tests_passed", "compacted"):
            if getattr(self, key) is not None:
                yield getattr(found, key) == getattr(self, key)
        for key in ("errors_in_row", "repeats"):
            if getattr(self, key) is not None:
                yield getattr(found, key) >= getattr(self, key)
        yield all(conversation.metadata.get(key) == value for key, value in self.metadata.items())


@dataclass(frozen=True, config=OPTIONS, kw_only=True)
class Rules:
    """default: where no rule holds."""

    default: str
    rules: tuple[Rule, ...] = ()
    name = "rules"

    def decide(self, conversation: Conversation, state: SessionState, catalogue: Catalogue) -> Decision:
        found = signals(conversation, state)
        for number, rule in enumerate(self.rules, 1):
            if rule.holds(conversation, found):
                choice, passed = pick([rule.use, self.default], conversation, catalogue)
                return decided(choice, [f"rule {number} holds", *passed], conversation, state, catalogue)
        choice, passed = pick([self.default], conversation, catalogue)
        return decided(choice, ["no rule holds", *passed], conversation, state, catalogue)
