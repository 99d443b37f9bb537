"""`slipstream route eval`: what a route would have done, offline, beside all-strong, all-fast and random."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from slipstream.cli.options import json_option
from slipstream.cli.route_serve import config_argument
from slipstream.errors import SlipstreamError

if TYPE_CHECKING:
    from collections.abc import Callable

    from slipstream.route.decision import Catalogue, Choice, Policy
    from slipstream.route.replay import Run


@click.command("eval")
@config_argument
@click.option("--route", "route_name", default=None, help="Default the first.")
@click.option("--questions", type=click.Path(path_type=Path), help="Outcomes, as `slipstream route train` reads them.")
@click.option("--strong-column", default=None, help="CSV: who was right for strong.")
@click.option("--fast-column", default=None, help="CSV: who was right for fast.")
@click.option(
    "--recorded",
    type=click.Path(path_type=Path),
    help="Recorded sessions: JSON Lines, a ledger (*.db), or the settings that name it.",
)
@click.option(
    "--tasks", type=click.IntRange(2), default=None, help="So many made-up software tasks; a model, no proof."
)
@click.option(
    "--strong-right", type=(float, float), default=(0.99, 0.9), show_default=True, help="Of easy, hard steps."
)
@click.option("--fast-right", type=(float, float), default=(0.97, 0.6), show_default=True, help="The same of fast.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw quality against cost and time here (PNG or SVG).")
@json_option
def command(
    config: Path,
    route_name: str | None,
    questions: Path | None,
    strong_column: str | None,
    fast_column: str | None,
    recorded: Path | None,
    tasks: int | None,
    strong_right: tuple[float, float],
    fast_right: tuple[float, float],
    plot: Path | None,
    as_json: bool,
) -> None:
    """Replay a route's policy on questions, recorded sessions or made-up tasks; time and money by CONFIG's figures.

    Quality is measured for --questions, unknown for --recorded, assumed for --tasks. Deciding, switches and prompts
    that are read again are counted; intervals are 95% bootstraps.

    \b
    Examples:
      slipstream route eval route.toml --questions outcomes.jsonl --plot frontier.svg
      slipstream route eval route.toml --route agent --recorded route.db
      slipstream route eval route.toml --route agent --tasks 300
    """
    given = [one for one in (questions, recorded, tasks) if one is not None]
    if len(given) != 1:
        raise click.UsageError("give one of --questions, --recorded and --tasks")
    from slipstream.route.config import load_config
    from slipstream.route.policies import make_policy
    from slipstream.route.replay import ask_once, compare, read_recording, replay, with_plain_arms

    settings = load_config(config)
    name = route_name or next(iter(settings.routes))
    if name not in settings.routes:
        raise SlipstreamError(f"there is no route {name!r}; there are {', '.join(settings.routes)}")
    route = settings.routes[name]
    if route.strong is None or route.fast is None:
        raise SlipstreamError(f'route {name} names no arms; set strong and fast, such as strong = "big/default"')
    strong, fast = settings.choice(route.strong), settings.choice(route.fast)
    if strong.target == fast.target:
        raise SlipstreamError(f"route {name}: strong and fast are both {strong.target}; eval compares two targets")
    catalogue = settings.catalogue(route)

    if questions is not None:
        from slipstream.route.outcomes import read_outcomes

        outcomes = read_outcomes(questions, strong_column, fast_column)

        def play(policy: Policy) -> list[Run]:
            return ask_once(policy, outcomes, catalogue, strong, fast)
    elif recorded is not None:
        from slipstream.route.logged import recorded as logged
        from slipstream.route.summary import ledger_of

        kept = recorded.suffix in (".db", ".toml")
        sessions = logged(ledger_of(recorded), name) if kept else read_recording(recorded)

        def play(policy: Policy) -> list[Run]:
            return [replay(policy, steps, catalogue, f"session {i}") for i, steps in enumerate(sessions)]
    else:
        made_up = _tasks(tasks or 2, {strong: strong_right, fast: fast_right}, catalogue)

        def play(policy: Policy) -> list[Run]:
            return made_up(policy)

    arms = compare(with_plain_arms(play, make_policy(route.policy, route.options), strong, fast), strong.target)
    if plot is not None:
        from slipstream.route.plots import frontiers

        frontiers(arms, plot, f"route {name}: {len(arms)} arms, {arms[0].sessions} sessions")
    if as_json:
        click.echo(json.dumps({"route": name, "arms": [_known(asdict(arm)) for arm in arms]}))
        return
    click.echo(
        f"{'arm':14} {'right':>6} {'time':>9} {'cost':>10} {'strong':>7} {'steps':>6} {'moves':>6}  "
        "saved against all-strong"
    )
    for arm in arms:
        right = "?" if arm.right != arm.right else f"{arm.right:.1%}"
        click.echo(
            f"{arm.arm:14} {right:>6} {arm.time_s:7.2f} s ${arm.usd:9.6f} {arm.strong_share:7.0%} {arm.steps:6.1f} "
            f"{arm.switches:6.1f}  time {arm.time_saved}, cost {arm.usd_saved}"
        )
    note = "measured" if questions is not None else "unknown" if recorded is not None else "assumed"
    click.echo(f"{arms[0].sessions} sessions, figures of one; right: {note}; time and cost: modelled by {config}")


def _tasks(count: int, right: dict[Choice, tuple[float, float]], catalogue: Catalogue) -> Callable[[Policy], list[Run]]:
    from slipstream.route.simulate import Task, World

    for pair in right.values():
        if not all(0 <= chance <= 1 for chance in pair):
            raise click.UsageError("chances of being right lie between 0 and 1")
    world = World({choice.target: pair for choice, pair in right.items()})
    return lambda policy: [Task(world, seed, policy, catalogue).play() for seed in range(count)]


def _known(value: object) -> object:
    """NaN is no JSON: what is unknown is null."""
    if isinstance(value, dict):
        return {key: _known(one) for key, one in value.items()}
    return None if isinstance(value, float) and value != value else value
