"""SQLite through apsw: one writer thread, one reader thread, WAL with full synchronization.

A server has the store to itself: another process that wants to write is refused when it opens the
store. Runs and commands share it. Readers are always allowed.
"""

import asyncio
import contextlib
import fcntl
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import apsw

from tidegate.core.errors import StoreFull, StoreRefused, StoreTaken, StoreUnavailable
from tidegate.store.database.disk_reserve import DiskReserve
from tidegate.store.database.driver import Missing, Row, TransactionBody, Tx
from tidegate.store.database.queries import bulk_for_sqlite, statements
from tidegate.store.database.schema import STAMPS
from tidegate.store.database.sqlite_clock import EmbeddedClock

T = TypeVar("T")

_BUSY_TIMEOUT_MS = 5_000
_STATEMENT_CACHE_COUNT = 500
_BULK_ROWS_MAX = 256


@cache
def _bulk_sql(name: str, row_count: int) -> tuple[str, int]:
    return bulk_for_sqlite(statements()[name], row_count)


class SqliteTx:
    """A transaction on one connection. Its methods never suspend."""

    def __init__(self, connection: apsw.Connection) -> None:
        self._connection = connection

    async def all(self, query: str, /, **parameters: Any) -> list[Row]:
        return list(self._connection.execute(statements()[query].sql, parameters))

    async def one(self, query: str, /, **parameters: Any) -> Row | None:
        rows = self._connection.execute(statements()[query].sql, parameters).fetchall()
        return rows[0] if rows else None

    async def dicts(self, query: str, /, **parameters: Any) -> list[dict[str, Any]]:
        cursor = self._connection.execute(statements()[query].sql, parameters)
        rows = []
        names: list[str] | None = None
        for row in cursor:
            if names is None:
                names = [column[0] for column in cursor.get_description()]
            rows.append(dict(zip(names, row, strict=True)))
        return rows

    async def many(self, query: str, rows: Iterable[Sequence[Any]]) -> None:
        self._connection.executemany(statements()[query].sql, rows)

    async def many_returning(self, query: str, rows: Sequence[Sequence[Any]]) -> list[Row]:
        if not statements()[query].is_insert:
            return self._run_each(query, rows)
        # Each step of a statement releases the GIL and must then wait for it, so few large
        # statements cost the event loop far less than many small ones. If some rows were not new,
        # the slow way finds which.
        self._connection.execute("savepoint bulk")
        returned = self._insert_all(query, rows)
        if returned is not None:
            self._connection.execute("release bulk")
            return returned
        self._connection.execute("rollback to bulk")
        self._connection.execute("release bulk")
        return self._run_each(query, rows)

    def _insert_all(self, query: str, rows: Sequence[Sequence[Any]]) -> list[Row] | None:
        done = 0
        returned: list[Row] = []
        while done < len(rows):
            count = min(_BULK_ROWS_MAX, 1 << ((len(rows) - done).bit_length() - 1))
            some = rows[done : done + count]
            sql, place = _bulk_sql(query, count)
            self._connection.execute(sql, [value for row in some for value in row])
            if self._connection.changes() != count:
                return None
            returned.extend((row[place],) for row in some)
            done += count
        return returned

    def _run_each(self, query: str, rows: Sequence[Sequence[Any]]) -> list[Row]:
        return list(self._connection.executemany(statements()[query].sql, rows))

    async def for_each(self, query: str, given: Mapping[str, Sequence[str]], /, **shared: Any) -> list[Row]:
        rows = (shared | dict(zip(given, values, strict=True)) for values in zip(*given.values(), strict=True))
        return list(self._connection.executemany(statements()[query].sql, rows))

    async def copy(self, table: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        marks = ", ".join("?" * len(columns))
        sql = f"insert into {table} ({', '.join(columns)}) values ({marks})"  # noqa: S608 - names come from the Store's own code
        self._connection.executemany(sql, rows)


class SqliteDriver:
    """The driver of one database file.

    Without a `path` everything is in memory and in the calling thread, as in the seeded simulation.
    """

    dialect = "sqlite"

    def __init__(
        self,
        path: Path | None,
        now_ms: Callable[[], int] | EmbeddedClock,
        *,
        read_only: bool = False,
        is_shared: bool = False,
    ) -> None:
        self._path = path
        self._clock = now_ms if isinstance(now_ms, EmbeddedClock) else None
        self._now_ms: Callable[..., int] = _time_by(now_ms) if isinstance(now_ms, EmbeddedClock) else now_ms
        self._wall_ms: Callable[..., int] = now_ms.wall_ms if isinstance(now_ms, EmbeddedClock) else now_ms
        self._read_only = read_only
        self._is_shared = is_shared
        self._reserve = DiskReserve(path) if path is not None and not read_only else None
        self._lock_fd: int | None = None
        self._file_id: tuple[int, int] | None = None
        self._is_closed = False
        self._threads: tuple[ThreadPoolExecutor, ThreadPoolExecutor] | None = None
        if path is None:
            self._writer = self._reader = self._open(":memory:", apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE)
            return
        flags = apsw.SQLITE_OPEN_READONLY if read_only else apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE
        try:
            if not read_only:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                if self._reserve is not None:
                    self._reserve.make_room()
                self._lock_fd = _lock_writers(path, is_shared=is_shared)
                _make_private(path)
            self._writer = self._open(str(path), flags)
            self._reader = self._open(str(path), flags)
            self._file_id = _file_id(path)
        except StoreRefused:
            self._unlock()
            raise
        except (apsw.Error, OSError) as error:
            self._unlock()
            raise StoreRefused(
                f"cannot open the store at {path}: {error}. Check that the path is right and writable."
            ) from error
        self._threads = (
            ThreadPoolExecutor(1, thread_name_prefix="tidegate-store-writer"),
            ThreadPoolExecutor(1, thread_name_prefix="tidegate-store-reader"),
        )

    def _open(self, name: str, flags: int) -> apsw.Connection:
        connection = apsw.Connection(name, flags, statementcachesize=_STATEMENT_CACHE_COUNT)
        connection.set_busy_timeout(_BUSY_TIMEOUT_MS)
        # Else a statement whose plan may depend on a parameter is planned each time, which costs
        # more than its run.
        connection.config(apsw.SQLITE_DBCONFIG_ENABLE_QPSG, 1)
        connection.create_scalar_function("now_ms", self._now_ms, 0)
        connection.create_scalar_function("wall_ms", self._wall_ms, 0)
        if not self._read_only:
            mode = connection.pragma("journal_mode", "wal")
            if mode != "wal" and self._path is not None:
                raise StoreRefused(
                    f"the directory of {self._path} cannot keep a write-ahead log (SQLite says {mode!r}). Use a local disk."
                )
            connection.execute("pragma synchronous = full")
            connection.execute("pragma journal_size_limit = 67108864")
        else:
            # Find out here, where the path is known, if the file is not SQLite's.
            connection.pragma("schema_version")
        connection.execute("pragma temp_store = memory")
        return connection

    async def write(self, body: TransactionBody[T]) -> T:
        return await self._run(0, self._write, body)

    async def read(self, body: TransactionBody[T]) -> T:
        return await self._run(1, self._read, body)

    async def beat(self, body: TransactionBody[T]) -> T:
        return await self.free(body)

    async def free(self, body: TransactionBody[T]) -> T:
        return await self._run(0, self._free, body)

    async def look_at_clock(self) -> None:
        if self._clock is not None:
            await (self.read(self._clock.borrow) if self._read_only else self._run(0, self._look, self._clock.look))

    async def schema_stamps(self, *, is_settled: bool = False) -> Mapping[str, str]:
        async def body(tx: Tx) -> Mapping[str, str]:
            return _stamps(self._reader)

        return await self.read(body)

    async def migrate(self, missing: Missing) -> list[int]:
        async def body(tx: Tx) -> list[int]:
            steps = missing(_stamps(self._writer))
            for step in steps:
                self._writer.execute(step.text).fetchall()
            return [step.version for step in steps]

        return await self.free(body)

    async def _run(self, thread: int, function: Callable[[TransactionBody[T]], T], body: TransactionBody[T]) -> T:
        if self._is_closed:
            raise StoreUnavailable(f"the store at {self._path} was closed: this process is stopping.")
        if self._threads is None:
            return function(body)
        return await asyncio.get_running_loop().run_in_executor(self._threads[thread], function, body)

    def _write(self, body: TransactionBody[T]) -> T:
        try:
            self._writer.execute("begin immediate")
            try:
                result = _step_to_end(body(SqliteTx(self._writer)))
                self._refuse_if_gone()
                self._writer.execute("commit")
            except BaseException:
                if self._writer.in_transaction:
                    self._writer.execute("rollback")
                raise
        except apsw.FullError as error:
            raise StoreFull(
                f"the store at {self._path} cannot be written: {error}. Free disk space, or delete files and batches; "
                "work goes on by itself."
            ) from error
        except _PASSING as error:
            raise StoreUnavailable(
                f"the store at {self._path} cannot be written: {error}. Free disk space or check the directory; work goes on by itself."
            ) from error
        return result

    def _free(self, body: TransactionBody[T]) -> T:
        """Write.

        If the disk is full, give up the reserve step by step, and then take back what was not
        needed.
        """
        try:
            return self._write(body)
        except StoreFull:
            if self._reserve is None or (kept_bytes := self._reserve.size_bytes()) == 0:
                raise
            try:
                return self._write_with(self._reserve, body)
            finally:
                self._reserve.take_back(kept_bytes)

    def _write_with(self, reserve: DiskReserve, body: TransactionBody[T]) -> T:
        while reserve.give_up():
            with contextlib.suppress(StoreFull):
                return self._write(body)
        return self._write(body)

    def _look(self, body: TransactionBody[T]) -> T:
        """Look at the clock, and fill the reserve.

        Only a server keeps one: a run or a command ends soon.
        """
        result = self._free(body)
        if self._reserve is not None and not self._is_shared:
            self._reserve.fill()
        return result

    def _refuse_if_gone(self) -> None:
        """Refuse to commit to a file that was deleted or replaced: it would keep nothing."""
        if self._file_id is not None and _file_id(self._path) != self._file_id:
            raise StoreUnavailable(
                f"the store at {self._path} was deleted or replaced while it was open: nothing is kept any more. "
                "Restore the directory from a backup and restart."
            )

    def _read(self, body: TransactionBody[T]) -> T:
        try:
            if self._reader is self._writer:
                return _step_to_end(body(SqliteTx(self._reader)))
            self._reader.execute("begin")
            try:
                return _step_to_end(body(SqliteTx(self._reader)))
            finally:
                if self._reader.in_transaction:
                    self._reader.execute("rollback")
        except _PASSING as error:
            raise StoreUnavailable(
                f"the store at {self._path} cannot be read: {error}. Check the directory and its disk."
            ) from error

    async def close(self) -> None:
        self._is_closed = True
        if self._threads is not None:
            for thread in self._threads:
                thread.shutdown(wait=True)
            self._reader.close()
        self._writer.close()
        self._unlock()

    def _unlock(self) -> None:
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None


_PASSING = (
    apsw.BusyError,
    apsw.LockedError,
    apsw.IOError,
    apsw.CantOpenError,
    apsw.ReadOnlyError,
    apsw.ProtocolError,
    apsw.InterruptError,
)


def _time_by(clock: EmbeddedClock) -> Callable[[], int]:
    """Return a function that returns the store's time."""
    return lambda: clock.reading(clock.steady_ms())


def _stamps(connection: apsw.Connection) -> Mapping[str, str]:
    if not connection.execute("select 1 from sqlite_master where name = 'meta'").fetchall():
        return {}
    return {str(name): str(value) for name, value in connection.execute(STAMPS)}


def _file_id(path: Path | None) -> tuple[int, int] | None:
    try:
        found = os.stat(path or "")
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _step_to_end(body: Awaitable[T]) -> T:
    """Run a coroutine that never suspends."""
    steps = body.__await__()
    try:
        next(steps)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    raise RuntimeError("a transaction body awaited something other than its transaction")


def _make_private(path: Path) -> None:
    """Let only this user read the database, which holds prompts.

    SQLite gives the files beside it the same rights.
    """
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    for one in (path, path.with_name(path.name + "-wal"), path.with_name(path.name + "-shm")):
        # Another user's database, such as a shared one, must be protected by that user.
        with contextlib.suppress(FileNotFoundError, PermissionError):
            one.chmod(0o600)


def is_taken(path: Path) -> bool:
    """Return whether a process has this database to itself, as a server does from its start."""
    try:
        descriptor = os.open(_lock_file(path), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _lock_file(path: Path) -> Path:
    return path.with_name(path.name + ".writer")


def _lock_writers(path: Path, *, is_shared: bool) -> int:
    """Take an advisory lock on a file beside the database, for this process alone or shared.

    The kernel drops it when this process dies.
    """
    descriptor = os.open(_lock_file(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        holder = _living_holder(descriptor)
        os.close(descriptor)
        named = f"another process (pid {holder or 'unknown'})"
        raise StoreTaken(
            f"{named} already writes to {path}. If it is starting or stopping, try again in a moment; otherwise "
            "stop it, give this one its own --data directory, or move to PostgreSQL for several processes.",
            named,
        ) from error
    if not is_shared or _living_holder(descriptor) is None:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def _living_holder(descriptor: int) -> int | None:
    """Return the process that a lock file names, if it still runs.

    If several share the lock, the first stays named while it lives: a later one may be refused and
    end at once.
    """
    try:
        pid = int(os.pread(descriptor, 32, 0))
        os.kill(pid, 0)
    except PermissionError:
        return pid
    except (ValueError, OverflowError, ProcessLookupError):
        return None
    return pid
