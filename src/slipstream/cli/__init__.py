"""The `slipstream` command: one file per command, each calls one function of the package below it.

Exit codes: 0 done, 1 a check failed, 2 bad input (one line on standard error: what, and what to do), 130 interrupted.
"""

from __future__ import annotations

import errno
import os
import sys
import warnings
from collections.abc import Sequence
from typing import NoReturn

import click

from slipstream.cli.lazy import LazyGroup
from slipstream.errors import SlipstreamError

COMMANDS = {
    "run": ("slipstream.cli.run", "Answer one prompt."),
    "chat": ("slipstream.cli.chat", "Chat in the terminal; the KV cache stays between turns."),
    "serve": ("slipstream.cli.serve", "Serve OpenAI's and Anthropic's APIs."),
    "route": ("slipstream.cli.route", "Send each step of an agent to the right model and speed tier."),
    "top": ("slipstream.cli.top", "Watch a server's streams live."),
    "tiers": ("slipstream.cli.tiers", "What a request costs and waits in each speed tier."),
    "models": ("slipstream.cli.models", "List the models that load by name, and their weights."),
    "plan": ("slipstream.cli.plan", "The floor of a model on a machine, from its config alone."),
    "bench": ("slipstream.cli.bench", "Measure this machine, or any endpoint."),
    "verify": ("slipstream.cli.verify", "Prove that speculative decoding changes nothing."),
    "train-drafter": ("slipstream.cli.train_drafter", "Train a block drafter for a model, from its own answers."),
    "eval-drafter": ("slipstream.cli.eval_drafter", "How many tokens a round a block drafter brings, by task."),
    "completion": ("slipstream.cli.completion", "Print the shell completion script."),
}


@click.command(
    cls=LazyGroup,
    lazy=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Start with `slipstream chat smollm2`. `slipstream COMMAND --help` shows a command's options and examples.",
)
@click.version_option(package_name="slipstream-llm", message="slipstream %(version)s")
def app() -> None:
    """Decode one stream of an open-weight language model as fast as memory allows."""


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command line `args` (default: the process's own) and exit."""
    warnings.formatwarning = lambda message, *_: f"slipstream: {message}\n"
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by the shell, as in `>&-`; no file may take its number
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - for the life of the process
    try:
        # Outside standalone mode click hands errors over and returns the code of an early exit (--help, ctx.exit).
        code = app.main(args, prog_name="slipstream", standalone_mode=False)
    except click.Abort:
        code = 130
    except click.ClickException as error:
        error.show()
        code = 2
    except SlipstreamError as error:
        click.echo(f"slipstream: {error}", err=True)
        code = 2
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the flush at exit complains
        code = 1  # the reader left, as in `slipstream run ... | head`
        if error.errno == errno.ENOSPC:
            click.echo("slipstream: the output cannot be written, its disk is full; make room", err=True)
            code = 2
    sys.exit(code if isinstance(code, int) else 0)
