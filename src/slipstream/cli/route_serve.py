"""`slipstream route serve`, which `slipstream route CONFIG.toml` means."""

from __future__ import annotations

from pathlib import Path

import click

from slipstream.cli.serve import LOOPBACK, need_server
from slipstream.errors import SlipstreamError

config_argument = click.argument("config", type=click.Path(path_type=Path))


def need_router() -> None:
    """Raises SlipstreamError where the packages of the router are not installed."""
    need_server()
    try:
        import httpx  # noqa: F401
    except ModuleNotFoundError:
        raise SlipstreamError("the router needs httpx; python -m pip install 'slipstream-llm[serve]'") from None


@click.command("serve")
@config_argument
@click.option("--host", default=None, help="Address to listen on; default the settings', or this machine only.")
@click.option("--port", type=click.IntRange(0, 65535), default=None, help="Default the settings', or 8100.")
@click.option(
    "--log-level", type=click.Choice(("debug", "info", "warning", "error")), default="info", show_default=True
)
def command(config: Path, host: str | None, port: int | None, log_level: str) -> None:
    """Serve the routes of CONFIG to OpenAI and Anthropic clients; a changed file is taken without a restart.

    \b
    Examples:
      slipstream route route.toml
      slipstream route serve route.toml --port 9100
    """
    need_router()
    from slipstream.route.config import load_config
    from slipstream.route.gateway import make_policies
    from slipstream.route.run import run_router

    settings = load_config(config)
    make_policies(settings)
    if host is not None and host not in LOOPBACK and not settings.keys:
        raise SlipstreamError(f"{host} can be reached by others; add [[keys]] to {config}, or leave out --host")
    at = f"http://{host or settings.server.host}:{settings.server.port if port is None else port}"
    click.echo(f"{', '.join(r.model or n for n, r in settings.routes.items())} at {at}", err=True)
    run_router(config, host, port, log_level)
