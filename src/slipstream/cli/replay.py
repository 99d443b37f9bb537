"""What `slipstream bench agent` and `bench rollout` share: tiers on the command line, and the table of a replay."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar

import click

from slipstream.cli.options import json_option

if TYPE_CHECKING:
    from slipstream.bench.trace import Turn

F = TypeVar("F", bound=Callable[..., Any])


class TierOption(click.ParamType[tuple[float, float]]):
    """tok/s, optionally with the price multiplier of the tier: 100 or 2000@6."""

    name = "tok/s[@x]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, float]:
        if isinstance(value, tuple):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(?:@(\d+(?:\.\d+)?))?", str(value))
        if match is None or float(match[1]) == 0:
            self.fail(f"{value!r} is no tier; write tok/s and its price multiplier, as in 100 or 2000@6", param, ctx)
        return float(match[1]), float(match[2] or 1)


def replay_options(command: F) -> F:
    """How fast calls are answered, and at what price."""
    for option in (
        json_option,
        click.option(
            "--price",
            type=(float, float, float),
            default=(1.0, 0.1, 4.0),
            show_default=True,
            help="List price, USD a million tokens: fresh input, cached input, output.",
        ),
        click.option(
            "--hour",
            "usd_per_hour",
            type=click.FloatRange(min=0),
            default=30.0,
            show_default=True,
            help="What an hour less of waiting is worth, USD: sets the price multiple that the task bears.",
        ),
        click.option(
            "--call", "call_s", type=float, default=0.0, show_default=True, help="Seconds of each TTFT besides prefill."
        ),
        click.option("--prefill", type=float, default=10_000.0, show_default=True, help="Prefill rate, tok/s."),
        click.option(
            "--tier",
            "tiers",
            type=TierOption(),
            multiple=True,
            default=((100.0, 1.0), (1000.0, 3.0), (2000.0, 6.0)),
            help="Decode rate and price multiplier; may be repeated. Default 100@1, 1000@3, 2000@6.",
        ),
    ):
        command = option(command)
    return command


def report(
    turns: Sequence[Turn],
    tiers: Sequence[tuple[float, float]],
    prefill: float,
    call_s: float,
    price: tuple[float, float, float],
    usd_per_hour: float,
    as_json: bool,
    measured: dict[str, Any] | None = None,
) -> None:
    """Replay `turns` at each tier and print where time and money go. Raises TraceError for impossible figures.

    measured: what a real endpoint took for them, for the JSON document.
    """
    from slipstream.bench.trace import Price, Speed, Tier, compare_tiers, useful_decode_rate

    rows = compare_tiers(turns, [Tier(*tier) for tier in tiers], Price(*price), prefill, call_s, usd_per_hour)
    useful = useful_decode_rate(turns, Speed(tiers[0][0], prefill, call_s))
    if as_json:
        document: dict[str, Any] = {
            "turns": len(turns),
            "output_tokens": sum(t.output_tokens for t in turns),
            "prefilled_tokens": sum(t.prompt_tokens - t.cached_tokens for t in turns),
            "cached_tokens": sum(t.cached_tokens for t in turns),
            "useful_decode_tokens_per_s": useful if useful < float("inf") else None,
            "tiers": [
                asdict(row.tier)
                | asdict(row.clock)
                | {"total_s": row.clock.total_s, "limit": row.clock.limit, "decode_share": row.clock.decode_share}
                | {"usd": row.usd, "usd_per_hour_saved": row.usd_per_hour_saved, "bears": row.bears, "pays": row.pays}
                for row in rows
            ],
        }
        if measured:
            document["measured"] = measured
        click.echo(json.dumps(document))
        return

    from rich.console import Console
    from rich.table import Table

    parts = {"decode": "decode_s", "prefill": "prefill_s", "calls": "call_s", "tools": "tool_s"}
    shown = {name: key for name, key in parts.items() if any(getattr(row.clock, key) for row in rows)}
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for name in ("tok/s", "price", *shown, "total", "limit", "cost", "$/h saved", "bears"):
        table.add_column(name, justify="left" if name == "limit" else "right", no_wrap=True)
    for row in rows:
        clock, saved = row.clock, row.usd_per_hour_saved
        table.add_row(
            f"{row.tier.decode_tokens_per_s:,.0f}",
            f"{row.tier.multiplier:g}x",
            *(duration(getattr(clock, key)) for key in shown.values()),
            f"[bold]{duration(clock.total_s)}[/]",
            (f"decode {clock.decode_share:.0%}" if clock.limit == "decode" else clock.limit)
            + ("" if row.pays else ", price"),
            f"${row.usd:,.2f}",
            f"{saved:,.2f}" if saved is not None else "",
            f"{row.bears:.3g}x" if row.bears is not None else "",
        )
    console = Console(highlight=False)
    console.print(table)
    if useful < float("inf"):
        console.print(f"[dim]Beyond {useful:,.0f} tok/s more than half of the time is not decoding.[/]")


def duration(seconds: float) -> str:
    """A time people read at a glance: 9.6s, 1m36s, 2h05m."""
    if seconds < 59.5:
        return f"{seconds:.3g}s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest:02}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02}m"
