"""`slipstream top`: a server's streams, live."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from slipstream.cli.tiers import ask_server

if TYPE_CHECKING:
    from rich.console import RenderableType


@click.command("top")
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="A running server.")
@click.option("--every", type=click.FloatRange(0.1), default=0.5, show_default=True, help="Seconds between two looks.")
@click.option("--once", is_flag=True, help="Print one look and end.")
def command(url: str, every: float, once: bool) -> None:
    """Watch the streams of a server: tiers, tokens, speed, acceptance.

    \b
    Examples:
      slipstream top
      slipstream top --url http://127.0.0.1:9000 --once
    """
    from rich.console import Console
    from rich.live import Live

    if once:
        Console().print(screen(ask_server(url, "/v1/slipstream/streams")))
        return
    with Live(screen(ask_server(url, "/v1/slipstream/streams")), screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(every)
            live.update(screen(ask_server(url, "/v1/slipstream/streams")), refresh=True)


def screen(state: dict[str, Any]) -> RenderableType:
    """What `/v1/slipstream/streams` tells, as tables."""
    from rich.console import Group
    from rich.table import Table

    sessions = state["sessions"]
    tiers = Table("tier", "running", "waiting", box=None)
    for name, load in state["tiers"].items():
        tiers.add_row(name, str(load["running"]), str(load["waiting"]))
    streams = Table("stream", "tier", "state", "prompt", "cached", "tokens", "tok/s", "tok/round", "accepted", box=None)
    for stream in state["streams"]:
        rounds, drafted = stream["rounds"], stream["drafted"]
        streams.add_row(
            str(stream["id"]),
            stream["tier"],
            stream["state"],
            str(stream["prompt_tokens"]),
            str(stream["cached_tokens"]),
            str(stream["tokens"]),
            f"{stream['tokens_per_s']:.0f}",
            f"{stream['tokens'] / rounds:.2f}" if rounds else "-",
            f"{stream['accepted'] / drafted:.0%}" if drafted else "-",
        )
    total = sum(stream["tokens_per_s"] for stream in state["streams"])
    head = (
        f"{state['model']} on {state['backend']}   {total:.0f} tok/s   "
        f"{sessions['busy']} busy and {sessions['idle']} idle sessions, {sessions['kv_bytes'] >> 20} MB of KV cache"
    )
    return Group(head, "", tiers, "", streams)
