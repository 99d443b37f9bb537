"""Tiers: who is served when, what is named and billed, and that waiting changes nothing."""

from __future__ import annotations

import threading
import time

import httpx
import openai
import pytest
from serving import serving

from slipstream.serve.auth import Client, hash_key
from slipstream.serve.config import Config, Key, Prices, Tier
from slipstream.serve.errors import ApiError
from slipstream.serve.tiers import choose_tier, cost_usd, explain

QUESTION = [{"role": "user", "content": "Tell me a story."}]
PRICES = Prices(input=1.0, cached_input=0.1, output=4.0)


def ask(running, **options):
    call = {"model": running.model, "messages": QUESTION, "max_tokens": 16, "temperature": 0}
    return running.openai().chat.completions.create(**(call | options))


@pytest.fixture(scope="module")
def priced(tiny_llm):
    with serving(tiny_llm, prices=PRICES) as running:
        yield running


@pytest.mark.parametrize(
    ("asked", "served", "times"),
    [(None, "default", 1), ("auto", "default", 1), ("default", "default", 1), ("flex", "flex", 0.5),
     ("priority", "priority", 2), ("fast", "priority", 2), ("ultrafast", "ultrafast", 6)],
)  # fmt: skip
def test_the_tier_that_served_is_named_and_billed(priced, asked, served, times):
    options = {"extra_body": {"service_tier": asked}} if asked else {}
    done = ask(priced, **options)
    assert done.service_tier == served
    usage = done.usage
    cached = usage.prompt_tokens_details.cached_tokens
    dollars = times * ((usage.prompt_tokens - cached) * 1.0 + cached * 0.1 + usage.completion_tokens * 4.0) / 1e6
    assert usage.cost == pytest.approx(dollars, abs=2e-9)
    chunks = list(ask(priced, stream=True, stream_options={"include_usage": True}, **options))
    assert {chunk.service_tier for chunk in chunks} == {served}


def test_costs_are_counted(priced):
    def total():
        lines = httpx.get(f"{priced.url}/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("slipstream_cost_usd_total"))

    before = total()
    done = ask(priced)
    assert total() - before == pytest.approx(done.usage.cost)


def test_an_unavailable_tier_is_an_error_unless_the_client_opted_in(tiny):
    with pytest.raises(openai.BadRequestError) as refused:
        ask(tiny, service_tier="scale")
    assert refused.value.code == "service_tier_unavailable"
    done = ask(tiny, service_tier="scale", extra_body={"service_tier_fallback": True})
    assert done.service_tier == "default"


def test_a_key_is_held_to_its_tiers():
    key = Key(name="k", hash=hash_key("secret"), tiers=("flex", "default"))
    config, client = Config(keys=(key,)), Client(key)
    assert choose_tier(config, "flex", client).name == "flex"
    with pytest.raises(ApiError, match="may not use"):
        choose_tier(config, "ultrafast", client)
    assert choose_tier(config, "ultrafast", client, fallback=True).name == "default"


@pytest.mark.parametrize("lower", ["flex", "default"])
def test_a_preempted_stream_waits_and_its_tokens_do_not_change(slow_llm, lower):
    call = {"max_tokens": 250, "temperature": 1.0, "seed": 9, "extra_body": {"service_tier": lower, "ignore_eos": True}}
    fast = {"max_tokens": 100, "extra_body": {"service_tier": "ultrafast", "ignore_eos": True}}
    with serving(slow_llm) as running:
        alone = ask(running, **call).choices[0].message.content
        stream = ask(running, stream=True, **call)
        first = next(chunk for chunk in stream if chunk.choices[0].delta.content)
        times, text = [], first.choices[0].delta.content

        def read():
            nonlocal text
            for chunk in stream:
                text += chunk.choices[0].delta.content or ""
                times.append(time.perf_counter())

        reader = threading.Thread(target=read)
        reader.start()
        started = time.perf_counter()
        fast_chunks = [time.perf_counter() for _ in ask(running, stream=True, **fast)]
        reader.join()
        assert text == alone
        assert times[-1] > fast_chunks[-1] > started  # the lower stream came last
        assert "slipstream_preemptions_total" in httpx.get(f"{running.url}/metrics").text
        lines = httpx.get(f"{running.url}/metrics").text.splitlines()
        paused = [line for line in lines if line.startswith(f'slipstream_preemptions_total{{tier="{lower}"}}')]
        assert paused
        assert float(paused[0].split()[-1]) >= 1


def test_streams_of_one_tier_share_the_machine(slow_llm):
    """The second of two equal streams does not wait for the first to end."""
    call = {"max_tokens": 400, "extra_body": {"ignore_eos": True}, "stream": True}
    with serving(slow_llm) as running:
        first = ask(running, **call)
        next(first)
        second_started = next(c for c in ask(running, **call | {"max_tokens": 8}) if c.choices[0].delta.content)
        assert second_started
        assert running.service.scheduler.streams(), "the first stream still runs"
        first.close()
        assert running.at_rest()


def test_a_full_queue_is_a_429_that_says_when_to_come_back(slow_llm):
    tiers = {"default": Tier(rank=0, streams=1, queue=1)}
    call = {"max_tokens": 450, "extra_body": {"ignore_eos": True}, "stream": True}
    with serving(slow_llm, tiers=tiers, fast="default") as running:
        stream = ask(running, **call)
        next(stream)
        threading.Thread(target=lambda: ask(running, **call).close(), daemon=True).start()
        while running.service.scheduler.load()["default"] != (1, 1):
            time.sleep(0.005)
        with pytest.raises(openai.RateLimitError) as refused:
            ask(running, **call)
        assert refused.value.code == "queue_full"
        assert int(refused.value.response.headers["retry-after"]) >= 1
        stream.close()
        assert running.at_rest()
        assert ask(running).usage.completion_tokens


def test_explained_costs_and_waits():
    config = Config(prices=PRICES)
    quotes = {q.tier: q for q in explain(config, 1000, 500, 100, {"default": (4, 2), "ultrafast": (1, 0)}, 10.0)}
    assert list(quotes) == ["ultrafast", "priority", "default", "flex"]
    assert quotes["default"].cost_usd == pytest.approx(cost_usd(config, config.tiers["default"], 1000, 500, 100))
    assert quotes["flex"].cost_usd == pytest.approx(quotes["default"].cost_usd / 2)
    assert quotes["ultrafast"].wait_s <= quotes["priority"].wait_s < quotes["flex"].wait_s


def test_the_server_explains_its_tiers(priced):
    body = {"prompt_tokens": 1000, "completion_tokens": 10}
    answer = httpx.post(f"{priced.url}/v1/slipstream/tiers", json=body).json()
    assert [q["tier"] for q in answer["tiers"]] == ["ultrafast", "priority", "default", "flex"]
