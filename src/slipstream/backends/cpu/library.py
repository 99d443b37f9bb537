"""The native library behind the CPU backend: finding it, and the C signatures of csrc/api.cpp."""

from __future__ import annotations

import ctypes as c
from functools import cache
from pathlib import Path

from slipstream.errors import BackendError

FORMATS = (
    "F32",
    "F16",
    "BF16",
    "Q8_0",
    "Q4_0",
    "Q4_1",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "MXFP4",
    "F8_E4M3",
)  # csrc/weights.h: Format


class LayerShape(c.Structure):
    """csrc/model.h: LayerShape. Numbers of heads, channels, positions and experts; window 0 is the whole history."""

    _fields_ = (
        *((n, c.c_int32) for n in ("heads", "kv_heads", "head_dim", "value_dim", "window", "rotary_pairs", "inner")),
        *((n, c.c_int32) for n in ("experts", "expert_inner", "top_k", "groups", "top_groups")),
        *((n, c.c_int32) for n in ("sigmoid", "normalise", "clamped")),
        *((n, c.c_float) for n in ("softmax_scale", "rope_scale", "value_scale", "routed_scale", "alpha", "limit")),
    )


class DrafterShape(c.Structure):
    """csrc/drafter.h: DrafterShape."""

    _fields_ = (
        *((n, c.c_int32) for n in ("hidden", "rows", "taps", "draft_vocab", "rank", "candidates", "coarse")),
        ("eps", c.c_float),
    )


_SIGNATURES: dict[str, tuple[object, tuple[object, ...]]] = {
    "slip_isa": (c.c_char_p, (c.c_int,)),
    "slip_model_new": (
        c.c_void_p,
        (
            c.c_int,
            c.c_int,
            c.c_float,
            c.c_int,
            c.c_int,
            c.POINTER(LayerShape),
            c.POINTER(c.POINTER(c.c_float)),
            c.c_int,
            c.c_int,
        ),
    ),
    "slip_model_free": (None, (c.c_void_p,)),
    "slip_drafter_new": (
        c.c_void_p,
        (
            c.c_void_p,
            c.POINTER(DrafterShape),
            c.c_void_p,
            c.c_void_p,
            c.c_int,
            c.POINTER(LayerShape),
            c.POINTER(c.c_float),
        ),
    ),
    "slip_drafter_ready": (c.c_int, (c.c_void_p,)),
    "slip_drafter_free": (None, (c.c_void_p,)),
    "slip_draft": (
        c.c_int,
        (
            c.c_void_p,
            c.c_void_p,
            c.c_int,
            c.c_double,
            c.c_uint64,
            c.c_void_p,
            c.c_void_p,
            c.c_void_p,
            c.c_void_p,
        ),
    ),
    "slip_vector": (c.c_int, (c.c_void_p, c.c_int, c.c_char_p, c.c_void_p, c.c_int)),
    "slip_matrix": (c.c_int, (c.c_void_p, c.c_int, c.c_char_p, c.c_int, c.c_int, c.c_int)),
    "slip_matrix_rows": (c.c_int, (c.c_void_p, c.c_int, c.c_char_p, c.c_int, c.c_int, c.c_void_p)),
    "slip_matrix_row": (c.c_int, (c.c_void_p, c.c_int, c.c_char_p, c.c_int, c.c_void_p)),
    "slip_cache_new": (c.c_void_p, (c.c_void_p, c.c_int)),
    "slip_cache_free": (None, (c.c_void_p,)),
    "slip_cache_length": (c.c_int, (c.c_void_p,)),
    "slip_cache_can_rewind": (c.c_int, (c.c_void_p, c.c_int)),
    "slip_cache_rewind": (None, (c.c_void_p, c.c_int)),
    "slip_cache_state_bytes": (c.c_size_t, (c.c_void_p, c.c_void_p)),
    "slip_cache_export": (None, (c.c_void_p, c.c_void_p, c.c_void_p)),
    "slip_cache_import": (c.c_int, (c.c_void_p, c.c_void_p, c.c_void_p, c.c_size_t)),
    "slip_prefill": (c.c_int, (c.c_void_p, c.c_void_p, c.c_void_p, c.c_int)),
    "slip_verify": (c.c_int, (c.c_void_p, c.c_void_p, c.c_void_p, c.c_int, c.c_void_p)),
    "slip_sample": (
        c.c_int,
        (c.c_void_p, c.c_void_p, c.c_int, c.c_double, c.c_int, c.c_double, c.c_double, c.c_uint64, c.c_uint64),
    ),
}


def library_path() -> Path | None:
    """Where the compiled library lies, or None where the package was installed without one."""
    import slipstream.backends.cpu as package

    for folder in package.__path__:  # an editable install keeps the library beside site-packages, not beside the source
        for suffix in ("so", "dylib"):
            path = Path(folder) / f"_slipstream_cpu.{suffix}"
            if path.is_file():
                return path
    return None


@cache
def library() -> c.CDLL:
    """The loaded library. Raises BackendError where it was not built or cannot be loaded."""
    path = library_path()
    if path is None:
        raise BackendError(
            "the native CPU kernels were not built (no C++ compiler at install time): install g++ or clang and "
            "reinstall slipstream, or use --backend reference (pip install 'slipstream-llm[torch]')"
        )
    try:
        lib = c.CDLL(str(path))
    except OSError as error:
        raise BackendError(
            f"the native CPU kernels at {path} cannot be loaded ({error}): reinstall slipstream"
        ) from error
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib


def instruction_sets() -> list[str]:
    """The instruction sets this machine can run, best first."""
    names: list[str] = []
    while (name := library().slip_isa(len(names))) is not None:
        names.append(name.decode())
    return names
