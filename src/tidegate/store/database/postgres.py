"""PostgreSQL through asyncpg: a pool, a connection for heartbeats, time-outs and reconnects.

Behind a transaction-mode pooler nothing depends on session state and everything happens inside
transactions. Without one, a read of one statement needs no transaction around it, which saves two
of three round trips. The server has time-outs too: a process that is paused or cut off in a
transaction must not lock a job's row for ever.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import cache
from itertools import islice
from typing import Any, TypeVar

import asyncpg

from tidegate.core.errors import StoreFull, StoreRefused, StoreUnavailable
from tidegate.store.database.driver import Missing, Row, TransactionBody
from tidegate.store.database.postgres_clock import DOUBTFUL_CLOCK, PostgresClock
from tidegate.store.database.queries import bulk_for_postgres, for_each_on_postgres, for_postgres, statements
from tidegate.store.database.schema import STAMPS

T = TypeVar("T")

_RETRIES_MAX = 8
_BULK_TIMEOUT_S = 120
_BULK_ROWS_MIN = 1_000
_BULK_ROWS_MAX = 20_000
_MIGRATION_TIMEOUT_S = 600
_MIGRATION_POLL_S = 0.1
_MIGRATION_LOCK = 7_308_327_417_365
_TRANSACTION_TIMEOUT_SINCE = (17,)
_WRITES = re.compile(r"\b(insert|update|delete)\b")
_SAFE_WHEN_ON = ("fsync", "synchronous_commit", "full_page_writes")


@cache
def _sql(name: str) -> tuple[str, tuple[str, ...]]:
    statement = statements()[name]
    return for_postgres(statement), statement.parameters


@cache
def _bulk_sql(name: str, types: tuple[str, ...]) -> str:
    return bulk_for_postgres(statements()[name], types)


@cache
def _each_sql(name: str, given: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    return for_each_on_postgres(statements()[name], given)


@cache
def _is_lone_read(name: str) -> bool:
    """Return whether a statement certainly only reads and needs no setting of its transaction."""
    statement = statements()[name]
    return not statement.has_open_filters and _WRITES.search(statement.sql) is None


_TYPES = {str: "text", int: "bigint", bytes: "bytea"}


def _type_of(column: list[Any]) -> str:
    """Return the type of a column. A column of nulls is one of numbers: only those may be null."""
    return next((_TYPES[type(value)] for value in column if value is not None), "bigint")


class PostgresTx:
    """A transaction on one connection."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    async def all(self, query: str, /, **parameters: Any) -> list[Row]:
        sql, names = _sql(query)
        if statements()[query].has_open_filters:
            await self._connection.execute("set local plan_cache_mode = force_custom_plan")
        return await self._connection.fetch(sql, *[parameters[key] for key in names])  # type: ignore[no-any-return]

    async def one(self, query: str, /, **parameters: Any) -> Row | None:
        sql, names = _sql(query)
        return await self._connection.fetchrow(sql, *[parameters[key] for key in names])  # type: ignore[no-any-return]

    async def dicts(self, query: str, /, **parameters: Any) -> list[dict[str, Any]]:
        return [dict(row) for row in await self.all(query, **parameters)]

    async def many(self, query: str, rows: Iterable[Sequence[Any]]) -> None:
        async for some in self._in_parts(rows):
            await self._connection.executemany(_sql(query)[0], some, timeout=_BULK_TIMEOUT_S)

    async def many_returning(self, query: str, rows: Sequence[Sequence[Any]]) -> list[Row]:
        if not rows:
            return []
        if not statements()[query].is_insert:
            return await self._connection.fetchmany(_sql(query)[0], rows)  # type: ignore[no-any-return]
        # One statement with arrays costs the server a tenth of one execution for each row.
        columns = [list(column) for column in zip(*rows, strict=True)]
        sql = _bulk_sql(query, tuple(map(_type_of, columns)))
        return await self._connection.fetch(sql, *columns)  # type: ignore[no-any-return]

    async def for_each(self, query: str, given: Mapping[str, Sequence[str]], /, **shared: Any) -> list[Row]:
        sql, names = _each_sql(query, tuple(given))
        return await self._connection.fetch(sql, *given.values(), *[shared[name] for name in names])  # type: ignore[no-any-return]

    async def copy(self, table: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        async for some in self._in_parts(rows):
            await self._connection.copy_records_to_table(table, columns=columns, records=some, timeout=_BULK_TIMEOUT_S)

    async def _in_parts(self, rows: Iterable[Sequence[Any]]) -> AsyncIterator[list[Sequence[Any]]]:
        """Yield the rows in parts, large enough that round trips cost little, with bounded memory.

        Only very many rows get more time: a transaction that is paused here keeps its locks for as
        long.
        """
        left, is_allowed = iter(rows), False
        while some := list(islice(left, _BULK_ROWS_MAX)):
            if not is_allowed and len(some) > _BULK_ROWS_MIN:
                await _allow_time(self._connection)
                is_allowed = True
            yield some


class _LoneTx(PostgresTx):
    """One statement that reads, without a transaction around it.

    Anything else that its body asks for needs a snapshot.
    """

    def __init__(self, connection: Any) -> None:
        super().__init__(connection)
        self._is_used = False

    async def all(self, query: str, /, **parameters: Any) -> list[Row]:
        self._use(query)
        return await super().all(query, **parameters)

    async def one(self, query: str, /, **parameters: Any) -> Row | None:
        self._use(query)
        return await super().one(query, **parameters)

    async def for_each(self, query: str, given: Mapping[str, Sequence[str]], /, **shared: Any) -> list[Row]:
        self._use(query)
        return await super().for_each(query, given, **shared)

    async def many(self, query: str, rows: Iterable[Sequence[Any]]) -> None:
        raise _SnapshotNeeded

    async def many_returning(self, query: str, rows: Sequence[Sequence[Any]]) -> list[Row]:
        raise _SnapshotNeeded

    async def copy(self, table: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        raise _SnapshotNeeded

    def _use(self, query: str) -> None:
        if self._is_used or not _is_lone_read(query):
            raise _SnapshotNeeded
        self._is_used = True


class _SnapshotNeeded(Exception):
    """Raised if a body does more than read with one statement: it must run in a transaction."""


class _DoubtfulClock(Exception):
    """Raised if the database's clock was perhaps set: it must be looked at first.

    Nothing was written.
    """


class _SessionLost(Exception):
    """Raised if a session ended before its transaction could commit.

    Another session may run it again.
    """


class PostgresDriver:
    dialect = "postgresql"

    def __init__(
        self,
        url: str,
        *,
        pool_size: int,
        statement_timeout_ms: int,
        pooler: str,
        steady_ms: Callable[[], float] | None = None,
    ) -> None:
        """Create a driver. `steady_ms` is a clock that cannot be set.

        Without it the database's clock is trusted, whatever it shows.
        """
        self._pool_size = pool_size
        self._timeout_s = statement_timeout_ms / 1000
        # Nearly all statements read a few rows by index: planning or compiling one takes longer
        # than its run.
        self._limits = {
            "statement_timeout": str(statement_timeout_ms),
            "idle_in_transaction_session_timeout": str(statement_timeout_ms),
            "jit": "off",
            "plan_cache_mode": "force_generic_plan",
        }
        self._pooled = pooler == "transaction"
        self._prelude = ""
        self._options: dict[str, Any] = {"dsn": url, "command_timeout": self._timeout_s, "timeout": self._timeout_s}
        if self._pooled:
            self._options["statement_cache_size"] = 0
        else:
            self._options["server_settings"] = {"application_name": "tidegate", **self._limits}
        self._pool: Any = None
        # Names of bodies that read with several statements.
        self._long_reads: set[str] = set()
        # Counts how often the pool's sessions were left because one of them had ended.
        self._left_count = 0
        self._heart: Any = None
        self._opening = asyncio.Lock()
        self._beating = asyncio.Lock()
        self._clock = PostgresClock(steady_ms) if steady_ms is not None else None

    async def write(self, body: TransactionBody[T]) -> T:
        return await self._retried(lambda: self._write_in_pool(body, is_checked=self._is_clock_watched))

    async def read(self, body: TransactionBody[T]) -> T:
        return await self._retried(lambda: self._read_in_pool(body))

    @property
    def _is_clock_watched(self) -> bool:
        return self._clock is not None and self._clock.is_watched

    async def _write_unchecked(self, body: TransactionBody[T]) -> T:
        """Run a body that corrects the clock, without a check of the clock."""
        return await self._retried(lambda: self._write_in_pool(body, is_checked=False))

    async def beat(self, body: TransactionBody[T]) -> T:
        async def run() -> T:
            async with self._beating:
                if self._heart is None or self._heart.is_closed():
                    await self._opened()
                    self._heart = await self._connect()
                try:
                    return await self._transact(self._heart, body, is_checked=self._is_clock_watched)
                except BaseException:
                    self._heart.terminate()
                    raise

        return await self._retried(run)

    async def free(self, body: TransactionBody[T]) -> T:
        return await self.write(body)

    async def look_at_clock(self) -> None:
        if self._clock is not None:
            await self._clock.look(self._write_unchecked)

    async def schema_stamps(self, *, is_settled: bool = False) -> Mapping[str, str]:
        async def look(connection: Any) -> Mapping[str, str] | None:
            if is_settled and not await connection.fetchval(
                "select pg_try_advisory_xact_lock_shared($1)", _MIGRATION_LOCK
            ):
                return None
            return await _stamps(connection)

        return await self._between_migrations(look, read_only=True)

    async def migrate(self, missing: Missing) -> list[int]:
        async def run(connection: Any) -> list[int] | None:
            if not await connection.fetchval("select pg_try_advisory_xact_lock($1)", _MIGRATION_LOCK):
                return None
            await _allow_time(connection, _MIGRATION_TIMEOUT_S)
            steps = missing(await _stamps(connection))
            for step in steps:
                await connection.execute(step.text, timeout=_MIGRATION_TIMEOUT_S)
            return [step.version for step in steps]

        return await self._between_migrations(run, read_only=False)

    async def _between_migrations(self, act: Callable[[Any], Awaitable[T | None]], *, read_only: bool) -> T:
        """Act in a transaction.

        If the result is None, another process migrates: ask again a little later.

        Asking again, instead of waiting inside the transaction, leaves a pooler's few connections
        to the process that migrates.
        """

        async def run() -> T | None:
            pool = await self._opened()
            async with pool.acquire(timeout=self._timeout_s) as connection, connection.transaction(readonly=read_only):
                return await act(connection)

        for _ in range(int(_MIGRATION_TIMEOUT_S / _MIGRATION_POLL_S)):
            result = await self._retried(run)
            if result is not None:
                return result
            await asyncio.sleep(_MIGRATION_POLL_S)
        raise StoreUnavailable(
            f"another process has been migrating this database for {_MIGRATION_TIMEOUT_S} s. Look for it, then start again."
        )

    async def _read_in_pool(self, body: TransactionBody[T]) -> T:
        """Run a body on one snapshot.

        One statement has that by itself. A body that asks for more runs once again, in a
        transaction, and those of its name do so from then on.
        """
        name = getattr(body, "__qualname__", "")
        async with self._session() as connection:
            try:
                if not self._pooled and name not in self._long_reads:
                    try:
                        return await body(_LoneTx(connection))
                    except _SnapshotNeeded:
                        self._long_reads.add(name)
                async with connection.transaction(isolation="repeatable_read", readonly=True):
                    if self._prelude:
                        await connection.execute(self._prelude)
                    return await body(PostgresTx(connection))
            except _LOST as error:
                raise _SessionLost from error

    async def _write_in_pool(self, body: TransactionBody[T], *, is_checked: bool) -> T:
        async with self._session() as connection:
            return await self._transact(connection, body, is_checked=is_checked)

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[Any]:
        """Take a connection of the pool.

        If its session turns out to have ended, all connections of that time are dropped: their
        sessions probably ended too, or soon will.
        """
        pool, left_count = await self._opened(), self._left_count
        try:
            async with pool.acquire(timeout=self._timeout_s) as connection:
                yield connection
        except _SessionLost:
            if left_count == self._left_count:
                self._left_count += 1
                await pool.expire_connections()
            raise

    async def _transact(self, connection: Any, body: TransactionBody[T], *, is_checked: bool) -> T:
        """Run the body and commit.

        One round trip begins the transaction, sets time-outs if a pooler would lose them, and
        checks the clock, so that nothing is written with a clock that was just set.
        """
        words = ["begin isolation level read committed", self._prelude, "select assert_clock()" if is_checked else ""]
        may_be_committed = False
        try:
            await connection.execute("; ".join(word for word in words if word))
            result = await body(PostgresTx(connection))
            may_be_committed = True
            await connection.execute("commit")
        except BaseException as error:
            # If this fails, the rollback happens when the connection returns to the pool, or ends.
            with suppress(
                asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError, TimeoutError
            ):
                await connection.execute("rollback")
            if isinstance(error, asyncpg.PostgresError) and error.sqlstate == DOUBTFUL_CLOCK:
                raise _DoubtfulClock from None
            if isinstance(error, _LOST) and not may_be_committed:
                raise _SessionLost from error
            raise
        return result

    async def _opened(self) -> Any:
        if self._pool is None:
            async with self._opening:
                if self._pool is None:
                    pool = await asyncpg.create_pool(
                        min_size=1,
                        max_size=self._pool_size,
                        init=self._limit_session,
                        reset=_keep_session,
                        **self._options,
                    )
                    try:
                        await _refuse_unsafe(pool)
                    except BaseException:
                        pool.terminate()
                        raise
                    self._pool = pool
        return self._pool

    async def _connect(self) -> Any:
        connection = await asyncpg.connect(**self._options)
        try:
            await self._limit_session(connection)
        except BaseException:
            connection.terminate()
            raise
        return connection

    async def _limit_session(self, connection: Any) -> None:
        """Set the time-outs that end the transaction of a paused process, with its locks.

        A process that stopped between the messages of one statement does not count as idle, and a
        server that waits for a message ignores the time-out of statements. Only the time-out of
        transactions ends that one. An older server refuses a connection that names it.
        """
        is_known = connection.get_server_version() >= _TRANSACTION_TIMEOUT_SINCE
        limit = self._limits["idle_in_transaction_session_timeout"]
        if self._pooled:
            limits = self._limits | ({"transaction_timeout": limit} if is_known else {})
            self._prelude = "; ".join(f"set local {name} = {value}" for name, value in limits.items())
        elif is_known:
            await connection.execute(f"set transaction_timeout = {limit}")

    async def _retried(self, run: Callable[[], Awaitable[T]]) -> T:
        """Run a transaction again after errors that have certainly rolled it back.

        - A deadlock, a serialization failure, a plan that a migration outdated, or a clock in
          doubt: run it again, several times.
        - A session that ended before its commit: run it once more in another session.
        - Anything else: the caller must decide.
        """
        was_lost = False
        for attempt in range(_RETRIES_MAX):
            try:
                return await run()
            except _SessionLost as lost:
                if was_lost:
                    raise _unavailable(lost.__cause__) from lost.__cause__
                was_lost = True
            except _ROLLED_BACK:
                if attempt == _RETRIES_MAX - 1:
                    raise StoreUnavailable(
                        "the database keeps refusing a transaction that collides with others"
                    ) from None
            except _DoubtfulClock:
                if attempt == _RETRIES_MAX - 1:
                    raise StoreUnavailable("the database's clock is set again and again: nothing is written") from None
                await self.look_at_clock()
            except asyncpg.DiskFullError as error:
                raise StoreFull(f"PostgreSQL's disk is full ({error}). Free some space there.") from error
            except _PASSING as error:
                raise _unavailable(error) from error
        raise AssertionError("unreachable")

    async def close(self) -> None:
        if self._heart is not None:
            self._heart.terminate()
        if self._pool is not None:
            try:
                await asyncio.wait_for(self._pool.close(), self._timeout_s)
            except (TimeoutError, asyncpg.PostgresError, OSError):
                self._pool.terminate()


_ROLLED_BACK = (asyncpg.DeadlockDetectedError, asyncpg.SerializationError, asyncpg.InvalidCachedStatementError)
# The errors of a session that has ended, for a statement that is under way or that is begun.
_LOST = (
    asyncpg.PostgresConnectionError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.IdleInTransactionSessionTimeoutError,
    asyncpg.InterfaceError,
    # Raised before anything is sent, if the session's last message was read but not its end (two
    # steps on uvloop).
    asyncpg.InternalClientError,
    ConnectionError,
)
_PASSING = (
    asyncpg.PostgresConnectionError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    asyncpg.QueryCanceledError,
    asyncpg.OperatorInterventionError,
    asyncpg.InsufficientResourcesError,
    asyncpg.PostgresIOError,
    asyncpg.CannotConnectNowError,
    asyncpg.InvalidCatalogNameError,
    asyncpg.InvalidAuthorizationSpecificationError,
    asyncpg.ReadOnlySQLTransactionError,
    asyncpg.IdleInTransactionSessionTimeoutError,
    asyncpg.LockNotAvailableError,
    ConnectionError,
    OSError,
    TimeoutError,
)


def _unavailable(error: BaseException | None) -> StoreUnavailable:
    return StoreUnavailable(
        f"PostgreSQL cannot be used now ({type(error).__name__}: {error}). Check that it runs and that store.url is right."
    )


async def _keep_session(connection: Any) -> None:
    """Do nothing when a connection returns to the pool: its transaction left nothing to reset.

    The pool rolls back an open transaction before it calls this. The pool's own reset would cost
    each transaction one more round trip.
    """


async def _allow_time(connection: Any, seconds: int = _BULK_TIMEOUT_S) -> None:
    """Raise the time-outs of this one transaction."""
    words = [f"set local statement_timeout = {seconds * 1000}"]
    if connection.get_server_version() >= _TRANSACTION_TIMEOUT_SINCE:
        # This time-out counts from the transaction's begin, and a new value does not move that:
        # restart it.
        words += ["set local transaction_timeout = 0", f"set local transaction_timeout = {seconds * 1000}"]
    await connection.execute("; ".join(words))


async def _stamps(connection: Any) -> Mapping[str, str]:
    # Read as a table: to_regclass uses a cache that is not refreshed by the wait for the migration
    # lock.
    present = "select 1 from pg_catalog.pg_tables where schemaname = current_schema() and tablename = 'meta'"
    if await connection.fetchval(present) is None:
        return {}
    return dict(await connection.fetch(STAMPS))


async def _refuse_unsafe(pool: Any) -> None:
    """Refuse a database that may lose committed transactions."""
    asked = ", ".join(f"current_setting('{setting}')" for setting in _SAFE_WHEN_ON)
    async with pool.acquire() as connection, connection.transaction(readonly=True):
        found = await connection.fetchrow(f"select {asked}")
    for setting, value in zip(_SAFE_WHEN_ON, found, strict=True):
        if value == "off":
            raise StoreRefused(
                f"PostgreSQL runs with {setting} = off and may lose committed work in a crash. Turn it on."
            )
