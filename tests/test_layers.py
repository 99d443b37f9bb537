"""Dependencies point one way: cli, bench, engine, drafters and backends, kernels and models."""

import subprocess
import sys
from pathlib import Path


def test_nothing_imports_upwards():
    lint = subprocess.run(
        [Path(sys.executable).parent / "lint-imports", "--no-cache"],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
    )
    assert lint.returncode == 0, lint.stdout + lint.stderr
