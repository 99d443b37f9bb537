"""For tests of GPU code: Triton's interpreter where there is no GPU, chosen before Triton is imported.

Importing this skips the importing module where torch or Triton is not installed.
"""

import importlib.util
import os

import numpy as np
import pytest

if not (importlib.util.find_spec("torch") and importlib.util.find_spec("triton")):
    pytest.skip("needs torch and triton", allow_module_level=True)
import torch

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"


def round_bfloat16() -> None:
    """The interpreter cuts float32 off to bfloat16, so numbers shrink; let it round to nearest even, as GPUs do."""
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def rounding(values, source, target, mode):
        if (source, target, mode) == (tl.float32, tl.bfloat16, None):
            bits = np.ascontiguousarray(values).view(np.uint32)
            nearest = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
            values = np.where(np.isnan(values), bits, nearest).astype(np.uint32).view(np.float32)
        return convert(values, source, target, mode)

    interpreter._convert_float = rounding


if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"
    round_bfloat16()
