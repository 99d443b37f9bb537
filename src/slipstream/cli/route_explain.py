"""`slipstream route explain`: why a request went where it went, and what came of it."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("explain")
@click.argument("request")
@click.option(
    "--ledger",
    type=click.Path(path_type=Path),
    default=Path("route.db"),
    show_default=True,
    help="The ledger, or the settings file that names it.",
)
def command(request: str, ledger: Path) -> None:
    """Explain REQUEST, the id that an answer carries in `x-slipstream-request`.

    \b
    Examples:
      slipstream route explain req_0123456789abcdef01234567
      slipstream route explain req_0123456789abcdef01234567 --ledger route.toml
    """
    from slipstream.route.summary import explain, ledger_of

    click.echo(explain(ledger_of(ledger), request))
