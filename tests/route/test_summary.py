"""What the ledger tells people: totals, savings, explanations, the live page; and what it teaches."""

import asyncio
from dataclasses import asdict

import pytest
from rich.console import Console
from starlette.testclient import TestClient

from slipstream.cli.route_top import screen
from slipstream.route import config, page
from slipstream.route.app import create_app
from slipstream.route.decision import Conversation, Message, RouteError, ToolCall
from slipstream.route.gateway import Gateway
from slipstream.route.learned import features
from slipstream.route.ledger import Allowance, Ledger, LedgerError
from slipstream.route.logged import recorded, train_logged
from slipstream.route.summary import explain, ledger_of, summary

NOW = 1_000_000.0
SETTINGS = """
ledger.path = "{path}"
[targets.big]
url = "http://127.0.0.1:9/v1"
[routes.ask]
options = {{use = "big"}}
"""


def texts(*messages):
    """As the gateway writes them."""
    return asdict(Conversation(messages, ("run",), 50))


def row(id, target="small", **more):
    return {
        "id": id,
        "started": NOW,
        "key": "anyone",
        "route": "ask",
        "session": "s",
        "agent": "main",
        "policy": "stage",
        "status": "ok",
        "target": target,
        "tier": "default",
        "tier_served": "default",
        "reasons": [f"because of [bold]{id}[/bold]"],
        "alternatives": [
            {"choice": {"target": "big", "tier": "fast"}, "time_s": 2.5, "cost": 0.02, "reread_tokens": 900}
        ],
        "predicted_s": 1.5,
        "predicted_cost": 0.004,
        "ttft_s": 0.2,
        "time_s": 2.0,
        "input": 100,
        "cached": 50,
        "output": 20,
        "cost": 0.005,
        "judge_cost": 0.001,
        "judge_time_s": 0.3,
        "arms": {"strong": {"cost": 0.012, "time_s": 4.0}, "fast": {"cost": 0.003, "time_s": 1.0}},
    } | more


def written(tmp_path, *rows):
    """A ledger with `rows`."""

    async def write():
        for one in rows:
            await ledger.admit(one, Allowance())

    path = tmp_path / "route.db"
    ledger = Ledger(config.Ledger(path=path, fsync=False), clock=lambda: NOW)
    asyncio.run(write())
    ledger.close()
    return path


def test_savings_count_judges_and_compare_the_same_steps(tmp_path):
    path = written(tmp_path, row("a"), row("b"), row("c", arms={}), row("old", started=NOW - 7200))
    told = summary(path, 60, now=NOW)
    assert told["requests"] == 3
    strong = told["saved"]["strong"]
    assert strong["steps"] == 2
    assert strong["usd"] == pytest.approx(2 * (0.012 - 0.006))
    assert (strong["time_share"], strong["usd_share"]) == (pytest.approx(0.5), pytest.approx(0.5))
    assert told["saved"]["fast"]["time_share"] == pytest.approx(-1.0)
    assert told["usd"] == pytest.approx(3 * 0.006)
    (target,) = told["targets"]
    assert (target["requests"], target["cached_share"], target["time_s"]) == (3, 0.5, 2.0)


def test_an_open_request_is_running_and_not_billed(tmp_path):
    told = summary(written(tmp_path, row("a", cost=None, status="open", time_s=None)), 60, now=NOW)
    assert (told["open"], told["failed"], told["usd"], told["saved"]["strong"]) == (1, 0, 0, None)


def test_explain_says_why_what_else_and_what_came_of_it(tmp_path):
    path = written(tmp_path, row("a", tier_served="priority", score=0.25, attempts=[{"target": "big", "status": 503}]))
    said = explain(path, "a")
    for part in (
        "went to small/default, which served tier priority",
        "because of",
        "score 0.250",
        "big/fast",
        "900 tokens",
        "attempt 1 failed: target big, status 503",
        "2.00 s, 1.50 s predicted",
        "deciding $0.001000 and 0.3000 s",
        "all-strong would have taken 4.00 s",
    ):
        assert part in said
    assert "still running" in explain(written(tmp_path / "2", row("b", cost=None)), "b")


def test_a_request_or_ledger_that_is_not_there_is_said_to_be_missing(tmp_path):
    with pytest.raises(RouteError, match="no request 'z'"):
        explain(written(tmp_path, row("a")), "z")
    with pytest.raises(LedgerError, match="there is no ledger"):
        summary(tmp_path / "none.db")


def test_settings_lead_to_their_ledger(tmp_path):
    settings = tmp_path / "route.toml"
    settings.write_text(SETTINGS.format(path=tmp_path / "x.db"))
    assert ledger_of(settings) == tmp_path / "x.db"
    assert ledger_of(tmp_path / "y.db") == tmp_path / "y.db"


def test_top_prints_reasons_as_they_are(tmp_path):
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(screen(summary(written(tmp_path, row("a")), 60, now=NOW)))
    said = console.export_text()
    assert "because of [bold]a[/bold]" in said
    assert "against all-strong: time +2.0 s (+50%)" in said


@pytest.fixture
def client(tmp_path):
    gateway = Gateway(config.read_config(SETTINGS.format(path=tmp_path / "route.db")))
    with TestClient(create_app(gateway, page.ROUTES), base_url="http://127.0.0.1") as made:
        yield made


def test_the_page_holds_no_figures_and_the_figures_are_json(client):
    got = client.get("/")
    assert got.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in got.headers["content-security-policy"]
    assert client.get("/v1/slipstream/route").json()["requests"] == 0


@pytest.mark.parametrize("minutes", ["x", "nan", "0", "-1", "1e9"])
def test_the_page_refuses_odd_spans(client, minutes):
    assert client.get(f"/v1/slipstream/route?minutes={minutes}").status_code == 400


def test_figures_need_a_key_where_keys_are_set(tmp_path):
    from slipstream.serve.auth import hash_key

    keys = "".join(
        f'[[keys]]\nname = "{name}"\nhash = "{hash_key(name)}"\n{more}'
        for name, more in (("all", ""), ("some", 'routes = ["ask"]\n'))
    )
    gateway = Gateway(config.read_config(SETTINGS.format(path=tmp_path / "route.db") + keys))
    with TestClient(create_app(gateway, page.ROUTES), base_url="http://127.0.0.1") as client:
        asked = {
            name: client.get("/v1/slipstream/route", headers={"x-api-key": name}).status_code
            for name in ("all", "some", "none")
        }
        assert asked == {"all": 200, "some": 403, "none": 401}
        assert client.get("/").status_code == 200


CALL = ToolCall("1", "run", "{}")


def step_rows(session, target, text, wrong):
    user = Message("user", text)
    first = texts(user)
    then = texts(user, Message("assistant", "", (CALL,)), Message("tool", "x", tool_call_id="1", is_error=wrong))
    return (
        row(f"{session} 1", target, session=session, texts=first),
        row(f"{session} 2", target, session=session, texts=then, started=NOW + 5),
    )


def test_logged_sessions_can_be_replayed(tmp_path):
    (steps,) = recorded(written(tmp_path, *step_rows("s", "small", "do it", True)))
    assert [len(step.conversation.messages) for step in steps] == [1, 3]
    assert [step.tool_s for step in steps] == [3.0, 0.0]
    assert steps[1].conversation.messages[1].tool_calls == (CALL,)


def test_a_ledger_without_texts_teaches_nothing(tmp_path):
    with pytest.raises(RouteError, match="texts = true"):
        recorded(written(tmp_path, row("a")))


def test_consequences_in_the_ledger_train_a_model(tmp_path):
    rows = []
    for i in range(240):
        long, target = i % 4 < 2, ("big", "small")[i % 2]
        wrong = (long and target == "small") != (i % 23 == 0)
        rows += step_rows(f"s{i}", target, "work hard on this " * (9 if long else 1), wrong)
    model = train_logged(written(tmp_path, *rows), "big", "small", share=0.5)
    hard, easy = (float(model.gain(features("work hard on this " * n)[None])[0]) for n in (9, 1))
    assert hard > model.threshold - 1e-9 > easy
    with pytest.raises(RouteError, match="0 logged steps of other"):
        train_logged(tmp_path / "route.db", "other", "small", share=0.5)
