"""Writes what documents must not say by hand: measured tables, and every command's help in docs/cli.md.

python docs/generate.py            write
python docs/generate.py --check    write nothing, exit 1 where something is out of date
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import click

from slipstream.bench.results import render
from slipstream.cli import app

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def documents() -> dict[Path, str]:
    """Every document that is generated, or holds generated tables, with the text that it should have."""
    texts = {
        path: render(path.read_text(encoding="utf-8"), RESULTS)
        for path in [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *sorted(ROOT.glob("docs/*.md"))]
    }
    return texts | {ROOT / "docs" / "cli.md": cli_page()}


def cli_page() -> str:
    """The help of all commands as one page."""
    parts = ["# Command line", "Every command's `--help`, written by `make docs-tables`."]
    for title, help in helps(app, "slipstream"):
        parts.append(f"## {title}\n\n```text\n{help}\n```")
    return "\n\n".join(parts) + "\n"


def helps(command: click.Command, path: str, parent: click.Context | None = None) -> Iterator[tuple[str, str]]:
    """The command's own help, then that of the commands below it."""
    settings = command.context_settings | {"terminal_width": 100, "max_content_width": 100}
    context = click.Context(command, parent, info_name=path.split()[-1], **settings)
    yield path, "\n".join(line.rstrip() for line in command.get_help(context).splitlines())
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from helps(below, f"{path} {name}", context)


def main() -> None:
    stale = [
        path for path, text in documents().items() if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    if "--check" in sys.argv and stale:
        sys.exit(f"out of date, run `make docs-tables`: {', '.join(str(path.relative_to(ROOT)) for path in stale)}")
    for path, text in documents().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
