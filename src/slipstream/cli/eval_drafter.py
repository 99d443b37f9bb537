"""`slipstream eval-drafter`: how many tokens a round a block drafter brings, by task."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from slipstream.cli.options import OneOf, json_option, model_argument

if TYPE_CHECKING:
    from slipstream.bench.drafter_eval import Acceptance


@click.command("eval-drafter")
@model_argument
@click.option(
    "--drafter", default="block", show_default=True, help="Its folder; block is the one that ships for the model."
)
@click.option("--tasks", default="chat,code,copy,math", show_default=True, help="Which tasks, comma-separated.")
@click.option(
    "--temperature", "temperatures", type=float, multiple=True, default=(0.0, 0.8), show_default=True,
    help="May be repeated.",
)  # fmt: skip
@click.option("--drafts", type=click.IntRange(1, 15), default=7, show_default=True, help="Guesses verified a round.")
@click.option("--backend", type=OneOf("auto", "cpu", "cuda"), default="auto", show_default=True)
@click.option("--threads", type=int, default=None, help="CPU threads; default one a core.")
@json_option
def command(model: str, tasks: str, as_json: bool, **options: Any) -> None:
    """Judge a block drafter by task: the tokens a round brings if every guess is verified.

    Answers held-out prompts, and prints the acceptance length with its 95% interval, the length that the drafter's own
    confidence promised, and the share of guesses that held at each place of a block, all before them being right.

    \b
    Examples:
      slipstream eval-drafter smollm2
      slipstream eval-drafter smollm2 --drafter ./my-drafter --tasks chat,code --temperature 0 --json
    """
    from slipstream.bench.drafter_eval import evaluate_drafter

    done = evaluate_drafter(
        model,
        tasks=[task.strip() for task in tasks.split(",")],  # type: ignore[misc]  # checked there
        progress=lambda line: click.secho(line, dim=True, err=True),
        **options,
    )
    click.echo(json.dumps([asdict(row) for row in done]) if as_json else in_words(done))


def in_words(rows: list[Acceptance]) -> str:
    """The figures as a table for people."""
    lines = ["task  temperature  tokens a round (95%)   promised  rounds  held by place"]
    for row in rows:
        held = " ".join(f"{share:.2f}" for share in row.held)
        length = f"{row.tokens_per_round:.2f} ({row.low:.2f}-{row.high:.2f})"
        lines.append(f"{row.task:5} {row.temperature:11g}  {length:21}  {row.promised:8.2f}  {row.rounds:6}  {held}")
    return "\n".join(lines)
