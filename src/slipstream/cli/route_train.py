"""`slipstream route train`: a classifier for the learned policy."""

from __future__ import annotations

import json
from pathlib import Path

import click

from slipstream.cli.options import json_option
from slipstream.errors import SlipstreamError


@click.command("train")
@click.argument("outcomes", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), default=Path("route-model.json"), show_default=True)
@click.option("--strong", default=None, help="CSV: the column of the strong arm. A ledger: the strong target.")
@click.option("--fast", default=None, help="CSV: the column of the fast arm. A ledger: the fast target.")
@click.option("--share", type=click.FloatRange(0, 1), default=None, help="Share of requests that may go to strong.")
@click.option(
    "--recover", type=click.FloatRange(0, 1), default=0.5, show_default=True, help="Without --share: gain to recover."
)
@click.option("--by-group", is_flag=True, help="Set the threshold for groups that were never seen.")
@json_option
def command(
    outcomes: Path,
    out: Path,
    strong: str | None,
    fast: str | None,
    share: float | None,
    recover: float,
    by_group: bool,
    as_json: bool,
) -> None:
    """Train on OUTCOMES, of which two models were right or wrong; write a model for `policy = "learned"`.

    OUTCOMES is JSON Lines with text, strong, fast and group; a CSV file with `prompt` and a column of True or False a
    model; a folder of such files; or the ledger of a router that keeps texts: *.db, or the settings that name it.

    \b
    Examples:
      slipstream route train outcomes.jsonl
      slipstream route train mmlu --strong gpt-4 --fast mixtral --share 0.38
      slipstream route train route.db --strong big --fast small --share 0.4
    """
    from dataclasses import replace

    from slipstream.route.learned import save

    if outcomes.suffix in (".db", ".toml"):
        from slipstream.route.logged import train_logged
        from slipstream.route.summary import ledger_of

        if strong is None or fast is None:
            raise click.UsageError("a ledger needs --strong TARGET and --fast TARGET")
        model = train_logged(ledger_of(outcomes), strong, fast, share=0.4 if share is None else share)
    else:
        from slipstream.route.outcomes import read_outcomes, table
        from slipstream.route.training import train

        model = train(table(read_outcomes(outcomes, strong, fast)), recover=recover, by_group=by_group)
        if share is not None:
            model = replace(model, threshold=model.threshold_at(share))
    try:
        save(model, out)
    except OSError as error:
        raise SlipstreamError(f"cannot write {out}: {error.strerror}") from None
    at = next(point for point in model.curve if point[0] <= model.threshold)
    half = next((point for point in model.curve if point[2] >= 0.5), model.curve[-1])
    told = {
        "model": str(out),
        "threshold": model.threshold,
        "strong_share": at[1],
        "recovered": at[2],
        "share_for_half": half[1],
    }
    if as_json:
        click.echo(json.dumps(told | {"trained": dict(model.trained)}))
        return
    how = "by the model's own word" if model.trained.get("logged") else "cross-validated"
    click.echo(f"{out}: sends {at[1]:.1%} to strong, which recovers {at[2]:.1%} of its gain ({how})")
    click.echo(f"half of the gain at {half[1]:.1%}; random needs 50%")
