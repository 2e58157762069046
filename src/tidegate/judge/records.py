"""The judge's own reader of the store: plain read-only SQL over SQLite or PostgreSQL.

It shares no statement and no driver with `store/`, so that one bug cannot hide in both. Parameters
are written as `$1`, which both databases understand.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import apsw
import asyncpg

from tidegate.judge.report import CannotJudge

T = TypeVar("T")
RecordRow = dict[str, Any]

_BUSY_TIMEOUT_MS = 10_000
_TIMEOUT_S = 60.0
_FAULTS_MAX = 10
_INVALID_INDEXES = """
select i.indexrelid::regclass::text as name from pg_index i join pg_class c on c.oid = i.indexrelid
where c.relnamespace = current_schema()::regnamespace and not i.indisvalid limit 10
"""
_CHECKSUM_FAILURES = """
select checksum_failures as failures from pg_stat_database where datname = current_database() and checksum_failures > 0
"""


class Records(Protocol):
    """A reader of the store's rows. All rows between two calls of `refresh` are of one moment."""

    async def rows(self, sql: str, params: Sequence[Any] = ()) -> list[RecordRow]:
        """Return the rows of one query."""

    async def refresh(self) -> None:
        """End this moment; the next query begins a new one."""

    async def now_ms(self) -> int:
        """Return the time of the store's clock."""

    async def faults(self) -> list[str]:
        """Return the faults that the database finds in itself; it is asked once."""


class SqliteRecords:
    def __init__(self, path: Path, connection: apsw.Connection) -> None:
        self._path = path
        self._connection = connection
        self._faults: list[str] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tidegate-judge")

    async def rows(self, sql: str, params: Sequence[Any] = ()) -> list[RecordRow]:
        return await self._run(lambda: self._rows(sql, params))

    async def refresh(self) -> None:
        await self._run(self._refresh)

    async def now_ms(self) -> int:
        [clock] = await self.rows(
            "select max(behind_ms) as behind, max(from_ms) as start, max(since_ms) as since from clock"
        )
        return _store_time(time.time_ns() // 1_000_000, clock)

    async def faults(self) -> list[str]:
        if self._faults is None:
            rows = await self.rows(f"pragma integrity_check({_FAULTS_MAX})")
            self._faults = [str(row["integrity_check"]) for row in rows if row["integrity_check"] != "ok"]
        return self._faults

    async def close(self) -> None:
        await self._run(self._connection.close)
        self._thread.shutdown()

    async def _run(self, do: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, do)
        except apsw.Error as error:
            raise CannotJudge(
                f"the store at {self._path} cannot be read: {error}. Check the path; an older store needs `tidegate migrate`."
            ) from error

    def _rows(self, sql: str, params: Sequence[Any]) -> list[RecordRow]:
        if not self._connection.in_transaction:
            self._connection.execute("begin")
        found: list[RecordRow] = []
        names: list[str] | None = None
        cursor = self._connection.cursor()
        for row in cursor.execute(sql, tuple(params)):
            if names is None:
                names = [column[0] for column in cursor.get_description()]
            found.append(dict(zip(names, row, strict=True)))
        return found

    def _refresh(self) -> None:
        if self._connection.in_transaction:
            self._connection.execute("rollback")


class PostgresRecords:
    def __init__(self, connection: "asyncpg.Connection[Any]") -> None:
        self._connection = connection
        self._faults: list[str] | None = None
        self._moment: Any = None

    async def rows(self, sql: str, params: Sequence[Any] = ()) -> list[RecordRow]:
        try:
            if self._moment is None:
                moment = self._connection.transaction(isolation="repeatable_read", readonly=True)
                await moment.start()
                self._moment = moment
            return [dict(row) for row in await self._connection.fetch(sql, *params)]
        except _POSTGRES_TROUBLE as error:
            raise _no_postgres(error) from error

    async def refresh(self) -> None:
        moment, self._moment = self._moment, None
        if moment is not None:
            try:
                await moment.rollback()
            except _POSTGRES_TROUBLE as error:
                raise _no_postgres(error) from error

    async def now_ms(self) -> int:
        found = await self.rows("select now_ms() as now")
        return int(found[0]["now"])

    async def faults(self) -> list[str]:
        if self._faults is None:
            indexes = await self.rows(_INVALID_INDEXES)
            failures = await self.rows(_CHECKSUM_FAILURES)
            self._faults = [f"the index {row['name']} is not valid" for row in indexes]
            self._faults += [f"{row['failures']} pages did not match their checksums" for row in failures]
        return self._faults


def _store_time(wall_ms: int, clock: RecordRow) -> int:
    """Return the store's time for this time of the machine's clock.

    Steps of the machine's clock are taken out, and while the store's time is ahead it runs slower.
    """
    if clock["behind"] is None:
        return wall_ms
    return max(wall_ms + int(clock["behind"]), int(clock["start"]) + (wall_ms - int(clock["since"])) * 99 // 100)


_POSTGRES_TROUBLE = (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError)


def _no_postgres(error: Exception) -> CannotJudge:
    return CannotJudge(
        f"PostgreSQL cannot be read ({type(error).__name__}: {error}). Check that it runs and that store.url is right; "
        "an older store needs `tidegate migrate`."
    )


@asynccontextmanager
async def sqlite_records(path: Path) -> AsyncIterator[SqliteRecords]:
    """Open the embedded store read-only; another process may write to it meanwhile."""
    try:
        connection = apsw.Connection(str(path), apsw.SQLITE_OPEN_READONLY)
        connection.set_busy_timeout(_BUSY_TIMEOUT_MS)
    except apsw.Error as error:
        raise CannotJudge(f"there is no store to read at {path}: {error}. Check --data and store.url.") from error
    records = SqliteRecords(path, connection)
    try:
        yield records
    finally:
        await records.close()


@asynccontextmanager
async def postgres_records(url: str) -> AsyncIterator[PostgresRecords]:
    """Open PostgreSQL for reading. A transaction-mode pooler is fine: no statement is prepared."""
    try:
        connection = await asyncpg.connect(url, timeout=_TIMEOUT_S, command_timeout=_TIMEOUT_S, statement_cache_size=0)
    except _POSTGRES_TROUBLE as error:
        raise _no_postgres(error) from error
    try:
        yield PostgresRecords(connection)
    finally:
        connection.terminate()
