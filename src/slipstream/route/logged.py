"""What a ledger that keeps texts teaches: sessions to replay, and steps whose consequences were seen.

A step counts as right where the next request of its session holds no error among the results of the tools it called,
and as wrong where it does. Only what served a step is seen, so the arms are trained on different steps; a `weighted`
policy that sends some of everything to both keeps them comparable. It is evidence, not proof: a step may be wrong
without an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from slipstream.route.decision import Conversation, Message, RouteError, ToolCall
from slipstream.route.learned import Model, features, newest_request
from slipstream.route.ledger import Source, read_rows
from slipstream.route.replay import RecordedStep
from slipstream.route.training import CURVE_POINTS, FEWEST, arm, gain_curve
from slipstream.route.trajectory import signals


def sessions(ledger: Source, route: str | None = None) -> Iterator[list[dict[str, Any]]]:
    """The answered rows of each session that have texts, in order. Raises LedgerError."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in read_rows(ledger, route=route):
        if row["texts"] and row["status"] == "ok":
            found.setdefault(row["session"], []).append(row)
    yield from found.values()


def recorded(ledger: Source, route: str | None = None) -> list[list[RecordedStep]]:
    """Sessions to replay. tool_s: from the end of an answer to the session's next request, people included.

    Raises RouteError where no row has its text.
    """
    made = []
    for rows in sessions(ledger, route):
        ends = [row["started"] + row["time_s"] for row in rows]
        gaps = [max(0.0, after["started"] - end) for after, end in zip(rows[1:], ends, strict=False)]
        made.append(
            [
                RecordedStep(conversation(row["texts"], row["input"]), row["output"], gap)
                for row, gap in zip(rows, [*gaps, 0.0], strict=True)
            ]
        )
    if not made:
        raise RouteError(f"{ledger} keeps no texts; set texts = true under [ledger], and let it work for a while")
    return made


def conversation(texts: Mapping[str, Any], prompt_tokens: int | None = None) -> Conversation:
    """A conversation as the ledger keeps it."""
    messages = tuple(
        Message(
            one["role"],
            one["text"],
            tuple(ToolCall(**call) for call in one["tool_calls"]),
            one["tool_call_id"],
            one["is_error"],
            one["images"],
        )
        for one in texts["messages"]
    )
    return Conversation(
        messages,
        tuple(texts["tools"]),
        prompt_tokens or texts["prompt_tokens"],
        texts["max_tokens"],
        texts["agent"],
        texts["metadata"],
    )


def train_logged(ledger: Source, strong: str, fast: str, *, share: float, route: str | None = None) -> Model:
    """A model from the ledger alone; its threshold sends `share` of the logged steps to strong.

    Raises RouteError where either target has too few steps with known consequences.
    """
    x: dict[str, list[Any]] = {strong: [], fast: []}
    right: dict[str, list[float]] = {strong: [], fast: []}
    for rows in sessions(ledger, route):
        for row, after in pairwise(rows):
            step, then = conversation(row["texts"]), conversation(after["texts"])
            new = Conversation((Message("user", ""), *then.messages[len(step.messages) :]))
            if row["target"] in x and any(message.role == "tool" for message in new.messages):
                x[row["target"]].append(features(newest_request(step), signals(step)))
                right[row["target"]].append(float(signals(new).errors == 0))
    for name in (strong, fast):
        if len(x[name]) < FEWEST:
            raise RouteError(f"{len(x[name])} logged steps of {name} have known consequences; {FEWEST} are needed")
    on_strong, on_fast = (arm(np.stack(x[name]), np.array(right[name])) for name in (strong, fast))
    model = Model(on_strong, on_fast, threshold=0.0)
    gains = model.gain(np.stack(x[strong] + x[fast]))
    if gains.sum() <= 0:
        raise RouteError(f"{strong} was not right more often than {fast} here; there is nothing to route for")
    curve = gain_curve(gains, gains)  # nobody knows both outcomes of a step, so the model's own word stands for them
    curve = [curve[i] for i in sorted({*np.linspace(0, len(curve) - 1, CURVE_POINTS).round().astype(int).tolist()})]
    facts = {"steps": {name: len(x[name]) for name in (strong, fast)}, "share": share, "logged": True}
    model = replace(model, curve=curve, trained=facts)
    return replace(model, threshold=model.threshold_at(share))
