"""`slipstream bench frontier`: chart model size against single-stream speed."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("frontier")
@click.argument("results", nargs=-1, type=click.Path(path_type=Path))
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("frontier"), show_default=True, help="Path without suffix."
)
@click.option("--no-published", is_flag=True, help="Leave out the published points shipped with the package.")
def command(results: tuple[Path, ...], out: Path, no_published: bool) -> None:
    """Draw total parameters against tok/s: PNG, SVG and an interactive page.

    RESULTS are JSON Lines files. A line is a point (name, parameters, tokens_per_s, source; kind is measured unless
    given) or what `slipstream plan --json` prints, which becomes a predicted point.

    \b
    Example:
      slipstream plan naive-n05-flash --gpu b200 --tp 8 --drafts 7 --acceptance 5.8 --json >> results.jsonl
      slipstream bench frontier results.jsonl --out docs/frontier
    """
    from slipstream.bench.frontier import published, read_points, write_charts

    points = [] if no_published else published()
    for path in results:
        points += read_points(path)
    for written in write_charts(points, out):
        click.echo(written)
