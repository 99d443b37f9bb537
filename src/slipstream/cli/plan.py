"""`slipstream plan`: the floor of a round on a machine, what is predicted of it, and what would move it."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import click

from slipstream.cli.options import json_option

if TYPE_CHECKING:
    from slipstream.bench.plan import Plan

_UNITS = {"": 1, "k": 2**10, "m": 2**20}


class Tokens(click.ParamType[int]):
    """A count of tokens: 2048, 128k (131,072) or 1M (1,048,576)."""

    name = "tokens"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([km]?)", str(value).strip().lower())
        if match is None:
            self.fail(f"{value!r} is no count of tokens; write 2048, 128k or 1M", param, ctx)
        return int(float(match[1]) * _UNITS[match[2]])


class Parameters(click.ParamType[int]):
    """A count of parameters: 650M, 0.65B, 1.02T."""

    name = "count"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([mbt]?)", str(value).strip().lower())
        if match is None:
            self.fail(f"{value!r} is no count of parameters; write 650M or 0.65B", param, ctx)
        return int(float(match[1]) * {"": 1, "m": 1e6, "b": 1e9, "t": 1e12}[match[2]])


@click.command("plan")
@click.argument("model", required=False)
@click.option("--gpu", default=None, help="Machine, by id, or cpu: this one, measured. Default h200; cpu for smollm2.")
@click.option("--tp", type=int, default=1, show_default=True, help="Devices that share each layer.")
@click.option("--dtype", default=None, help="Store the weights so (experts only, in a sparse model).")
@click.option("--kv-dtype", default="bf16", show_default=True, help="Store keys and values so.")
@click.option("--context", type=Tokens(), default=2048, show_default=True, help="Tokens of history: 2048, 128k, 1M.")
@click.option("--drafts", type=int, default=0, show_default=True, help="Drafts verified a round.")
@click.option("--acceptance", type=float, default=None, help="Tokens committed a round, the target's own included.")
@click.option("--drafter-params", type=Parameters(), default=0, help="Size of a draft model run each round: 0.65B.")
@click.option("--launch", default=None, help="Launch structure; default the machine's usual one.")
@click.option("--list", "list_known", is_flag=True, help="List what is known by name: models, machines, launches.")
@json_option
def command(
    model: str | None,
    gpu: str | None,
    dtype: str | None,
    launch: str | None,
    list_known: bool,
    as_json: bool,
    **setup: Any,
) -> None:
    """Count the bytes of a round and say how fast it can be.

    MODEL is a name from `slipstream plan --list`, a config.json or its directory, or a .gguf file. No weights are read.

    \b
    Examples:
      slipstream plan qwen3-30b-a3b
      slipstream plan naive-n05-flash --gpu h200 --tp 8 --dtype mxfp4 --context 128k --drafts 7 --acceptance 5.8
      slipstream plan ./my-model/config.json --gpu rtx5090 --dtype int4 --json
    """
    if list_known:
        return _print_known()
    if model is None:
        raise click.UsageError("no model; give MODEL, or --list the names known")
    from slipstream.bench.hardware import load_hardware, load_launch
    from slipstream.bench.model_costs import load_model
    from slipstream.bench.plan import Setup, plan

    costs = load_model(model)
    planned = plan(
        costs.with_dtype(dtype) if dtype else costs,
        load_hardware(gpu or ("cpu" if model == "smollm2" else "h200")),
        Setup(**setup),
        load_launch(launch) if launch else None,
    )
    if as_json:
        click.echo(json.dumps(planned.to_json()))
    else:
        _print(planned)


def _print(plan: Plan) -> None:
    from rich.console import Console, Group
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    model, hardware, setup, p = plan.model, plan.hardware, plan.setup, plan.prediction
    devices = f"{setup.tp} x {hardware.name}" if setup.tp > 1 else hardware.name
    size = f"{count(model.total_params)} parameters, {count(model.active_params)} active"
    round_is = f"{setup.rows} row{'s' if setup.drafts else ''} at {setup.context:,} tokens of context"

    parts = Table(box=None, pad_edge=False, header_style="dim")
    parts.add_column("part")
    parts.add_column("a rank reads" if setup.tp > 1 else "read", justify="right")
    parts.add_column("")
    dtypes = {
        "attention": model.dtypes.attention,
        "experts": model.dtypes.experts,
        "dense_ffn": model.dtypes.dense_ffn,
        "head": model.dtypes.head,
        "kv": setup.kv_dtype,
    }
    for part, size_bytes in sorted(plan.bytes.items(), key=lambda item: -item[1]):
        if size_bytes:
            share = size_bytes / plan.total_bytes
            bar = Text("█" * max(1, round(24 * share)), style="cyan") + Text(f" {share:.0%}", style="dim")
            label = Text(part.replace("_", " ")) + Text(f"  {dtypes.get(part, '')}", style="dim")
            parts.add_row(label, octets(size_bytes), bar)
    parts.add_row("total", octets(plan.total_bytes), Text(f"{plan.flops / 1e9:.1f} GFLOP", style="dim"), style="bold")

    times = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("", "a round", "tok/s"):
        times.add_column(name, justify="left" if not name else "right")
    times.add_row("floor", milliseconds(plan.floor_s), f"{plan.floor_tokens_per_s:,.0f}")
    efficiency = f"predicted ({plan.floor_s / p.round_s:.0%} of the floor)"
    times.add_row(efficiency, milliseconds(p.round_s), f"{plan.tokens_per_s:,.0f}", style="bold green")
    work = ("arithmetic", p.compute_s) if p.compute_s > p.read_s else ("reading", p.read_s)
    links = (f"{plan.all_reduces} all-reduces" if plan.all_reduces else "hand-over", p.communication_s)
    for name, seconds in (work, (f"{plan.kernels} kernels", p.launch_s), links):
        if seconds:
            times.add_row(f"  {name}", milliseconds(seconds), "", style="dim")

    memory = sum(plan.memory.values())
    fits = Text(f"{octets(memory)} of {octets(hardware.memory_bytes)}")
    if not plan.fits:
        enough = plan.fitting_tp()
        remedy = f"--tp {enough} does" if enough else "choose a narrower --dtype or a larger machine"
        fits += Text(f"  does not fit; {remedy}", style="bold red")
    facts = Table.grid(padding=(0, 2))
    facts.add_row(Text("limited by", style="dim"), plan.limited_by)
    facts.add_row(Text("memory a device", style="dim"), fits)
    cache = ", ".join(f"{octets(size)} {kind}" for kind, size in plan.kv_bytes_per_token.items())
    facts.add_row(Text("cache a token", style="dim"), cache)
    facts.add_row(Text("tokens a round", style="dim"), f"{setup.tokens_a_round:.2f}")

    moves = Table(box=None, pad_edge=False, show_header=False)
    for change, gain in plan.sensitivities():
        moves.add_row(Text(f"{gain:+.0%}", style="green" if gain > 0 else "red"), change)
    notes = Group(*(Text(f"- {note}", style="dim") for note in plan.assumptions()))
    sections: list[Any] = [
        parts,
        "",
        times,
        "",
        facts,
        "",
        Text("what would move tok/s", style="dim"),
        moves,
        "",
        Text("assumed", style="dim"),
        notes,
    ]
    console = Console(highlight=False)
    body = Group(Text(f"{size}; {round_is}\n", style="dim"), *sections)
    title, width = f"[bold]{model.name}[/] on {devices}", min(console.width, 100)
    console.print(Panel(body, title=title, title_align="left", border_style="dim", width=width))


def _print_known() -> None:
    from slipstream.bench.hardware import hardware_names, launch_names, load_hardware, load_launch
    from slipstream.bench.model_costs import described_models, load_model

    click.secho("models", bold=True)
    for name in described_models():
        model = load_model(name)
        click.echo(f"  {name:18} {count(model.total_params):>6} total {count(model.active_params):>6} active")
    click.secho("machines", bold=True)
    for name in hardware_names():
        machine = load_hardware(name)
        rate = f"{machine.read_bytes_per_s / 1e12:.2f} TB/s" + ("" if machine.read_measured else " assumed")
        click.echo(f"  {name:18} {octets(machine.memory_bytes):>7}  {rate:20} {machine.name} ({machine.status})")
    click.secho("launch structures", bold=True)
    for name in launch_names():
        click.echo(f"  {name:18} {load_launch(name).us_per_kernel:>5.1f} us a kernel  {load_launch(name).about}")


def octets(size: float) -> str:
    """A size in bytes with three figures: 9.81 GB."""
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            return f"{size:.3g} {unit}"
        size /= 1000
    raise AssertionError("unreachable")


def count(parameters: float) -> str:
    """A number of parameters with three figures: 30.5B."""
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if parameters >= limit:
            return f"{parameters / limit:.3g}{unit}"
    return f"{parameters:.0f}"


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"
