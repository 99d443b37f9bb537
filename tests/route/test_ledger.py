"""The ledger in either database: limits hold across routers, rows are billed once, and no answer can end the writer."""

import asyncio
import sqlite3
import time
from contextlib import ExitStack, contextmanager

import pytest
from postgres import programs, server
from redis_server import redis_server
from upstreams import Fake, routing, table, targets

from slipstream.route.config import Budget, RouteConfigError, read_config
from slipstream.route.config import Ledger as Settings
from slipstream.route.databases import LedgerError
from slipstream.route.ledger import LOST_S, Allowance, Ledger, read_rows
from slipstream.route.summary import explain, summary
from slipstream.serve.errors import ApiError

ONE_DOLLAR = Allowance(budgets=[("route:r", Budget(usd=1.0))])
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def postgres():
    if (bin := programs()) is None:
        pytest.skip("no PostgreSQL server is installed")
    with server(bin) as (url, _):
        yield url


@pytest.fixture(scope="module")
def redis_url():
    with redis_server() as url:
        yield url


@pytest.fixture(params=["sqlite", "postgres", "redis"])
def settings(request, tmp_path):
    """An empty ledger's settings."""
    if request.param == "sqlite":
        return Settings(path=tmp_path / "route.db")
    if request.param == "redis":
        import redis

        url = request.getfixturevalue("redis_url")
        redis.Redis.from_url(url).flushall()
        return Settings(path=tmp_path / "route.db", limits=url)
    import psycopg

    url = request.getfixturevalue("postgres")
    with psycopg.connect(url, autocommit=True) as db:
        db.execute("DROP TABLE IF EXISTS requests, spent")
    return Settings(url=url)


@contextmanager
def open_ledgers(settings, count=1, **options):
    found = [Ledger(settings, **options) for _ in range(count)]
    try:
        yield found
    finally:
        for one in found:
            one.close()


def row(id, **more):
    return {"id": id, "started": time.time(), "key": "k", "route": "r", "stream": True, "status": "open", **more}


def test_a_budget_holds_across_routers_that_ask_at_once(settings):
    async def main(ledgers) -> int:
        asked = (ledgers[i % 2].admit(row(f"r{i}", reserved=0.3), ONE_DOLLAR) for i in range(20))
        ends = await asyncio.gather(*asked, return_exceptions=True)
        refused = [end for end in ends if end is not None]
        assert all(isinstance(end, ApiError) and end.status == 402 for end in refused)
        return len(ends) - len(refused)

    with open_ledgers(settings, 2) as ledgers:
        assert asyncio.run(main(ledgers)) == 3  # 3 x 0.3 fit a dollar, 4 do not


def test_a_rate_limit_holds_across_routers(settings):
    async def main(one, other) -> None:
        limited = Allowance(requests_per_minute=2)
        await one.admit(row("a"), limited)
        await other.admit(row("b"), limited)
        for ledger in (one, other):
            with pytest.raises(ApiError, match="rate limit") as refused:
                await ledger.admit(row("c"), limited)
            assert refused.value.status == 429

    with open_ledgers(settings, 2) as ledgers:
        asyncio.run(main(*ledgers))


@pytest.fixture
def two(redis_url, tmp_path):
    """Ledgers in their own files that share their limits alone."""
    import redis

    redis.Redis.from_url(redis_url).flushall()
    found = [Ledger(Settings(path=tmp_path / f"{name}.db", limits=redis_url)) for name in "ab"]
    yield found
    for one in found:
        one.close()


def test_routers_with_a_redis_share_budgets_limits_and_bills_but_no_rows(two):
    one, other = two
    limited = Allowance(tokens_per_minute=100, budgets=ONE_DOLLAR.budgets)

    async def main() -> None:
        await one.admit(row("a", reserved=0.3), limited)
        await one.decided("a", {"target": "t"})
        with pytest.raises(ApiError, match=r"the day's budget of route r is spent \(\$1\)"):
            await other.admit(row("b", reserved=0.8), limited)
        assert await one.billed("a", {"cost": 0.5, "judge_cost": 0.1, "input": 90, "output": 9})
        assert not await one.billed("a", {"cost": 0.5})
        await other.admit(row("c", reserved=0.4), limited)  # 0.6 are spent, and nothing is reserved any more
        assert await other.billed("c", {"cost": 0.0, "input": 1})
        with pytest.raises(ApiError, match="rate limit of key 'k'") as refused:
            await one.admit(row("d"), limited)
        assert 50 < refused.value.retry_s <= 60
        await one.admit(row("d", key="another"), limited)
        await one.decided("d", {"target": "t"})

    asyncio.run(main())
    assert [[r["id"] for r in read_rows(ledger.source)] for ledger in (one, other)] == [["a", "d"], ["c"]]


def test_an_admission_that_is_written_again_counts_once_in_redis(two):
    one, _ = two
    asked = ("a", time.time(), "2026-01-31", "k", "r", 0.6, (1, 0), [("route:r", "total", 1.0)])
    assert [one._limits.admit(*asked) for _ in range(2)] == [("", "")] * 2
    assert one._limits.admit("b", *asked[1:])[0] == "limit"
    assert one._limits.admit("b", *asked[1:6], (0, 0), asked[7])[0] == "budget"


def test_what_a_dead_router_reserved_in_redis_becomes_its_bill(two):
    one, other = two

    async def main() -> None:
        await one.admit(row("a", started=time.time() - LOST_S - 1, reserved=0.7), Allowance())
        total = Allowance(budgets=[("route:r", Budget(usd=1.0, period="total"))])
        await other.admit(row("b", reserved=0.2), total)
        with pytest.raises(ApiError, match="budget"):
            await other.admit(row("c", reserved=0.2), total)
        await one.billed("a", {"cost": 0.1})  # too late: it is billed already
        with pytest.raises(ApiError, match="budget"):
            await other.admit(row("c", reserved=0.2), total)

    asyncio.run(main())


def test_without_its_redis_a_router_lets_nobody_in_and_still_writes_its_bills(tmp_path):
    async def main(ledger, stop) -> None:
        await ledger.admit(row("a"), Allowance())
        stop()
        with pytest.raises(ApiError, match="cannot be written") as refused:
            await ledger.admit(row("b"), Allowance())
        assert refused.value.status == 503
        assert await ledger.billed("a", {"cost": 0.5, "status": "ok"})

    with ExitStack() as running:
        ledger = Ledger(Settings(path=tmp_path / "route.db", limits=running.enter_context(redis_server())))

        def stop() -> None:
            running.close()
            ledger._limits.close()  # the server in Python would answer on connections that are open

        asyncio.run(main(ledger, stop))
        ledger.close()
    (told,) = read_rows(tmp_path / "route.db")
    assert told["cost"] == 0.5


def test_a_row_is_billed_once_whoever_bills_it(settings):
    async def main(one, other) -> None:
        await one.admit(row("a", reserved=0.1), ONE_DOLLAR)
        await one.decided("a", {"target": "t", "reasons": ["because"], "latch": False})
        assert await asyncio.gather(one.billed("a", {"cost": 0.9}), other.billed("a", {"cost": 0.9})) in (
            [True, False],
            [False, True],
        )
        with pytest.raises(ApiError, match="budget of route r is spent"):
            await other.admit(row("b", reserved=0.2), ONE_DOLLAR)
        await other.admit(row("c", reserved=0.05), ONE_DOLLAR)

    with open_ledgers(settings, 2) as ledgers:
        asyncio.run(main(*ledgers))
    source = ledgers[0].source
    first, second = read_rows(source)
    assert (first["cost"], first["reasons"], first["latch"], first["stream"]) == (0.9, ["because"], 0, 1)
    assert second["cost"] is None
    assert summary(source)["open"] == 1
    assert "because" in explain(source, "a")


def test_what_a_dead_router_left_open_is_billed_as_reserved(settings):
    async def leave(ledger) -> None:
        await ledger.admit(row("a", reserved=0.7), Allowance())
        await ledger.decided("a", {"target": "t"})

    with open_ledgers(settings) as (ledger,):
        asyncio.run(leave(ledger))
    with open_ledgers(settings, clock=lambda: time.time() + LOST_S + 1) as (ledger,):
        (lost,) = read_rows(ledger.source)
    assert (lost["status"], lost["cost"], lost["estimated"]) == ("lost", 0.7, 1)


def test_nothing_that_a_target_says_ends_the_writer(settings):
    async def main(ledger) -> None:
        await ledger.admit(row("a"), Allowance())
        odd = {"model": "half \ud800, NUL \0", "error": "\0", "attempts": [{"error": "\ud800"}], "cost": 0.5}
        assert await ledger.billed("a", odd)

    with open_ledgers(settings) as (ledger,):
        asyncio.run(main(ledger))
        (told,) = read_rows(ledger.source)
        assert told["model"] == "half ?, NUL "


def test_one_request_that_cannot_be_written_fails_alone(settings):
    async def main(ledger) -> None:
        good = [ledger.admit(row(f"good{i}"), Allowance()) for i in range(5)]
        bad = ledger.admit(row("bad", cost=object()), Allowance())
        ends = await asyncio.gather(*good[:2], bad, *good[2:], return_exceptions=True)
        assert [type(end) for end in ends] == [type(None)] * 2 + [ApiError] + [type(None)] * 3
        await asyncio.gather(*(ledger.decided(f"good{i}", {"target": "t"}) for i in range(5)))

    with open_ledgers(settings) as (ledger,):
        asyncio.run(main(ledger))
    assert [one["target"] for one in read_rows(ledger.source)] == ["t"] * 5


def test_a_request_whose_admission_the_disk_did_not_take_goes_no_further(settings):
    async def main(ledger) -> None:
        with pytest.raises(ApiError, match="lost this request"):
            await ledger.decided("never", {"target": "t"})

    with open_ledgers(settings) as (ledger,):
        asyncio.run(main(ledger))


def test_the_router_works_on_a_shared_database(postgres, tmp_path):
    fake = Fake("anthropic")
    with targets(fake):
        text = f'[ledger]\nurl = "{postgres}"\n' + table("a", fake) + '[routes.auto]\npolicy = "fixed"\n'
        with routing(text, tmp_path) as one, routing(text, tmp_path) as other:
            for router in (one, other):
                router.openai().chat.completions.create(model="auto", messages=HI, extra_headers={"x-session-id": "s"})
            told = [r for r in read_rows(postgres, since=time.time() - 60) if r["session"] == "s"]
    assert [r["status"] for r in told] == ["ok", "ok"]
    assert not list(tmp_path.glob("*.db"))


def test_a_server_that_comes_back_is_used_again(postgres):
    import psycopg

    async def main(ledger) -> None:
        await ledger.admit(row("before"), Allowance())
        with psycopg.connect(postgres, autocommit=True) as db:
            others = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
            db.execute(f"{others} AND backend_type = 'client backend'".encode())
        await ledger.admit(row("after"), Allowance())
        await ledger.billed("after", {"cost": 0.1})

    with open_ledgers(Settings(url=postgres)) as (ledger,):
        asyncio.run(main(ledger))
    assert {"before", "after"} <= {one["id"] for one in read_rows(postgres)}


def test_what_cannot_be_opened_is_told_with_its_remedy(tmp_path):
    with pytest.raises(LedgerError, match="a file that can be written"):
        Ledger(Settings(path=tmp_path))
    with pytest.raises(LedgerError, match=r"see \[ledger\] url"):
        Ledger(Settings(url="postgresql://router@127.0.0.1:9/none"))
    with pytest.raises(LedgerError, match=r"see \[ledger\] limits"):
        Ledger(Settings(path=tmp_path / "a.db", limits="redis://127.0.0.1:9/0"))
    (tmp_path / "no.db").write_text("this is no database, whatever its name says, and it is long enough to tell")
    with pytest.raises(LedgerError, match="not a database"):
        list(read_rows(tmp_path / "no.db"))


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ('url = "postgresql://a:secret@h/d"', "must not hold a password"),
        ('url = "redis://h"', "must be a postgresql"),
        ('limits = "redis://:secret@h"', "must not hold a password"),
        ('limits = "redis://h?password=secret"', "must not hold a password"),
        ('limits = "http://h"', "must be a redis"),
    ],
)
def test_a_ledgers_addresses_are_checked_and_hold_no_password(setting, said):
    with pytest.raises(RouteConfigError, match=said):
        read_config(f'[ledger]\n{setting}\n[targets.a]\nurl = "http://x"\n[routes.auto]\n')


def test_a_locked_file_is_one_clear_error_and_then_works_again(tmp_path, monkeypatch):
    async def main(ledger) -> None:
        with sqlite3.connect(tmp_path / "route.db", isolation_level=None) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(ApiError, match="cannot be written"):
                await ledger.admit(row("a"), Allowance())
            other.execute("ROLLBACK")
        await ledger.admit(row("b"), Allowance())

    with open_ledgers(Settings(path=tmp_path / "route.db")) as (ledger,):
        ledger._db.execute("PRAGMA busy_timeout = 50")
        asyncio.run(main(ledger))
