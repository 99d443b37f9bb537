"""What the router remembers of sessions: by the id that a client gives, or else by the messages that came before.

An agent sends its whole conversation again each time, so a request whose first messages are exactly those of an earlier
request of the same key goes on with its session. Kept in memory, the least recent forgotten first.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from slipstream.route.decision import Choice, Decision, SessionState
from slipstream.route.wire.neutral import Ask, Call, Image, Part, Result, Text, Thought


@dataclass
class Held:
    """What a target has in its cache: the messages up to `count`, whose chain ends in `chain`."""

    count: int
    chain: bytes
    tokens: int
    when: float


@dataclass
class Session:
    id: str
    began: float
    seen: float
    last: Choice | None = None
    latched: Choice | None = None
    turn_choice: Choice | None = None
    scores: dict[str, float] = field(default_factory=dict)
    spent: float = 0.0
    requests: int = 0
    held: dict[str, Held] = field(default_factory=dict)
    newest: Held | None = None

    def state(self, chain: Sequence[bytes], ttl_s: dict[str, float], now: float) -> SessionState:
        cached = {
            name: held.tokens
            for name, held in self.held.items()
            if now - held.when <= ttl_s.get(name, 0.0) and self._shares(held, chain)
        }
        return SessionState(
            self.id, self.last, cached, self.latched, self.turn_choice, dict(self.scores), self.spent,
            now - self.began, self.requests,
        )  # fmt: skip

    def prefix_tokens(self, chain: Sequence[bytes]) -> int:
        """Prompt tokens that a target which served every step of this session would still hold."""
        return self.newest.tokens if self.newest and self._shares(self.newest, chain) else 0

    def _shares(self, held: Held, chain: Sequence[bytes]) -> bool:
        return held.count <= len(chain) and chain[held.count - 1] == held.chain

    def decided(self, policy: str, decision: Decision) -> None:
        if self.turn_choice is None:
            self.turn_choice = decision.choice
        if decision.latch:
            self.latched = decision.choice
        if decision.score is not None:
            self.scores[policy] = decision.score

    def answered(self, choice: Choice, chain: Sequence[bytes], tokens: int, cost: float, now: float) -> None:
        self.last, self.seen = choice, now
        self.spent += cost
        self.requests += 1
        if chain:
            self.newest = self.held[choice.target] = Held(len(chain), chain[-1], tokens, now)


class Sessions:
    """All sessions; keys never see each other's."""

    def __init__(self, most: int, ttl_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.most, self.ttl_s, self._clock = most, ttl_s, clock
        self._by_id: OrderedDict[tuple[str, str], Session] = OrderedDict()
        self._by_chain: OrderedDict[tuple[str, bytes], str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_id)

    def find(self, key: str, ask: Ask, given: str | None, new_id: str) -> tuple[Session, list[bytes]]:
        """The session of `ask`, a new one if need be, and the chain of its messages.

        given: the client's own id. A user's message at the end begins a new turn.
        """
        chain, now = chain_of(ask), self._clock()
        id = given or next((found for one in reversed(chain) if (found := self._by_chain.get((key, one)))), None)
        session = self._by_id.get((key, id)) if id else None
        if session is None or now - session.seen > self.ttl_s:
            session = Session(id or new_id, now, now)
            self._by_id[key, session.id] = session
        self._by_id.move_to_end((key, session.id))
        session.seen = now
        if chain:
            self._by_chain[key, chain[-1]] = session.id
            self._by_chain.move_to_end((key, chain[-1]))
        while len(self._by_id) > self.most:
            self._by_id.popitem(last=False)
        while len(self._by_chain) > 4 * self.most:
            self._by_chain.popitem(last=False)
        if begins_turn(ask):
            session.turn_choice = None
        return session, chain

    def now(self) -> float:
        return self._clock()


def begins_turn(ask: Ask) -> bool:
    """Whether a person spoke last, and not a tool."""
    last = ask.turns[-1] if ask.turns else None
    return last is None or (last.role == "user" and not any(isinstance(part, Result) for part in last.parts))


def chain_of(ask: Ask) -> list[bytes]:
    """A hash after each message, of it and all before it; system messages count into the first of the others."""
    chain: list[bytes] = []
    hash = hashlib.blake2b(ask.wire.encode(), digest_size=16)
    for turn in ask.turns:
        hash.update(turn.role.encode())
        for part in turn.parts:
            _add(hash, part)
        if turn.role != "system":
            chain.append(hash.digest())
    return chain


def _add(hash: hashlib.blake2b, part: Part) -> None:
    if isinstance(part, Text | Thought):
        hash.update(b"t" + part.text.encode("utf-8", "surrogatepass"))
    elif isinstance(part, Image):
        hash.update(b"i" + part.url.encode())
    elif isinstance(part, Call):
        hash.update(f"c{part.id}\0{part.name}\0{part.arguments}".encode("utf-8", "surrogatepass"))
    else:
        hash.update(f"r{part.id}".encode())
        for inner in part.parts:
            _add(hash, inner)
