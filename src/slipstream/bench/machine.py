"""What a measurement was made on: the machine, its memory's read rate, and the software."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import numpy as np

READ_BYTES = 512 * 2**20
"""Far more than any cache holds, so that every pass comes from memory."""


@cache
def read_bandwidth(threads: int, passes: int = 7) -> float:
    """Bytes a second that `threads` threads read from memory: the best of several passes over a large buffer.

    This is the floor that decode is held to: the rate of a program that only reads, with numpy's vectorised OR, which
    keeps up with memory where sums do not.
    """
    buffer = np.ones(READ_BYTES // 8, np.uint64)
    parts = np.array_split(buffer, threads)
    fastest = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(passes):
            start = time.perf_counter()
            list(pool.map(np.bitwise_or.reduce, parts))
            fastest = max(fastest, READ_BYTES / (time.perf_counter() - start))
    return fastest


def describe_machine() -> dict[str, str | int]:
    """The processor, its cores as this process may use them, and the memory in bytes."""
    return {"cpu": cpu_model(), "cores": cores(), "memory_bytes": memory_bytes(), "system": platform.system()}


def cores() -> int:
    """How many cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_model() -> str:
    """The processor's name as the system gives it, with the instruction sets that matter to the kernels."""
    cpuinfo = Path("/proc/cpuinfo")
    fields: dict[str, str] = {}
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value.strip())
    elif platform.system() == "Darwin":
        asked = subprocess.run(["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True)
        fields["model name"] = asked.stdout.strip()
    name = fields.get("model name") or platform.processor() or platform.machine()
    flags = fields.get("flags", fields.get("Features", "")).split()
    known = {"avx2": "AVX2", "avx512f": "AVX-512", "avx512_vnni": "VNNI", "asimddp": "dot product"}
    extensions = [label for flag, label in known.items() if flag in flags]
    return f"{name} ({', '.join(extensions)})" if extensions else name


def memory_bytes() -> int:
    """Physical memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0


def versions(*packages: str) -> dict[str, str]:
    """The versions of Python and of those `packages` that are installed."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def git_commit(folder: Path) -> str:
    """The commit that `folder` stands at, marked where its files differ from it; empty outside a repository."""
    asked = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    return asked.stdout.strip()
