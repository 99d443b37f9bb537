"""`slipstream bench agent`: what decode speed does to a recorded chain of calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from slipstream.cli.replay import replay_options, report


@click.command("agent")
@click.argument("trace", required=False, type=click.Path(path_type=Path))
@click.option("--calls", type=int, default=48, show_default=True, help="Without TRACE: dependent calls.")
@click.option("--output", type=int, default=1000, show_default=True, help="Without TRACE: tokens written a call.")
@click.option(
    "--input", "new_tokens", type=int, default=0, show_default=True, help="Without TRACE: fresh tokens a call."
)
@click.option(
    "--tool", "tool_s", type=float, default=0.0, show_default=True, help="Without TRACE: seconds a tool runs."
)
@replay_options
def command(trace: Path | None, calls: int, output: int, new_tokens: int, tool_s: float, **options: Any) -> None:
    """Replay an agent's trace at several decode speeds, by arithmetic.

    TRACE is JSON Lines, one turn a line: prompt_tokens, cached_tokens, output_tokens, tool_s. Without it, a chain of
    equal calls stands in; the default one takes 8 minutes at 100 tok/s.

    \b
    Examples:
      slipstream bench agent
      slipstream bench agent agent.jsonl --tier 60 --tier 400@2 --tier 1500@6 --prefill 20000
      slipstream bench agent --calls 30 --output 500 --input 2000 --tool 4
    """
    from slipstream.bench.trace import read_trace, workflow

    report(read_trace(trace) if trace else workflow(calls, output, new_tokens, tool_s), **options)
