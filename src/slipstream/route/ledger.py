"""Every decision and every bill, in one SQLite file (WAL) that several routers of a machine may share.

A request is one row: admitted, decided, billed. `decided` and `billed` return when the row is on disk, and the gateway
waits for them before the first and the last byte go to the client, so a process that is killed loses no row that a
client knows of. A row is billed once. One thread writes; what waits is committed together.
"""

from __future__ import annotations

import asyncio
import json
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from slipstream.errors import SlipstreamError
from slipstream.route.config import Budget
from slipstream.route.config import Ledger as Settings
from slipstream.serve.errors import ApiError

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


@dataclass(frozen=True)
class Allowance:
    """What a request must stay within. budgets: (scope, budget), a scope being `key:NAME` or `route:NAME`."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    budgets: Sequence[tuple[str, Budget]] = ()


class Store(Protocol):
    """Where rows are kept. SQLite here; several machines that share budgets need another."""

    async def admit(self, row: Mapping[str, Any], allowance: Allowance) -> None: ...
    async def decided(self, id: str, row: Mapping[str, Any]) -> None: ...
    async def billed(self, id: str, row: Mapping[str, Any]) -> bool: ...


class LedgerError(SlipstreamError):
    """The file cannot be opened or written."""


@dataclass
class _Job:
    work: Callable[[sqlite3.Connection], Any]
    done: Callable[[Any, BaseException | None], None]
    durable: bool


class Ledger:
    """The writer of one file. `close` when nothing more comes."""

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.time) -> None:
        self._settings, self._clock = settings, clock
        try:
            settings.path.parent.mkdir(parents=True, exist_ok=True)
            self._db = _open(settings.path, settings.fsync)
        except (OSError, sqlite3.Error) as error:
            raise LedgerError(f"{settings.path}: {error}; set [ledger] path to a file that can be written") from error
        self._recover()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="ledger", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()
        self._db.close()

    async def admit(self, row: Mapping[str, Any], allowance: Allowance) -> None:
        """Open a row with its `key`, `route` and `reserved`. Raises ApiError 429 over a limit, 402 over a budget."""
        await self._do(lambda db: self._admit(db, row, allowance), durable=False)

    async def decided(self, id: str, row: Mapping[str, Any]) -> None:
        await self._do(lambda db: _update(db, id, row, ""), durable=True)

    async def billed(self, id: str, row: Mapping[str, Any]) -> bool:
        """Close a row with its cost; False where that was done before, and nothing changed."""
        return bool(await self._do(lambda db: self._bill(db, id, row), durable=True))

    def _admit(self, db: sqlite3.Connection, row: Mapping[str, Any], allowance: Allowance) -> None:
        now, key = row["started"], row.get("key")
        if allowance.requests_per_minute or allowance.tokens_per_minute:
            since = now - MINUTE_S
            sums = "SELECT COUNT(*), SUM(COALESCE(input, 0) + COALESCE(output, 0)), MIN(started) FROM requests"
            count, tokens, first = db.execute(f"{sums} WHERE key = ? AND started > ?", (key, since)).fetchone()
            over = allowance.requests_per_minute and count >= allowance.requests_per_minute
            if over or (allowance.tokens_per_minute and (tokens or 0) >= allowance.tokens_per_minute):
                wait = max(1.0, (first or now) + MINUTE_S - now)
                message = f"the rate limit of key {key!r} is reached; try again in {wait:.0f} s"
                raise ApiError(429, message, code="rate_limit_exceeded", retry_s=wait)
        for scope, budget in allowance.budgets:
            spent, open_usd = spent_usd(db, scope, budget.period, now)
            if spent + open_usd + (row.get("reserved") or 0.0) > budget.usd:
                message = f"the {budget.period}'s budget of {scope.replace(':', ' ', 1)} is spent (${budget.usd:g})"
                raise ApiError(402, message, code="budget_exceeded")
        _insert(db, row)

    def _bill(self, db: sqlite3.Connection, id: str, row: Mapping[str, Any]) -> bool:
        if not _update(db, id, row, " AND cost IS NULL"):
            return False
        started, key, route = db.execute("SELECT started, key, route FROM requests WHERE id = ?", (id,)).fetchone()
        usd = (row.get("cost") or 0.0) + (row.get("judge_cost") or 0.0)
        for scope in (f"key:{key}", f"route:{route}"):
            for period in ("day", "month", "total"):
                db.execute(
                    "INSERT INTO spent VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET usd = usd + excluded.usd",
                    (scope, period_of(period, started), usd),
                )
        return True

    def _recover(self) -> None:
        """Close what a router that died left open, and forget what is too old."""
        now = self._clock()
        with self._db:
            lost = self._db.execute(
                "SELECT id, reserved FROM requests WHERE cost IS NULL AND started < ?", (now - LOST_S,)
            ).fetchall()
            for id, reserved in lost:
                self._bill(self._db, id, {"cost": reserved or 0.0, "status": "lost", "estimated": 1})
            if self._settings.keep_days:
                self._db.execute("DELETE FROM requests WHERE started < ?", (now - 86400 * self._settings.keep_days,))

    async def _do(self, work: Callable[[sqlite3.Connection], Any], durable: bool) -> Any:
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
        while (job := self._jobs.get()) is not None:
            told: list[tuple[_Job, Any]] = []
            last = False
            try:
                self._db.execute("BEGIN IMMEDIATE")
                batch: _Job | None = job
                while batch is not None:
                    self._run(batch, told)
                    try:
                        batch = self._jobs.get_nowait()
                        last = batch is None
                    except queue.Empty:
                        batch = None
                self._db.execute("COMMIT")
            except sqlite3.Error as error:
                with suppress(sqlite3.Error):
                    self._db.execute("ROLLBACK")
                refused = ApiError(503, f"the ledger cannot be written: {error}", code="ledger_unavailable")
                for waiting, _ in told or [(job, None)]:
                    waiting.done(None, refused)
                told = []
            for waiting, value in told:
                waiting.done(value, None)
            if last:
                return

    def _run(self, job: _Job, told: list[tuple[_Job, Any]]) -> None:
        """A refusal is told at once; what need not be on disk first, too."""
        try:
            value = job.work(self._db)
        except ApiError as error:
            job.done(None, error)
            return
        if job.durable:
            told.append((job, value))
        else:
            job.done(value, None)


def _open(path: Path, fsync: bool) -> sqlite3.Connection:
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=5.0)
    path.chmod(0o600)
    db.execute("PRAGMA journal_mode = WAL")
    db.execute(f"PRAGMA synchronous = {'FULL' if fsync else 'NORMAL'}")
    columns = ", ".join(f'"{name}" {kind}' for name, kind in COLUMNS.items())
    db.execute(f"CREATE TABLE IF NOT EXISTS requests ({columns})")
    db.execute("CREATE INDEX IF NOT EXISTS by_key ON requests (key, started)")
    db.execute("CREATE INDEX IF NOT EXISTS by_time ON requests (started)")
    db.execute("CREATE INDEX IF NOT EXISTS by_open ON requests (route, key) WHERE cost IS NULL")
    db.execute("CREATE TABLE IF NOT EXISTS spent (scope TEXT, period TEXT, usd REAL, PRIMARY KEY (scope, period))")
    return db


def _encoded(row: Mapping[str, Any]) -> dict[str, Any]:
    return {k: json.dumps(v) if k in JSON_COLUMNS and v is not None else v for k, v in row.items() if k in COLUMNS}


def _insert(db: sqlite3.Connection, row: Mapping[str, Any]) -> None:
    values = _encoded(row)
    names = ", ".join(f'"{name}"' for name in values)
    db.execute(f"INSERT INTO requests ({names}) VALUES ({', '.join('?' * len(values))})", list(values.values()))


def _update(db: sqlite3.Connection, id: str, row: Mapping[str, Any], only: str) -> int:
    values = _encoded(row)
    sets = ", ".join(f'"{name}" = ?' for name in values)
    return db.execute(f"UPDATE requests SET {sets} WHERE id = ?{only}", [*values.values(), id]).rowcount


def period_of(period: str, when: float) -> str:
    day = datetime.fromtimestamp(when, UTC).strftime("%Y-%m-%d")
    return {"day": day, "month": day[:7]}.get(period, "total")


def spent_usd(db: sqlite3.Connection, scope: str, period: str, now: float) -> tuple[float, float]:
    """(billed, reserved by open requests) of a scope in the period of `now`."""
    column, _, name = scope.partition(":")
    assert column in ("key", "route")
    found = db.execute("SELECT usd FROM spent WHERE scope = ? AND period = ?", (scope, period_of(period, now)))
    billed = (found.fetchone() or (0.0,))[0]
    sums = f"SELECT SUM(COALESCE(reserved, 0)) FROM requests WHERE cost IS NULL AND {column} = ?"
    return billed, db.execute(sums, (name,)).fetchone()[0] or 0.0


def read_rows(
    path: Path, *, since: float = 0.0, id: str | None = None, route: str | None = None, last: int | None = None
) -> Iterator[dict[str, Any]]:
    """Rows of a ledger as they were written, the oldest first; of `last`, only so many of the newest.

    Raises LedgerError where there is no such file.
    """
    if not path.exists():
        raise LedgerError(f"{path}: there is no ledger; `slipstream route CONFIG.toml` writes one")
    db = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
    db.row_factory = sqlite3.Row
    where, values = ["started >= ?"], [since]
    for name, value in (("id", id), ("route", route)):
        if value is not None:
            where.append(f"{name} = ?")
            values.append(value)  # type: ignore[arg-type]
    newest = f" ORDER BY started DESC LIMIT {int(last)}" if last is not None else ""
    try:
        picked = f"SELECT * FROM requests WHERE {' AND '.join(where)}{newest}"
        for row in db.execute(f"SELECT * FROM ({picked}) ORDER BY started", values):
            yield {k: json.loads(row[k]) if k in JSON_COLUMNS and row[k] else row[k] for k in row.keys()}  # noqa: SIM118
    finally:
        db.close()
