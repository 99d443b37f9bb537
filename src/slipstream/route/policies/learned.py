"""By a classifier that was trained on who answered what right: strong where its expected gain is worth a strong call.

Classifying takes well under a millisecond on one CPU core and asks no model; that time is on the bill all the same.
"""

from __future__ import annotations

import time
from dataclasses import field, replace
from functools import lru_cache
from pathlib import Path

from pydantic import Field
from pydantic.dataclasses import dataclass

from slipstream.route.decision import Catalogue, Conversation, Decision, RouteError, SessionState
from slipstream.route.learned import Model, features, load, newest_request
from slipstream.route.policies.common import OPTIONS, Pair, keeps_turn
from slipstream.route.trajectory import signals


@dataclass(frozen=True, config=OPTIONS, kw_only=True)
class Learned(Pair):
    """model: a file of `slipstream route train`. threshold: of the expected gain; share: of requests that shall go to
    strong, as in training. Without either, the file's own threshold."""

    model: Path
    threshold: float | None = Field(default=None, ge=-1, le=1)
    share: float | None = Field(default=None, ge=0, le=1)
    name = "learned"
    _model: Model = field(init=False, repr=False, compare=False)
    _least: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.threshold is not None and self.share is not None:
            raise RouteError("policy learned: give threshold or share, not both")
        model = _loaded(self.model, self.model.stat().st_mtime_ns if self.model.exists() else 0)
        object.__setattr__(self, "_model", model)
        least = model.threshold if self.share is None else model.threshold_at(self.share)
        object.__setattr__(self, "_least", least if self.threshold is None else self.threshold)

    def decide(self, conversation: Conversation, state: SessionState, catalogue: Catalogue) -> Decision:
        if kept := keeps_turn(self.each, conversation, state, catalogue):
            return kept
        started = time.perf_counter()
        row = features(newest_request(conversation), signals(conversation, state))
        gain = float(self._model.gain(row[None])[0])
        hard = gain >= self._least
        reason = f"expected gain of strong {gain:+.3f} {'>=' if hard else '<'} {self._least:+.3f}"
        decision = self.settle(hard, [reason], conversation, state, catalogue, score=gain)
        return replace(decision, judge_time_s=time.perf_counter() - started)


@lru_cache(maxsize=16)
def _loaded(path: Path, changed_ns: int) -> Model:
    """One copy for all routes; a file that was trained anew is read anew."""
    return load(path)
