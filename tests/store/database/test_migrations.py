"""Migrations add up to the schema and run once however many start them; two versions of the program can share a database.

The steps of later versions are made up here, over the schema as it is.
"""

from __future__ import annotations

import asyncio
import os
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import apsw
import asyncpg
import pytest

from tests.store.database.pooler import Pooler
from tests.support.postgres import PostgresServer
from tests.support.processes import Processes
from tests.support.store_verbs import postgres_driver
from tidegate import storage
from tidegate.backends import disk
from tidegate.core.audit_chain import ChainCheck
from tidegate.core.errors import StoreRefused, StoreUnavailable
from tidegate.settings import load
from tidegate.store.database.driver import Driver, Migration
from tidegate.store.database.postgres import _MIGRATION_LOCK
from tidegate.store.database.schema import Step, StoreSchema, current_schema
from tidegate.store.database.sqlite import SqliteDriver
from tidegate.store.operators.audit import AuditNote
from tidegate.store.store import Store

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


NOW = current_schema()
VERSION = NOW.version

# A column that an older program never sees, and a change that it could not live with.
ADDS = Step(VERSION + 1, f"-- compatible_from: {VERSION}\nalter table tenants add column\n    colour text;\n")
BREAKS = Step(VERSION + 2, f"-- compatible_from: {VERSION + 2}\nalter table tenants rename column colour to color;\n")
# Nothing listens there.
POSTGRES = "postgresql://postgres@127.0.0.1:1/none"


def after(*steps: Step) -> StoreSchema:
    """The schema of a later program that has these steps more than this one."""
    return StoreSchema(NOW.fresh + "".join(step.text for step in steps), (*NOW.steps, *steps))


def sqlite(path: Path | None = None, *, read_only: bool = False) -> SqliteDriver:
    return SqliteDriver(path, lambda: 0, read_only=read_only)


def opened(kind: str, tmp_path: Path, url: str, schema: StoreSchema = NOW) -> Store:
    return Store(postgres_driver(url) if kind == "postgresql" else sqlite(tmp_path / "store.db"), schema)


async def run_sql(store: Store, text: str) -> None:
    """Run it as one transaction of the driver."""
    assert await store._driver.migrate(lambda stamps: [Migration(0, text)]) == [0]


async def shape(url: str) -> list[list[tuple[Any, ...]]]:
    connection: Any = await asyncpg.connect(url)
    try:
        return [[tuple(row) for row in await connection.fetch(sql)] for sql in (COLUMNS, INDEXES, CONSTRAINTS)]
    finally:
        await connection.close()


def test_steps_are_numbered_without_a_gap_and_say_what_they_are_compatible_with() -> None:
    assert [step.version for step in NOW.steps] == list(range(1, VERSION + 1))
    named = [step.compatible_from for step in NOW.steps]
    assert named == sorted(named), "what was broken once is broken for good"
    assert all(named <= step.version for named, step in zip(named, NOW.steps, strict=True))
    with pytest.raises(ValueError, match="compatible_from"):
        _ = Step(2, "alter table jobs add column a text").compatible_from


async def steps_one_by_one(store: Store, schema: StoreSchema) -> None:
    """Bring a database from the first release to this schema, version by version."""
    first = StoreSchema(schema.steps[0].text, schema.steps[:1])
    for step in [first, *(StoreSchema("", schema.steps[:count]) for count in range(2, len(schema.steps) + 1))]:
        assert await Store(store._driver, step).migrate() == [step.version]


@pytest.mark.parametrize("schema", [NOW, after(ADDS), after(ADDS, BREAKS)], ids=["now", "next", "after next"])
async def test_the_fresh_schema_is_the_migrated_one_on_postgresql(
    schema: StoreSchema, postgres_url: str, postgres_server: PostgresServer
) -> None:
    fresh = postgres_server.create_database()
    made, migrated = Store(postgres_driver(fresh), schema), Store(postgres_driver(postgres_url), schema)
    assert await made.migrate() == [schema.version]
    await steps_one_by_one(migrated, schema)
    assert await made._driver.schema_stamps() == await migrated._driver.schema_stamps()
    await made.close()
    await migrated.close()
    shapes = await shape(fresh), await shape(postgres_url)
    postgres_server.drop_database(fresh)
    assert shapes[0] == shapes[1]
    assert len(shapes[0][0]) > 100
    assert {row[5] for row in shapes[0][0] if row[2] == "text"} == {"C"}, "text collates as C, as it does in SQLite"


@pytest.mark.parametrize("schema", [NOW, after(ADDS), after(ADDS, BREAKS)], ids=["now", "next", "after next"])
async def test_the_fresh_schema_is_the_migrated_one_on_sqlite(schema: StoreSchema, tmp_path: Path) -> None:
    made, migrated = Store(sqlite(tmp_path / "made.db"), schema), Store(sqlite(tmp_path / "migrated.db"), schema)
    assert await made.migrate() == [schema.version]
    await steps_one_by_one(migrated, schema)
    assert await made._driver.schema_stamps() == await migrated._driver.schema_stamps()
    await made.close()
    await migrated.close()
    # A column that was added stands where it was written down, only with other spaces around it.
    look = "select type, name, tbl_name, replace(replace(replace(sql, char(10), ''), ' ', ''), ',,', ',') from sqlite_master order by 1, 2"
    both = [apsw.Connection(str(tmp_path / name)) for name in ("made.db", "migrated.db")]
    shapes = [one.execute(look).fetchall() for one in both]
    for one in both:
        one.close()
    assert shapes[0] == shapes[1]


def test_both_dialects_have_the_same_tables_and_nothing_of_the_other() -> None:
    [of_sqlite], [of_postgres] = NOW.missing("sqlite", {}), NOW.missing("postgresql", {})
    assert of_postgres.text.count("create table") == of_sqlite.text.count("create table") > 20
    assert "create function" not in of_sqlite.text
    assert "without rowid" not in of_postgres.text
    assert "/*" not in of_sqlite.text + of_postgres.text


@pytest.mark.parametrize("kind", ["sqlite", "memory", "postgresql"])
async def test_migrating_twice_changes_nothing(kind: str, tmp_path: Path, postgres_url: str) -> None:
    driver: Driver = (
        postgres_driver(postgres_url) if kind == "postgresql" else sqlite(tmp_path / "a" if kind == "sqlite" else None)
    )
    store = Store(driver)
    assert await store.schema_version() == 0
    with pytest.raises(StoreRefused, match=r"The store is empty\. Run `tidegate migrate`"):
        await store.require_schema()
    await store.migrate()
    assert await store.migrate() == []
    assert await store.schema_version() == VERSION
    await store.require_schema()
    await store.close()


async def test_many_may_migrate_at_once(postgres_url: str) -> None:
    stores = [Store(postgres_driver(postgres_url)) for _ in range(8)]
    ran = await asyncio.gather(*(store.migrate() for store in stores))
    assert sorted(version for versions in ran for version in versions) == [VERSION], "once, whichever process does it"
    for store in stores:
        await store.require_schema()
        await store.close()


MIGRATE = """
import asyncio, sys
from tidegate.store.database.postgres import PostgresDriver
from tidegate.store.store import Store

async def main():
    store = Store(PostgresDriver(sys.argv[1], pool_size=2, statement_timeout_ms=20_000, pooler="none"))
    print("ran", await store.migrate(), flush=True)
    await store.close()

asyncio.run(main())
"""


def test_many_processes_may_migrate_at_once(postgres_url: str, processes: Processes) -> None:
    started = [processes.start([sys.executable, "-c", MIGRATE, postgres_url], name=f"migrate-{n}") for n in range(3)]
    versions = [one.wait_for_line(r"^ran (.*)$").group(1) for one in started]
    assert sorted(versions) == [f"[{VERSION}]", "[]", "[]"], "once, whichever process does it"
    assert [one.wait() for one in started] == [0, 0, 0]


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
async def test_an_older_program_runs_beside_a_newer_one_that_only_added(
    kind: str, tmp_path: Path, postgres_url: str
) -> None:
    older = opened(kind, tmp_path, postgres_url)
    newer = Store(older._driver, after(ADDS))
    await older.migrate()
    assert (older.program_version, newer.program_version) == (VERSION, ADDS.version)
    await older.put_tenant("t1", "acme")
    with pytest.raises(StoreRefused, match=rf"needs {ADDS.version}\. Run `tidegate migrate`"):
        await newer.require_schema()
    assert await newer.migrate() == [ADDS.version]
    for store in (older, newer):
        await store.require_schema()
        assert await store.migrate() == []
        assert await store.schema_version() == ADDS.version
        assert await store.tenant_by_name("acme") == "t1"
    await older.close()


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
async def test_an_older_program_is_refused_by_a_schema_that_it_cannot_use(
    kind: str, tmp_path: Path, postgres_url: str
) -> None:
    older = opened(kind, tmp_path, postgres_url)
    between, newest = Store(older._driver, after(ADDS)), Store(older._driver, after(ADDS, BREAKS))
    await older.migrate()
    assert await newest.migrate() == [ADDS.version, BREAKS.version]
    for store, has in ((older, VERSION), (between, ADDS.version)):
        for refuse in (store.migrate, store.require_schema):
            with pytest.raises(StoreRefused, match=f"version {BREAKS.version} or later; this program has {has}"):
                await refuse()
    assert await older.schema_version() == BREAKS.version, "left as it is"
    await newest.require_schema()
    await older.close()


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
async def test_a_store_of_an_unreleased_version_is_refused_with_advice(
    kind: str, tmp_path: Path, postgres_url: str
) -> None:
    """Of one with fifteen steps, and of another text of the schema as it is before the first release."""
    store = opened(kind, tmp_path, postgres_url)
    await run_sql(
        store,
        "create table meta (name text primary key, value text not null);"
        "insert into meta (name, value) values ('schema_version', '15'), ('migration_0001', 'of another time');",
    )
    await refuses_unreleased(store)
    await run_sql(store, "drop table meta")
    text = f"{NOW.fresh} create table colours (name text);"
    assert await Store(store._driver, StoreSchema(text, (Step(1, text),))).migrate() == [1]
    await refuses_unreleased(store)
    await store.close()


async def refuses_unreleased(store: Store) -> None:
    for refuse in (store.migrate, store.require_schema):
        with pytest.raises(StoreRefused, match=r"before the first release.* an empty store: another --data directory"):
            await refuse()


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
async def test_a_migration_that_fails_leaves_nothing(kind: str, tmp_path: Path, postgres_url: str) -> None:
    store = opened(kind, tmp_path, postgres_url)
    torn = StoreSchema(
        NOW.fresh, (*NOW.steps, ADDS, Step(VERSION + 2, "-- compatible_from: 1\ncreate table meta (name text)"))
    )
    broken = StoreSchema(f"{NOW.fresh} create table meta (name text);", NOW.steps)
    with pytest.raises((asyncpg.PostgresError, apsw.Error)):
        await Store(store._driver, broken).migrate()
    assert await store.schema_version() == 0
    assert await store.migrate() == [VERSION]
    with pytest.raises((asyncpg.PostgresError, apsw.Error)):
        await Store(store._driver, torn).migrate()
    assert await store.schema_version() == VERSION, "also not the step before it"
    assert await Store(store._driver, after(ADDS)).migrate() == [ADDS.version]
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
        async with storage.opened(load(None, tmp_path / str(number), {}).settings) as parts:
            return parts.tenant_id

    watcher, seen, starting = Store(postgres_driver(postgres_url)), set[int](), list[asyncio.Task[str]]()
    for number in range(24):
        starting.append(asyncio.create_task(start(number)))
        seen.add(await watcher.schema_version())
    assert len(set(await asyncio.gather(*starting))) == 1
    assert seen <= {0, VERSION}, "no process meets a database with some of the steps"
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


@pytest.mark.parametrize(
    ("url", "version", "is_migrated"),
    [("", 1, True), (POSTGRES, 0, True), (POSTGRES, 1, False)],
    ids=["embedded", "empty", "older"],
)
async def test_a_start_migrates_an_embedded_store_or_an_empty_database_and_no_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, url: str, version: int, is_migrated: bool
) -> None:
    """Processes of the version before may still use it: its operator says when."""
    monkeypatch.setenv("TIDEGATE_STORE_URL", url)
    asked = list[str]()

    async def noted(name: str, reply: int = 0) -> int:
        asked.append(name)
        return reply

    store: Any = SimpleNamespace(
        schema_version=partial(noted, "version", version),
        migrate=partial(noted, "migrate"),
        require_schema=partial(noted, "require"),
        chain_audit=lambda count: noted("chain"),
    )
    await storage._ready_schema(store, load(None, tmp_path, {}).settings, read_only=False)
    assert [one for one in asked if one != "version"] == [*["migrate"] * is_migrated, "require", "chain"]


async def test_a_process_waits_while_another_migrates(postgres_url: str) -> None:
    """An older database that is being migrated is waited for, not refused."""
    older, newer = Store(postgres_driver(postgres_url)), Store(postgres_driver(postgres_url), after(ADDS))
    await older.migrate()
    [step] = after(ADDS).missing("postgresql", await older._driver.schema_stamps())
    connection: Any = await asyncpg.connect(postgres_url)
    async with connection.transaction():
        await connection.execute("select pg_advisory_xact_lock($1)", _MIGRATION_LOCK)
        waiting = [asyncio.create_task(newer.require_schema()), asyncio.create_task(newer.migrate())]
        assert await asyncio.wait(waiting, timeout=0.3) == (set(), set(waiting))
        await connection.execute(step.text)
    assert await asyncio.gather(*waiting) == [None, []]
    for one in (connection, older, newer):
        await one.close()


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
async def test_a_step_that_was_edited_after_it_ran_is_refused(kind: str, tmp_path: Path, postgres_url: str) -> None:
    store = opened(kind, tmp_path, postgres_url, after(ADDS))
    await store.migrate()
    edited = Store(store._driver, after(Step(ADDS.version, ADDS.text.replace("colour", "hue"))))
    for refuse in (edited.migrate, edited.require_schema):
        with pytest.raises(
            StoreRefused, match=f"{ADDS.stamp} in `meta` is not the checksum of this program's migration"
        ):
            await refuse()
    await store.require_schema()
    await store.close()


def test_a_comment_does_not_change_a_checksum() -> None:
    assert (
        Step(1, "create  table a (b text); -- why").checksum
        == Step(1, "-- why not\ncreate table a\n(b text);").checksum
    )
    assert Step(1, "create table a (b text)").checksum != Step(1, "create table a (c text)").checksum


async def test_new_directories_are_closed_to_others_and_their_names_survive_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[Path] = set()
    real = disk.sync_directory

    def sync(path: Path) -> None:
        synced.add(path)
        real(path)

    monkeypatch.setattr(disk, "sync_directory", sync)
    monkeypatch.setenv("TIDEGATE_STORE_URL", f"sqlite:///{tmp_path}/c/d/store.db")
    async with storage.opened(load(None, tmp_path / "a" / "b", {}).settings):
        assert {tmp_path, tmp_path / "a", tmp_path / "c"} <= synced
        assert [one.stat().st_mode & 0o077 for one in (tmp_path / "a" / "b", tmp_path / "c" / "d")] == [0, 0]


async def test_a_store_that_goes_away_while_its_old_audit_is_chained_is_chained_oldest_first(
    private_postgres_server: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The schema is there and the chain is not whole: the next process to open the store goes on before it notes anything."""
    url = private_postgres_server.create_database()
    first = Store(postgres_driver(url), StoreSchema(NOW.steps[0].text, NOW.steps[:1]))
    await first.migrate()
    rows = ", ".join(f"('aud_{n:04}', {1_000 + n}, 'operator', 'key.create', 'key', 'k')" for n in range(30))
    await run_sql(first, f"insert into audit (id, happened_at, actor, action, kind, target) values {rows}")  # noqa: S608
    await first.close()
    monkeypatch.setattr(storage, "CHAINED_AT_ONCE", 10)
    chain = Store.chain_audit

    async def chain_and_go(store: Store, count_max: int) -> int:
        chained = await chain(store, count_max)
        await asyncio.to_thread(private_postgres_server.stop)
        return chained

    settings = load(None, tmp_path, {"store.url": url}).settings
    with monkeypatch.context() as patched:
        patched.setattr(Store, "chain_audit", chain_and_go)
        with pytest.raises(StoreUnavailable):
            await storage.migrate(settings)
    private_postgres_server.start()
    async with storage.opened(settings) as parts:
        await parts.store.note_read(AuditNote("aud_new", "operator", "batch.item_read", "batch", "b"), {})
        check = ChainCheck()
        ends, entries = await parts.store.audit_entries(0, 100)
        check.look(ends, entries)
        check.look(ends, [])
    assert [one.id for one in entries] == [*(f"aud_{n:04}" for n in range(30)), "aud_new"]
    assert check.findings == []
