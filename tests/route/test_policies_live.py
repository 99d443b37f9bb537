"""Policies behind the gateway: what a real client's agent sends is what they see, and the ledger can be replayed."""

import pytest
from upstreams import Fake, routing, table, targets

from slipstream.route.ledger import read_rows
from slipstream.route.logged import recorded
from slipstream.route.policies import make_policy
from slipstream.route.replay import replay
from slipstream.route.summary import explain, summary

PRICED = "[targets.{0}.tiers.default]\ninput = {1}\noutput = {1}\n"
ROUTES = """
[routes.agent]
policy = "stage"
options = {strong = "big", fast = "small", affinity_steps = 0}
strong = "big"
fast = "small"
[routes.judged]
policy = "judge"
options = {strong = "big", fast = "small", judge = "small", otherwise = "fast"}
"""
STAGE = {"strong": "big", "fast": "small", "affinity_steps": 0}


@pytest.fixture
def router(tmp_path):
    with targets(Fake("openai-chat"), Fake("anthropic")) as (big, small):
        text = "ledger.texts = true\n" + table("big", big) + PRICED.format("big", 30)
        text += table("small", small) + PRICED.format("small", 1) + ROUTES
        with routing(text, tmp_path) as running:
            yield running


def rows(router):
    return list(read_rows(router.gateway.ledger._settings.path))


def work(router):
    """An agent of Anthropic's client: a plan, a step that goes well, and one that does not."""
    client, messages = router.anthropic(), [{"role": "user", "content": "mend the parser"}]
    tool = {"name": "edit", "description": "Edit a file.", "input_schema": {"type": "object", "properties": {}}}
    for wrong in (False, True, None):
        client.messages.create(model="agent", max_tokens=50, messages=messages, tools=[tool])
        call = {"type": "tool_use", "id": f"c{len(messages)}", "name": "edit", "input": {"n": len(messages)}}
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": "error: done", "is_error": bool(wrong)}
        messages += [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]


def test_a_clients_tool_errors_choose_the_stage(router):
    work(router)
    assert [row["target"] for row in rows(router)] == ["big", "small", "big"]
    assert [row["reasons"][0].partition(":")[0] for row in rows(router)] == [
        "stage plan",
        "stage carry out",
        "stage diagnose",
    ]


def test_the_ledger_of_an_agent_explains_and_replays(router):
    work(router)
    path = router.gateway.ledger._settings.path
    told = summary(path)
    assert told["saved"]["strong"]["steps"] == 3
    assert told["saved"]["strong"]["usd"] > 0 > told["saved"]["fast"]["usd"]
    assert "stage diagnose" in explain(path, rows(router)[-1]["id"])
    (steps,) = recorded(path, "agent")
    catalogue = router.config.catalogue(router.config.routes["agent"])
    run = replay(make_policy("stage", STAGE), steps, catalogue, "s")
    assert (run.steps, run.share("big")) == (3, pytest.approx(2 / 3))


def test_a_judge_is_asked_through_the_gateway_and_billed(router):
    router.openai().chat.completions.create(model="judged", messages=[{"role": "user", "content": "hi"}])
    (row,) = rows(router)
    assert row["target"] == "small"
    assert "the judge's answer is no digit; fast then" in row["reasons"][0]
    assert row["judge_cost"] > 0
    assert row["judge_time_s"] > 0
