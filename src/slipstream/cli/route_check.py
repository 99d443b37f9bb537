"""`slipstream route check`: a settings file's mistakes with their lines, and what would become of a request."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import click

from slipstream.cli.options import json_option
from slipstream.cli.route_serve import config_argument, need_router
from slipstream.errors import SlipstreamError


@click.command("check")
@config_argument
@click.option("--request", "request_path", type=click.Path(path_type=Path), help="A request's JSON, to dry-run.")
@click.option("--route", "route_name", default=None, help="Dry-run a prompt on this route.")
@click.option("--prompt", default="Hello", show_default=True, help="What the dry run says.")
@json_option
def command(config: Path, request_path: Path | None, route_name: str | None, prompt: str, as_json: bool) -> None:
    """Explain what is wrong with CONFIG, line by line; then, asking nobody, show where a request would go.

    \b
    Examples:
      slipstream route check route.toml
      slipstream route check route.toml --request request.json
    """
    need_router()
    from slipstream.route.config import RouteConfigError, load_config
    from slipstream.route.gateway import make_policies

    try:
        settings = load_config(config)
        policies = make_policies(settings)
    except RouteConfigError as error:
        if not error.problems:
            raise
        if as_json:
            click.echo(json.dumps([vars(problem) for problem in error.problems]))
        for problem in error.problems if not as_json else ():
            click.echo(f"{config}:{problem.line}: {problem.place + ': ' if problem.place else ''}{problem.message}")
        sys.exit(1)
    lacking = [
        f"{target.key_env} of target {name} is not set"
        for name, target in settings.targets.items()
        if target.key_env and not os.environ.get(target.key_env)
    ]
    done = _dry_run(settings, policies, request_path, route_name, prompt)
    if as_json:
        click.echo(json.dumps({"warnings": lacking} | done))
        return
    click.echo(f"{config}: {len(settings.targets)} targets, {len(settings.routes)} routes, no mistakes")
    for line in lacking:
        click.echo(f"warning: {line}")
    choice, predicted = done["choice"], done["predicted"]
    click.echo(f"\nroute {done['route']} ({done['policy']}) would ask {choice['target']}/{choice['tier']}")
    for reason in done["reasons"]:
        click.echo(f"  {reason}")
    click.echo(f"  expected {predicted['time_s']:.2f} s and ${predicted['cost']:.6f}")
    for name, fields in done["not_carried"].items():
        click.echo(f"  {name} cannot be told {', '.join(fields)}")
    if done["dropped"]:
        click.echo(f"  left out: {', '.join(done['dropped'])}")


def _dry_run(
    settings: Any, policies: Any, request_path: Path | None, route_name: str | None, prompt: str
) -> dict[str, Any]:
    from slipstream.route.decision import SessionState
    from slipstream.route.gateway import Live
    from slipstream.route.step import dry_run
    from slipstream.route.wire import parse_request

    by_model = {route.model or name: name for name, route in settings.routes.items()}
    if request_path is not None:
        try:
            body = json.loads(request_path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise SlipstreamError(f"{request_path}: {error}") from None
        wire = "openai-responses" if "input" in body else "anthropic" if _anthropic(body) else "openai-chat"
    else:
        if route_name is not None and route_name not in settings.routes:
            raise SlipstreamError(f"there is no route {route_name!r}; there are {', '.join(settings.routes)}")
        model = next(m for m, name in by_model.items() if route_name in (None, name))
        body, wire = {"model": model, "messages": [{"role": "user", "content": prompt}]}, "openai-chat"
    return dry_run(Live(settings, {}, policies, by_model), parse_request(wire, body), SessionState("check"))


def _anthropic(body: dict[str, Any]) -> bool:
    """Told by what only Anthropic's API has."""
    tools = body.get("tools") or [{}]
    return "system" in body or "stop_sequences" in body or "thinking" in body or "input_schema" in tools[0]
