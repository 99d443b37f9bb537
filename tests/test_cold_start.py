"""Starting costs next to nothing: what is heavy is imported when it is used. Times are measured by `make bench`."""

import subprocess
import sys

import pytest

HEAVY = {"torch", "transformers", "rich", "numpy", "tokenizers", "gguf", "jinja2", "huggingface_hub", "safetensors"}
STARTS = {
    "import slipstream": "import slipstream",
    "slipstream --help": "from slipstream.cli import app; app(['--help'], standalone_mode=False)",
    "slipstream run --help": "from slipstream.cli import app; app(['run', '--help'], standalone_mode=False)",
}


def imported_by(code: str) -> set[str]:
    report = f"{code}\nimport sys; print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", report], capture_output=True, text=True, check=True)
    return set(done.stderr.split())


@pytest.mark.parametrize("start", STARTS)
def test_starting_imports_nothing_heavy(start):
    assert not imported_by(STARTS[start]) & HEAVY


def test_answering_on_the_cpu_needs_no_pytorch():
    code = """
import sys
sys.modules |= dict.fromkeys(("torch", "transformers", "triton"))  # importing them fails
from slipstream import LLM, SamplingParams
from slipstream.backends.cpu.library import library_path
if library_path() is not None:
    llm = LLM("smollm2", backend="cpu", context=256)
    assert len(llm.chat("Hello", SamplingParams(max_tokens=4)).token_ids) == 4
"""
    assert "slipstream.engine.engine" in imported_by(code)
