"""Backends: who runs the passes. `open_backend` picks one; nothing above this folder knows how they differ."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.errors import BackendError

if TYPE_CHECKING:
    from slipstream.backends.base import Backend
    from slipstream.models.checkpoint import Checkpoint

BACKENDS = ("cpu", "cuda", "reference")


def open_backend(checkpoint: Checkpoint, name: str = "auto", threads: int | None = None,
                 weights: str = "auto") -> Backend:  # fmt: skip
    """The model on a backend, weights loaded.

    name: "cpu" (native kernels), "cuda" (one NVIDIA GPU), "reference" (plain PyTorch), or "auto": cuda for a dense
    model where there is a GPU with PyTorch and Triton, else cpu where it was built and fits the model, else reference.
    threads: CPU threads, None is one a core. weights: their format on a GPU; the others run a file as it is. Raises
    BackendError naming what is missing.
    """
    if name == "auto":
        on_gpu = checkpoint.spec.dense and _gpu_ready()
        why = None if on_gpu else why_not_native(checkpoint)
        if why and not find_spec("torch"):
            raise BackendError(f"{why}; the reference backend needs PyTorch: pip install 'slipstream-llm[torch]'")
        name = "cuda" if on_gpu else "reference" if why else "cpu"
    if name == "cuda":
        if not all(map(find_spec, ("torch", "triton"))):
            raise BackendError("the cuda backend needs PyTorch and Triton; run: pip install 'slipstream-llm[cuda]'")
        from slipstream.backends.cuda.backend import CudaBackend

        return CudaBackend(checkpoint.spec, checkpoint.tensors, format=weights)
    if weights != "auto" and name in BACKENDS:
        raise BackendError(f"the {name} backend runs weights as the file has them; --weights is for the cuda backend")
    if name == "cpu":
        from slipstream.backends.cpu.backend import CpuBackend

        return CpuBackend(checkpoint.spec, checkpoint.tensors, threads)
    if name == "reference":
        from slipstream.backends.reference import ReferenceBackend

        return ReferenceBackend(checkpoint, threads=threads)
    raise BackendError(f"unknown backend {name!r}: one of auto, {', '.join(BACKENDS)}")


def _gpu_ready() -> bool:
    """Told by the driver's device file, so that a machine without a GPU never waits for `import torch`."""
    return Path("/dev/nvidia0").exists() and all(map(find_spec, ("torch", "triton")))


def why_not_native(checkpoint: Checkpoint) -> str | None:
    """Why `auto` would not choose the native CPU kernels for this model, or None."""
    from slipstream.backends.cpu.library import library
    from slipstream.backends.cpu.loading import unsupported

    try:
        library()
    except BackendError as error:
        return str(error)
    return unsupported(checkpoint.spec, checkpoint.tensors)
