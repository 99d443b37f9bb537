"""Live conversations: which one a prompt continues, which are let go, and when one is written to disk.

Agents resend everything each turn. The pool finds the session that shares the longest prefix with a prompt, and hands
it out where the prompt continues it; where it only branches off, the session is copied so that both can go on.
Everything here runs on the device thread, between rounds, when every cache is at rest.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from slipstream.engine.engine import LLM
from slipstream.engine.kv import common_prefix
from slipstream.engine.session import Session
from slipstream.models.spec import ModelSpec
from slipstream.serve.config import Sessions
from slipstream.serve.drafts import FilteredDrafter
from slipstream.serve.spill import SpillStore

COPY_FROM = 32
"""Shared tokens from which copying a cache beats computing the tokens again."""


@runtime_checkable
class Portable(Protocol):
    """A cache whose state can be taken elsewhere, bit for bit."""

    def export_state(self) -> bytes: ...

    def import_state(self, data: bytes) -> None: ...


@dataclass(eq=False)
class Live:
    """A session with its drafter. busy: it belongs to a stream. saved: the length last written to disk."""

    session: Session
    drafter: FilteredDrafter
    busy: bool = False
    used_at: float = field(default_factory=time.monotonic)
    saved: int = 0
    file: str | None = None

    @property
    def tokens(self) -> list[int]:
        """The tokens whose keys and values are in the cache."""
        kv = self.session.kv
        return kv.tokens[: kv.cache.length] if kv.tokens else []


def kv_bytes(spec: ModelSpec, length: int, element_bytes: int = 2) -> int:
    """Bytes of keys and values of `length` tokens; sliding windows hold no more than themselves."""
    total = 0
    for layer in spec.layers:
        a = layer.attention
        held = min(length, a.window) if a.window else length
        total += held * a.cache_width * element_bytes
    return total


class SessionPool:
    """Sessions within a budget; `acquire` and `release` bracket a stream."""

    def __init__(self, llm: LLM, settings: Sessions, store: SpillStore | None = None, drafter: str = "auto") -> None:
        self._llm, self._settings, self._store, self._drafter = llm, settings, store, drafter
        self._live: list[Live] = []
        self.budget_bytes = settings.memory_mb << 20

    @property
    def busy(self) -> int:
        return sum(live.busy for live in self._live)

    @property
    def idle(self) -> int:
        return len(self._live) - self.busy

    @property
    def held_bytes(self) -> int:
        return sum(kv_bytes(self._llm.spec, len(live.session.kv.tokens)) for live in self._live)

    def acquire(self, tokens: list[int]) -> tuple[Live, int]:
        """A session for `tokens`, and how many of them it holds already (an estimate: `prepare` tells)."""
        best, shared = self._closest(tokens)
        stored = self._store.closest(tokens) if self._store else None
        if stored and stored.shared > max(shared, COPY_FROM) and (live := self._wake(stored.name)):
            return self._take(live), stored.shared
        if best is None or shared < 1:
            return self._take(self._new()), 0
        if not best.busy and self._continues(best, shared):
            return self._take(best), shared
        if shared >= COPY_FROM and (live := self._copy(best)):
            return self._take(live), shared
        if not best.busy and 2 * shared >= len(best.session.kv.tokens):
            return self._take(best), shared
        return self._take(self._new()), 0

    def release(self, live: Live, *, broken: bool = False) -> None:
        """The stream is over. broken: its state is not to be trusted."""
        live.busy, live.used_at = False, time.monotonic()
        live.drafter.grammar = None
        if broken or not live.session.kv.tokens:
            self._drop(live)
        self._shrink()

    def save_one(self, idle_s: float | None = None) -> bool:
        """Write one idle session that has grown since it was written; False where there is none to write."""
        if self._store is None:
            return False
        now = time.monotonic()
        wait = self._settings.spill_s if idle_s is None else idle_s
        return any(not live.busy and now - live.used_at >= wait and self._save(live) for live in self._live)

    def close(self) -> None:
        """Save what is to be kept, free everything."""
        while self.save_one(idle_s=0):
            pass
        for live in list(self._live):
            self._drop(live)

    def _closest(self, tokens: list[int]) -> tuple[Live | None, int]:
        """Of those that share most, an idle one, and of these the shortest: going on from it costs no copy."""
        best, shared, score = None, 0, (0, False, 0)
        for live in self._live:
            held = live.tokens
            common = min(common_prefix(held, tokens), len(tokens) - 1)
            if (mine := (common, not live.busy, -len(held))) > score:
                best, shared, score = live, common, mine
        return best, shared

    def _continues(self, live: Live, shared: int) -> bool:
        """Whether little but the end of the last answer would be lost: templates rewrite that."""
        return shared >= len(live.session.kv.tokens) - max(16, shared // 8)

    def _new(self) -> Live:
        while len(self._live) >= self._settings.count and self._evict():
            pass
        drafter = FilteredDrafter(self._llm, self._drafter)
        live = Live(self._llm.session(drafter=drafter), drafter)
        self._live.append(live)
        return live

    def _take(self, live: Live) -> Live:
        live.busy = True
        return live

    def _copy(self, source: Live) -> Live | None:
        cache = source.session.kv.cache
        if not isinstance(cache, Portable):
            return None
        tokens = source.tokens
        return self._filled(tokens, cache.export_state())

    def _wake(self, name: str) -> Live | None:
        assert self._store is not None
        loaded = self._store.load(name)
        if loaded is None:
            return None
        tokens, state = loaded
        live = self._filled(tokens, state)
        if live is None:
            self._store.remove(name)
        else:
            live.file, live.saved = name, len(tokens)
        return live

    def _filled(self, tokens: list[int], state: bytes) -> Live | None:
        live = self._new()
        cache = live.session.kv.cache
        if isinstance(cache, Portable):
            try:
                cache.import_state(state)
                live.session.kv.tokens = list(tokens)
                return live
            except ValueError:
                pass  # written by another model or version: as if it were not there
        self._drop(live)
        return None

    def _save(self, live: Live) -> bool:
        cache = live.session.kv.cache if live.session.kv.tokens else None
        if self._store is None or not isinstance(cache, Portable) or cache.length <= live.saved:
            return False
        tokens = live.tokens
        live.file = self._store.save(tokens, cache.export_state(), replaces=live.file)
        live.saved = len(tokens)
        return True

    def _shrink(self) -> None:
        while self.held_bytes > self.budget_bytes and self._evict():
            pass

    def _evict(self) -> bool:
        idle = [live for live in self._live if not live.busy]
        if not idle:
            return False
        oldest = min(idle, key=lambda live: live.used_at)
        self._save(oldest)
        self._drop(oldest)
        return True

    def _drop(self, live: Live) -> None:
        live.session.close()
        self._live.remove(live)
