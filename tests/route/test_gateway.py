"""The gateway itself: who may ask, what they may spend, sessions, reloading, many streams, kill -9."""

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import time

import httpx
import openai
import pytest
from upstreams import TEXT, Fake, routing, table, targets

from slipstream.route.config import read_config
from slipstream.route.ledger import Allowance, Ledger, read_rows
from slipstream.route.upstream import CircuitBreaker
from slipstream.serve.auth import hash_key
from slipstream.serve.errors import ApiError

ROUTE = '[routes.auto]\npolicy = "fixed"\n'
HI = [{"role": "user", "content": "hi"}]


def key(name: str, secret: str, more: str = "") -> str:
    return f'[[keys]]\nname = "{name}"\nhash = "{hash_key(secret)}"\n{more}\n'


def say(router, secret: str = "none", messages=HI, **options):
    return router.openai(secret).chat.completions.create(model="auto", messages=messages, **options)


def test_it_listens_on_this_machine_alone_unless_told(tmp_path):
    text = '[targets.a]\nurl = "http://x"\n' + ROUTE
    assert read_config(text).server.host == "127.0.0.1"
    with pytest.raises(Exception, match="others can reach this address"):
        read_config('[server]\nhost = "0.0.0.0"\n' + text)


def test_keys_open_what_they_may_and_nothing_else(tmp_path):
    fake = Fake("openai-chat")
    with targets(fake):
        text = table("a", fake) + ROUTE + "[routes.secret]\n" + key("ada", "s3cret", 'routes = ["auto"]')
        with routing(text, tmp_path) as router:
            for path in ("/v1/models", "/metrics"):
                assert httpx.get(router.url + path).status_code == 401
            with pytest.raises(openai.AuthenticationError):
                say(router, "wrong")
            assert say(router, "s3cret").choices[0].message.content == "".join(TEXT)
            assert [m.id for m in router.openai("s3cret").models.list()] == ["auto"]
            with pytest.raises(openai.NotFoundError, match="no model 'secret' here"):
                router.openai("s3cret").chat.completions.create(model="secret", messages=HI)
    assert "s3cret" not in (tmp_path / "route.db").read_bytes().decode("latin-1")


def test_no_secret_is_ever_logged_or_told_to_a_client(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("FAKE_KEY", "upstream-s3cret")
    fake = Fake("openai-chat", faults=["401"])
    with targets(fake), caplog.at_level(logging.DEBUG):
        for name in ("slipstream", "slipstream.route"):
            logging.getLogger(name).propagate = True
        with routing(
            table("a", fake, 'key_env = "FAKE_KEY"') + ROUTE + key("ada", "client-s3cret"), tmp_path
        ) as router:
            with pytest.raises(openai.InternalServerError) as refused:
                say(router, "client-s3cret")
            metrics = httpx.get(f"{router.url}/metrics", headers={"x-api-key": "client-s3cret"}).text
    assert fake.headers[0]["authorization"] == "Bearer upstream-s3cret"
    everything = caplog.text + str(refused.value) + metrics
    everything += (tmp_path / "route.db").read_bytes().decode("latin-1")
    assert "s3cret" not in everything


def test_a_client_cannot_choose_addresses_or_headers_upstream(tmp_path):
    fake = Fake("openai-chat")
    with targets(fake), routing(table("a", fake) + ROUTE, tmp_path) as router:
        body = {"model": "auto", "messages": HI, "base_url": "http://169.254.169.254", "odd\r\nX-Evil: 1": 1}
        headers = {"x-evil": "1", "traceparent": "junk", "x-session-id": "s"}
        answer = httpx.post(f"{router.url}/v1/chat/completions", json=body, headers=headers)
        assert answer.status_code == 200
        assert "x-evil" not in answer.headers
        told = fake.headers[-1]
        assert not {"x-evil", "traceparent", "x-session-id"} & set(told)
        assert told["host"] == fake.url.removeprefix("http://")
        rebound = httpx.post(f"{router.url}/v1/chat/completions", json=body, headers={"host": "evil.example"})
        assert rebound.status_code == 403


def test_bodies_are_bounded_and_must_be_json(tmp_path):
    fake = Fake("openai-chat")
    with targets(fake), routing("[server]\nbody_bytes = 1000\n" + table("a", fake) + ROUTE, tmp_path) as router:
        url, kind = f"{router.url}/v1/chat/completions", {"content-type": "application/json"}
        assert httpx.post(url, content=b"x" * 2000, headers=kind).status_code == 413
        assert httpx.post(url, content=iter([b"x" * 900] * 2), headers=kind).status_code == 413
        assert httpx.post(url, content=b"{", headers=kind).status_code == 400
        assert httpx.post(url, content=b"[" * 900, headers=kind).status_code == 400
        assert httpx.post(url, content=b'{"model":"\\ud800"}', headers=kind).status_code == 400
        assert httpx.post(url, content=b"{}", headers={"content-type": "text/plain"}).status_code == 415
        assert httpx.post(url, json={"model": "auto", "messages": "hi"}).status_code == 400
        assert httpx.post(url, json={"model": "auto", "messages": [{"role": 3}]}).status_code == 400
    assert not fake.requests


def test_rate_limits_and_budgets_hold(tmp_path):
    fake = Fake("openai-chat", prompt=1_000_000)
    price = "[targets.a.tiers.default]\ninput = 1.0\n"
    keys = key("slow", "slow", "requests_per_minute = 2") + key("poor", "poor", "budget = {usd = 1.5}")
    with targets(fake), routing(table("a", fake) + price + ROUTE + keys, tmp_path) as router:
        for _ in range(2):
            say(router, "slow")
        with pytest.raises(openai.RateLimitError) as refused:
            say(router, "slow")
        assert int(refused.value.response.headers["retry-after"]) >= 1
        for _ in range(2):
            say(router, "poor")  # a million tokens at a dollar each
        with pytest.raises(openai.APIStatusError, match="budget of key poor is spent") as refused:
            say(router, "poor")
        assert refused.value.status_code == 402
    assert len(fake.requests) == 4


def test_the_tier_that_was_served_is_billed(tmp_path):
    fake = Fake("openai-chat", tier="default", prompt=1_000_000)
    tiers = '[targets.a.tiers.fast]\ninput = 6\nrequest = {service_tier = "priority"}\n'
    tiers += "[targets.a.tiers.default]\ninput = 1\ncached_input = 1\n"
    with targets(fake), routing(table("a", fake) + tiers + ROUTE, tmp_path) as router:
        say(router, service_tier="flex")
        assert fake.requests[-1]["service_tier"] == "priority"
        (row,) = read_rows(router.config.ledger.path)
        assert (row["tier"], row["tier_served"], round(row["cost"], 3)) == ("fast", "default", 1.0)
        assert row["dropped"] == ["service_tier"]


def test_sessions_are_known_by_id_or_by_their_messages(tmp_path):
    fake = Fake("openai-chat")
    with targets(fake), routing(table("a", fake) + ROUTE, tmp_path) as router:
        say(router)
        longer = [*HI, {"role": "assistant", "content": "x"}, {"role": "user", "content": "more"}]
        say(router, messages=longer)
        say(router, messages=[{"role": "user", "content": "someone else"}])
        say(router, messages=[{"role": "user", "content": "by id"}], extra_headers={"x-session-id": "mine"})
        say(router, messages=[{"role": "user", "content": "compacted"}], extra_headers={"x-session-id": "mine"})
        one, two, other, named, again = [row["session"] for row in read_rows(router.config.ledger.path)]
        assert one == two != other
        assert named == again == "mine"
        session = router.gateway.sessions._by_id["anyone", one]
        assert session.requests == 2
        assert session.held["a"].count == 3


def test_settings_are_reloaded_without_dropping_a_stream(tmp_path):
    old, new = Fake("openai-chat", delay_s=0.1), Fake("openai-chat")
    with targets(old, new), routing(table("a", old) + ROUTE, tmp_path) as router:
        stream = say(router, stream=True)
        text = next(iter(stream)).choices[0].delta.content or ""
        work = router.gateway.reload(read_config(table("a", new) + ROUTE))
        asyncio.run_coroutine_threadsafe(work, router.gateway.loop).result(5)
        say(router)
        assert len(new.requests) == 1
        text += "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
        assert text == "".join(TEXT)


def test_two_hundred_streams_at_once_all_get_their_tokens(tmp_path):
    fake = Fake("anthropic", delay_s=0.05)

    async def one(client: httpx.AsyncClient, url: str) -> str:
        text = ""
        body = {"model": "auto", "messages": HI, "stream": True}
        async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        text += choice["delta"].get("content") or ""
        return text

    async def all_of_them(url: str) -> list[str]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(limits=limits, timeout=60) as client:
            return await asyncio.gather(*(one(client, url) for _ in range(200)))

    with targets(fake), routing(table("a", fake) + ROUTE, tmp_path) as router:
        texts = asyncio.run(all_of_them(router.url))
        assert texts == ["".join(TEXT)] * 200
        assert fake.most > 100
        rows = list(read_rows(router.config.ledger.path))
        assert len(rows) == fake.billed == 200
        assert all(row["status"] == "ok" and row["output"] == 5 for row in rows)


def test_kill_9_loses_no_entry_that_was_acknowledged(tmp_path):
    path = tmp_path / "route.db"
    code = f"""
import asyncio, sys, time
from pathlib import Path
from slipstream.route.config import Ledger as Settings
from slipstream.route.ledger import Allowance, Ledger
async def main():
    ledger = Ledger(Settings(path=Path({str(path)!r})))
    n = 0
    while True:
        n += 1
        id = f"r{{n}}"
        await ledger.admit(dict(id=id, started=time.time(), key="k", route="r", reserved=1.0), Allowance())
        await ledger.decided(id, dict(target="t", reasons=["because"]))
        print("decided", id, flush=True)
        await ledger.billed(id, dict(cost=0.5, status="ok"))
        print("billed", id, flush=True)
asyncio.run(main())
"""
    worker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    said = [worker.stdout.readline().split() for _ in range(101)]
    os.kill(worker.pid, signal.SIGKILL)
    said += [line.split() for line in worker.stdout.read().splitlines()]
    worker.wait()
    rows = {row["id"]: row for row in read_rows(path)}
    for what, id in said:
        assert rows[id]["target"] == "t"
        assert what == "decided" or rows[id]["cost"] == 0.5


def test_a_row_is_billed_once_and_spent_once(tmp_path):
    async def main() -> tuple[bool, bool]:
        ledger = Ledger(read_config('[targets.a]\nurl = "http://x"\n' + ROUTE).ledger.model_copy(update={"path": path}))
        await ledger.admit({"id": "r", "started": time.time(), "key": "k", "route": "auto"}, Allowance())
        both = await ledger.billed("r", {"cost": 1.0}), await ledger.billed("r", {"cost": 1.0})
        budget = (
            read_config('[targets.a]\nurl = "http://x"\n[routes.auto]\nbudget = {usd = 1.2}\n').routes["auto"].budget
        )
        allowed = Allowance(budgets=[("key:k", budget)])
        await ledger.admit({"id": "s", "started": time.time(), "key": "k", "route": "auto", "reserved": 0.1}, allowed)
        with pytest.raises(ApiError, match="budget"):  # 1.0 spent, 0.1 reserved
            await ledger.admit({"id": "t", "started": time.time(), "key": "k", "reserved": 0.2}, allowed)
        ledger.close()
        return both

    path = tmp_path / "route.db"
    assert asyncio.run(main()) == (True, False)
    assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("target", ["openai-chat", "anthropic"])
def test_the_last_byte_waits_for_the_bill_and_the_first_for_the_decision(target, tmp_path, monkeypatch):
    fake = Fake(target)
    with targets(fake), routing(table("a", fake) + ROUTE, tmp_path) as router:
        ledger, order = router.gateway.ledger, []

        def slowed(name: str):
            write = getattr(ledger, name)

            async def later(*args) -> bool:
                await asyncio.sleep(0.15)
                done = await write(*args)
                order.append(name)
                return done

            return later

        monkeypatch.setattr(ledger, "decided", slowed("decided"))
        monkeypatch.setattr(ledger, "billed", slowed("billed"))
        body = {"model": "auto", "messages": HI, "stream": True}
        with httpx.stream("POST", f"{router.url}/v1/chat/completions", json=body) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {") and "first" not in order:
                    order.append("first")
                if line == "data: [DONE]":
                    order.append("last")
    assert order == ["decided", "first", "billed", "last"]


def test_an_open_breaker_lets_one_probe_through_at_a_time():
    now = 0.0
    settings = read_config('[targets.a]\nurl = "http://x"\nbreaker = {failures = 2, open_s = 10}\n' + ROUTE)
    breaker = CircuitBreaker(settings.targets["a"].breaker, lambda: now)
    for _ in range(2):
        assert breaker.enter()
        breaker.fail()
    assert not breaker.enter()
    now = 11.0
    assert breaker.enter()
    assert not breaker.enter()
    breaker.fail()
    assert not breaker.enter()
    now = 22.0
    assert breaker.enter()
    breaker.succeed()
    assert breaker.enter()
    assert breaker.state == "closed"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_connection_is_used_again(stream, tmp_path):
    fake = Fake("openai-chat")
    with targets(fake), routing(table("a", fake) + ROUTE, tmp_path) as router:
        for _ in range(3):
            list(say(router, stream=stream))
        assert len(fake.peers) == 1


def test_places_are_limited(tmp_path):
    fake = Fake("openai-chat", delay_s=0.1)
    with (
        targets(fake),
        routing(table("a", fake, "concurrency = 1\nqueue_s = 0.1\nretries = 0") + ROUTE, tmp_path) as router,
    ):
        stream = say(router, stream=True)
        next(iter(stream))
        with pytest.raises(openai.RateLimitError, match="no place free"):
            say(router)
        stream.close()


def test_our_own_engine_is_a_target(tiny_checkpoint, tmp_path):
    text = f'[targets.a]\nengine = "{tiny_checkpoint}"\nengine_options = {{threads = 1}}\ncontext = 2048\n' + ROUTE
    with routing(text, tmp_path) as router:
        message = router.anthropic().messages.create(model="auto", max_tokens=8, messages=HI)
        assert message.usage.output_tokens > 0
        with router.anthropic().messages.stream(model="auto", max_tokens=8, messages=HI) as events:
            last = events.get_final_message()
        assert last.usage.output_tokens > 0
        statuses = [row["status"] for row in read_rows(router.config.ledger.path)]
        assert statuses == ["ok", "ok"]


def test_a_judge_is_asked_through_the_gateway_and_is_on_the_bill(tmp_path):
    big, small = Fake("anthropic"), Fake("openai-chat")
    price = "[targets.{}.tiers.default]\ninput = 100\n"
    options = '{judge = "small", strong = "big", fast = "small"}'
    with targets(big, small):
        text = table("big", big) + price.format("big") + table("small", small) + price.format("small")
        with routing(text + f'[routes.auto]\npolicy = "judge"\noptions = {options}\n', tmp_path) as router:
            say(router)
            (row,) = read_rows(router.config.ledger.path)
    assert len(small.requests) == 1
    assert small.requests[0]["max_tokens"] == 4
    assert row["judge_cost"] == pytest.approx(10 * 100 / 1e6)
    assert row["judge_time_s"] > 0
    assert row["cost"] > 0


def test_savings_are_counted_against_both_arms(tmp_path):
    big, small = Fake("openai-chat", prompt=1000), Fake("openai-chat", prompt=1000)
    with targets(big, small):
        text = table("big", big) + "[targets.big.tiers.default]\ninput = 10\noutput = 20\n" + table("small", small)
        route = '[routes.auto]\npolicy = "fixed"\noptions = {use = "small"}\nstrong = "big"\nfast = "small"\n'
        with routing(text + route, tmp_path) as router:
            say(router)
            (row,) = read_rows(router.config.ledger.path)
            metrics = httpx.get(f"{router.url}/metrics").text
    assert row["arms"]["strong"]["cost"] == pytest.approx((1000 * 10 + 5 * 20) / 1e6)
    assert row["arms"]["fast"]["cost"] == row["cost"] == 0
    assert 'slipstream_route_arm_cost_usd_total{arm="strong",route="auto"} 0.0101' in metrics


def test_a_step_is_a_span_without_text(tmp_path, monkeypatch):
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    spans = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    monkeypatch.setattr("slipstream.route.trace.trace.get_tracer", provider.get_tracer)
    fake, parent = Fake("openai-chat"), "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"
    with targets(fake), routing(table("a", fake) + ROUTE, tmp_path) as router:
        say(router, extra_headers={"traceparent": parent})
    (span,) = spans.get_finished_spans()
    assert format(span.context.trace_id, "032x") == parent.split("-")[1]
    assert span.attributes["slipstream.target"] == "a"
    assert span.attributes["gen_ai.usage.input_tokens"] == 10
    assert "wörld" not in str(span.to_json())
    assert fake.headers[0]["traceparent"] == parent
