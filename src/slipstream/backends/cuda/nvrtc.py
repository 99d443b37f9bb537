"""Compiling a CUDA C++ source at run time and launching a kernel of it, through NVIDIA's `cuda.bindings`."""

from __future__ import annotations

import ctypes
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from slipstream.errors import BackendError


def _call(function: Any, *args: Any) -> Any:
    error, *results = function(*args)
    if int(error):
        raise BackendError(f"{function.__name__} failed with {error.name}")
    return results[0] if results else None


class Kernel:
    """`name` of the source at `path`, compiled with `macros` for the current device.

    Raises BackendError where the compiler is missing (remedy: pip install cuda-bindings) or refuses the source.
    """

    def __init__(self, path: Path, name: str, macros: dict[str, object], shared_bytes: int) -> None:
        try:
            driver, nvrtc = (import_module(f"cuda.bindings.{name}") for name in ("driver", "nvrtc"))
        except ImportError as error:
            raise BackendError("the persistent kernel needs NVIDIA's bindings: pip install cuda-bindings") from error
        self._driver = driver
        major, minor = torch.cuda.get_device_capability()
        options = [f"--gpu-architecture=sm_{major}{minor}{'a' if major == 9 else ''}", "--std=c++17", "--use_fast_math"]
        options += [f"-D{key}={value}" for key, value in macros.items()]
        program = _call(nvrtc.nvrtcCreateProgram, path.read_bytes(), path.name.encode(), 0, [], [])
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
        if int(status):
            log = bytearray(_call(nvrtc.nvrtcGetProgramLogSize, program))
            nvrtc.nvrtcGetProgramLog(program, log)
            first = next((x for x in log.decode(errors="replace").splitlines() if "error" in x), "no log")
            raise BackendError(f"{path.name} does not compile for this model: {first}")
        cubin = bytearray(_call(nvrtc.nvrtcGetCUBINSize, program))
        _call(nvrtc.nvrtcGetCUBIN, program, cubin)
        torch.cuda.current_stream().synchronize()  # makes the context current, once, at load
        self._module = _call(driver.cuModuleLoadData, bytes(cubin))
        self._function = _call(driver.cuModuleGetFunction, self._module, name.encode())
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _call(driver.cuFuncSetAttribute, self._function, limit, shared_bytes)
        self._shared_bytes = shared_bytes

    def launch(self, grid: int, threads: int, argument: ctypes.Structure, pdl: bool) -> None:
        """Enqueue on the current stream with one argument, a structure by value. pdl: may start before its
        predecessor has ended."""
        driver = self._driver
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = self._shared_bytes
        config.hStream = driver.CUstream(torch.cuda.current_stream().cuda_stream)
        if pdl:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            value = driver.CUlaunchAttributeValue()
            value.programmaticStreamSerializationAllowed = 1
            attribute.value = value
            config.attrs, config.numAttrs = [attribute], 1
        params = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
        _call(driver.cuLaunchKernelEx, config, self._function, ctypes.addressof(params), 0)
