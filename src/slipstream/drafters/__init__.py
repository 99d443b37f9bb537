"""Drafters by name. A drafter changes how fast text comes, never which text."""

from __future__ import annotations

from collections.abc import Callable

from slipstream.drafters.base import Drafter
from slipstream.drafters.none import NoDrafter
from slipstream.drafters.suffix import Memory, SuffixDrafter
from slipstream.errors import RequestError

__all__ = ["DRAFTERS", "Drafter", "Memory", "make_drafter"]

DRAFTERS = ("auto", "none", "suffix")


def make_drafter(
    name: str = "auto", *, cost: Callable[[int], float] | None = None, memory: Memory | None = None
) -> Drafter:
    """A drafter for one stream.

    cost: time of a round of n rows over that of one row. memory: earlier texts, shared by the streams of a model.
    Raises RequestError for an unknown name.
    """
    if name == "none":
        return NoDrafter()
    if name in ("auto", "suffix"):
        return SuffixDrafter(cost=cost, memory=memory)
    raise RequestError(f"no drafter {name!r}; known are {', '.join(DRAFTERS)}")
