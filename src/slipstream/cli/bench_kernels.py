"""`slipstream bench kernels`: one GPU kernel at a time, at the sizes of a model."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

import click

from slipstream.cli.options import json_option, model_argument, weights_option

if TYPE_CHECKING:
    from slipstream.bench.kernels import KernelReport


@click.command("kernels")
@model_argument
@weights_option
@click.option("--context", type=click.IntRange(min=0), default=512, show_default=True, help="Tokens before the rows.")
@json_option
def command(model: str, weights: str, context: int, as_json: bool) -> None:
    """Time the GPU's kernels one at a time at MODEL's sizes, on random numbers.

    Inputs rotate through more memory than the L2 cache holds. Each kernel is checked against its reference first.

    \b
    Examples:
      slipstream bench kernels smollm2
      slipstream bench kernels model.gguf --weights int4 --json
    """
    from slipstream.bench.kernels import bench_kernels, need_gpu
    from slipstream.models.checkpoint import load_checkpoint

    need_gpu("bench kernels")
    spec = load_checkpoint(model).spec
    report = bench_kernels(spec, weights, context, progress=lambda line: click.secho(line, dim=True, err=True))
    click.echo(json.dumps(dataclasses.asdict(report)) if as_json else in_words(model, report))


def in_words(model: str, report: KernelReport) -> str:
    """The report as a table for people."""
    rate = report.read_bytes_per_s
    lines = [f"{model}, {report.weights} weights; memory reads {rate / 1e12:.2f} TB/s", ""]
    for k in report.kernels:
        lines.append(
            f"{k.name:20} {k.us:8.1f} us {k.bytes / 1e6:9.1f} MB {k.bytes_per_s / 1e12:6.2f} TB/s "
            f"{k.bytes_per_s / rate:5.0%}"
        )
    return "\n".join(lines)
