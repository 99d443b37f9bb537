"""Drafters by name. A drafter changes how fast text comes, never which text."""

from __future__ import annotations

from slipstream.drafters.base import Cost, Drafter
from slipstream.drafters.block import BlockDrafter, Record
from slipstream.drafters.none import NoDrafter
from slipstream.drafters.suffix import Memory, SuffixDrafter
from slipstream.errors import RequestError

__all__ = ["DRAFTERS", "Cost", "Drafter", "Memory", "Record", "make_drafter"]

DRAFTERS = ("auto", "none", "suffix", "block")


def make_drafter(
    name: str = "auto", *, cost: Cost | None = None, memory: Memory | None = None, record: Record | None = None
) -> Drafter:
    """A drafter for one stream.

    cost: what rounds and drafts take on this machine. memory: earlier texts, shared by the streams of a model.
    record: how well its block drafter did; None where none is loaded, and then `auto` is `suffix`.
    Raises RequestError for an unknown name, and for `block` without one.
    """
    if name == "none":
        return NoDrafter()
    suffix = SuffixDrafter(cost=cost, memory=memory)
    if name == "suffix" or (name == "auto" and (record is None or cost is None)):
        return suffix
    if name not in DRAFTERS:
        raise RequestError(f"no drafter {name!r}; known are {', '.join(DRAFTERS)}, or the folder of a block drafter")
    if record is None or cost is None:
        raise RequestError("no block drafter is loaded; open the model with drafter='auto', 'block' or its folder")
    return BlockDrafter(cost, record, suffix if name == "auto" else None)
