"""`slipstream completion`: the script that teaches a shell to complete slipstream's commands and options."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """Print the shell completion script.

    \b
    Examples:
      eval "$(slipstream completion bash)"      # in ~/.bashrc
      eval "$(slipstream completion zsh)"       # in ~/.zshrc
      slipstream completion fish | source       # in ~/.config/fish/config.fish
    """
    from slipstream.cli import app

    completion = get_completion_class(shell)
    assert completion is not None
    click.echo(completion(app, {}, "slipstream", "_SLIPSTREAM_COMPLETE").source())
