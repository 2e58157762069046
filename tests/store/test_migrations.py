"""Migrations add up to the schema, run once however many start them, and a database from the future is left alone."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from typing import Any

import apsw
import asyncpg
import pytest

from tests.support.postgres import PostgresServer
from tests.support.processes import Processes
from tidegate.core.errors import StoreRefused
from tidegate.store.driver import Driver
from tidegate.store.postgres import PostgresDriver
from tidegate.store.queries import schema_for
from tidegate.store.sqlite import SqliteDriver
from tidegate.store.store import SCHEMA_VERSION, Store, fresh_schema, migrations

pytestmark = pytest.mark.anyio

COLUMNS = """
select table_name, column_name, data_type, is_nullable, column_default, collation_name
from information_schema.columns where table_schema = 'public' order by 1, 2
"""
INDEXES = "select tablename, indexname, indexdef from pg_indexes where schemaname = 'public' order by 1, 2"
CONSTRAINTS = """
select conrelid::regclass::text, conname, contype::text, pg_get_constraintdef(oid)
from pg_constraint where connamespace = 'public'::regnamespace order by 1, 2
"""


def postgres(url: str) -> PostgresDriver:
    return PostgresDriver(url, pool_size=2, statement_timeout_ms=20_000, pooler="none")


def sqlite(path: Path | None = None, *, read_only: bool = False) -> SqliteDriver:
    return SqliteDriver(path, lambda: 0, read_only=read_only)


async def shape(url: str) -> list[list[tuple[Any, ...]]]:
    connection: Any = await asyncpg.connect(url)
    try:
        return [[tuple(row) for row in await connection.fetch(sql)] for sql in (COLUMNS, INDEXES, CONSTRAINTS)]
    finally:
        await connection.close()


def test_migrations_are_numbered_without_a_gap() -> None:
    assert [int(name[:4]) for name in migrations()] == list(range(1, SCHEMA_VERSION + 1))


async def test_the_fresh_schema_is_the_migrated_one_on_postgresql(
    postgres_url: str, postgres_server: PostgresServer
) -> None:
    store = Store(postgres(postgres_url))
    assert await store.migrate() == list(range(1, SCHEMA_VERSION + 1))
    await store.close()
    fresh = postgres_server.create_database()
    connection: Any = await asyncpg.connect(fresh)
    await connection.execute(fresh_schema("postgresql"))
    await connection.close()
    migrated, made = await shape(postgres_url), await shape(fresh)
    postgres_server.drop_database(fresh)
    assert migrated == made
    assert len(made[0]) > 100
    assert {row[5] for row in made[0] if row[2] == "text"} == {"C"}, "text collates as C, as it does in SQLite"


async def test_the_fresh_schema_is_the_migrated_one_on_sqlite(tmp_path: Path) -> None:
    store = Store(sqlite(tmp_path / "store.db"))
    assert await store.migrate() == list(range(1, SCHEMA_VERSION + 1))
    await store.close()
    # A column that was added stands where it was written down, only with other spaces around it.
    look = "select type, name, tbl_name, replace(replace(replace(sql, char(10), ''), ' ', ''), ',,', ',') from sqlite_master order by 1, 2"
    fresh = apsw.Connection(":memory:")
    fresh.execute(fresh_schema("sqlite"))
    migrated = apsw.Connection(str(tmp_path / "store.db"))
    assert migrated.execute(look).fetchall() == fresh.execute(look).fetchall()
    assert "sqlite:" not in fresh_schema("sqlite")
    migrated.close()


def test_both_dialects_have_the_same_tables_and_columns() -> None:
    assert schema_for("sqlite", fresh_schema("sqlite")) == fresh_schema("sqlite")
    assert fresh_schema("postgresql").count("create table") == fresh_schema("sqlite").count("create table")


@pytest.mark.parametrize("kind", ["sqlite", "memory", "postgresql"])
async def test_migrating_twice_changes_nothing(kind: str, tmp_path: Path, postgres_url: str) -> None:
    driver: Driver = (
        postgres(postgres_url) if kind == "postgresql" else sqlite(tmp_path / "a" if kind == "sqlite" else None)
    )
    store = Store(driver)
    assert await store.schema_version() == 0
    with pytest.raises(StoreRefused, match="tidegate migrate"):
        await store.require_current()
    await store.migrate()
    assert await store.migrate() == []
    assert await store.schema_version() == SCHEMA_VERSION
    await store.require_current()
    await store.close()


async def test_many_may_migrate_at_once(postgres_url: str) -> None:
    stores = [Store(postgres(postgres_url)) for _ in range(8)]
    ran = await asyncio.gather(*(store.migrate() for store in stores))
    assert sorted(version for versions in ran for version in versions) == list(range(1, SCHEMA_VERSION + 1))
    for store in stores:
        await store.require_current()
        await store.close()


MIGRATE = """
import asyncio, sys
from tidegate.store.postgres import PostgresDriver
from tidegate.store.store import Store

async def main():
    store = Store(PostgresDriver(sys.argv[1], pool_size=2, statement_timeout_ms=20_000, pooler="none"))
    print("ran", await store.migrate(), flush=True)
    await store.close()

asyncio.run(main())
"""


def test_many_processes_may_migrate_at_once(postgres_url: str, processes: Processes) -> None:
    started = [processes.start([sys.executable, "-c", MIGRATE, postgres_url], name=f"migrate-{n}") for n in range(3)]
    said = [one.wait_for_line(r"^ran (.*)$").group(1) for one in started]
    ran = sorted(int(number) for one in said for number in re.findall(r"\d+", one))
    assert ran == list(range(1, SCHEMA_VERSION + 1)), "each step once, whoever runs it"
    assert [one.wait() for one in started] == [0, 0, 0]


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
async def test_a_newer_database_is_refused_and_left_alone(kind: str, tmp_path: Path, postgres_url: str) -> None:
    newer = SCHEMA_VERSION + 1
    store = Store(postgres(postgres_url) if kind == "postgresql" else sqlite(tmp_path / "store.db"))
    await store.migrate()
    text = f"update meta set value = '{newer}'"  # noqa: S608 - a number of our own
    assert await store._driver.migrate_to(newer, text)
    assert not await store._driver.migrate_to(newer, "drop table jobs")
    assert await store.schema_version() == newer
    for refuse in (store.migrate, store.require_current):
        with pytest.raises(StoreRefused, match=f"version {newer}"):
            await refuse()
    await store.close()


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
async def test_a_migration_that_fails_leaves_nothing(kind: str, tmp_path: Path, postgres_url: str) -> None:
    store = Store(postgres(postgres_url) if kind == "postgresql" else sqlite(tmp_path / "store.db"))
    with pytest.raises((asyncpg.PostgresError, apsw.Error)):
        await store._driver.migrate_to(1, "create table meta (name text); create table meta (name text);")
    assert await store.schema_version() == 0
    assert await store.migrate() == list(range(1, SCHEMA_VERSION + 1))
    await store.close()
