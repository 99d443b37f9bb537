"""`slipstream models`: what loads by name, and where its weights lie."""

from __future__ import annotations

import json

import click

from slipstream.cli.options import json_option


@click.command("models")
@json_option
def command(as_json: bool) -> None:
    """List the models that load by name, and where their weights are.

    Besides a name, every command takes a .gguf file, a directory with config.json and safetensors, or a hub id
    such as HuggingFaceTB/SmolLM2-135M-Instruct, which is downloaded.
    """
    from slipstream.models.checkpoint import list_models

    models = list_models()
    if as_json:
        click.echo(json.dumps([model._asdict() for model in models], default=str))
        return
    for model in models:
        click.echo(f"{model.name}  {model.path or 'not on this machine; ' + model.remedy}")
    click.echo("Other models load by path (.gguf, or a directory with config.json) or by hub id.")
