"""Requests and targets at random: whatever meets, an answer is whole or breaks off with an error, and bills add up.

A busy machine may turn any answer into one that came too late, so nothing here rests on what is quick enough.
"""

import asyncio
import json
import secrets
import time
from dataclasses import dataclass, replace

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from upstreams import PATHS, TEXT, Fake, routing, table, targets

from slipstream.route.ledger import read_rows, spent_usd
from slipstream.route.wire.neutral import BYTES_PER_TOKEN

WHOLE, OUTPUT = "".join(TEXT), 5
BUDGET = 150.0
"""Of the route `poor`, in dollars; an answer is expected to cost 5, at one for each token, and does."""
FAULTS = ["", "", "", "429", "500", "503", "400", "401", "html", "json", "stall", "reset", "malformed"]
FAULTS += [f"{kind}@{place}" for kind in ("reset", "stall", "late", "malformed", "cut", "error") for place in range(9)]
TARGET = """retries = 1
timeouts = {connect = 1, first_token = 0.15, between_tokens = 0.15, total = 1}
breaker = {failures = 3, open_s = 0.05}
concurrency = 3
queue_s = 0.3
[targets.NAME.tiers.default]
output = 1e6
"""
ROUTE = """[routes.NAME]
policy = "weighted"
options = {weights = {one = 1, other = 1}, sticky = "request"}
fallbacks = ["other", "one"]
expected_output = 5
"""
ROUTES = (
    ROUTE.replace("NAME", "rich") + ROUTE.replace("NAME", "poor") + f'budget = {{usd = {BUDGET}, period = "total"}}\n'
)


@dataclass
class Asked:
    """One request, and what came of it. leaves: after so many blocks of its stream."""

    route: str
    wire: str
    stream: bool
    leaves: int | None
    session: str = ""
    status: int = 0
    text: str = ""
    ended: bool = False
    errors: int = 0


requests = st.builds(Asked, st.sampled_from(["rich", "poor"]), st.sampled_from(list(PATHS)),
                     st.sampled_from([True, True, False]), st.sampled_from([None, None, 0, 1, 2, 4, 7]))  # fmt: skip
faults = st.lists(st.sampled_from(FAULTS), max_size=8)


@pytest.fixture(scope="module", params=["openai-chat", "openai-responses", "anthropic"])
def place(request, tmp_path_factory):
    """A router with targets of two wires."""
    second = "anthropic" if request.param == "openai-chat" else "openai-chat"
    one, other = Fake(request.param, delay_s=0.001), Fake(second, delay_s=0.001)
    with targets(one, other):
        text = table("one", one, TARGET.replace("NAME", "one")) + table("other", other, TARGET.replace("NAME", "other"))
        with routing(text + ROUTES, tmp_path_factory.mktemp("fuzz")) as router:
            yield router, one, other


@settings(max_examples=15, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(requests, min_size=1, max_size=8), faults, faults)
def test_whatever_meets_answers_are_whole_or_end_in_one_error_and_are_billed_once(place, asked, first, second):
    router, one, other = place
    asked = [replace(request, session=secrets.token_hex(8)) for request in asked]
    one.faults, other.faults, one.bills, other.bills = list(first), list(second), [], []

    async def all_of_them() -> None:
        async with httpx.AsyncClient(base_url=router.url, timeout=60) as client, asyncio.timeout(60):
            await asyncio.gather(*(send(client, request) for request in asked))  # nothing hangs

    asyncio.run(all_of_them())
    everything = at_rest(router)
    for request in asked:
        check(request, [row for row in everything if row["session"] == request.session], one.bills + other.bills)
    spent = {name: sum(row["cost"] for row in everything if row["route"] == name) for name in ("rich", "poor")}
    assert spent["poor"] <= BUDGET
    for name, usd in spent.items():
        assert spent_usd(router.gateway.ledger._db, f"route:{name}", "total", 0) == (pytest.approx(usd), 0)


async def send(client: httpx.AsyncClient, asked: Asked) -> None:
    """Ask, listen, and leave where it is said so."""
    said = {"input": "hi"} if asked.wire == "openai-responses" else {"messages": [{"role": "user", "content": "hi"}]}
    said |= {"max_tokens": 999} if asked.wire == "anthropic" else {}
    body = {"model": asked.route, "stream": asked.stream, **said}
    async with client.stream("POST", PATHS[asked.wire], json=body, headers={"x-session-id": asked.session}) as answer:
        asked.status = answer.status_code
        if not answer.headers["content-type"].startswith("text/event-stream"):
            told = json.loads(await answer.aread())
            asked.errors += "error" in told and told["error"] is not None
            asked.ended = answer.status_code == 200
            asked.text = whole(asked.wire, told) if asked.ended else ""
            return
        count = 0
        async for line in answer.aiter_lines():
            if line.startswith("data:"):
                hear(asked, line[5:].strip())
                count += 1
            if count == asked.leaves:
                return
    asked.leaves = None  # it stayed to the end


def hear(asked: Asked, data: str) -> None:
    """One event of a stream."""
    if data == "[DONE]":
        asked.ended = not asked.errors
        return
    event = json.loads(data)
    kind = event.get("type")
    asked.errors += kind == "error" or bool(event.get("error"))
    asked.ended |= kind in ("response.completed", "message_stop")
    if kind == "response.output_text.delta":
        asked.text += event["delta"]
    elif kind == "content_block_delta":
        asked.text += event["delta"].get("text", "")
    for choice in event.get("choices", ()):
        asked.text += choice["delta"].get("content") or ""


def whole(wire: str, body: dict) -> str:
    if wire == "openai-chat":
        return body["choices"][0]["message"]["content"]
    parts = body["content"] if wire == "anthropic" else [p for item in body["output"] for p in item.get("content", ())]
    return "".join(part["text"] for part in parts if part["type"] in ("text", "output_text"))


def at_rest(router) -> list[dict]:
    """All rows, when nothing runs any more."""
    deadline = time.monotonic() + 60
    while True:
        rows = list(read_rows(router.config.ledger.path))
        running = sum(upstream.running for upstream in router.gateway.live.upstreams.values())
        if not running and all(row["cost"] is not None for row in rows):
            return rows
        assert time.monotonic() < deadline, [running, *(row for row in rows if row["cost"] is None)]
        time.sleep(0.01)


def check(asked: Asked, rows: list[dict], bills: list[str]) -> None:
    """What the client heard, what the ledger says of it, and the ids that targets billed."""
    left = asked.stream and asked.leaves is not None and asked.status == 200
    assert WHOLE.startswith(asked.text)  # nothing twice, nothing left out
    assert left or asked.ended != (asked.errors == 1)
    assert asked.errors <= 1
    if asked.ended:
        assert asked.text == WHOLE
    if not rows:  # refused before anyone was asked: every target is down, or the budget is spent
        assert asked.status in (402, 503)
        return
    (row,) = rows
    lost = sum(attempt.get("may_be_billed", False) for attempt in row["attempts"])
    assert bills.count(row["id"]) <= (row["ttft_s"] is not None) + lost  # once, but for tries that are marked as lost
    assert row["cost"] == row["output"] <= OUTPUT
    assert row["output"] >= len(asked.text) // BYTES_PER_TOKEN  # what came is paid
    if asked.ended:
        assert (row["status"], row["output"]) == ("ok", OUTPUT)
    elif not left:
        assert row["status"] == ("failed" if asked.status != 402 else "refused")
        assert row["ttft_s"] is not None or row["cost"] == 0
