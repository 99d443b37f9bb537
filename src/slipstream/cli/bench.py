"""`slipstream bench`: a group of measurements."""

from __future__ import annotations

import click

from slipstream.cli.lazy import LazyGroup

BENCHES = {
    "decode": ("slipstream.cli.bench_decode", "Decode speed against this machine's memory floor."),
    "kernels": ("slipstream.cli.bench_kernels", "One GPU kernel at a time: us, bytes, TB/s."),
    "serve": ("slipstream.cli.bench_serve", "Speed of one stream of any OpenAI-compatible endpoint."),
    "frontier": ("slipstream.cli.frontier", "Chart model size against single-stream speed."),
    "agent": ("slipstream.cli.agent", "What decode speed does to an agent's chain of calls."),
    "rollout": ("slipstream.cli.rollout", "What decode speed does to a long training trajectory."),
}


@click.command("bench", cls=LazyGroup, lazy=BENCHES)
def command() -> None:
    """Measure this machine, or any endpoint."""
