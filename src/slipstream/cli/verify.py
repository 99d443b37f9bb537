"""`slipstream verify`: the exactness gate, as a table."""

from __future__ import annotations

import json
from typing import Any

import click

from slipstream.cli.options import OneOf, json_option, model_argument, weights_option


@click.command("verify")
@model_argument
@click.option("--backend", type=OneOf("auto", "cpu", "cuda", "reference"), default="auto", show_default=True)
@click.option(
    "--drafter", default="auto", show_default=True, help="auto: also the model's block drafter, or the folder of one."
)
@click.option("--threads", type=int, default=None, help="CPU threads; default one a core.")
@weights_option
@click.option("--quick", is_flag=True, help="Fewer prompts and modes.")
@json_option
@click.pass_context
def command(ctx: click.Context, /, model: str, as_json: bool, **options: Any) -> None:
    """Prove that speculative decoding changes nothing.

    Runs fixed prompts with and without drafters, with other draft lengths, prefill chunks and reused prefixes, and
    compares token ids bit for bit. Exits 1 on any difference.

    \b
    Examples:
      slipstream verify smollm2
      slipstream verify model.gguf --quick --json
    """
    from slipstream.bench.verify import verify

    checks = verify(model, progress=lambda line: click.secho(line, dim=True, err=True), **options)
    failed = [check for check in checks if not check.passed]
    if as_json:
        click.echo(json.dumps([{"name": c.name, "passed": c.passed, "detail": c.detail} for c in checks]))
    else:
        width = max(len(check.name) for check in checks)
        for check in checks:
            mark = click.style("ok  ", fg="green") if check.passed else click.style("FAIL", fg="red")
            click.echo(f"{mark} {check.name:{width}}  {check.detail}")
        click.echo(f"{len(checks) - len(failed)} of {len(checks)} checks passed")
    ctx.exit(1 if failed else 0)
