"""Arguments and options that several commands share, and how they become an `LLM` and `SamplingParams`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem
from click.types import StringParamType

if TYPE_CHECKING:
    from slipstream import LLM, SamplingParams

F = TypeVar("F", bound=Callable[..., Any])

SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop")
ENGINE = ("backend", "drafter", "drafts", "context", "threads", "weights")


class Model(StringParamType):
    """A model's name, a .gguf file, a checkpoint directory or a hub id; completes names and paths."""

    name = "model"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from slipstream.models.checkpoint import list_models

        names = [CompletionItem(model.name) for model in list_models() if model.name.startswith(incomplete)]
        return [*names, CompletionItem(incomplete, type="file")]


class OneOf(StringParamType):
    """A name that the shell completes and the engine checks, since the engine knows what can be loaded."""

    name = "name"

    def __init__(self, *names: str) -> None:
        self.names = names

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(name) for name in self.names if name.startswith(incomplete)]


model_argument = click.argument("model", type=Model())


def sampling_options(command: F) -> F:
    """How tokens are chosen and when an answer ends."""
    return _add(
        command,
        click.option("--max-tokens", type=int, default=512, show_default=True, help="Longest answer, in tokens."),
        click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy."),
        click.option("--top-p", type=float, default=1.0, show_default=True, help="Nucleus: the share of probability."),
        click.option("--top-k", type=int, default=0, show_default=True, help="Only the k likeliest tokens; 0 is all."),
        click.option(
            "--min-p", type=float, default=0.0, show_default=True, help="Drop tokens below this share of the likeliest."
        ),
        click.option("--seed", type=int, default=None, help="Repeat a sampled answer exactly."),
        click.option("--stop", multiple=True, help="End the answer before this text; may be repeated."),
    )


def engine_options(command: F) -> F:
    """Where and how the model runs."""
    return _add(
        command,
        click.option(
            "--drafter",
            type=OneOf("auto", "none", "suffix", "block"),
            default="auto",
            show_default=True,
            help="Who guesses ahead: none, suffix, block, auto, a block drafter's folder or a smaller model. "
            "Never changes the answer.",
        ),
        click.option("--drafts", type=int, default=7, show_default=True, help="Most tokens guessed a round."),
        click.option(
            "--backend",
            type=OneOf("auto", "cpu", "cuda", "reference"),
            default="auto",
            show_default=True,
            help="What computes: cpu, cuda, reference, or auto, the fastest that works here.",
        ),
        click.option("--threads", type=int, default=None, help="CPU threads; default one a core."),
        weights_option,
        click.option("--context", type=int, default=None, help="Longest text in tokens; default the model's own."),
    )


def weights_option(command: F) -> F:
    return click.option(
        "--weights",
        type=OneOf("auto", "bf16", "fp8", "int4", "int4-128", "mxfp4"),
        default="auto",
        show_default=True,
        help="Format of the linear layers on a GPU: auto (16 bits), bf16, fp8, int4, int4-128 or mxfp4.",
    )(command)


def json_option(command: F) -> F:
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")(command)


def sampling_params(options: Mapping[str, Any]) -> SamplingParams:
    """Raises RequestError where a value is out of range."""
    from slipstream import SamplingParams

    return SamplingParams(**{name: options[name] for name in SAMPLING})


def load(model: str, options: Mapping[str, Any]) -> LLM:
    """Load `model`, and say so where only the slow backend can run it.

    Raises SlipstreamError where the model, or any backend for it, cannot be had.
    """
    from slipstream import LLM

    llm = LLM(model, **{name: options[name] for name in ENGINE})
    if options["backend"] == "auto" and llm.backend.name == "reference":
        from slipstream.backends import why_not_native

        click.secho(f"slow reference backend: {why_not_native(llm.checkpoint)}", dim=True, err=True)
    return llm


def _add(command: F, *options: Callable[[F], F]) -> F:
    for option in reversed(options):
        command = option(command)
    return command
