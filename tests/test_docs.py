"""Documents keep their word: tables and help are current, links lead somewhere, commands and code run."""

import io
import re
import shlex
from pathlib import Path

import generate
import pytest

from slipstream.cli import main

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "benchmarks" / "README.md",
    *sorted(ROOT.glob("docs/*.md")),
]


def blocks(language: str) -> list:
    """All fenced blocks of a language, as pytest parameters named for their place."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in re.finditer(rf"^```{language}\n(.*?)^```", text, re.M | re.S):
            line = text[: match.start()].count("\n") + 1
            found.append(pytest.param(match[1], id=f"{page.name}:{line}"))
    return found


@pytest.mark.parametrize(("page", "text"), generate.documents().items(), ids=lambda value: getattr(value, "name", ""))
def test_generated_parts_are_current(page, text):
    assert page.read_text(encoding="utf-8") == text, "run `make docs-tables`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_files_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text) + re.findall(r'src="([^"]+)"', text):
        if "://" not in target:
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("code", blocks("python"))
def test_python_examples_run(code):
    exec(compile(code, "example", "exec"), {"__name__": "example"})


def slipstream_lines() -> list:
    """Every `slipstream` command line of the documents, without comments and redirections."""
    lines = [line for block in blocks("bash") for line in block.values[0].splitlines()]
    words = [
        shlex.split(re.sub(r" < \S+", "", line), comments=True) for line in lines if line.startswith("slipstream ")
    ]
    return [pytest.param(args, id=" ".join(args)[:60]) for _, *args in words]


class Parsed(Exception):
    """Raised in place of loading a model."""


@pytest.mark.parametrize("args", slipstream_lines())
def test_shell_examples_name_real_commands_and_options(args, monkeypatch):
    def parsed(*args, **options):
        raise Parsed

    for target in (
        "slipstream.LLM",
        "slipstream.bench.decode.LLM",
        "slipstream.bench.endpoint.HttpEndpoint",
        "slipstream.bench.verify.verify",
        "slipstream.bench.drafter_eval.evaluate_drafter",
        "slipstream.train.loop.train_drafter",
    ):
        monkeypatch.setattr(target, parsed)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"Hello")))
    with pytest.raises((Parsed, SystemExit)) as stop:
        main(args)
    assert not getattr(stop.value, "code", 0)


def test_make_targets_in_documents_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for page in PAGES:
        for line in re.findall(r"^make (.*)$", page.read_text(encoding="utf-8"), re.M):
            for word in shlex.split(line, comments=True):
                assert "=" in word or re.search(rf"^{re.escape(word)}:", makefile, re.M), f"{page.name}: make {word}"


def test_ci_runs_exactly_the_test_command_of_the_readme():
    assert re.search(r"^make test", (ROOT / "README.md").read_text(encoding="utf-8"), re.M)
    commands = [
        line for line in (ROOT / ".ci" / "run").read_text().splitlines() if not line.startswith(("#", "set ", "cd "))
    ]
    assert commands == ["make test"]
