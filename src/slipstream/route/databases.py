"""The databases a ledger may lie in: an SQLite file for the routers of one machine, PostgreSQL for those of several.

Both take one writer at a time, so that what a budget still allows is read and reserved as one act. Statements are
written with `?`, in what both understand.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from slipstream.errors import SlipstreamError
from slipstream.route.config import Ledger as Settings

if TYPE_CHECKING:
    import psycopg

CONNECT_S = 5
WRITER = 0x736C6970
"""The advisory lock that the writing router holds in PostgreSQL."""
Source = Path | str
"""Where a ledger lies: a file, or the URL of a PostgreSQL database."""


class LedgerError(SlipstreamError):
    """The ledger cannot be opened, read or written."""


class Rows(Protocol):
    """What a statement answered."""

    @property
    def rowcount(self) -> int: ...
    def fetchone(self) -> Any: ...
    def fetchall(self) -> Sequence[Any]: ...


class Database(Protocol):
    """One writer's connection; errors of a database are of many classes, and all mean that nothing was written."""

    def begin(self) -> None:
        """Wait until no other router writes."""
        ...

    def execute(self, statement: str, values: Sequence[Any] = ()) -> Rows: ...
    def commit(self) -> None: ...
    def rollback(self) -> None: ...
    def close(self) -> None: ...


class Sqlite:
    """A file in WAL mode, for its owner's eyes alone."""

    def __init__(self, path: Path, fsync: bool, tables: Sequence[str]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=5.0)
        path.chmod(0o600)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute(f"PRAGMA synchronous = {'FULL' if fsync else 'NORMAL'}")
        for table in tables:
            self._db.execute(table)

    def begin(self) -> None:
        self._db.execute("BEGIN IMMEDIATE")

    def execute(self, statement: str, values: Sequence[Any] = ()) -> Rows:
        return self._db.execute(statement, values)

    def commit(self) -> None:
        self._db.execute("COMMIT")

    def rollback(self) -> None:
        if self._db.in_transaction:
            self._db.execute("ROLLBACK")

    def close(self) -> None:
        self._db.close()


class Postgres:
    """A database on a server (the extra `[postgres]`); a connection that was lost is opened again by `begin`."""

    def __init__(self, url: str, fsync: bool, tables: Sequence[str]) -> None:
        self._url, self._fsync = url, fsync
        self._db = self._opened()
        self.begin()  # two routers that start together would create the tables twice
        for table in tables:
            self.execute(table.replace(" REAL", " DOUBLE PRECISION").replace(" INTEGER", " BIGINT"))
        self.commit()

    def _opened(self) -> psycopg.Connection[Any]:
        db: psycopg.Connection[Any] = _psycopg().connect(self._url, autocommit=True, connect_timeout=CONNECT_S)
        if not self._fsync:
            db.execute("SET synchronous_commit = off")
        return db

    def begin(self) -> None:
        if self._db.closed:
            self._db = self._opened()
        self._db.execute("BEGIN")
        self._db.execute(f"SELECT pg_advisory_xact_lock({WRITER})".encode())

    def execute(self, statement: str, values: Sequence[Any] = ()) -> Rows:
        return self._db.execute(_marked(statement), values)

    def commit(self) -> None:
        self._db.execute("COMMIT")

    def rollback(self) -> None:
        try:
            self._db.execute("ROLLBACK")
        except Exception:  # the server is gone, and the transaction with it
            self.close()

    def close(self) -> None:
        with suppress(Exception):
            self._db.close()


def opened(settings: Settings, tables: Sequence[str]) -> Database:
    """The ledger's database, its tables made. Raises LedgerError."""
    try:
        if settings.url is not None:
            return Postgres(settings.url, settings.fsync, tables)
        return Sqlite(settings.path, settings.fsync, tables)
    except (OSError, sqlite3.Error) as error:
        message = f"{settings.path}: {error}; set [ledger] path to a file that can be written"
        raise LedgerError(message) from error
    except LedgerError:
        raise
    except Exception as error:
        raise LedgerError(f"{settings.url}: {str(error).strip()}; see [ledger] url") from error


def read(source: Source, statement: str, values: Sequence[Any]) -> Iterator[Mapping[str, Any]]:
    """The rows that a statement finds, which changes nothing. Raises LedgerError where there is no such ledger."""
    if isinstance(source, str):
        try:
            with _psycopg().connect(source, connect_timeout=CONNECT_S) as db, db.cursor() as cursor:
                cursor.execute(_marked(statement), values)
                names = [column.name for column in cursor.description or ()]
                for row in cursor:
                    yield dict(zip(names, row, strict=True))
        except _psycopg().Error as error:
            raise LedgerError(f"{source}: {str(error).strip()}") from error
        return
    if not source.exists():
        raise LedgerError(f"{source}: there is no ledger; `slipstream route CONFIG.toml` writes one")
    try:
        with closing(sqlite3.connect(f"{source.resolve().as_uri()}?mode=ro", uri=True)) as file:
            found = file.execute(statement, values)
            names = [column[0] for column in found.description]
            for row in found:
                yield dict(zip(names, row, strict=True))
    except sqlite3.Error as error:
        raise LedgerError(f"{source}: {error}") from error


def _marked(statement: str) -> bytes:
    return statement.replace("?", "%s").encode()


def _psycopg() -> Any:
    try:
        import psycopg
    except ImportError as error:
        raise LedgerError(
            f"a ledger in PostgreSQL needs psycopg ({error}); pip install 'slipstream-llm[postgres]'"
        ) from None
    return psycopg
