"""A small classifier for routing: what a request looks like -> how likely each arm answers it right. No dependencies.

    text, signals -> features (n,) -> boosted trees of each arm -> P(strong right) - P(fast right) = the expected gain

It looks at form and not at topics: lengths, numbers, formulae, negations, how alike the options of a question are, how
an agent's work is going. Form carries over to subjects that were never seen, where words do not
(`docs/route-policies.md` compares them). The file is plain JSON; `route.training` writes it. Gradient boosting:
Friedman, 2001.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import combinations, islice
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.route.decision import Conversation, RouteError
from slipstream.route.trajectory import Signals

MOST_OPTIONS = 10
FORMAT = "slipstream-route-1"
LONGEST = 8_000  # characters of a text that are looked at, so that a pasted file costs no more than this
Floats = npt.NDArray[np.float32]

_OPTION = re.compile(r"^\(?([A-J])[.):]\s+(.*?)(?=^\(?[A-J][.):]\s|^Answer:|\Z)", re.M | re.S)
_WORD = re.compile(r"[A-Za-z']+")
_SYMBOL = re.compile(r"[=^_{}\\<>+*/|~∧∨→⊃]")  # noqa: RUF001
_PATTERNS = {
    "negated": r"(?i)\b(?:not|except|least|false|incorrect|never)\b",
    "NEGATED": r"\b(?:NOT|EXCEPT|LEAST)\b",
    "blank": r"___",
    "question": r"\?",
    "statements": r"\bStatement",
    "quoted": r"[\"“]",
    "year": r"\b(?:1\d{3}|20\d\d)\b",
    "what": r"(?i)\bwhat\b",
    "which": r"(?i)\bwhich\b",
    "why": r"(?i)\b(?:why|how)\b",
    "who": r"(?i)\bwho\b",
    "you": r"(?i)\byou\b",
    "first_person": r"\bI\b|(?i:\bmy\b)",
    "third_person": r"(?i)\b(?:he|his|she|her|man|woman|patient)\b",
    "condition": r"(?i)\bif\b",
    "according": r"(?i)\baccording\b",
    "how_many": r"(?i)\b(?:many|much)\b",
    "compute": r"(?i)\b(?:calculate|compute|find|value|probability|number)\b",
    "code": r"```|(?m:^\s*(?:def|class|import|#include|function|SELECT)\b)",
}
_COMPILED = {name: re.compile(pattern) for name, pattern in _PATTERNS.items()}
_COMBINED = re.compile(r"(?i)\b(?:all|none|both) of (?:the|these)|\bboth\b|\bI\b and \bII\b")

TEXT_FEATURES = (
    *("chars", "option_chars", "longest_option", "shortest_option", "option_spread", "options"),
    *("digits", "option_digits", "numbers", "numeric_options", "symbols", "option_symbols"),
    *("names", "name_count", "word_length", "option_word_length", "variety", "long_words", "sentences", "commas"),
    *("parentheses", "lines", "option_overlap", "closest_options", "question_overlap", "short_options", "combined"),
    *_PATTERNS,
)
SIGNAL_FEATURES = (*(one.name for one in fields(Signals) if one.name != "tests_passed"), "tests_passed")
FEATURES = (*TEXT_FEATURES, *SIGNAL_FEATURES)


def features(text: str, signals: Signals | None = None) -> Floats:
    """(len(FEATURES),) of a request and of how the work is going; without `signals`, of a first message."""
    return np.array([*_of_text(text), *(signals or Signals(turns=1)).numbers()], np.float32)


def newest_request(conversation: Conversation) -> str:
    """What is classified: the newest message of a person."""
    return next((message.text for message in reversed(conversation.messages) if message.role == "user"), "")


def _of_text(text: str) -> list[float]:
    text = text[:LONGEST]
    options = [found[2].strip() for found in islice(_OPTION.finditer(text), MOST_OPTIONS)]
    first = _OPTION.search(text)
    stem = text[: first.start()] if first and len(options) > 1 else text
    options = options if len(options) > 1 else []
    joined = " ".join(options)
    words = [word.lower() for word in _WORD.findall(stem)]
    option_words = _WORD.findall(joined)
    lengths = [len(option) for option in options] or [0]
    sets = [{word.lower() for word in _WORD.findall(option)} for option in options]
    alike = [len(a & b) / (1 + len(a | b)) for a, b in combinations(sets, 2)] or [0.0]
    known, n, chars = set(words), len(words), len(stem)
    names = len(re.findall(r"(?<=[a-z,] )[A-Z][a-z]+", stem))
    return [
        math.log1p(chars),
        math.log1p(sum(lengths)),
        math.log1p(max(lengths)),
        math.log1p(min(lengths)),
        pstdev(lengths) / (1 + fmean(lengths)),
        len(options),
        sum(map(str.isdigit, stem)) / (1 + chars),
        sum(map(str.isdigit, joined)) / (1 + len(joined)),
        math.log1p(len(re.findall(r"\d+", stem))),
        sum(len(option) <= 12 and any(map(str.isdigit, option)) for option in options),
        len(_SYMBOL.findall(stem)) / (1 + chars),
        len(_SYMBOL.findall(joined)) / (1 + len(joined)),
        names / (1 + n),
        math.log1p(names),
        fmean(map(len, words)) if words else 0,
        fmean(map(len, option_words)) if option_words else 0,
        len(known) / (1 + n),
        sum(len(word) >= 9 for word in words) / (1 + n),
        math.log1p(stem.count(". ")),
        stem.count(",") / (1 + n),
        stem.count("(") / (1 + n),
        math.log1p(stem.count("\n")),
        fmean(alike),
        max(alike),
        fmean(len(one & known) / (1 + len(one)) for one in sets) if sets else 0,
        fmean(len(one) <= 2 for one in sets) if sets else 0,
        _COMBINED.search(joined) is not None,
        *(pattern.search(stem) is not None for pattern in _COMPILED.values()),
    ]


@dataclass(frozen=True)
class Trees:
    """Boosted trees of one arm. All arrays (trees, nodes): `feature` is -1 at a leaf, `left` where x <= cut.

    base: log-odds before the first tree. value: of a leaf, in log-odds.
    """

    base: float
    feature: npt.NDArray[np.int32]
    cut: npt.NDArray[np.float64]
    left: npt.NDArray[np.int32]
    right: npt.NDArray[np.int32]
    value: npt.NDArray[np.float64]
    depth: int

    def probability(self, x: Floats) -> npt.NDArray[np.float64]:
        """x (rows, features) -> (rows,) the chance that the arm is right."""
        trees = np.arange(len(self.feature))[None, :]
        at = np.zeros((len(x), len(self.feature)), np.int32)
        rows = np.arange(len(x))[:, None]
        for _ in range(self.depth):
            which = self.feature[trees, at]
            below = x[rows, np.maximum(which, 0)] <= self.cut[trees, at]
            at = np.where(which < 0, at, np.where(below, self.left[trees, at], self.right[trees, at]))
        odds = self.base + self.value[trees, at].sum(1)
        chances: npt.NDArray[np.float64] = 1 / (1 + np.exp(-odds))
        return chances


@dataclass(frozen=True)
class Model:
    """strong, fast: of the two arms. threshold: of the gain, from which on a request goes to the strong arm.

    curve: (gain, share of calls to strong, share of the gain recovered) of held-out predictions in training, by which a
    user may choose another threshold. trained: what it was trained on, for people.
    """

    strong: Trees
    fast: Trees
    threshold: float
    curve: Sequence[tuple[float, float, float]] = ()
    trained: Mapping[str, Any] = field(default_factory=dict)
    features: Sequence[str] = FEATURES

    def gain(self, x: Floats) -> npt.NDArray[np.float64]:
        """x (rows, features) -> (rows,) P(strong right) - P(fast right), in [-1, 1]."""
        return self.strong.probability(x) - self.fast.probability(x)

    def threshold_at(self, share: float) -> float:
        """The threshold that sent `share` of the training questions to strong. Raises RouteError without a curve."""
        if not self.curve:
            raise RouteError("this model has no curve to find a threshold for a share; set threshold instead")
        return min(self.curve, key=lambda point: abs(point[1] - share))[0]


def save(model: Model, path: Path) -> None:
    """Write `model` as JSON."""
    path.write_text(json.dumps({"format": FORMAT, **asdict(model)}, default=_plain) + "\n", encoding="utf-8")


def load(path: Path) -> Model:
    """Raises RouteError where `path` is no model, or was trained with other features."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data.pop("format") != FORMAT:
            raise ValueError(f"its format is not {FORMAT}")
        if tuple(data["features"]) != FEATURES:
            raise ValueError("it was trained with other features")
        return Model(
            _checked(data["strong"]),
            _checked(data["fast"]),
            float(data["threshold"]),
            [(float(a), float(b), float(c)) for a, b, c in data["curve"]],
            dict(data["trained"]),
        )
    except OSError as error:
        raise RouteError(
            f"cannot read the model {path}: {error.strerror}; train one with `slipstream route train`"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise RouteError(
            f"{path} is no routing model ({error}); train it again with `slipstream route train`"
        ) from None


def _checked(arm: dict[str, Any]) -> Trees:
    whole = {name: np.array(arm[name], np.int32) for name in ("feature", "left", "right")}
    real = {name: np.array(arm[name], np.float64) for name in ("cut", "value")}
    shapes = {tuple(whole[name].shape) for name in whole} | {tuple(real[name].shape) for name in real}
    if len(shapes) != 1 or whole["feature"].ndim != 2:
        raise ValueError("its trees do not fit together")
    if not (whole["feature"].min() >= -1 and whole["feature"].max() < len(FEATURES)):
        raise ValueError("a tree asks for a feature that does not exist")
    nodes = whole["left"].shape[1]
    if min(whole["left"].min(), whole["right"].min()) < 0 or max(whole["left"].max(), whole["right"].max()) >= nodes:
        raise ValueError("a tree points outside itself")
    if not all(np.isfinite(array).all() for array in real.values()):
        raise ValueError("a tree holds a figure that is not finite")
    return Trees(base=float(arm["base"]), depth=int(arm["depth"]), **whole, **real)  # type: ignore[arg-type]


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not plain data")
