"""The command line in this process, on a fake model."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from fakes import fake_llm

from slipstream.cli import main


@dataclass
class Result:
    code: int
    out: str
    err: str


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Runs `slipstream` with arguments and standard input; every model is the fake one."""

    def load(model: str, *, backend: str, threads: int | None, **options):
        return fake_llm(**options)

    monkeypatch.setattr("slipstream.LLM", load)

    def run(*args: str, stdin: bytes = b"") -> Result:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        with pytest.raises(SystemExit) as exit:
            main(args)
        captured = capsys.readouterr()
        return Result(int(exit.value.code or 0), captured.out, captured.err)

    return run
