"""`slipstream bench decode`: how fast answers come, and what share of the memory floor that is."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import click

from slipstream.cli.options import engine_options, json_option, model_argument

if TYPE_CHECKING:
    from slipstream.bench.decode import DecodeReport
    from slipstream.bench.decode_cuda import DeviceReport
    from slipstream.bench.measure import Summary


@click.command("decode")
@model_argument
@click.option("--prompt-set", type=click.Choice(["chat", "code", "copy"]), default="chat", show_default=True)
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True, help="Answers to each prompt.")
@click.option("--max-tokens", type=click.IntRange(min=2), default=None, help="Answer length; default the prompt set's.")
@engine_options
@json_option
def command(model: str, as_json: bool, **options: Any) -> None:
    """Measure decode speed against this machine's memory floor.

    Answers a fixed set of prompts greedily. A pass over the model cannot be faster than memory delivers its weights;
    the report ends with the share of a round that this floor explains. On a GPU it also has the device's own clock and
    a line for each kernel.

    \b
    Examples:
      slipstream bench decode smollm2
      slipstream bench decode smollm2 --prompt-set copy --drafter suffix --json
    """
    from slipstream.bench.decode import measure_decode

    report = measure_decode(model, progress=lambda line: click.secho(line, dim=True, err=True), **options)
    click.echo(json.dumps(dataclasses.asdict(report)) if as_json else in_words(report))


def in_words(report: DecodeReport) -> str:
    """The report as a table for people."""

    def spread(summary: Summary, scale: float, unit: str, digits: int) -> str:
        median, p10, p90 = (f"{v * scale:.{digits}f}" for v in (summary.median, summary.p10, summary.p90))
        return f"{median} {unit}   (p10 {p10}, p90 {p90})"

    lines = [
        f"{report.model} on {report.backend}, {report.prompt_set} prompts, drafter {report.drafter}: "
        f"{report.answers} answers, {report.tokens} tokens",
        f"first token   {spread(report.ttft_s, 1e3, 'ms', 1)}",
        f"decode        {spread(report.tokens_per_s, 1, 'tok/s', 1)}",
        f"round         {spread(report.round_s, 1e3, 'ms', 2)}",
        f"              {report.tokens_per_round:.2f} tokens a round",
        f"pass          {report.weight_bytes / 1e6:.1f} MB of weights",
    ]
    if report.device:
        lines += device_in_words(report.device)
    if report.read_bytes_per_s is not None and report.floor_fraction is not None:
        floor_ms = report.weight_bytes / report.read_bytes_per_s * 1e3
        lines.append(
            f"memory floor  {floor_ms:.2f} ms at {report.read_bytes_per_s / 1e9:.1f} GB/s: "
            f"{report.floor_fraction:.0%} of a round"
        )
    return "\n".join(lines)


def device_in_words(device: DeviceReport) -> list[str]:
    """The rounds by the device's clock, and a line a kernel."""
    lines = [
        f"device        {device.tokens_per_s:.0f} tok/s; a round {device.round_us.median:.1f} us, "
        f"99 of 100 within {device.round_p99_us:.1f} us; {device.launches:.1f} launches a round"
    ]
    busy = sum(k.us for k in device.kernels)
    for k in device.kernels:
        rate = f"{k.weight_bytes / 1e6:9.1f} MB {k.bytes_per_s / 1e12:6.2f} TB/s" if k.weight_bytes else ""
        lines.append(f"  {k.name[:28]:28} {k.launches:6.1f} x {k.us:8.1f} us {k.us / busy:5.0%} {rate}".rstrip())
    return lines
