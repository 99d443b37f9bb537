"""`slipstream tiers explain`: what a request costs and waits in each speed tier."""

from __future__ import annotations

import json
import os
import urllib.request
from pathlib import Path
from typing import Any

import click

from slipstream.cli.options import json_option
from slipstream.cli.serve import need_server
from slipstream.errors import SlipstreamError

url_option = click.option("--url", default=None, help="A running server, such as http://127.0.0.1:8000.")


@click.group("tiers")
def command() -> None:
    """Speed tiers and their prices."""


@command.command("explain")
@click.option("--config", "config_path", type=click.Path(path_type=Path), help="Settings of a server, in TOML.")
@url_option
@click.option(
    "--input", "prompt_tokens", type=click.IntRange(0), default=10_000, show_default=True, help="Prompt tokens."
)
@click.option("--cached", type=click.IntRange(0), default=0, show_default=True, help="Of them reused from a session.")
@click.option(
    "--output", "completion_tokens", type=click.IntRange(0), default=1000, show_default=True, help="Tokens written."
)
@json_option
def explain(
    config_path: Path | None, url: str | None, prompt_tokens: int, cached: int, completion_tokens: int, as_json: bool
) -> None:
    """Say what a request would cost in each tier, and with --url how long it would wait there now.

    \b
    Examples:
      slipstream tiers explain --input 20000 --cached 18000 --output 500
      slipstream tiers explain --url http://127.0.0.1:8000
    """
    if cached > prompt_tokens:
        raise click.UsageError("--cached is part of --input and cannot be larger")
    asked = {"prompt_tokens": prompt_tokens, "cached_tokens": cached, "completion_tokens": completion_tokens}
    if url:
        if config_path:
            raise click.UsageError("--url asks a server that has its own settings; leave out --config")
        answer = ask_server(url, "/v1/slipstream/tiers", asked)
    else:
        need_server()
        from dataclasses import asdict

        from slipstream.serve import tiers
        from slipstream.serve.config import load_config

        config = load_config(config_path)
        quotes = tiers.explain(config, prompt_tokens, cached, completion_tokens)
        answer = {"auto": config.auto, "tiers": [asdict(quote) for quote in quotes]}
    if as_json:
        click.echo(json.dumps(answer))
        return
    click.echo(f"{'tier':12} {'cost':>12}  {'streams':>7}  {'running':>7}  {'waiting':>7}  {'wait':>8}")
    for quote in answer["tiers"]:
        name = quote["tier"] + (" *" if quote["tier"] == answer["auto"] else "")
        wait = f"{quote['wait_s']:.1f} s" if url else "-"
        click.echo(
            f"{name:12} ${quote['cost_usd']:>11.6f}  {quote['streams']:>7}  {quote['running']:>7}  "
            f"{quote['waiting']:>7}  {wait:>8}"
        )
    click.echo("* serves requests that name no tier. A tier further up gets every round before those below.")


def ask_server(url: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """The JSON that a server answers, with the key in SLIPSTREAM_API_KEY. Raises SlipstreamError where it does not."""
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("SLIPSTREAM_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    if not url.startswith(("http://", "https://")):
        raise SlipstreamError(f"{url!r} is no http:// or https:// address")
    data = json.dumps(body).encode() if body is not None else None
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url.rstrip("/") + path, data, headers), timeout=10
        ) as answer:
            return json.load(answer)
    except (OSError, ValueError) as error:
        raise SlipstreamError(f"{url} does not answer: {error}; is it a running `slipstream serve`?") from None
