"""Whatever a target does, the client gets the right answer or one clear error, is billed once, and nothing hangs."""

import asyncio
import time

import anthropic
import httpx
import openai
import pytest
from upstreams import TEXT, Fake, routing, table, targets

from slipstream.route import app
from slipstream.route.config import read_config
from slipstream.route.ledger import read_rows
from slipstream.route.local import AsgiTransport
from slipstream.route.summary import explain
from slipstream.route.upstream import Attempt, Fault, Upstream

WIRES = ("openai-chat", "openai-responses", "anthropic")
WHOLE = "".join(TEXT)
QUICK = "retries = 1\ntimeouts = {connect = 1, first_token = 0.4, between_tokens = 0.4, total = 3}\n"
BEFORE = ["429", "500", "503", "401", "html", "stall", "stall@start", "reset@start", "malformed@start", "cut@start",
          "error@start", "reset@first", "malformed@first", "cut@first", "error@first", "stall@first"]  # fmt: skip
AFTER = ["reset@middle", "stall@middle", "malformed@middle", "error@middle", "cut@middle"]


def stream(router, client: str) -> str:
    """The streamed text. Raises the client's own error."""
    if client == "anthropic":
        with router.anthropic().messages.stream(
            model="auto", max_tokens=9, messages=[{"role": "user", "content": "hi"}]
        ) as events:
            return "".join(events.text_stream)
    if client == "openai-responses":
        text, ended = "", False
        for event in router.openai().responses.create(model="auto", input="hi", stream=True):
            if event.type == "error":
                raise openai.APIError(event.message, httpx.Request("POST", router.url), body=None)
            text += event.delta if event.type == "response.output_text.delta" else ""
            ended |= event.type == "response.completed"
        assert ended
        return text
    chunks = router.openai().chat.completions.create(
        model="auto", messages=[{"role": "user", "content": "hi"}], stream=True
    )
    text, stop = "", None
    for chunk in chunks:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            stop = choice.finish_reason or stop
    assert stop == "stop"
    return text


def settings(first: Fake, second: Fake, more: str = QUICK) -> str:
    route = '[routes.auto]\npolicy = "fixed"\noptions = {use = "first"}\nfallbacks = ["second"]\n'
    route += '[routes.whole]\npolicy = "fixed"\noptions = {use = "second"}\n'
    return table("first", first, more) + table("second", second, more) + route


@pytest.fixture(scope="module", params=WIRES)
def shared(request, tmp_path_factory):
    """A router with a first target of each wire, and a second to fall back on."""
    first, second = Fake(request.param), Fake("openai-chat")
    with targets(first, second), routing(settings(first, second), tmp_path_factory.mktemp("ledger")) as router:
        yield router, first, second


@pytest.fixture
def pair(shared):
    """The same as if nothing had been asked before."""
    router, *fakes = shared
    for fake in fakes:
        fake.requests, fake.bills = [], []
    router.gateway.live.upstreams["first"].breaker.succeed()
    return shared


@pytest.mark.parametrize("fault", BEFORE)
def test_before_the_first_token_another_try_answers(pair, fault):
    router, first, second = pair
    first.faults = [fault] * 2
    began = time.monotonic()
    assert stream(router, "anthropic") == WHOLE
    assert time.monotonic() - began < 3
    first.faults = []
    row = list(read_rows(router.config.ledger.path))[-1]
    assert (row["status"], row["target"], row["output"]) == ("ok", "second", 5)
    assert row["attempts"]
    assert first.billed + second.billed == 1


@pytest.mark.parametrize("fault", AFTER)
@pytest.mark.parametrize("client", WIRES)
def test_after_the_first_token_there_is_one_clear_error(pair, client, fault):
    router, first, second = pair
    first.faults = [fault]
    before = len(list(read_rows(router.config.ledger.path)))
    with pytest.raises((openai.APIError, anthropic.APIError), match=r"first|fake overload"):
        stream(router, client)
    *earlier, row = read_rows(router.config.ledger.path)
    assert len(earlier) == before
    assert row["status"] == "failed"
    assert not second.requests
    assert row["cost"] is not None
    assert router.gateway.live.upstreams["first"].running == 0


def test_an_answer_without_usage_is_billed_by_estimate_and_its_client_told_so(pair):
    router, _, second = pair
    second.faults = ["cut@7"]  # after its finish, before its usage
    with router.anthropic().messages.stream(
        model="whole", max_tokens=9, messages=[{"role": "user", "content": "hi"}]
    ) as events:
        told = events.get_final_message()
    *_, row = read_rows(router.config.ledger.path)
    assert told.content[-1].text == WHOLE
    assert (row["status"], row["estimated"]) == ("ok", 1)
    assert (told.usage.input_tokens, told.usage.output_tokens) == (row["input"], row["output"])
    assert row["output"] == len(f"hmm{WHOLE}".encode()) // 4


def test_a_first_token_that_came_too_late_may_be_billed_too_and_is_marked(tmp_path):
    first, second = Fake("openai-chat", faults=["late"]), Fake("openai-chat")
    priced = "[targets.{}.tiers.default]\noutput = 1e6\n"
    with targets(first, second):
        text = table("first", first, "timeouts = {first_token = 0.2}") + priced.format("first")
        text += table("second", second) + priced.format("second")
        text += '[routes.auto]\noptions = {use = "first"}\nfallbacks = ["second"]\n'
        with routing(text, tmp_path) as router:
            assert stream(router, "openai-chat") == WHOLE
            (row,) = read_rows(router.config.ledger.path)
    assert first.bills == second.bills == [row["id"]]
    (lost,) = row["attempts"]
    assert (lost["target"], lost["status"], lost["may_be_billed"]) == ("first", 504, True)
    assert (row["target"], row["cost"]) == ("second", 5)
    assert "may_be_billed" in explain(router.config.ledger.path, row["id"])


@pytest.mark.parametrize("fault", ["500", "429", "error@start"])
def test_what_a_target_refused_is_not_marked_as_billed(pair, fault):
    router, first, _ = pair
    first.faults = [fault] * 2
    assert stream(router, "openai-chat") == WHOLE
    *_, row = read_rows(router.config.ledger.path)
    assert row["attempts"]
    assert not any("may_be_billed" in one for one in row["attempts"])


def attempt(fake: Fake, more: str) -> Attempt:
    """One at a target in this very loop."""
    target = read_config(table("a", fake, more) + "[routes.auto]\n").targets["a"]
    upstream = Upstream("a", target, AsgiTransport(fake.app()))
    return Attempt(upstream, {"messages": [], "stream": True}, {}, stream=True)


@pytest.mark.parametrize("place", ["first", "middle"])
def test_what_arrived_while_the_router_was_busy_is_read_before_its_time_is_up(place):
    fake = Fake("openai-chat", url="http://fake", delay_s=0.001)

    async def main() -> int:
        asked = attempt(fake, "timeouts = {first_token = 0.2, between_tokens = 0.2}")
        if place == "first":
            asyncio.get_running_loop().call_later(0.0, time.sleep, 0.3)
        await asked.start()
        count = len(asked.prelude)
        if place == "middle":
            asyncio.get_running_loop().call_soon(time.sleep, 0.3)
        async for pieces in asked.rest():
            count += len(pieces)
        await asked.close()
        return count

    assert asyncio.run(main()) == 9


@pytest.mark.parametrize(("fault", "state"), [("error@middle", "open"), ("stall@middle", "closed")])
def test_a_target_that_always_breaks_off_is_left_alone_and_one_whose_reader_is_slow_is_not(fault, state):
    fake = Fake("openai-chat", url="http://fake", faults=[fault] * 3)

    async def main() -> str:
        upstream = attempt(fake, "breaker = {failures = 3}").upstream
        for _ in range(3):
            one = Attempt(upstream, {"messages": [], "stream": True}, {}, stream=True)
            await one.start()
            if fault == "stall@middle":
                one._deadline = time.monotonic()  # the reader took all the time there was
            with pytest.raises(Fault):
                async for _ in one.rest():
                    pass
            await one.close()
        return upstream.breaker.state

    assert asyncio.run(main()) == state


def test_a_client_that_reads_nothing_frees_its_place(tmp_path, monkeypatch):
    monkeypatch.setattr(app, "SLOW_S", 0.1)
    fake = Fake("openai-chat")
    body = b'{"model": "auto", "messages": [{"role": "user", "content": "hi"}], "stream": true}'
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers, "query_string": b"",
             "server": ("localhost", 80)}  # fmt: skip
    asked = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive():
        return asked.pop() if asked else await asyncio.Event().wait()

    async def send(message):
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    with targets(fake), routing(table("a", fake) + "[routes.auto]\n", tmp_path) as router:
        gateway = router.gateway
        ran = asyncio.run_coroutine_threadsafe(app.create_app(gateway)(scope, receive, send), gateway.loop)
        ran.result(30)
        assert gateway.live.upstreams["a"].running == 0
        (row,) = read_rows(router.config.ledger.path)
    assert row["status"] == "cancelled"
    assert row["cost"] is not None


@pytest.mark.parametrize("fault", ["reset", "malformed"])
def test_a_whole_answer_that_got_lost_is_never_asked_for_again(fault, tmp_path):
    first, second = Fake("openai-chat", faults=[fault] * 3), Fake("openai-chat")
    with targets(first, second), routing(settings(first, second), tmp_path) as router:
        with pytest.raises(openai.InternalServerError, match="first"):
            router.openai().chat.completions.create(model="auto", messages=[{"role": "user", "content": "hi"}])
        assert len(first.requests) == 1
        assert not second.requests


def test_a_whole_json_answer_to_a_stream_is_not_asked_for_again(tmp_path):
    first, second = Fake("openai-chat", faults=["json"]), Fake("openai-chat")
    with targets(first, second), routing(settings(first, second), tmp_path) as router:
        with pytest.raises(openai.InternalServerError, match="where a stream was asked for"):
            stream(router, "openai-chat")
        assert first.billed + second.billed == 1


def test_what_the_target_says_of_the_request_itself_reaches_the_client(tmp_path):
    first, second = Fake("anthropic", faults=["400"]), Fake("openai-chat")
    with targets(first, second), routing(settings(first, second), tmp_path) as router:
        with pytest.raises(openai.BadRequestError, match="fake 400"):
            stream(router, "openai-chat")
        assert not second.requests


def test_a_dead_target_is_left_alone_and_probed_again(tmp_path):
    first, second = Fake("openai-chat", faults=["500"] * 3), Fake("openai-chat")
    more = QUICK.replace("retries = 1", "retries = 0\nbreaker = {failures = 3, open_s = 0.3}")
    with targets(first, second), routing(settings(first, second, more), tmp_path) as router:
        for _ in range(5):
            assert stream(router, "openai-chat") == WHOLE
        assert len(first.requests) == 3  # the last two were not even tried
        time.sleep(0.35)
        assert stream(router, "openai-chat") == WHOLE
        assert len(first.requests) == 4
        assert router.gateway.live.upstreams["first"].breaker.state == "closed"


def test_no_target_left_is_a_503_at_once(tmp_path):
    first = Fake("openai-chat", faults=["500"] * 9)
    with targets(first):
        text = table("first", first, "retries = 0\nbreaker = {failures = 1, open_s = 60}") + "[routes.auto]\n"
        with routing(text, tmp_path) as router:
            for _ in range(2):
                with pytest.raises(openai.InternalServerError):
                    stream(router, "openai-chat")
            assert len(first.requests) == 1


def test_an_unreachable_target_falls_back(tmp_path):
    first, second = Fake("openai-chat", url="http://127.0.0.1:9"), Fake("openai-chat")
    with targets(second), routing(settings(first, second), tmp_path) as router:
        assert stream(router, "openai-chat") == WHOLE


def test_a_client_that_leaves_cancels_upstream_and_is_billed_for_what_came(tmp_path):
    fake = Fake("openai-chat", delay_s=0.2)
    with targets(fake), routing(table("first", fake) + "[routes.auto]\n", tmp_path) as router:
        body = {"model": "auto", "messages": [{"role": "user", "content": "hi"}], "stream": True}
        with httpx.stream("POST", f"{router.url}/v1/chat/completions", json=body) as answer:
            next(answer.iter_raw())
        deadline = time.monotonic() + 3
        while not fake.cancelled and time.monotonic() < deadline:
            time.sleep(0.01)
        assert fake.cancelled == 1
        while (row := next(iter(read_rows(router.config.ledger.path))))["cost"] is None:
            assert time.monotonic() < deadline
        assert (row["status"], row["estimated"]) == ("cancelled", 1)
        assert router.gateway.live.upstreams["first"].running == 0


def test_health_checks_find_a_dead_target_before_a_client_does(tmp_path):
    dead = 'url = "http://127.0.0.1:9/v1"\nhealth = {every_s = 0.05, timeout_s = 0.5}\n'
    with routing(f"[targets.first]\n{dead}[routes.auto]\n", tmp_path) as router:
        deadline = time.monotonic() + 3
        while httpx.get(f"{router.url}/ready").status_code != 503:
            assert time.monotonic() < deadline
            time.sleep(0.02)
