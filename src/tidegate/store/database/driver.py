"""The seam under the Store: a driver runs a transaction body against its database.

A body is a coroutine function over a `Tx`. On PostgreSQL it is awaited. On SQLite it is stepped to
its end in the writer's thread, where it never suspends. So each verb of the Store is written once.
A body may run several times, so it keeps no state.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

Row = Sequence[Any]
T = TypeVar("T")


class Tx(Protocol):
    """One transaction. Statements are named in `queries/*.sql`."""

    async def all(self, query: str, /, **parameters: Any) -> list[Row]:
        """Return all rows."""

    async def one(self, query: str, /, **parameters: Any) -> Row | None:
        """Return the first row, if there is one."""

    async def dicts(self, query: str, /, **parameters: Any) -> list[dict[str, Any]]:
        """Return all rows by column name, for wide rows."""

    async def many(self, query: str, rows: Iterable[Sequence[Any]]) -> None:
        """Run the statement once for each row, with parameters in order of first appearance."""

    async def many_returning(self, query: str, rows: Sequence[Sequence[Any]]) -> list[Row]:
        """Run the statement once for each row, in order, and return all rows that it returns."""

    async def for_each(self, query: str, given: Mapping[str, Sequence[str]], /, **shared: Any) -> list[Row]:
        """Run a select once for each of the given texts, in order, and return all rows.

        The `shared` parameters are the same for all runs.
        """

    async def copy(self, table: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """Insert many rows in the fastest way of this database.

        A conflict fails the transaction.
        """


TransactionBody = Callable[[Tx], Awaitable[T]]


class Migration(msgspec.Struct, frozen=True):
    """The SQL of one dialect that brings a database to a version and stamps it."""

    version: int
    text: str


# Returns the migrations that a database with these stamps still lacks.
Missing = Callable[[Mapping[str, str]], Sequence[Migration]]


class Transactions(Protocol):
    """The four kinds of transactions that verbs run in."""

    async def write(self, body: TransactionBody[T]) -> T:
        """Run the body in a transaction and commit.

        After StoreUnavailable it may have committed or not.
        """

    async def read(self, body: TransactionBody[T]) -> T:
        """Run the body on one consistent snapshot."""

    async def beat(self, body: TransactionBody[T]) -> T:
        """Write on a connection that is reserved for heartbeats."""

    async def free(self, body: TransactionBody[T]) -> T:
        """Write something that frees room: on a full disk this may use the reserved room."""


class Driver(Transactions, Protocol):
    dialect: str

    async def look_at_clock(self) -> None:
        """Take a step of the machine's clock out of the store's time.

        A working process calls this every second.
        """

    async def schema_stamps(self, *, is_settled: bool = False) -> Mapping[str, str]:
        """Return what migrations wrote into `meta`; nothing for an empty database.

        `is_settled` waits while a process migrates.
        """

    async def migrate(self, missing: Missing) -> list[int]:
        """Run what is missing in one transaction, under a lock that may have to be waited for.

        Return which versions ran.
        """

    async def close(self) -> None:
        """Close all connections and release all locks."""
