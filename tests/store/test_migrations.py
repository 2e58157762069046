"""Migrations add up to the schema, run once however many start them, and a database from the future is left alone."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from pathlib import Path
from typing import Any

import apsw
import asyncpg
import pytest

from tests.store.pooler import Pooler
from tests.support.postgres import PostgresServer
from tests.support.processes import Processes
from tidegate import service
from tidegate.backends import disk
from tidegate.core.errors import StoreRefused
from tidegate.settings import load
from tidegate.store.driver import Driver, Migration
from tidegate.store.postgres import _MIGRATION_LOCK, PostgresDriver
from tidegate.store.queries import schema_for
from tidegate.store.schema import _checksum, checksums, fresh_schema, migration_steps, migrations
from tidegate.store.sqlite import SqliteDriver
from tidegate.store.store import SCHEMA_VERSION, Store

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
    text = f"update meta set value = '{newer}' where name = 'schema_version'"  # noqa: S608 - a number of our own
    assert await store._driver.migrate([Migration(newer, text)]) == [newer]
    assert await store._driver.migrate([Migration(newer, "drop table jobs")]) == []
    assert await store.schema_version() == newer
    for refuse in (store.migrate, store.require_current):
        with pytest.raises(StoreRefused, match=f"version {newer}"):
            await refuse()
    await store.close()


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
async def test_a_migration_that_fails_leaves_nothing(kind: str, tmp_path: Path, postgres_url: str) -> None:
    store = Store(postgres(postgres_url) if kind == "postgresql" else sqlite(tmp_path / "store.db"))
    with pytest.raises((asyncpg.PostgresError, apsw.Error)):
        await store._driver.migrate([migration_steps(store.dialect)[0], Migration(2, "create table meta (name text)")])
    assert await store.schema_version() == 0
    assert await store.migrate() == list(range(1, SCHEMA_VERSION + 1))
    await store.close()


@pytest.mark.parametrize("pooler", ["none", "transaction"])
def test_24_that_start_together_on_an_empty_database_all_start(
    pooler: str, postgres_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each with connections of its own, as processes have; also behind a pooler with three of them."""
    # In a loop of its own: a connection that took too long on a busy machine is tried again, and asyncpg tells the loop of the first try.
    asyncio.run(_start_24_together(pooler, postgres_url, monkeypatch, tmp_path))


async def _start_24_together(pooler: str, postgres_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    between = Pooler("127.0.0.1", int(postgres_url.rsplit(":", 1)[1].split("/")[0]))
    behind = f"postgresql://postgres@127.0.0.1:{await between.start()}/{postgres_url.rsplit('/', 1)[1]}"
    monkeypatch.setenv("TIDEGATE_STORE_URL", behind if pooler == "transaction" else postgres_url)
    monkeypatch.setenv("TIDEGATE_STORE_POOLER", pooler)

    async def start(number: int) -> str:
        async with service.opened(load(None, tmp_path / str(number), {}).settings) as parts:
            return parts.tenant_id

    watcher, seen, starting = Store(postgres(postgres_url)), set[int](), list[asyncio.Task[str]]()
    for number in range(24):
        starting.append(asyncio.create_task(start(number)))
        seen.add(await watcher.schema_version())
    assert len(set(await asyncio.gather(*starting))) == 1
    assert seen <= {0, SCHEMA_VERSION}, "no process meets a database with some of the steps"
    await watcher.close()
    between.close()


@pytest.mark.soak
def test_24_real_processes_start_together(postgres_url: str, processes: Processes, tmp_path: Path) -> None:
    env = os.environ | {"TIDEGATE_STORE_URL": postgres_url, "TIDEGATE_SERVER_PORT": "0"}
    command = [sys.executable, "-m", "tidegate", "api", "--data"]
    started = [processes.start([*command, str(tmp_path / f"{n}")], name=f"api-{n}", env=env) for n in range(24)]
    for one in started:
        one.wait_for_line("http://127.0.0.1", timeout_s=120)
    assert all(one.running for one in started)


async def test_a_process_waits_while_another_migrates(postgres_url: str) -> None:
    """An older database that is being migrated is waited for, not refused."""
    older, newer = Store(postgres(postgres_url)), Store(postgres(postgres_url))
    await older._driver.migrate(migration_steps("postgresql")[:-1])
    connection: Any = await asyncpg.connect(postgres_url)
    async with connection.transaction():
        await connection.execute("select pg_advisory_xact_lock($1)", _MIGRATION_LOCK)
        waiting = [asyncio.create_task(newer.require_current()), asyncio.create_task(newer.migrate())]
        assert await asyncio.wait(waiting, timeout=0.3) == (set(), set(waiting))
        await connection.execute(migration_steps("postgresql")[-1].text)
    assert await asyncio.gather(*waiting) == [None, []]
    for one in (connection, older, newer):
        await one.close()


# A step that has run somewhere is never edited: write a new one instead, and add its line here.
CHECKSUMS = Path(__file__).with_name("migration_checksums.txt")


def test_no_step_was_edited() -> None:
    assert "".join(f"{name} {checksum}\n" for name, checksum in checksums().items()) == CHECKSUMS.read_text()


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
async def test_a_step_that_was_edited_after_it_ran_is_refused(kind: str, tmp_path: Path, postgres_url: str) -> None:
    store = Store(postgres(postgres_url) if kind == "postgresql" else sqlite(tmp_path / "store.db"))
    await store.migrate()
    await store.require_current()
    was = "update meta set value = 'of another text' where name = 'migration_0003'"
    await store._driver.migrate([Migration(SCHEMA_VERSION + 1, was)])
    for refuse in (store.migrate, store.require_current):
        with pytest.raises(StoreRefused, match="migration_0003 said something else"):
            await refuse()
    await store.close()


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
async def test_a_database_from_before_checksums_gets_them_with_its_next_step(
    kind: str, tmp_path: Path, postgres_url: str
) -> None:
    store = Store(postgres(postgres_url) if kind == "postgresql" else sqlite(tmp_path / "store.db"))
    *before, last = migration_steps(store.dialect)
    forget = f"{before[-1].text}\ndelete from meta where name like 'migration_%';"
    await store._driver.migrate([*before[:-1], Migration(last.version - 1, forget)])
    assert await store.migrate() == [SCHEMA_VERSION]
    stamps = await store._driver.schema_stamps()
    assert {name: stamps[name] for name in checksums()} == checksums()
    await store.close()


def test_a_comment_does_not_change_a_checksum() -> None:
    assert _checksum("create  table a (b text); -- why") == _checksum("-- why not\ncreate table a\n(b text);")
    assert _checksum("create table a (b text)") != _checksum("create table a (c text)")


async def test_the_names_of_new_directories_survive_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[Path] = set()
    real = disk.sync_directory
    monkeypatch.setattr(disk, "sync_directory", lambda path: (synced.add(path), real(path)))
    monkeypatch.setenv("TIDEGATE_STORE_URL", f"sqlite:///{tmp_path}/c/d/store.db")
    async with service.opened(load(None, tmp_path / "a" / "b", {}).settings):
        assert {tmp_path, tmp_path / "a", tmp_path / "c"} <= synced
