"""`slipstream bench frontier`: chart model size against single-stream speed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from slipstream.cli.plan import Parameters


class Size(click.ParamType[tuple[str, float]]):
    """A count of parameters, of one endpoint or of all: NAME=309B or 309B."""

    name = "[endpoint=]count"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, float]:
        if isinstance(value, tuple):
            return value
        endpoint, _, size = str(value).rpartition("=")
        return endpoint, Parameters().convert(size, param, ctx)


@click.command("frontier")
@click.argument("results", nargs=-1, type=click.Path(path_type=Path))
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("frontier"), show_default=True, help="Path without suffix."
)
@click.option(
    "--parameters",
    "sizes",
    type=Size(),
    multiple=True,
    help="Size of measured models that is not known: 309B, or ENDPOINT=309B for one.",
)
@click.option("--no-published", is_flag=True, help="Leave out the published points shipped with the package.")
def command(results: tuple[Path, ...], out: Path, sizes: tuple[tuple[str, float], ...], no_published: bool) -> None:
    """Draw total parameters against tok/s: PNG, SVG and an interactive page.

    RESULTS are JSON Lines files: what `slipstream bench serve --out` wrote, which becomes measured points; lines of
    `slipstream plan --json`, which become predicted ones; or points (name, parameters, tokens_per_s, source).

    \b
    Example:
      slipstream bench serve --url http://127.0.0.1:8000 --out results.jsonl
      slipstream plan naive-n05-flash --gpu b200 --tp 8 --drafts 7 --acceptance 5.8 --json >> results.jsonl
      slipstream bench frontier results.jsonl --out docs/frontier
    """
    from slipstream.bench.frontier import published, read_points, write_charts

    points = [] if no_published else published()
    for path in results:
        points += read_points(path, dict(sizes))
    for written in write_charts(points, out):
        click.echo(written)
