"""`slipstream train-drafter`: a block drafter for a model of one's own, from that model's answers."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

from slipstream.cli.options import OneOf, json_option, model_argument


@click.command("train-drafter")
@model_argument
@click.option("--data", type=click.Path(path_type=Path), default=None, help="JSON Lines of prompts.")
@click.option("--own-prompts", type=click.IntRange(0), default=0, help="Prompts that the model makes up itself.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True, help="The drafter's folder.")
@click.option("--steps", type=click.IntRange(1), default=4000, show_default=True)
@click.option("--batch", type=click.IntRange(1), default=4096, show_default=True, help="Positions a step.")
@click.option("--max-tokens", type=click.IntRange(2), default=512, show_default=True, help="Of an answer.")
@click.option("--layers", type=click.IntRange(1, 64), default=3, show_default=True, help="Of the drafter.")
@click.option(
    "--draft-vocab", type=click.IntRange(16), default=16384, show_default=True, help="Tokens it guesses among."
)
@click.option(
    "--lr", type=click.FloatRange(0, min_open=True), default=2e-3, show_default=True, help="The highest learning rate."
)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--backend", type=OneOf("auto", "cpu", "cuda"), default="auto", show_default=True, help="That answers.")
@click.option(
    "--device", type=click.Choice(["cpu", "cuda"]), default=None, help="That trains; default a GPU where there is one."
)
@json_option
def command(
    model: str, data: Path | None, own_prompts: int, out: Path, max_tokens: int, backend: str, device: str | None,
    as_json: bool, steps: int, batch: int, layers: int, draft_vocab: int, lr: float, seed: int,
) -> None:  # fmt: skip
    """Train a block drafter for the dense model MODEL on its own answers to prompts: those in --data, and
    --own-prompts that it makes up itself.

    A line of --data holds `messages`, or a user's text as `prompt` or `question`. Answers and the state of training lie
    in --out; the same command goes on where it was cut off. Judge the result by `slipstream eval-drafter`.

    \b
    Examples:
      slipstream train-drafter smollm2 --data prompts.jsonl --out ./my-drafter
      slipstream train-drafter smollm2 --own-prompts 60000 --max-tokens 320 --out ./my-drafter
      torchrun --nproc-per-node 4 -m slipstream train-drafter smollm2 --data prompts.jsonl --out ./my-drafter
      slipstream eval-drafter smollm2 --drafter ./my-drafter
    """
    from slipstream.train.loop import Recipe, train_drafter

    def progress(stage: str, done: int, total: int) -> None:
        bar = "=" * (30 * done // total)
        click.secho(f"\r[{bar:30}] {done}/{total} {stage} ", dim=True, err=True, nl=done == total)

    recipe = Recipe(steps=steps, batch=batch, layers=layers, draft_vocab=draft_vocab, lr=lr, seed=seed)
    done = train_drafter(model, data, out, recipe, own=own_prompts, max_tokens=max_tokens, device=device,
                         backend=backend, progress=progress)  # fmt: skip
    if int(os.environ.get("RANK", "0")):
        return  # the first of several processes tells
    if as_json:
        told = {"out": str(out), "steps": len(done.losses), "held": done.held, "losses": done.losses}
        click.echo(json.dumps(told))
        return
    if done.held:
        click.echo(f"held-out greedy answers: {1 + sum(done.held):.2f} tokens a round")
    click.echo(f"{out}: a drafter for {model}; judge it: slipstream eval-drafter {model} --drafter {out}")
