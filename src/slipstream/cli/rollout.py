"""`slipstream bench rollout`: what decode speed does to one long training trajectory."""

from __future__ import annotations

from typing import Any

import click

from slipstream.cli.replay import replay_options, report


@click.command("rollout")
@click.option("--tokens", type=int, default=1_000_000, show_default=True, help="Tokens of the whole trajectory.")
@click.option("--generated", type=float, default=0.3, show_default=True, help="Share of them that the model writes.")
@click.option("--turns", type=int, default=100, show_default=True, help="Calls in the trajectory.")
@click.option("--tool", "tool_s", type=float, default=0.8, show_default=True, help="Seconds each tool call runs.")
@click.option("--no-cache", is_flag=True, help="Prefill the whole history every turn.")
@replay_options
def command(tokens: int, generated: float, turns: int, tool_s: float, no_cache: bool, **options: Any) -> None:
    """Time a long tool-using trajectory at several decode speeds, by arithmetic.

    \b
    Examples:
      slipstream bench rollout
      slipstream bench rollout --generated 0.2 --tier 100 --tier 2000
      slipstream bench rollout --no-cache
    """
    from slipstream.bench.trace import trajectory

    report(trajectory(tokens, generated, turns, tool_s, cached=not no_cache), **options)
