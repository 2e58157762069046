"""The store of every driver, for the suites in this directory. A new driver is one word in `DRIVERS` and one branch here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from tests.contracts.limits_world import KINDS, LimitsWorld, limits_world
from tests.contracts.store_world import DRIVERS, FAKE_CLOCK, WIPE, DatabaseClock, StoreHandClock, StoreWorld
from tests.contracts.unknown_names import UnknownNamesDriver
from tests.support.postgres import PostgresServer
from tests.support.store_verbs import postgres_driver
from tidegate.store.database.postgres import PostgresDriver
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


def open_driver(url: str) -> PostgresDriver:
    """A deadlock would hide behind a second of waiting and a retry: here it is not noticed before the statement's time-out."""
    return postgres_driver(f"{url}?deadlock_timeout=10min", pool_size=10)


def open_postgres(url: str) -> Store:
    return Store(open_driver(url))


@dataclass(frozen=True)
class OpenPostgres:
    """Connections that have planned their statements: a test that plans its own again costs the server three times as much."""

    url: str
    driver: PostgresDriver
    operator: asyncpg.Connection[Any]


@pytest.fixture(scope="module")
async def open_database(shared_database: str) -> AsyncIterator[OpenPostgres]:
    driver = open_driver(shared_database)
    # What an earlier test left locked must not keep the next one waiting for ever.
    operator = await asyncpg.connect(shared_database, command_timeout=30)
    yield OpenPostgres(shared_database, driver, operator)
    await driver.close()
    await operator.close()


@pytest.fixture(scope="session")
def migrated_sqlite() -> bytes:
    """What a migrated store of SQLite holds: to begin with a copy costs a third of migrating one."""
    driver = SqliteDriver(None, StoreHandClock())
    store = Store(driver)
    asyncio.run(store.migrate())
    held = driver._writer.serialize("main")
    asyncio.run(store.close())
    return held


@pytest.fixture
def sqlite_place(tmp_path: Path, migrated_sqlite: bytes) -> Path:
    path = tmp_path / "store.db"
    path.write_bytes(migrated_sqlite)
    return path


@pytest.fixture(params=DRIVERS)
def store_place(request: pytest.FixtureRequest) -> OpenPostgres | Path:
    """Where the store is: a database or a file."""
    place: OpenPostgres | Path
    place = request.getfixturevalue("open_database" if request.param == "postgresql" else "sqlite_place")
    return place


@pytest.fixture
async def world(store_place: OpenPostgres | Path) -> AsyncIterator[StoreWorld]:
    """An empty store of each driver."""
    async for made in _opened(store_place):
        yield made


async def _opened(store_place: OpenPostgres | Path) -> AsyncIterator[StoreWorld]:
    if isinstance(store_place, OpenPostgres):
        async for made in _postgres_world(store_place):
            yield made
        return
    clock = StoreHandClock()
    store = Store(UnknownNamesDriver(store_place, clock))

    async def same() -> Store:
        return store

    yield StoreWorld(store, clock, same)
    await store.close()


@pytest.fixture
async def postgres_world(open_database: OpenPostgres) -> AsyncIterator[StoreWorld]:
    """For what only several processes can do to each other."""
    async for made in _postgres_world(open_database):
        yield made


async def _postgres_world(database: OpenPostgres) -> AsyncIterator[StoreWorld]:
    await database.operator.execute(WIPE)
    opened: list[Store] = []

    async def another() -> Store:
        opened.append(open_postgres(database.url))
        return opened[-1]

    clock = DatabaseClock(database.operator)
    await clock.advance(0)
    yield StoreWorld(Store(database.driver), clock, another)
    for store in opened:
        await store.close()


@pytest.fixture(params=KINDS)
def limits_place(request: pytest.FixtureRequest) -> tuple[OpenPostgres | Path, str | None]:
    """Where the store under the limits is, and the Redis in between if there is one."""
    store = request.getfixturevalue("sqlite_place" if request.param == "sqlite" else "open_database")
    return store, request.getfixturevalue("redis_url") if request.param == "redis" else None


@pytest.fixture
async def limits(limits_place: tuple[OpenPostgres | Path, str | None]) -> AsyncIterator[LimitsWorld]:
    """Shared limits of each kind."""
    store_place, redis_url = limits_place
    async for stores in _opened(store_place):
        async with limits_world(stores, redis_url) as made:
            yield made
