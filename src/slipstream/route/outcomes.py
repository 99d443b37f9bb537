"""Questions that two models answered, and which of them was right: what a classifier is trained and judged on.

JSON Lines: {"text": ..., "strong": true, "fast": false, "group": "law", "tokens": 312}; the last two may be left out.
CSV: a column `prompt`, and one of True or False for each model. A folder: all its CSV files, each a group.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from slipstream.route.decision import RouteError
from slipstream.route.learned import Floats, features


@dataclass(frozen=True)
class Outcome:
    """One question. strong, fast: whether that arm was right. group: its subject, or where it came from."""

    text: str
    strong: bool
    fast: bool
    group: str = ""
    tokens: int | None = None


@dataclass(frozen=True)
class Table:
    """Outcomes as arrays: x (n, features), strong and fast (n,) 0 or 1, groups (n,) names, texts (n,)."""

    x: Floats
    strong: npt.NDArray[np.float64]
    fast: npt.NDArray[np.float64]
    groups: npt.NDArray[np.str_]
    texts: Sequence[str]

    @property
    def gain(self) -> npt.NDArray[np.float64]:
        """(n,) 1 where only strong was right, -1 where only fast was, else 0."""
        return self.strong - self.fast

    def __len__(self) -> int:
        return len(self.x)

    def take(self, which: npt.NDArray[np.bool_] | npt.NDArray[np.intp]) -> Table:
        at = np.flatnonzero(which) if which.dtype == bool else which
        return Table(self.x[at], self.strong[at], self.fast[at], self.groups[at], [self.texts[int(i)] for i in at])


def table(outcomes: Sequence[Outcome]) -> Table:
    """Raises RouteError where there is nothing to learn."""
    if not outcomes:
        raise RouteError("there are no outcomes; a file needs one question a line")
    return Table(
        np.stack([features(one.text) for one in outcomes]),
        np.array([one.strong for one in outcomes], np.float64),
        np.array([one.fast for one in outcomes], np.float64),
        np.array([one.group for one in outcomes]),
        [one.text for one in outcomes],
    )


def read_outcomes(path: Path, strong: str | None = None, fast: str | None = None) -> list[Outcome]:
    """strong, fast: the columns of a CSV file. Raises RouteError naming the file and line that is wrong."""
    if path.is_dir():
        files = sorted(path.glob("*.csv"))
        if not files:
            raise RouteError(f"{path} holds no CSV files")
        return [one for file in files for one in _csv(file, strong, fast)]
    return _csv(path, strong, fast) if path.suffix == ".csv" else _json_lines(path)


def _csv(path: Path, strong: str | None, fast: str | None) -> list[Outcome]:
    found: list[Outcome] = []
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = csv.DictReader(file)
            names = rows.fieldnames or ()
            if strong not in names or fast not in names or "prompt" not in names:
                raise RouteError(
                    f"{path} has the columns {', '.join(names)}; it needs `prompt`, and the two that "
                    "are named as the strong and the fast arm"
                )
            for row in rows:
                right = {"True": True, "False": False}
                try:
                    found.append(Outcome(row["prompt"], right[row[strong]], right[row[fast]], path.stem))
                except KeyError:
                    raise RouteError(f"{path}:{rows.line_num}: right or wrong must be True or False") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise RouteError(f"cannot read {path}: {error}") from None
    return found


def _json_lines(path: Path) -> list[Outcome]:
    found: list[Outcome] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RouteError(f"cannot read {path}: {error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not (isinstance(row["strong"], bool) and isinstance(row["fast"], bool) and isinstance(row["text"], str)):
                raise TypeError("text must be a string, strong and fast true or false")
            found.append(Outcome(row["text"], row["strong"], row["fast"], str(row.get("group", "")), row.get("tokens")))
        except KeyError as error:
            raise RouteError(f"{path}:{number}: an outcome lacks {error}") from None
        except (TypeError, ValueError) as error:
            raise RouteError(f"{path}:{number}: not an outcome: {error}") from None
    return found
