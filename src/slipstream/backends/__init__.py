"""Backends: who runs the passes. `open_backend` picks one; nothing above this folder knows how they differ."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.errors import BackendError

if TYPE_CHECKING:
    from slipstream.backends.base import Backend
    from slipstream.models.checkpoint import Checkpoint

BACKENDS = ("cpu", "cuda", "reference")


def open_backend(checkpoint: Checkpoint, name: str = "auto", threads: int | None = None) -> Backend:
    """The model on a backend, weights loaded.

    name: "cpu" (native kernels), "cuda" (Triton and captured graphs), "reference" (plain PyTorch), or "auto": cpu where
    it was built and fits the model, else reference. threads: CPU threads, None is one a core.
    Raises BackendError naming what is missing.
    """
    if name == "auto":
        name = "reference" if why_not_native(checkpoint) else "cpu"
    if name == "cpu":
        from slipstream.backends.cpu.backend import CpuBackend

        return CpuBackend(checkpoint.spec, checkpoint.tensors, threads)
    if name == "reference":
        from slipstream.backends.reference import ReferenceBackend

        return ReferenceBackend(checkpoint, threads=threads)
    raise BackendError(f"unknown backend {name!r}: one of auto, {', '.join(BACKENDS)}")


def why_not_native(checkpoint: Checkpoint) -> str | None:
    """Why `auto` would not choose the native CPU kernels for this model, or None."""
    from slipstream.backends.cpu.backend import unsupported
    from slipstream.backends.cpu.library import library

    try:
        library()
    except BackendError as error:
        return str(error)
    return unsupported(checkpoint.spec, checkpoint.tensors)
