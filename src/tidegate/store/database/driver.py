"""The seam under the Store: a driver runs a transaction body against its database.

A body is a coroutine function over a `Tx`. On PostgreSQL it is awaited; on SQLite it is stepped to its end in the writer's thread, where
nothing it awaits ever suspends. So each verb of the Store is written once. A body may run several times: it keeps no state of its own.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

Row = Sequence[Any]
T = TypeVar("T")


class Tx(Protocol):
    """One transaction. Statements are named in `queries/*.sql`."""

    async def all(self, query: str, /, **parameters: Any) -> list[Row]:
        """Every row."""

    async def one(self, query: str, /, **parameters: Any) -> Row | None:
        """The first row, if any."""

    async def dicts(self, query: str, /, **parameters: Any) -> list[dict[str, Any]]:
        """Every row by column name, for wide rows."""

    async def many(self, query: str, rows: Iterable[Sequence[Any]]) -> None:
        """Run it once per row, parameters by order of first appearance."""

    async def many_returning(self, query: str, rows: Sequence[Sequence[Any]]) -> list[Row]:
        """Run it once per row, in their order, and collect what each returns; of a row that returns nothing there is nothing."""

    async def for_each(self, query: str, given: Mapping[str, Sequence[str]], /, **shared: Any) -> list[Row]:
        """Every row of a select that runs once for each of the given texts, in their order; the other parameters are the same for all."""

    async def copy(self, table: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """Insert many rows the fastest way this database has; a conflict fails the transaction."""


Body = Callable[[Tx], Awaitable[T]]


class Migration(msgspec.Struct, frozen=True):
    """SQL of one dialect that brings a database to a version and stamps it."""

    version: int
    text: str


# What a database with these stamps still lacks.
Missing = Callable[[Mapping[str, str]], Sequence[Migration]]


class Transactions(Protocol):
    """What verbs run on."""

    async def write(self, body: Body[T]) -> T:
        """Run the body in a transaction and commit. StoreUnavailable: it may or may not have committed."""

    async def read(self, body: Body[T]) -> T:
        """Run the body on one consistent snapshot."""

    async def beat(self, body: Body[T]) -> T:
        """Like write, on a connection that nothing else can use up."""

    async def free(self, body: Body[T]) -> T:
        """Like write, for what frees room: on a full disk it may use the room that is kept for it."""


class Driver(Transactions, Protocol):
    dialect: str

    async def look_at_clock(self) -> None:
        """Take a step of the machine's clock out of the store's time; a process that works looks once a second."""

    async def schema_stamps(self, *, is_settled: bool = False) -> Mapping[str, str]:
        """Return what migrations wrote into `meta`; empty when the database is. `is_settled` waits while a process migrates."""

    async def migrate(self, missing: Missing) -> list[int]:
        """Run what is missing in one transaction under a lock, waiting while another process holds it. Return which versions ran."""

    async def close(self) -> None:
        """Give everything back."""
