"""The store of every driver, for the suites in this directory. A new driver is one word in `DRIVERS` and one branch here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import asyncpg
import pytest

from tests.contracts.limits_world import KINDS, LimitsWorld, limits_world
from tests.contracts.store_world import DRIVERS, FAKE_CLOCK, WIPE, Clock, DatabaseClock, StoreWorld
from tests.contracts.strangers import StrangerDriver
from tests.support.postgres import PostgresServer
from tests.support.store_verbs import postgres_driver
from tidegate.store.database.sqlite import SqliteDriver
from tidegate.store.store import Store


@pytest.fixture(scope="session")
def shared_database(postgres_server: PostgresServer) -> Iterator[str]:
    """A migrated database with a clock that stands still; `world` empties it before each test."""
    url = postgres_server.create_database()

    async def prepare() -> None:
        store = open_postgres(url)
        await store.migrate()
        await store.close()
        connection = await asyncpg.connect(url)
        await connection.execute(FAKE_CLOCK)
        await connection.close()

    asyncio.run(prepare())
    yield url
    postgres_server.drop_database(url)


def open_postgres(url: str) -> Store:
    """A deadlock would hide behind a second of waiting and a retry: here it is not noticed before the statement's time-out."""
    url += "?deadlock_timeout=10min"
    return Store(postgres_driver(url, pool_size=10))


@pytest.fixture(params=DRIVERS)
def store_place(request: pytest.FixtureRequest, tmp_path: Path) -> str | Path | None:
    """Where the store is: a database's url, a file, or nowhere but in memory."""
    if request.param == "postgresql":
        url: str = request.getfixturevalue("shared_database")
        return url
    return tmp_path / "store.db" if request.param == "sqlite" else None


@pytest.fixture
async def world(store_place: str | Path | None) -> AsyncIterator[StoreWorld]:
    """An empty store of each driver."""
    async for made in _opened(store_place):
        yield made


async def _opened(store_place: str | Path | None) -> AsyncIterator[StoreWorld]:
    if isinstance(store_place, str):
        async for made in _postgres_world(store_place):
            yield made
        return
    clock = Clock()
    store = Store(SqliteDriver(store_place, clock) if store_place else StrangerDriver(None, clock))
    await store.migrate()

    async def same() -> Store:
        return store

    yield StoreWorld(store, clock, same)
    await store.close()


@pytest.fixture
async def postgres_world(shared_database: str) -> AsyncIterator[StoreWorld]:
    """For what only several processes can do to each other."""
    async for made in _postgres_world(shared_database):
        yield made


async def _postgres_world(url: str) -> AsyncIterator[StoreWorld]:
    # What an earlier test left locked must not keep this one waiting for ever.
    connection = await asyncpg.connect(url, command_timeout=30)
    await connection.execute(WIPE)
    opened: list[Store] = []

    async def another() -> Store:
        opened.append(open_postgres(url))
        return opened[-1]

    clock = DatabaseClock(connection)
    await clock.advance(0)
    yield StoreWorld(await another(), clock, another)
    for store in opened:
        await store.close()
    await connection.close()


@pytest.fixture(params=KINDS)
def limits_place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str | Path, str | None]:
    """Where the store under the limits is, and the Redis in between if there is one."""
    store = tmp_path / "store.db" if request.param == "sqlite" else request.getfixturevalue("shared_database")
    return store, request.getfixturevalue("redis_url") if request.param == "redis" else None


@pytest.fixture
async def limits(limits_place: tuple[str | Path, str | None]) -> AsyncIterator[LimitsWorld]:
    """Shared limits of each kind."""
    store_place, redis_url = limits_place
    async for stores in _opened(store_place):
        async with limits_world(stores, redis_url) as made:
            yield made
