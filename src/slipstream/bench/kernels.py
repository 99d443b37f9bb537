"""One kernel at a time: microseconds, bytes and FLOPs, over rotating buffers.

Each operation's `case` makes its inputs; enough cases are made that together they exceed the L2 cache, so a kernel
finds nothing of its last run there. A case's outputs are checked against its reference before it is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slipstream.errors import BackendError
from slipstream.models.spec import ModelSpec

if TYPE_CHECKING:
    from slipstream.kernels.launch import Case

ROTATED_BYTES = 256 << 20
MOST_CASES = 64
TOLERANCE = 2e-2


@dataclass(frozen=True)
class KernelTime:
    """One operation at a model's sizes: median microseconds of one launch, the bytes it must move and its FLOPs."""

    name: str
    us: float
    bytes: int
    flops: int

    @property
    def bytes_per_s(self) -> float:
        return self.bytes / self.us * 1e6


@dataclass(frozen=True)
class KernelReport:
    """The kernels of one model, and the rate at which the GPU reads memory."""

    weights: str
    read_bytes_per_s: float
    kernels: list[KernelTime]


def need_gpu(what: str) -> None:
    """Raises BackendError where there is none that PyTorch and Triton can use."""
    try:
        import torch
        import triton  # noqa: F401
    except ImportError as error:
        raise BackendError(f"{what} needs torch and triton ({error}): install the [cuda] extra") from error
    if not torch.cuda.is_available():
        raise BackendError(f"{what} needs an NVIDIA GPU that PyTorch can use")


def bench_kernels(spec: ModelSpec, weights: str = "auto", context: int = 512,
                  progress: Callable[[str], None] = lambda line: None) -> KernelReport:  # fmt: skip
    """Times of the chain's kernels for the first layer of `spec`, and of embedding and head. weights: as of `LLM`.

    Raises BackendError without a GPU, or where a kernel's outputs are wrong: no speed is reported on a failed check.
    """
    need_gpu("bench kernels")
    import torch

    from slipstream.backends.cuda.weights import check, numbers
    from slipstream.kernels import attention, embed, gate_up, head, norm_qkv, projection
    from slipstream.kernels.read import read_rate

    check(spec)
    device = torch.device("cuda")
    format, dtype = numbers(weights)
    of_head = format if format == "plain" else "fp8"
    a, inner, hidden = spec.layers[0].attention, spec.layers[0].feed_forward.inner, spec.hidden
    wide = a.heads * a.head_dim
    splits = -(-(context + 16) // 256)
    cases: dict[str, Callable[[], Case]] = {
        "embed": lambda: embed.case(hidden, spec.vocab, dtype, device),
        "norm_qkv": lambda: norm_qkv.case(hidden, a.heads, a.kv_heads, a.head_dim, dtype, device, format=format),
        "attention": lambda: attention.case(a.heads, a.kv_heads, a.head_dim, dtype, device, start=context),
        "attention_projection": lambda: projection.case(
            hidden, wide, dtype, device, splits=splits, d=a.head_dim, format=format
        ),
        "gate_up": lambda: gate_up.case(hidden, inner, dtype, device, format),
        "projection": lambda: projection.case(hidden, inner, dtype, device, format=format),
        "head": lambda: head.case(hidden, spec.vocab, dtype, device, of_head),
    }
    rate = read_rate(device)
    times = []
    for name, make in cases.items():
        progress(name)
        made = [make()]
        made += [make() for _ in range(min(MOST_CASES, ROTATED_BYTES // made[0].cost.bytes))]
        _check(name, made[0])
        times.append(KernelTime(name, _median_us(made), made[0].cost.bytes, made[0].cost.flops))
    return KernelReport(weights, rate, times)


def _check(name: str, case: Case) -> None:
    case.run()
    for output, expected in case.expected().items():
        error = float((case.outputs[output].double() - expected).norm() / expected.norm())
        if not error < TOLERANCE:  # NaN fails too
            raise BackendError(
                f"kernel {name} is wrong: relative error {error:.1e} in {output}; its time means nothing"
            )


def _median_us(cases: list[Case]) -> float:
    """Median over graph replays of one launch a case: host time and launch gaps of single kernels stay out."""
    import torch

    graph = torch.cuda.CUDAGraph()
    for case in cases:
        case.run()
    with torch.cuda.graph(graph):
        for case in cases:
            (case.timed or case.run)()
    samples: list[float] = []
    for _ in range(20):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        before.record()
        graph.replay()
        after.record()
        after.synchronize()
        samples.append(before.elapsed_time(after) * 1e3 / len(cases))
    return sorted(samples)[len(samples) // 2]
