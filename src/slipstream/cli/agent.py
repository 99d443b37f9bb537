"""`slipstream bench agent`: what decode speed does to a recorded chain of calls, and an agent to record one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from slipstream.cli.replay import replay_options, report

if TYPE_CHECKING:
    from slipstream.bench.trace import Turn


@click.command("agent")
@click.argument("trace", required=False, type=click.Path(path_type=Path))
@click.option("--calls", type=int, default=48, show_default=True, help="Without TRACE: dependent calls.")
@click.option("--output", type=int, default=1000, show_default=True, help="Without TRACE: tokens written a call.")
@click.option(
    "--input", "new_tokens", type=int, default=0, show_default=True, help="Without TRACE: fresh tokens a call."
)
@click.option(
    "--tool", "tool_s", type=float, default=0.0, show_default=True, help="Without TRACE: seconds a tool runs."
)
@click.option("--record", type=click.Path(path_type=Path, dir_okay=False), help="Run an agent, write its TRACE here.")
@click.option(
    "--url", default=None, help="Server that answers TRACE for real, or --record's; then default http://127.0.0.1:8000."
)
@click.option("--model", default=None, help="With a server: the model; default the server's first.")
@click.option("--key", default=None, envvar="SLIPSTREAM_BENCH_KEY", help="With a server: API key.")
@click.option("--turns", type=click.IntRange(min=1), default=12, show_default=True, help="With --record: most calls.")
@click.option("--free", is_flag=True, help="With --record: let the model choose its tools; a small one needs guidance.")
@replay_options
def command(
    trace: Path | None,
    calls: int,
    output: int,
    new_tokens: int,
    tool_s: float,
    record: Path | None,
    url: str | None,
    model: str | None,
    key: str | None,
    turns: int,
    free: bool,
    **options: Any,
) -> None:
    """Replay an agent's trace at several decode speeds, by arithmetic, and against a real server.

    TRACE is JSON Lines, one turn a line: prompt_tokens, cached_tokens, output_tokens, tool_s. Without it, a chain of
    equal calls stands in; the default one takes 8 minutes at 100 tok/s. With --url, a server is asked turns of
    the same lengths (prompt, reused prefix, answer) and timed; tools are not waited for. With --record, a small agent
    that reads, edits and tests code in a scratch directory runs against a server first, and its own trace is replayed.

    \b
    Examples:
      slipstream bench agent
      slipstream bench agent agent.jsonl --tier 60 --tier 400@2 --tier 1500@6 --prefill 20000
      slipstream bench agent agent.jsonl --url http://127.0.0.1:8000
      slipstream bench agent --calls 30 --output 500 --input 2000 --tool 4
      slipstream bench agent --record agent.jsonl --url http://127.0.0.1:8000
    """
    from slipstream.bench.trace import read_trace, workflow

    if record is not None:
        if trace is not None:
            raise click.UsageError("give a TRACE to replay or --record to make one, not both")
        trace = _record(record, url or "http://127.0.0.1:8000", model, key, turns, guided=not free)
    chain = read_trace(trace) if trace else workflow(calls, output, new_tokens, tool_s)
    measured = _replay(chain, url, model, key, options["as_json"]) if url and record is None else None
    report(chain, **options, measured=measured)


def _replay(turns: Sequence[Turn], url: str, model: str | None, key: str | None, as_json: bool) -> dict[str, Any]:
    """Ask the server at `url`, show where the time went, and return it."""
    from slipstream.bench.endpoint import HttpEndpoint
    from slipstream.bench.trace_replay import Replayed, clock, replay_on, to_json
    from slipstream.cli.replay import duration

    endpoint = HttpEndpoint(url, model, key)

    def show(one: Replayed) -> None:
        said = (
            f"{one.done.prompt_tokens} prompt tokens, {one.done.cached_tokens} cached, {one.done.output_tokens} written"
        )
        click.secho(f"{said}: {duration(one.ttft_s)} + {duration(one.decode_s)}", dim=True, err=True)

    done = replay_on(endpoint, turns, progress=show)
    if not as_json:
        took = clock(done)
        counts = [sum(getattr(one.done, name) for one in done) for name in ("prompt_tokens", "cached_tokens")]
        asked = [sum(getattr(turn, name) for turn in turns) for name in ("prompt_tokens", "cached_tokens")]
        click.echo(
            f"{endpoint.name}, measured: {duration(took.total_s)} for {len(done)} calls: first tokens "
            f"{duration(took.prefill_s)}, decode {duration(took.decode_s)}, the trace's tools {duration(took.tool_s)}\n"
            f"prompts {counts[0]:,} tokens, {counts[1]:,} cached (the trace: {asked[0]:,}, {asked[1]:,})\n"
        )
    return to_json(done)


def _record(path: Path, url: str, model: str | None, key: str | None, turns: int, guided: bool) -> Path:
    """Run the agent against `url`, and return where its trace is. An earlier trace there is replaced."""
    from tempfile import TemporaryDirectory

    from slipstream.bench.agent_loop import http_create, run_agent
    from slipstream.bench.endpoint import HttpEndpoint
    from slipstream.bench.recorder import Recorder
    from slipstream.bench.sandbox import protections

    endpoint = HttpEndpoint(url, model, key)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with TemporaryDirectory() as scratch, Recorder(http_create(endpoint.url, key), path) as create:
        work = run_agent(
            create,
            Path(scratch),
            model=endpoint.model or "",
            turns=turns,
            guided=guided,
            progress=lambda line: click.secho(line, dim=True, err=True),
        )
    tools = ", ".join(f"{count} {name}" for name, count in work.tools.items())
    passed = "the tests pass" if work.passed else "the tests still fail"
    held = ", ".join(protections()) or "nothing"
    click.secho(f"the sandbox of the tests held: {held}", dim=True, err=True)
    click.secho(f"{work.calls} calls in {work.wall_s:.1f} s ({tools}); {passed}", dim=True, err=True)
    return path
