"""`slipstream run`: answer one prompt, streaming, then say how fast it was."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from slipstream.cli.options import engine_options, json_option, load, model_argument, sampling_options, sampling_params
from slipstream.cli.text import printable, read_stdin, speed_line
from slipstream.errors import RequestError

if TYPE_CHECKING:
    from slipstream import LLM, Chunk, Completion, SamplingParams


@click.command("run")
@model_argument
@click.argument("prompt", required=False)
@click.option("--system", default=None, help="System message of the chat template.")
@click.option("--raw", is_flag=True, help="Continue the prompt as it is, without the chat template.")
@sampling_options
@engine_options
@json_option
def command(model: str, prompt: str | None, system: str | None, raw: bool, as_json: bool, **options: Any) -> None:
    """Answer one prompt.

    MODEL is a name from `slipstream models`, a .gguf file, a directory with config.json and safetensors, or a hub id.
    PROMPT is read from standard input where it is `-` or left out. The answer goes to standard output, the speed line
    to standard error.

    \b
    Examples:
      slipstream run smollm2 "Name three uses of a paper clip."
      slipstream run smollm2 "Write a haiku." --temperature 0.8 --seed 7
      cat notes.txt | slipstream run smollm2 --system "Summarise the text."
      slipstream run smollm2 "def fibonacci(n):" --raw --stop "def " --json
    """
    answer_once(model, prompt, system=system, raw=raw, as_json=as_json, **options)


def answer_once(
    model: str, prompt: str | None, *, system: str | None, raw: bool, as_json: bool, **options: Any
) -> None:
    """Load, answer, print. Raises SlipstreamError where the input or the model is unusable."""
    params = sampling_params(options)  # checked before a model is loaded
    if prompt is None or prompt == "-":
        if sys.stdin.isatty():
            raise click.UsageError("no prompt; give PROMPT, or pipe it in on standard input")
        prompt = read_stdin()
    if not prompt.strip():
        raise RequestError("the prompt is empty; give some text to answer")
    if raw and system is not None:
        raise click.UsageError("--system needs the chat template, which --raw leaves out; drop one of them")

    llm = load(model, options)
    completion: Completion | None = None
    for chunk in _stream(llm, prompt, system, raw, params):
        if not as_json:
            click.echo(printable(chunk.text) if sys.stdout.isatty() else chunk.text, nl=False)
        completion = chunk.completion
    assert completion is not None  # the last chunk of a stream carries it
    if as_json:
        click.echo(json.dumps(as_object(completion, model=model, backend=llm.backend.name), ensure_ascii=False))
    else:
        click.echo()
        click.secho(speed_line(completion), dim=True, err=True)


def as_object(completion: Completion, *, model: str, backend: str) -> dict[str, Any]:
    """The `--json` object."""
    timing, speculation = completion.timing, completion.speculation
    return {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "usage": {
            "prompt_tokens": completion.prompt_tokens,
            "completion_tokens": completion.completion_tokens,
        },
        "timing": {
            "load_s": timing.load_s,
            "ttft_s": timing.ttft_s,
            "decode_s": timing.decode_s,
            "tokens_per_s": timing.tokens_per_s,
        },
        "speculation": {
            "drafter": speculation.drafter,
            "rounds": speculation.rounds,
            "drafted": speculation.drafted,
            "accepted": speculation.accepted,
            "tokens_per_round": speculation.tokens_per_round,
        },
        "model": model,
        "backend": backend,
    }


def _stream(llm: LLM, prompt: str, system: str | None, raw: bool, params: SamplingParams) -> Iterator[Chunk]:
    """A chat turn where the model has a chat template, a plain continuation where it has none."""
    if raw or not llm.has_chat_template:
        if system is not None:
            raise RequestError("this model has no chat template to put --system in; write it into the prompt")
        return llm.stream(prompt, params)
    messages = [{"role": "system", "content": system}] if system is not None else []
    return llm.stream_chat([*messages, {"role": "user", "content": prompt}], params)
