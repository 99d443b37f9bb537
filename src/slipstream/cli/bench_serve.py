"""`slipstream bench serve`: what one stream of any OpenAI-compatible endpoint is worth, measured at the socket."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from slipstream.cli.options import json_option

if TYPE_CHECKING:
    from collections.abc import Callable

    from slipstream.bench.endpoint import Endpoint, Tokenizer
    from slipstream.bench.endpoint_questions import Plan
    from slipstream.bench.endpoint_run import Sample
    from slipstream.bench.endpoint_summary import Comparison, Summary

EACH = "; once for all, or once for each --url"


@click.command("serve")
@click.option("--url", "urls", multiple=True, required=True, help="Endpoint, or engine:MODEL for the engine itself.")
@click.option("--model", "models", multiple=True, help=f"Model; default the server's first{EACH}.")
@click.option("--key", "keys", multiple=True, envvar="SLIPSTREAM_BENCH_KEY", help=f"API key; never written{EACH}.")
@click.option("--tier", "tiers", multiple=True, help=f"Service tier to ask for{EACH}.")
@click.option("--name", "names", multiple=True, help="Name in tables, once for each --url.")
@click.option(
    "--tokenizer",
    "tokenizers",
    multiple=True,
    help=f"Model or tokenizer.json that checks counts; default the local model of that name{EACH}.",
)
@click.option(
    "--count-locally", is_flag=True, help="Let --tokenizer count where a server sends no usage; noted as such."
)
@click.option(
    "--prompt-set",
    "question_set",
    type=click.Choice(["mixed", "chat", "code", "copy"]),
    default="mixed",
    show_default=True,
)
@click.option("--requests", type=click.IntRange(min=1), default=10, show_default=True, help="Answers of each kind.")
@click.option(
    "--warmup", type=click.IntRange(min=1), default=2, show_default=True, help="Answers before, not measured."
)
@click.option(
    "--stops",
    type=click.Choice(["natural", "forced", "both"]),
    default="both",
    show_default=True,
    help="Answers end where the model ends them, or at --max-tokens exactly.",
)
@click.option("--max-tokens", type=click.IntRange(min=2), default=None, help="Answer length; default the prompt set's.")
@click.option("--temperature", type=click.FloatRange(min=0), default=0.0, show_default=True, help="0 is greedy.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the questions and of sampling.")
@click.option("--body", default="{}", help="More of the request as JSON: '{\"top_k\": 20}'; null removes a field.")
@click.option(
    "--price", type=(float, float, float), default=None, help="USD a million tokens: fresh input, cached input, output."
)
@click.option(
    "--timeout", type=click.FloatRange(min=0, min_open=True), default=120.0, show_default=True, help="Seconds."
)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write every answer as JSON Lines.")
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), help="Write a report with plots.")
@json_option
def command(
    urls: tuple[str, ...],
    models: tuple[str, ...],
    keys: tuple[str, ...],
    tiers: tuple[str, ...],
    names: tuple[str, ...],
    tokenizers: tuple[str, ...],
    count_locally: bool,
    stops: str,
    body: str,
    price: tuple[float, float, float] | None,
    timeout: float,
    out: Path | None,
    html: Path | None,
    as_json: bool,
    **plan: Any,
) -> None:
    """Measure one stream of any OpenAI-compatible endpoint: TTFT, TPOT, tok/s, gaps.

    Every chunk is stamped at the socket, before it is parsed. Several --url are asked in turns and compared with the
    first. A rate is refused where the server's usage is missing or contradictory.

    \b
    Examples:
      slipstream bench serve --url http://127.0.0.1:8000 --tokenizer smollm2
      slipstream bench serve --url http://127.0.0.1:8000 --url engine:smollm2 --html report.html
      slipstream bench serve --url https://api.example.com/v1 --model m --key "$KEY" --tier priority --out m.jsonl
    """
    from slipstream.bench.endpoint_questions import Plan
    from slipstream.bench.endpoint_run import header, measure
    from slipstream.bench.endpoint_summary import compare, summarize
    from slipstream.bench.trace import Price

    columns = [
        _each(values, len(urls), flag)
        for flag, values in (("--model", models), ("--key", keys), ("--tier", tiers), ("--tokenizer", tokenizers))
    ]
    named = names or ("",) * len(urls)
    if len(named) != len(urls):
        raise click.UsageError(f"give --name once for each --url: {len(urls)} times, not {len(names)}")
    if html is not None:
        from slipstream.bench.report import require_matplotlib

        require_matplotlib()
    asked = Plan(stops=("natural", "forced") if stops == "both" else (stops,), **plan)  # type: ignore[arg-type]
    more = _json_object(body)
    endpoints = [
        _open(url, name, model, key, tier, tokenizer, count_locally, more, timeout)
        for url, name, model, key, tier, tokenizer in zip(urls, named, *columns, strict=True)
    ]
    with _writer(out) as write, _bar(asked, len(endpoints)) as advance:

        def note(sample: Sample) -> None:
            write(sample.to_json())
            advance(sample)

        write(header(endpoints, asked))
        run = measure(endpoints, asked, note)
        summaries, ratios = summarize(run, Price(*price) if price else None), compare(run)
        parts = [part.to_json() for part in summaries] + [part.to_json() for part in ratios]
        for part in parts:
            write(part)
    if html is not None:
        from slipstream.bench.report import write_report

        write_report(html, run, summaries, ratios)
    if as_json:
        for part in parts:
            click.echo(json.dumps(part))
    else:
        show(summaries, ratios)


def _each(values: Sequence[str], count: int, flag: str) -> Sequence[str | None]:
    """One value an endpoint."""
    if len(values) not in (0, 1, count):
        raise click.UsageError(f"give {flag} once, or once for each --url: {count} times, not {len(values)}")
    return values if len(values) == count else [values[0] if values else None] * count


def _json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise click.UsageError(f"--body is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise click.UsageError('--body must be a JSON object, such as {"top_k": 20}')
    return found


def _open(
    url: str,
    name: str,
    model: str | None,
    key: str | None,
    tier: str | None,
    tokenizer: str | None,
    count_locally: bool,
    body: dict[str, Any],
    timeout_s: float,
) -> Endpoint:
    from slipstream.bench.endpoint import HttpEndpoint
    from slipstream.bench.endpoint_engine import SCHEME, open_engine
    from slipstream.bench.model_costs import known_parameters

    if url.startswith(SCHEME):
        engine = open_engine(url)
        engine.name = name or engine.name
        return engine
    checks = _tokenizer(tokenizer) if tokenizer else None
    endpoint = HttpEndpoint(url, model, key, tier, body, timeout_s, name, checks, count_locally)
    if checks is None:
        endpoint.tokenizer = _own_tokenizer(endpoint.model)
    endpoint.parameters = known_parameters(endpoint.model or "")
    return endpoint


def _tokenizer(name: str) -> Tokenizer:
    """Of a model by name or path, a directory with tokenizer.json, or that file."""
    from slipstream.models.checkpoint import load_checkpoint
    from slipstream.models.tokenizer import load_tokenizer

    path = Path(name)
    folder = path.parent if path.name == "tokenizer.json" else path
    return load_tokenizer(folder) if (folder / "tokenizer.json").is_file() else load_checkpoint(name).tokenizer


def _own_tokenizer(model: str | None) -> Tokenizer | None:
    """Of the model of that name on this machine, if there is one."""
    from slipstream.errors import SlipstreamError
    from slipstream.models.checkpoint import list_models, load_checkpoint

    if model not in {known.name for known in list_models()}:
        return None
    try:
        return load_checkpoint(model or "").tokenizer
    except SlipstreamError:
        return None  # it is here in part, or of a kind that cannot be read


@contextmanager
def _writer(path: Path | None) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Writes lines as they come, so that an interrupted run keeps its answers."""
    if path is None:
        yield lambda line: None
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file: TextIO = path.open("w", encoding="utf-8")
    except OSError as error:
        raise click.UsageError(f"cannot write {path}: {error.strerror}") from None
    with file:

        def write(line: dict[str, Any]) -> None:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
            file.flush()

        yield write


@contextmanager
def _bar(plan: Plan, endpoints: int) -> Iterator[Callable[[Sample], None]]:
    """A progress bar on standard error: questions done, and the last answer's rate."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    total = endpoints * (plan.warmup + plan.requests * len(plan.stops))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("measuring", total=total)

        def advance(sample: Sample) -> None:
            rate = sample.figures.decode_tokens_per_s if sample.figures else None
            said = f"{rate:,.0f} tok/s" if rate else "failed" if sample.error else "no rate"
            progress.update(task, advance=1, description=f"{sample.endpoint}: {said}")

        yield advance


def show(summaries: Sequence[Summary], ratios: Sequence[Comparison]) -> None:
    """Print everything for people."""
    from rich.console import Console
    from rich.table import Table

    from slipstream.bench.report_tables import HEADINGS, complaints, facts, ratio_lines, title, value_rows

    console = Console(highlight=False, markup=False)
    for summary in summaries:
        table = Table(box=None, pad_edge=True, padding=(0, 2, 0, 0), header_style="dim")
        for heading in HEADINGS:
            table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
        for row in value_rows(summary):
            table.add_row(*row)
        console.print(title(summary), style="bold", soft_wrap=True)
        console.print(table)
        for lines, style in ((facts(summary), ""), (complaints(summary), "red"), (summary.notes, "yellow")):
            for line in lines:
                console.print(f" {line}", style=style, soft_wrap=True)
        console.print()
    for ratio in ratios:
        console.print(title(ratio), style="bold", soft_wrap=True)
        for line in ratio_lines(ratio):
            console.print(f"  {line}")
        console.print()
