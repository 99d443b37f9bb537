"""`slipstream route top`: a router's decisions and savings, live, from its ledger."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import RenderableType


@click.command("top")
@click.argument("ledger", type=click.Path(path_type=Path), default=Path("route.db"))
@click.option("--minutes", type=click.FloatRange(0, min_open=True), default=60.0, show_default=True, help="Look back.")
@click.option("--every", type=click.FloatRange(0.1), default=1.0, show_default=True, help="Seconds between two looks.")
@click.option("--once", is_flag=True, help="Print one look and end.")
def command(ledger: Path, minutes: float, every: float, once: bool) -> None:
    """Watch a router through its LEDGER, or through the settings file that names it. Default: route.db.

    \b
    Examples:
      slipstream route top
      slipstream route top route.toml --minutes 1440 --once
    """
    from rich.console import Console
    from rich.live import Live

    from slipstream.route.summary import ledger_of, summary

    path = ledger_of(ledger)
    if once:
        Console().print(screen(summary(path, minutes)))
        return
    with Live(screen(summary(path, minutes)), screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(every)
            live.update(screen(summary(path, minutes)), refresh=True)


def screen(state: dict[str, Any]) -> RenderableType:
    """`route.summary.summary` as tables."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    head = (
        f"last {state['minutes']:g} min: {state['requests']} requests of {state['sessions']} sessions, "
        f"{state['open']} running, {state['failed']} failed; "
        f"${state['usd']:.4f}, of it judges ${state['judge_usd']:.4f}"
    )
    saved = [
        f"against all-{arm}: time {one['time_s']:+.1f} s ({one['time_share']:+.0%}), "
        f"cost {one['usd']:+.4f} USD ({one['usd_share']:+.0%}) saved"
        for arm, one in state["saved"].items()
        if one
    ]
    targets = Table("target", "tier", "requests", "share", "cost", "written", "cached", "TTFT", "time", box=None)
    for one in state["targets"]:
        targets.add_row(
            one["target"],
            one["tier"],
            str(one["requests"]),
            f"{one['share']:.0%}",
            f"${one['usd']:.4f}",
            str(one["output"]),
            f"{one['cached_share']:.0%}",
            _seconds(one["ttft_s"]),
            _seconds(one["time_s"]),
        )
    latest = Table("at", "route", "agent", "went to", "status", "time", "cost", "because", box=None)
    for one in state["latest"]:
        latest.add_row(
            time.strftime("%H:%M:%S", time.localtime(one["started"])),
            *(Text(str(one[key])) for key in ("route", "agent")),
            f"{one['target'] or '-'}/{one['tier_served'] or one['tier'] or '-'}",
            str(one["status"]),
            _seconds(one["time_s"]),
            f"${one['usd']:.6f}",
            Text(one["reason"]),  # as written, never as markup
        )
    return Group(head, *saved, "", targets, "", latest)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"
