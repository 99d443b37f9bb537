"""What speed does to a chain of calls: a trace of an agent's turns, replayed by arithmetic.

A trace is JSON Lines, one turn a line, in order:

    {"prompt_tokens": 9500, "cached_tokens": 9000, "output_tokens": 420, "tool_s": 1.8}

`cached_tokens` of the prompt need no prefill; `tool_s` passes between this answer and the next call. Turns depend on
each other, so times add up. It knows nothing about models or servers: a `Speed` stands for whatever answers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from slipstream.errors import SlipstreamError


class TraceError(SlipstreamError):
    """A trace that cannot be read, or figures that make no sense."""


@dataclass(frozen=True)
class Turn:
    """One call and the tool it leads to. Raises TraceError for negative or contradictory counts."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    tool_s: float = 0.0

    def __post_init__(self) -> None:
        if min(self.prompt_tokens, self.cached_tokens, self.output_tokens) < 0 or not 0 <= self.tool_s < float("inf"):
            raise TraceError(f"a turn has negative or endless parts: {self}")
        if self.cached_tokens > self.prompt_tokens:
            raise TraceError(f"a turn has {self.cached_tokens} cached tokens in a prompt of {self.prompt_tokens}")


@dataclass(frozen=True)
class Speed:
    """How fast calls are answered. call_s: what every call costs besides tokens (network, queue, scheduling)."""

    decode_tokens_per_s: float
    prefill_tokens_per_s: float = 10_000
    call_s: float = 0.0

    def __post_init__(self) -> None:
        if min(self.decode_tokens_per_s, self.prefill_tokens_per_s) <= 0 or self.call_s < 0:
            raise TraceError(f"rates must be positive and time a call not negative: {self}")


@dataclass(frozen=True)
class Price:
    """US dollars a million tokens."""

    input: float
    cached: float
    output: float

    def of(self, turns: Iterable[Turn], multiplier: float = 1.0) -> float:
        """What `turns` cost in dollars at a tier of `multiplier` times this price."""
        per_turn = (
            (t.prompt_tokens - t.cached_tokens) * self.input
            + t.cached_tokens * self.cached
            + t.output_tokens * self.output
            for t in turns
        )
        return multiplier * sum(per_turn) / 1e6


@dataclass(frozen=True)
class Clock:
    """Where the time of a replay goes, in seconds."""

    decode_s: float
    prefill_s: float
    call_s: float
    tool_s: float

    @property
    def total_s(self) -> float:
        return self.decode_s + self.prefill_s + self.call_s + self.tool_s

    @property
    def decode_share(self) -> float:
        return self.decode_s / self.total_s if self.total_s else 0.0

    @property
    def limit(self) -> str:
        """What takes longest: decode, prefill, calls or tools."""
        parts = {"decode": self.decode_s, "prefill": self.prefill_s, "calls": self.call_s, "tools": self.tool_s}
        return max(parts, key=lambda part: parts[part])


def replay(turns: Sequence[Turn], speed: Speed) -> Clock:
    """The time `turns` take one after another at `speed`."""
    return Clock(
        decode_s=sum(t.output_tokens for t in turns) / speed.decode_tokens_per_s,
        prefill_s=sum(t.prompt_tokens - t.cached_tokens for t in turns) / speed.prefill_tokens_per_s,
        call_s=len(turns) * speed.call_s,
        tool_s=sum(t.tool_s for t in turns),
    )


def useful_decode_rate(turns: Sequence[Turn], speed: Speed) -> float:
    """The decode rate in tok/s at which decoding takes half of the time; beyond it, everything else is the limit."""
    clock = replay(turns, speed)
    others_s = clock.total_s - clock.decode_s
    return sum(t.output_tokens for t in turns) / others_s if others_s else float("inf")


@dataclass(frozen=True)
class Tier:
    """A speed for sale: decode rate in tok/s at `multiplier` times the list price."""

    decode_tokens_per_s: float
    multiplier: float = 1.0


@dataclass(frozen=True)
class Comparison:
    """A trace at one tier. usd_per_hour_saved: extra dollars for each hour less than at the first tier; None there.

    A faster tier pays when an hour of waiting (people, machines, a training run) is worth more than that. bears: the
    multiple of the list price at which tier and first tier cost the same, waiting included.
    """

    tier: Tier
    clock: Clock
    usd: float
    usd_per_hour_saved: float | None
    bears: float | None = None

    @property
    def pays(self) -> bool:
        return self.bears is None or self.tier.multiplier <= self.bears


def compare_tiers(
    turns: Sequence[Turn],
    tiers: Sequence[Tier],
    price: Price,
    prefill_tokens_per_s: float,
    call_s: float,
    usd_per_hour: float = 0.0,
) -> list[Comparison]:
    """Replay `turns` at each tier and set time against money, relative to the first.

    usd_per_hour: what an hour less of waiting is worth.
    """
    list_usd = price.of(turns)
    rows: list[Comparison] = []
    for tier in tiers:
        clock = replay(turns, Speed(tier.decode_tokens_per_s, prefill_tokens_per_s, call_s))
        usd = price.of(turns, tier.multiplier)
        saved_s = rows[0].clock.total_s - clock.total_s if rows else 0.0
        each_hour = (usd - rows[0].usd) / saved_s * 3600 if saved_s > 0 else None
        bears = (rows[0].usd + usd_per_hour * saved_s / 3600) / list_usd if rows and list_usd else None
        rows.append(Comparison(tier, clock, usd, each_hour, bears))
    return rows


def workflow(calls: int = 48, output_tokens: int = 1000, new_tokens: int = 0, tool_s: float = 0.0) -> list[Turn]:
    """`calls` dependent calls, each writing `output_tokens` after `new_tokens` of fresh prompt.

    The default is a published example: calls of 10 s (1,000 tokens at 100 tok/s) that add up to 8 minutes.
    """
    return trajectory(calls * (output_tokens + new_tokens), output_tokens / (output_tokens + new_tokens), calls, tool_s)


def trajectory(
    tokens: int = 1_000_000, generated: float = 0.3, turns: int = 100, tool_s: float = 0.8, cached: bool = True
) -> list[Turn]:
    """One long tool-using trajectory: `tokens` in all, the share `generated` of them written by the model.

    Every turn resends the whole history; what was sent or written before is cached unless `cached` is false.
    """
    if not 0 < generated <= 1:
        raise TraceError(f"the generated share must be in (0, 1], got {generated:g}")
    if turns < 1 or tokens < turns:
        raise TraceError(f"{tokens} tokens cannot fill {turns} turns")
    edges = [tokens * i // turns for i in range(turns + 1)]
    made: list[Turn] = []
    for start, end in pairwise(edges):
        output = round((end - start) * generated)
        made.append(Turn(end - output, start if cached else 0, output, tool_s))
    return made


def read_trace(path: Path) -> list[Turn]:
    """The turns in a JSON Lines file. Raises TraceError naming the line that is wrong; other keys are ignored."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"cannot read the trace {path}: {error}") from None
    turns: list[Turn] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            turns.append(
                Turn(
                    prompt_tokens=int(row["prompt_tokens"]),
                    cached_tokens=int(row.get("cached_tokens", 0)),
                    output_tokens=int(row["output_tokens"]),
                    tool_s=float(row.get("tool_s", 0.0)),
                )
            )
        except KeyError as error:
            raise TraceError(f"{path}:{number}: a turn lacks {error}") from None
        except (TypeError, ValueError, AttributeError) as error:
            raise TraceError(f"{path}:{number}: not a turn: {error}") from None
        except TraceError as error:
            raise TraceError(f"{path}:{number}: {error}") from None
    if not turns:
        raise TraceError(f"the trace {path} holds no turns")
    return turns


def write_trace(path: Path, turns: Iterable[Turn]) -> None:
    path.write_text("".join(json.dumps(asdict(turn)) + "\n" for turn in turns), encoding="utf-8")
