"""Every decision and every bill, in one database that several routers share: an SQLite file, or PostgreSQL.

Limits and budgets are counted there too, or in Redis for routers that share nothing else.

A request is one row: admitted, decided, billed. `decided` and `billed` return when the row is on disk, and the gateway
waits for them before the first and the last byte go to the client, so a process that is killed loses no row that a
client knows of. A row is billed once. One thread writes; what waits is committed together.
"""

from __future__ import annotations

import asyncio
import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from slipstream.route.config import Budget
from slipstream.route.config import Ledger as Settings
from slipstream.route.databases import Database, LedgerError, Source, opened, read
from slipstream.route.limits import RedisLimits
from slipstream.serve.errors import ApiError

__all__ = ["Allowance", "Ledger", "LedgerError", "Source", "read_rows"]

log = logging.getLogger("slipstream.route")

MINUTE_S = 60.0
LOST_S = 3600.0
"""An open row this old belongs to a router that died; its reserved cost is its bill."""

COLUMNS = {
    "id": "TEXT PRIMARY KEY", "started": "REAL NOT NULL", "key": "TEXT", "route": "TEXT", "session": "TEXT",
    "wire": "TEXT", "stream": "INTEGER", "agent": "TEXT", "step": "INTEGER", "policy": "TEXT", "status": "TEXT",
    "target": "TEXT", "tier": "TEXT", "tier_served": "TEXT", "model": "TEXT", "reasons": "TEXT", "alternatives": "TEXT",
    "score": "REAL", "latch": "INTEGER", "predicted_s": "REAL", "predicted_cost": "REAL", "attempts": "TEXT",
    "ttft_s": "REAL", "time_s": "REAL", "input": "INTEGER", "cached": "INTEGER", "written": "INTEGER",
    "output": "INTEGER", "reasoning": "INTEGER", "estimated": "INTEGER", "cost": "REAL", "judge_cost": "REAL",
    "judge_time_s": "REAL", "reserved": "REAL", "dropped": "TEXT", "arms": "TEXT", "error": "TEXT", "texts": "TEXT",
}  # fmt: skip
JSON_COLUMNS = ("reasons", "alternatives", "attempts", "dropped", "arms", "texts")
TABLES = (
    f"CREATE TABLE IF NOT EXISTS requests ({', '.join(f'{name} {kind}' for name, kind in COLUMNS.items())})",
    "CREATE INDEX IF NOT EXISTS by_key ON requests (key, started)",
    "CREATE INDEX IF NOT EXISTS by_time ON requests (started)",
    "CREATE INDEX IF NOT EXISTS by_open ON requests (route, key) WHERE cost IS NULL",
    "CREATE TABLE IF NOT EXISTS spent (scope TEXT, period TEXT, usd REAL, PRIMARY KEY (scope, period))",
)


@dataclass(frozen=True)
class Allowance:
    """What a request must stay within. budgets: (scope, budget), a scope being `key:NAME` or `route:NAME`."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    budgets: Sequence[tuple[str, Budget]] = ()


@dataclass
class _Job:
    work: Callable[[Database], Any]
    done: Callable[[Any, BaseException | None], None]
    durable: bool


class Ledger:
    """The writer of one ledger. `close` when nothing more comes."""

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.time) -> None:
        """Raises LedgerError."""
        self.source: Source = settings.path if settings.url is None else settings.url
        self._settings, self._clock = settings, clock
        self._db = opened(settings, TABLES)
        self._limits = RedisLimits(settings.limits, LOST_S) if settings.limits else None
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._tidy()
        self._thread = threading.Thread(target=self._write, name="ledger", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()
        self._db.close()
        if self._limits:
            self._limits.close()

    async def admit(self, row: Mapping[str, Any], allowance: Allowance) -> None:
        """Open a row with its `key`, `route` and `reserved`. Raises ApiError 429 over a limit, 402 over a budget."""
        await self._do(lambda db: self._admit(db, row, allowance), durable=False)

    async def decided(self, id: str, row: Mapping[str, Any]) -> None:
        await self._do(lambda db: self._decided(db, id, row), durable=True)

    async def billed(self, id: str, row: Mapping[str, Any]) -> bool:
        """Close a row with its cost; False where that was done before, and nothing changed."""
        return bool(await self._do(lambda db: self._bill(db, id, row), durable=True))

    def _admit(self, db: Database, row: Mapping[str, Any], allowance: Allowance) -> None:
        if self._limits is None:
            self._allow(db, row, allowance)
        else:
            self._allow_together(self._limits, row, allowance)
        _insert(db, row)

    def _allow(self, db: Database, row: Mapping[str, Any], allowance: Allowance) -> None:
        now, key = row["started"], row.get("key")
        if allowance.requests_per_minute or allowance.tokens_per_minute:
            since = now - MINUTE_S
            sums = "SELECT COUNT(*), SUM(COALESCE(input, 0) + COALESCE(output, 0)), MIN(started) FROM requests"
            count, tokens, first = db.execute(f"{sums} WHERE key = ? AND started > ?", (key, since)).fetchone()
            over = allowance.requests_per_minute and count >= allowance.requests_per_minute
            if over or (allowance.tokens_per_minute and (tokens or 0) >= allowance.tokens_per_minute):
                raise _too_often(key, first or now, now)
        for scope, budget in allowance.budgets:
            spent, open_usd = spent_usd(db, scope, budget.period, now)
            if spent + open_usd + (row.get("reserved") or 0.0) > budget.usd:
                raise _too_much(scope, budget)

    def _allow_together(self, limits: RedisLimits, row: Mapping[str, Any], allowance: Allowance) -> None:
        now, key = row["started"], row["key"]
        why, told = limits.admit(
            row["id"], now, period_of("day", now), key, row["route"], row.get("reserved") or 0.0,
            (allowance.requests_per_minute or 0, allowance.tokens_per_minute or 0),
            [(scope, period_of(budget.period, now), budget.usd) for scope, budget in allowance.budgets],
        )  # fmt: skip
        if why == "limit":
            raise _too_often(key, float(told), now)
        if why == "budget":
            raise _too_much(*allowance.budgets[int(float(told))])

    def _decided(self, db: Database, id: str, row: Mapping[str, Any]) -> None:
        if not _update(db, id, row, ""):  # it was admitted in a transaction that the disk did not take
            raise ApiError(503, "the ledger lost this request; send it again", code="ledger_unavailable")

    def _bill(self, db: Database, id: str, row: Mapping[str, Any]) -> bool:
        if not _update(db, id, row, " AND cost IS NULL"):
            return False
        started, key, route = db.execute("SELECT started, key, route FROM requests WHERE id = ?", (id,)).fetchone()
        usd = (row.get("cost") or 0.0) + (row.get("judge_cost") or 0.0)
        if self._limits is not None:
            try:
                self._limits.bill(id, usd, (row.get("input") or 0) + (row.get("output") or 0))
            except Exception as error:  # of many classes; what was reserved stays, and becomes the bill
                log.error("%s", json.dumps({"event": "bill not counted in Redis", "request": id, "error": str(error)}))
        for scope in (f"key:{key}", f"route:{route}"):
            for period in ("day", "month", "total"):
                db.execute(
                    "INSERT INTO spent VALUES (?, ?, ?) "
                    "ON CONFLICT (scope, period) DO UPDATE SET usd = spent.usd + excluded.usd",
                    (scope, period_of(period, started), usd),
                )
        return True

    def _tidy(self) -> None:
        """Close what a router that died left open, and forget what is too old."""
        self._tidied = time.monotonic()
        try:
            self._db.begin()
            now = self._clock()
            lost = self._db.execute(
                "SELECT id, reserved FROM requests WHERE cost IS NULL AND started < ?", (now - LOST_S,)
            ).fetchall()
            for id, reserved in lost:
                self._bill(self._db, id, {"cost": reserved or 0.0, "status": "lost", "estimated": 1})
            if self._settings.keep_days:
                self._db.execute("DELETE FROM requests WHERE started < ?", (now - 86400 * self._settings.keep_days,))
            self._db.commit()
        except Exception as error:  # of many classes; the next hour tries again
            self._db.rollback()
            log.error("%s", json.dumps({"event": "ledger not tidied", "error": str(error)}))

    async def _do(self, work: Callable[[Database], Any], durable: bool) -> Any:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def settle(value: Any, error: BaseException | None) -> None:
            if not future.done():
                if error is None:
                    future.set_result(value)
                else:
                    future.set_exception(error)

        def done(value: Any, error: BaseException | None) -> None:
            with suppress(RuntimeError):  # the loop is closed, so nobody waits
                loop.call_soon_threadsafe(settle, value, error)

        self._jobs.put(_Job(work, done, durable))
        return await asyncio.shield(future)

    def _write(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=max(0.0, self._tidied + LOST_S - time.monotonic()))
            except queue.Empty:
                self._tidy()
                continue
            if job is None:
                return
            batch = [job]
            try:
                self._together(batch)
            except Exception:  # of many classes, and none may end this thread
                self._db.rollback()
                for one in batch:
                    self._alone(one)

    def _together(self, batch: list[_Job]) -> None:
        """Write the jobs in `batch`, and those that come meanwhile, as one transaction."""
        told = []
        self._db.begin()
        for job in batch:  # which grows
            value, refused = self._run(job)
            if job.durable and not refused:
                told.append((job, value))
            with suppress(queue.Empty):
                if (waits := self._jobs.get_nowait()) is None:
                    self._jobs.put(None)  # the end, after this
                    break
                batch.append(waits)
        self._db.commit()
        for job, value in told:
            job.done(value, None)

    def _alone(self, job: _Job) -> None:
        """Another try for a job of a batch that failed: one of the others was at fault, or a lost connection."""
        try:
            self._db.begin()
            value, refused = self._run(job)
            self._db.commit()
            if not refused:
                job.done(value, None)
        except Exception as why:
            self._db.rollback()
            log.error("%s", json.dumps({"event": "ledger not written", "error": str(why)}))
            job.done(None, ApiError(503, "the ledger cannot be written; the log says why", code="ledger_unavailable"))

    def _run(self, job: _Job) -> tuple[Any, bool]:
        """(what came of it, whether it was refused). A refusal is told at once; what need not be on disk first, too."""
        try:
            value = job.work(self._db)
        except ApiError as error:
            job.done(None, error)
            return None, True
        if not job.durable:
            job.done(value, None)
        return value, False


def _too_often(key: str | None, first: float, now: float) -> ApiError:
    wait = max(1.0, first + MINUTE_S - now)
    message = f"the rate limit of key {key!r} is reached; try again in {wait:.0f} s"
    return ApiError(429, message, code="rate_limit_exceeded", retry_s=wait)


def _too_much(scope: str, budget: Budget) -> ApiError:
    message = f"the {budget.period}'s budget of {scope.replace(':', ' ', 1)} is spent (${budget.usd:g})"
    return ApiError(402, message, code="budget_exceeded")


def _encoded(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _plain(name, value) for name, value in row.items() if name in COLUMNS}


def _plain(name: str, value: Any) -> Any:
    """As every database takes it: text without half a surrogate pair or NUL, which a target's answer may hold."""
    if name in JSON_COLUMNS and value is not None:
        return json.dumps(value)
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode().replace("\0", "")
    return int(value) if isinstance(value, bool) else value


def _insert(db: Database, row: Mapping[str, Any]) -> None:
    values = _encoded(row)
    names = ", ".join(f'"{name}"' for name in values)
    db.execute(
        f"INSERT INTO requests ({names}) VALUES ({', '.join('?' * len(values))}) ON CONFLICT (id) DO NOTHING",
        list(values.values()),
    )


def _update(db: Database, id: str, row: Mapping[str, Any], only: str) -> int:
    values = _encoded(row)
    sets = ", ".join(f'"{name}" = ?' for name in values)
    return db.execute(f"UPDATE requests SET {sets} WHERE id = ?{only}", [*values.values(), id]).rowcount


def period_of(period: str, when: float) -> str:
    day = datetime.fromtimestamp(when, UTC).strftime("%Y-%m-%d")
    return {"day": day, "month": day[:7]}.get(period, "total")


def spent_usd(db: Database, scope: str, period: str, now: float) -> tuple[float, float]:
    """(billed, reserved by open requests) of a scope in the period of `now`."""
    column, _, name = scope.partition(":")
    assert column in ("key", "route")
    found = db.execute("SELECT usd FROM spent WHERE scope = ? AND period = ?", (scope, period_of(period, now)))
    billed = (found.fetchone() or (0.0,))[0]
    sums = f"SELECT SUM(COALESCE(reserved, 0)) FROM requests WHERE cost IS NULL AND {column} = ?"
    return billed, db.execute(sums, (name,)).fetchone()[0] or 0.0


def read_rows(
    source: Source, *, since: float = 0.0, id: str | None = None, route: str | None = None, last: int | None = None
) -> Iterator[dict[str, Any]]:
    """Rows of a ledger as they were written, the oldest first; of `last`, only so many of the newest.

    Raises LedgerError where there is no such ledger.
    """
    where, values = ["started >= ?"], [since]
    for name, value in (("id", id), ("route", route)):
        if value is not None:
            where.append(f"{name} = ?")
            values.append(value)  # type: ignore[arg-type]
    newest = f" ORDER BY started DESC LIMIT {int(last)}" if last is not None else ""
    picked = f"SELECT * FROM requests WHERE {' AND '.join(where)}{newest}"
    for row in read(source, f"SELECT * FROM ({picked}) AS picked ORDER BY started", values):
        yield {name: json.loads(value) if name in JSON_COLUMNS and value else value for name, value in row.items()}
