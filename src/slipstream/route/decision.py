"""What a policy sees and what it answers. Everything here is plain data, so that a policy is a pure function.

wire request -> Conversation -> Policy.decide(Conversation, SessionState, Catalogue) -> Decision -> target
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from slipstream.errors import SlipstreamError

Role = Literal["system", "user", "assistant", "tool"]


class RouteError(SlipstreamError):
    """No target can take a request, or a policy's options make no sense."""


@dataclass(frozen=True)
class ToolCall:
    """A call the model made. arguments: the JSON text as it was written."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Message:
    """One message in no wire's form. is_error: what the client said of a tool result; None where it said nothing."""

    role: Role
    text: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    is_error: bool | None = None
    images: int = 0


@dataclass(frozen=True)
class Conversation:
    """A request as policies read it. prompt_tokens: estimated where no tokenizer of the target is at hand.

    agent: who asks, `main` or the name of a sub-agent, where the client says so.
    """

    messages: tuple[Message, ...]
    tools: tuple[str, ...] = ()
    prompt_tokens: int = 0
    max_tokens: int | None = None
    agent: str = "main"
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Tier:
    """One speed tier of a target. Prices in dollars per million tokens; speeds in tokens a second, as measured."""

    name: str
    input_price: float
    cached_price: float
    output_price: float
    decode_speed: float
    prefill_speed: float
    latency_s: float = 0.0


@dataclass(frozen=True)
class Target:
    """A model that can be asked. context: tokens. quality: share of hard steps it solves, where known."""

    name: str
    tiers: Mapping[str, Tier]
    context: int
    tools: bool = True
    images: bool = False
    quality: float | None = None


@dataclass(frozen=True)
class Choice:
    """A (target, tier) pair."""

    target: str
    tier: str


@dataclass(frozen=True)
class SessionState:
    """What the router remembers of a session.

    cached: prompt tokens each target still holds in its KV cache. latched: where a cascade escalated to. scores: what
    judges or classifiers said before. spent: dollars. elapsed_s: since the first request. turns: user turns so far.
    """

    id: str
    last: Choice | None = None
    cached: Mapping[str, int] = field(default_factory=dict)
    latched: Choice | None = None
    turn_choice: Choice | None = None
    scores: Mapping[str, float] = field(default_factory=dict)
    spent: float = 0.0
    elapsed_s: float = 0.0
    requests: int = 0


@dataclass(frozen=True)
class Estimate:
    """What a choice is expected to take: seconds and dollars, the prompt that must be read again included."""

    choice: Choice
    time_s: float
    cost: float
    reread_tokens: int = 0


@dataclass(frozen=True)
class Decision:
    """choice: where the step goes. reasons: one line each, for people. alternatives: every choice that was weighed.

    latch: keep the session here from now on. judge_cost, judge_time_s: what deciding itself took.
    """

    choice: Choice
    reasons: tuple[str, ...]
    alternatives: tuple[Estimate, ...] = ()
    score: float | None = None
    latch: bool = False
    judge_cost: float = 0.0
    judge_time_s: float = 0.0


@dataclass(frozen=True)
class Catalogue:
    """The targets that can be asked now (circuit breakers already taken out), and the expected answer in tokens."""

    targets: Mapping[str, Target]
    expected_output: int = 300


class Policy(Protocol):
    """A pure function of its arguments; what it learned or was configured with it holds since it was made."""

    name: str

    def decide(self, conversation: Conversation, state: SessionState, catalogue: Catalogue) -> Decision:
        """Choose. Raises RouteError where no target can take the request."""
        ...


@dataclass(frozen=True)
class Reply:
    """What a model said to a policy that asked it, and what that took. cost: dollars."""

    text: str
    prompt_tokens: int
    completion_tokens: int
    cost: float
    time_s: float


class Asker(Protocol):
    """How a policy asks a model. The gateway's goes through its targets, and puts the reply on the ledger."""

    async def __call__(self, choice: Choice, prompt: str, *, max_tokens: int, timeout_s: float) -> Reply:
        """Raises RouteError where no reply came in time."""
        ...


class AskingPolicy(Policy, Protocol):
    """A policy that may ask a model first; the gateway calls this in place of `decide`, which must not ask."""

    async def decide_asking(
        self, conversation: Conversation, state: SessionState, catalogue: Catalogue, ask: Asker
    ) -> Decision:
        """Choose; judge_cost and judge_time_s say what asking took."""
        ...
