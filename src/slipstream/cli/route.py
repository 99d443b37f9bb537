"""`slipstream route`: the router, and what belongs to it. `slipstream route CONFIG.toml` serves."""

from __future__ import annotations

import click

from slipstream.cli.lazy import LazyGroup

COMMANDS = {
    "serve": ("slipstream.cli.route_serve", "Serve the routes of a settings file; may be left out."),
    "check": ("slipstream.cli.route_check", "Explain a settings file's mistakes, and dry-run a request."),
    "train": ("slipstream.cli.route_train", "Train the learned policy on outcomes."),
    "eval": ("slipstream.cli.route_eval", "Replay recorded steps offline, against every arm."),
    "explain": ("slipstream.cli.route_explain", "Why a request went where it went."),
    "top": ("slipstream.cli.route_top", "Watch a router live."),
}


class RouteGroup(LazyGroup):
    """A first word that is no command is the settings file of `serve`."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self.lazy and not args[0].startswith("-"):
            args = ["serve", *args]
        return super().resolve_command(ctx, args)


@click.command("route", cls=RouteGroup, lazy=COMMANDS)
def command() -> None:
    """Send each step of an agent to the model and speed tier that its policy chooses.

    \b
    Examples:
      slipstream route route.toml
      slipstream route check route.toml
    """
