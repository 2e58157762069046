"""A driver of the store between the store and its database, whose transactions get lost when a test wants them to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from tidegate.core.errors import StoreUnavailable
from tidegate.store.database.driver import Driver, Missing, TransactionBody

T = TypeVar("T")


class FaultyDriver:
    """A driver whose next transactions get lost: before they begin, or after they were committed. After a commit that got lost,
    `then_lost_before` more are lost before they begin."""

    def __init__(self, inner: Driver) -> None:
        self._inner = inner
        self.dialect = inner.dialect
        self.lost_before = 0
        self.lost_after = 0
        self.then_lost_before = 0

    async def write(self, body: TransactionBody[T]) -> T:
        if self.lost_before:
            self.lost_before -= 1
            raise StoreUnavailable("the store did not answer")
        result = await self._inner.write(body)
        if self.lost_after:
            self.lost_after -= 1
            self.lost_before, self.then_lost_before = self.then_lost_before, 0
            raise StoreUnavailable("the connection broke after the commit was sent")
        return result

    async def read(self, body: TransactionBody[T]) -> T:
        return await self._inner.read(body)

    async def beat(self, body: TransactionBody[T]) -> T:
        return await self._inner.beat(body)

    async def free(self, body: TransactionBody[T]) -> T:
        return await self.write(body)

    async def look_at_clock(self) -> None:
        await self._inner.look_at_clock()

    async def schema_stamps(self, *, is_settled: bool = False) -> Mapping[str, str]:
        return await self._inner.schema_stamps(is_settled=is_settled)

    async def migrate(self, missing: Missing) -> list[int]:
        return await self._inner.migrate(missing)

    async def close(self) -> None:
        await self._inner.close()
