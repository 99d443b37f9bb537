"""`slipstream serve`: a model behind OpenAI's and Anthropic's HTTP APIs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from slipstream.cli.options import engine_options, load, model_argument
from slipstream.errors import SlipstreamError

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@click.command("serve")
@model_argument
@click.option("--host", default=None, help="Address to listen on; default 127.0.0.1, this machine only.")
@click.option("--port", type=click.IntRange(0, 65535), default=None, help="Default 8000.")
@click.option("--config", "config_path", type=click.Path(path_type=Path), help="Settings in TOML: tiers, keys, limits.")
@click.option(
    "--api-key", envvar="SLIPSTREAM_API_KEY", default=None, help="Ask for this key; rather in SLIPSTREAM_API_KEY."
)
@click.option("--model-name", default=None, help="What clients call the model; default its own name.")
@click.option("--session-dir", type=click.Path(path_type=Path), default=None, help="Keep sessions here over restarts.")
@click.option("--session-memory", type=click.IntRange(1), default=None, help="MB of KV caches kept; default 4096.")
@click.option(
    "--log-level", type=click.Choice(("debug", "info", "warning", "error")), default="info", show_default=True
)
@engine_options
def command(
    model: str,
    config_path: Path | None,
    api_key: str | None,
    log_level: str,
    host: str | None,
    port: int | None,
    model_name: str | None,
    session_dir: Path | None,
    session_memory: int | None,
    **options: Any,
) -> None:
    """Serve MODEL to OpenAI and Anthropic clients.

    Point a client at http://127.0.0.1:8000/v1 (OpenAI) or http://127.0.0.1:8000 (Anthropic); the page there is a chat.
    docs/server.md tells of tiers, keys and agents.

    \b
    Examples:
      slipstream serve smollm2
      slipstream serve smollm2 --port 9000 --session-dir ~/.cache/slipstream/sessions
      slipstream serve smollm2 --host 0.0.0.0 --config serve.toml
    """
    need_server()
    from slipstream.serve.auth import hash_key
    from slipstream.serve.config import Key, load_config
    from slipstream.serve.run import run_server

    config = load_config(
        config_path,
        host=host,
        port=port,
        model_name=model_name,
        drafter=options["drafter"],
        session_dir=session_dir,
        session_memory_mb=session_memory,
    )
    if api_key:
        key = Key(name="command-line", hash=hash_key(api_key))
        config = config.model_copy(update={"keys": (*config.keys, key)})
    if config.host not in LOOPBACK and not config.keys:
        raise SlipstreamError(
            f"{config.host} can be reached by others; set --api-key or keys in --config, or leave out --host"
        )
    llm = load(model, options)
    click.echo(f"{model} on {llm.backend.name} at http://{config.host}:{config.port}", err=True)
    run_server(llm, config, log_level)


def need_server() -> None:
    """Raises SlipstreamError where the packages of the server are not installed."""
    try:
        import fastapi  # noqa: F401
        import llguidance  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ModuleNotFoundError as error:
        python = Path(sys.executable).name
        raise SlipstreamError(
            f"the server needs {error.name}; {python} -m pip install 'slipstream-llm[serve]'"
        ) from None
