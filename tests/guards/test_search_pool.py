"""Long searches of several tenants: whose turn it is, and what becomes of a turn that is given up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from tidegate.guards.search_pool import THREADS_MAX, SearchPool

pytestmark = pytest.mark.anyio


class Searches:
    """A pool, and searches that end when a test lets them."""

    def __init__(self) -> None:
        self.pool = SearchPool()
        self.begun: list[str] = []
        self.tasks: dict[str, asyncio.Task[bytes]] = {}
        self._ends: dict[str, threading.Event] = {}

    async def ask(self, *names: str) -> None:
        """Ask for searches, each of the tenant whose letter its name begins with."""
        for name in names:
            self._ends[name] = threading.Event()
            self.tasks[name] = asyncio.create_task(self.pool.run(name[0], self._search, name.encode()))
        await asyncio.sleep(0)

    def _search(self, body: bytes) -> bytes:
        self.begun.append(body.decode())
        self._ends[body.decode()].wait()
        return body

    def end(self, *names: str) -> None:
        for name in names:
            self._ends[name].set()

    async def began(self, count: int) -> list[str]:
        async with asyncio.timeout(20):
            while len(self.begun) < count:  # noqa: ASYNC110 - it happens in other threads
                await asyncio.sleep(0.001)
        return self.begun

    def close(self) -> None:
        self.pool.close()
        self.end(*self._ends)


@pytest.fixture
def searches() -> Iterator[Searches]:
    searches = Searches()
    yield searches
    searches.close()


async def test_tenants_take_turns_and_begin_no_more_than_there_are_threads(searches: Searches) -> None:
    await searches.ask("x1", "x2", "y1", "y2", "a1", "a2", "a3", "b1", "b2")
    assert set(await searches.began(THREADS_MAX)) == {"x1", "x2", "y1", "y2"}
    for count, ended in enumerate(("x1", "x2", "y1", "y2"), start=THREADS_MAX + 1):
        assert sum(map(len, searches.pool._lines.values())) == 10 - count
        searches.end(ended)
        await searches.began(count)
    assert searches.begun[THREADS_MAX:] == ["a1", "b1", "a2", "b2"]


async def test_a_turn_whose_caller_left_at_that_moment_goes_to_the_next(searches: Searches) -> None:
    await searches.ask("x1", "x2", "y1", "y2", "a1")
    await searches.began(THREADS_MAX)
    searches.end("x1")
    while searches.pool._lines:  # noqa: ASYNC110 - until the turn is given, and no longer
        await asyncio.sleep(0)
    searches.tasks["a1"].cancel()
    await asyncio.gather(searches.tasks["a1"], return_exceptions=True)
    await searches.ask("b1")
    assert "b1" in await searches.began(THREADS_MAX + 1)
    assert "a1" not in searches.begun


async def test_closing_waits_for_no_search(searches: Searches) -> None:
    await searches.ask("x1")
    await searches.began(1)
    searches.pool.close()
    assert not searches.tasks["x1"].done()
    searches.end("x1")
    assert await searches.tasks["x1"] == b"x1"
