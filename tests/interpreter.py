"""For tests of GPU code: Triton's interpreter where there is no GPU, chosen before Triton is imported.

Importing this skips the importing module where torch or Triton is not installed.
"""

import importlib.util
import os

import pytest

if not (importlib.util.find_spec("torch") and importlib.util.find_spec("triton")):
    pytest.skip("needs torch and triton", allow_module_level=True)
import torch

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"
