"""Machines and launch structures, as data: rates with their sources, from `bench/data/hardware.toml` and `launch.toml`.

It knows nothing about models. Adding a machine touches the TOML file alone.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from typing import Any

from slipstream.bench.model_costs import PlanError, same_name

ASSUMED_READ_SHARE = 4.35 / 4.8
"""Share of the peak rate that reads reach where nobody measured: what an H200 reaches."""

THIS_CPU = "cpu"


@dataclass(frozen=True)
class Hardware:
    """One kind of device. Rates in bytes and FLOPs a second; `flops` dense bf16; `link_bytes_per_s` one direction.

    domain: how many devices one fast link joins; 1 is a device alone, without a link.
    launch, moe_launch: how dense models and mixtures of experts run on it where nothing else is asked for.
    pipeline: several devices hold a model layer after layer, so adding them adds capacity, not read rate.
    status: measured, specification or announced.
    """

    id: str
    name: str
    memory_bytes: float
    peak_bytes_per_s: float
    read_bytes_per_s: float
    flops: float
    domain: int
    link_bytes_per_s: float
    all_reduce_s: float
    launch: str
    moe_launch: str
    pipeline: bool
    read_measured: bool
    status: str
    source: str


@dataclass(frozen=True)
class Launch:
    """How a pass is launched: see `launch.toml` for the model behind the numbers.

    bandwidth_share, flops_share: what is left of the read rate and of the peak arithmetic. unpack_share: what is left
    of the former for weights of a dtype that is slow to unpack. us_per_row: what each row after the first adds to a
    kernel.
    """

    id: str
    about: str
    us_per_kernel: float
    bandwidth_share: float
    source: str
    us_per_row: float = 0.0
    flops_share: float = 1.0
    unpack_share: Mapping[str, float] = field(default_factory=dict)


@cache
def _table(name: str) -> Mapping[str, Mapping[str, Any]]:
    return tomllib.loads((files("slipstream.bench") / f"data/{name}.toml").read_text(encoding="utf-8"))


def hardware_names() -> list[str]:
    return list(_table("hardware"))


def launch_names() -> list[str]:
    return [name for name in _table("launch") if name != "kernels"]


def load_hardware(name: str) -> Hardware:
    """A machine by its id; `cpu` is this one, measured now. Raises PlanError with the ids there are."""
    if name == THIS_CPU:
        return this_cpu()
    key = same_name(name, hardware_names())
    if key is None:
        raise PlanError(f"unknown machine {name!r}; choose {THIS_CPU} (this one) or {', '.join(hardware_names())}")
    entry = _table("hardware")[key]
    peak = entry["peak_tb_s"] * 1e12
    return Hardware(
        id=key,
        name=entry["name"],
        memory_bytes=entry["memory_gb"] * 1e9,
        peak_bytes_per_s=peak,
        read_bytes_per_s=entry["read_tb_s"] * 1e12 if "read_tb_s" in entry else peak * ASSUMED_READ_SHARE,
        flops=entry["tflops"] * 1e12,
        domain=entry["domain"],
        link_bytes_per_s=entry.get("link_gb_s", 0) * 1e9,
        all_reduce_s=entry.get("all_reduce_us", 0) * 1e-6,
        launch=entry.get("launch", "graph-pdl"),
        moe_launch=entry.get("launch", "graph-pdl-moe"),
        pipeline=entry.get("pipeline", False),
        read_measured="read_tb_s" in entry,
        status=entry["status"],
        source=entry["source"],
    )


def this_cpu() -> Hardware:
    """This machine: its read rate measured now (half a second), its arithmetic as the Zen 4 of the table."""
    from slipstream.bench.machine import cores, cpu_model, memory_bytes, read_bandwidth

    like = load_hardware("cpu-zen4")
    rate = read_bandwidth(cores())
    return replace(
        like,
        id=THIS_CPU,
        name=f"{cores()} cores of {cpu_model()}",
        memory_bytes=memory_bytes(),
        peak_bytes_per_s=rate,
        read_bytes_per_s=rate,
        flops=like.flops / 2 * cores(),
        source=f"read rate measured now with {cores()} threads; arithmetic assumed as fast a core as {like.name}",
    )


def load_launch(name: str) -> Launch:
    """A launch structure by its id. Raises PlanError with the ids there are."""
    if name not in launch_names():
        raise PlanError(f"unknown launch structure {name!r}; choose one of {', '.join(launch_names())}")
    return Launch(id=name, **_table("launch")[name])


def kernel_counts() -> Mapping[str, int]:
    """Kernels a layer half takes, by kind."""
    counts: Mapping[str, int] = _table("launch")["kernels"]
    return counts
