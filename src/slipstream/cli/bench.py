"""`slipstream bench`: a group of measurements."""

from __future__ import annotations

import click

from slipstream.cli.lazy import LazyGroup

BENCHES = {
    "decode": ("slipstream.cli.bench_decode", "Decode speed against this machine's memory floor."),
}


@click.command("bench", cls=LazyGroup, lazy=BENCHES)
def command() -> None:
    """Measure this machine against its memory floor."""
