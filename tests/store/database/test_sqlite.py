"""The SQLite driver: one writer, real durability, and what happens when the disk or the process gives out."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import apsw
import pytest

from tests.contracts.store_world import DAY_MS, StoreHandClock, StoreWorld
from tests.support.processes import Processes, wait_until
from tests.support.shims import Shims, preload_env
from tidegate import storage
from tidegate.core.errors import StoreFull, StoreRefused, StoreUnavailable
from tidegate.settings import load
from tidegate.store.database.disk_reserve import RESERVE_BYTES, DiskReserve
from tidegate.store.database.driver import Tx
from tidegate.store.database.queries import schema_for, statements
from tidegate.store.database.schema import current_schema
from tidegate.store.database.sqlite import SqliteDriver
from tidegate.store.store import Store

pytestmark = pytest.mark.anyio


def open_store(path: Path, *, read_only: bool = False) -> Store:
    return Store(SqliteDriver(path, lambda: 0, read_only=read_only))


HOLD = """
import asyncio, sys
from pathlib import Path
from tidegate.store.database.sqlite import SqliteDriver
from tidegate.store.store import Store

async def main():
    store = Store(SqliteDriver(Path(sys.argv[1]), lambda: 0))
    await store.migrate()
    print("ready", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_a_second_writing_process_is_refused_with_the_pid_of_the_first(
    processes: Processes, tmp_path: Path
) -> None:
    path = tmp_path / "store.db"
    first = processes.start([sys.executable, "-c", HOLD, str(path)])
    first.wait_for_line("ready")
    with pytest.raises(StoreRefused, match=rf"pid {first.pid}\b.*PostgreSQL"):
        open_store(path)
    reader = open_store(path, read_only=True)
    await reader.require_schema()
    await reader.close()
    first.kill()
    store = open_store(path)
    await store.require_schema()
    with pytest.raises(StoreRefused, match=rf"pid {os.getpid()}\b"):
        open_store(path)
    await store.close()


async def test_a_reader_beside_the_writer_sees_what_is_committed(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    writer = open_store(path)
    await writer.migrate()
    reader = open_store(path, read_only=True)
    await writer.put_tenant("t1", "acme")
    assert await reader.tenant_by_name("acme") == "t1"
    with pytest.raises(StoreUnavailable):
        await reader.put_tenant("t2", "other")
    await writer.put_tenant("t3", "third")
    assert await reader.tenant_by_name("third") == "t3"
    assert await reader.tenant_by_name("other") is None
    await writer.close()
    await reader.close()
    alone = open_store(path, read_only=True)
    assert await alone.tenant_by_name("acme") == "t1"
    await alone.close()


async def test_the_durability_that_is_promised_is_really_on(tmp_path: Path) -> None:
    driver = SqliteDriver(tmp_path / "store.db", lambda: 0)
    for connection in (driver._writer, driver._reader):
        assert connection.pragma("journal_mode") == "wal"
        assert connection.pragma("synchronous") == 2, "FULL"
        assert connection.pragma("journal_size_limit") == 64 << 20, "a long transaction leaves no large file behind"
        assert connection.pragma("foreign_keys") in (0, 1)
    await driver.close()


@pytest.mark.parametrize("what", ["garbage", "directory", "under a file", "missing"])
def test_a_place_that_cannot_be_the_store_is_refused_with_what_to_do(what: str, tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    if what == "garbage":
        path.write_bytes(b"this is not a database, by far" * 100)
    elif what == "directory":
        path.mkdir()
    elif what == "under a file":
        path.write_text("")
        path = path / "store.db"
    with pytest.raises(StoreRefused, match="Check that the path"):
        open_store(path, read_only=what == "missing")
    if what == "garbage":
        path.unlink()
        driver = SqliteDriver(path, lambda: 0)
        asyncio.run(driver.close())


async def test_an_error_inside_a_transaction_leaves_nothing_of_it(tmp_path: Path) -> None:
    for path in (tmp_path / "store.db", None):
        driver = SqliteDriver(path, lambda: 0)
        store = Store(driver)
        await store.migrate()

        async def body(tx: Tx) -> None:
            await tx.all("tenant_put", id="t1", name="acme")
            raise KeyError("changed its mind")

        with pytest.raises(KeyError):
            await driver.write(body)
        assert await store.tenant_by_name("acme") is None
        assert await store.put_tenant("t2", "acme") == "t2"
        await store.close()


async def test_a_body_may_await_nothing_but_its_transaction(tmp_path: Path) -> None:
    driver = SqliteDriver(None, lambda: 0)

    async def body(tx: Tx) -> None:
        await asyncio.sleep(0)

    with pytest.raises(RuntimeError, match="awaited something other"):
        await driver.write(body)
    await driver.close()


async def test_a_call_that_is_cancelled_leaves_the_store_usable(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store.db")
    await store.migrate()
    for number in range(20):
        calls = [asyncio.create_task(store.put_tenant(f"t{number}-{n}", f"{number}-{n}")) for n in range(3)]
        await asyncio.sleep(0)
        calls[number % 3].cancel()
        done: list[Any] = await asyncio.gather(*calls, return_exceptions=True)
        for n, answer in enumerate(done):
            if n != number % 3:
                assert answer == f"t{number}-{n}", "the answer to this question, not to the one that was given up"
    await store.close()


FILL = """
import asyncio, sys
from pathlib import Path
from tidegate.core.errors import StoreUnavailable
from tidegate.store.database.sqlite import SqliteDriver
from tidegate.store.store import Store

async def main():
    store = Store(SqliteDriver(Path(sys.argv[1]), lambda: 0))
    await store.migrate()
    number, failing = 0, False
    print("ready", flush=True)
    while True:
        name = f"{number:08}" + "x" * 3000
        try:
            await store.put_tenant(f"t{number}", name)
        except StoreUnavailable as error:
            if not failing:
                print("unavailable", error, flush=True)
            failing = True
            if await store.tenant_by_name(name) is None:
                print("refused", number, flush=True)
            continue
        if failing:
            print("works again", number, flush=True)
            failing = False
        print("kept", number, flush=True)
        number += 1

asyncio.run(main())
"""


@pytest.mark.parametrize("fault", ["enospc-write", "eio-fsync", "short-write"])
def test_a_failing_disk_is_waited_out_and_costs_nothing(
    fault: str, processes: Processes, shims: Shims, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    disk = shims.disk(home)
    proc = processes.start([sys.executable, "-c", FILL, str(home / "store.db")], env=preload_env(disk))
    proc.wait_for_line("^kept 5$")
    disk.fail(fault)
    if fault != "short-write":
        # SQLite writes the rest of a short write by itself.
        proc.wait_for_line("^unavailable .*Free disk space")
        proc.wait_for_line("^refused")
        disk.heal()
        proc.wait_for_line("^works again")
    seen = len(proc.stdout())
    wait_until(lambda: "kept" in proc.stdout()[seen:], what="more rows after the fault")
    proc.kill()
    check_every_kept_row(home / "store.db", proc.stdout())


def test_kill_9_in_the_middle_of_a_transaction_loses_nothing_acknowledged(processes: Processes, tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    for number in range(3):
        if path.exists():
            path.unlink()
            for beside in tmp_path.glob("store.db-*"):
                beside.unlink()
        proc = processes.start([sys.executable, "-c", FILL, str(path)], name=f"writer-{number}")
        proc.wait_for_line(f"^kept {10 + 7 * number}$")
        proc.kill()
        check_every_kept_row(path, proc.stdout())


def check_every_kept_row(path: Path, output: str) -> None:
    store = open_store(path)
    assert store._driver._writer.pragma("integrity_check") == "ok"  # type: ignore[attr-defined]
    rows = store._driver._writer.execute("select id from tenants").fetchall()  # type: ignore[attr-defined]
    kept = {f"t{line.split()[1]}" for line in output.splitlines() if line.startswith("kept ") and line.count(" ") == 1}
    assert kept <= {row[0] for row in rows}
    assert len(rows) <= len(kept) + 1, "at most the one whose answer never came"
    asyncio.run(store.close())


UNFINISHED = """
import os, signal, sys
from pathlib import Path
from tidegate.store.database.sqlite import SqliteDriver
from tidegate.store.store import Store
import asyncio

async def main():
    driver = SqliteDriver(Path(sys.argv[1]), lambda: 0)
    store = Store(driver)
    await store.migrate()
    await store.put_tenant("t0", "committed")

    async def body(tx):
        for number in range(5000):
            await tx.all("tenant_put", id=f"u{number}", name="x" * 500 + str(number))
        os.kill(os.getpid(), signal.SIGKILL)

    await driver.write(body)

asyncio.run(main())
"""


async def test_a_transaction_that_was_never_committed_is_gone_after_kill_9(
    processes: Processes, tmp_path: Path
) -> None:
    """Large enough that pages of it were already written to the log."""
    path = tmp_path / "store.db"
    proc = processes.start([sys.executable, "-c", UNFINISHED, str(path)])
    assert proc.wait() == -9
    store = open_store(path)
    assert store._driver._writer.pragma("integrity_check") == "ok"  # type: ignore[attr-defined]
    assert store._driver._writer.execute("select id from tenants").fetchall() == [("t0",)]  # type: ignore[attr-defined]
    assert await store.put_tenant("t1", "next") == "t1"
    await store.close()


async def test_a_busy_database_is_unavailable_not_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidegate.store.database.sqlite._BUSY_TIMEOUT_MS", 10)
    store = open_store(tmp_path / "store.db")
    await store.migrate()
    intruder = apsw.Connection(str(tmp_path / "store.db"))
    intruder.execute("begin immediate")
    with pytest.raises(StoreUnavailable):
        await store.put_tenant("t1", "acme")
    assert await store.tenant_by_name("acme") is None
    intruder.execute("rollback")
    intruder.close()
    assert await store.put_tenant("t1", "acme") == "t1"
    await store.close()


async def test_everything_is_unavailable_after_closing(tmp_path: Path) -> None:
    for path in (tmp_path / "store.db", None):
        store = Store(SqliteDriver(path, lambda: 0))
        await store.migrate()
        for _ in range(2):
            await store.close()
        with pytest.raises(StoreUnavailable, match="stopping"):
            await store.now_ms()


def rights_in(directory: Path) -> dict[str, int]:
    return {one.name: one.stat().st_mode & 0o777 for one in directory.iterdir()}


async def test_the_files_of_the_store_are_this_users_alone(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    path.touch(mode=0o644)
    before = os.umask(0)
    try:
        store = open_store(path)
        await store.migrate()
        found = rights_in(tmp_path)
        await store.close()
    finally:
        os.umask(before)
    assert found.keys() >= {"store.db", "store.db-wal", "store.db-shm"}
    assert set(found.values()) == {0o600}


@pytest.mark.parametrize("how", ["deleted", "replaced"])
async def test_nothing_is_acknowledged_after_the_directory_was_taken_away(tmp_path: Path, how: str) -> None:
    store = Store(SqliteDriver(tmp_path / "data" / "store.db", lambda: 0))
    await store.migrate()
    await store.put_tenant("t1", "acme")
    shutil.rmtree(tmp_path / "data")
    if how == "replaced":
        (tmp_path / "data").mkdir()
        (tmp_path / "data" / "store.db").touch()
    with pytest.raises(StoreUnavailable, match="deleted or replaced"):
        await store.put_tenant("t2", "other")
    await store.close()


async def test_a_full_disk_has_a_name_of_its_own(tmp_path: Path) -> None:
    driver = SqliteDriver(tmp_path / "store.db", lambda: 0)
    store = Store(driver)
    await store.migrate()
    driver._writer.pragma("max_page_count", 1)
    with pytest.raises(StoreFull, match="Free disk space"):
        await store.put_tenant("t1", "x" * 100_000)
    driver._writer.pragma("max_page_count", 1_000_000)
    assert await store.put_tenant("t", "acme") == "t"
    await store.close()


class TickingClock(StoreHandClock):
    """A clock that is a millisecond on at every look."""

    def __call__(self) -> int:
        self.now += 1
        return self.now


async def test_a_deadline_lies_one_window_after_the_creation_when_the_clock_ticks_in_between() -> None:
    clock = TickingClock()
    store = Store(SqliteDriver(None, clock))
    await store.migrate()

    async def open_another() -> Store:
        return store

    world = StoreWorld(store, clock, open_another)
    caller = await world.caller()
    file = await world.file(caller, expires_after_ms=DAY_MS)
    assert file.expires_at is not None
    job = await world.job(caller, file)
    assert (file.expires_at - file.created_at, job.expires_at - job.created_at) == (DAY_MS, DAY_MS)
    await store.close()


@pytest.mark.parametrize(
    ("statement", "index"),
    [
        ("job_search", "jobs_listed"),
        ("jobs_search", "jobs_by_age"),
        ("jobs_search_open", "jobs_open"),
        ("jobs_search_ended", "jobs_by_end"),
        ("operation_jobs_open", "jobs_open"),
        ("operation_impact_ended", "jobs_retryable"),
    ],
)
def test_a_search_goes_along_the_index_that_it_was_made_for(statement: str, index: str) -> None:
    """Another index, or a sort, would read every job that is stored."""
    connection = apsw.Connection(":memory:")
    connection.create_scalar_function("now_ms", lambda *_: 0, 0)
    connection.execute(schema_for("sqlite", current_schema().fresh))
    asked = statements()[statement]
    plan = [row[3] for row in connection.execute(f"explain query plan {asked.sql}", dict.fromkeys(asked.parameters))]
    assert any(step.startswith("SEARCH j ") and f" {index} " in step for step in plan), plan
    assert not any("TEMP B-TREE" in step for step in plan), plan


def test_runs_of_a_file_are_found_by_the_file() -> None:
    """By the tenant, every job of a large one would be read."""
    connection = apsw.Connection(":memory:")
    connection.execute(schema_for("sqlite", current_schema().fresh))
    asked = statements()["runs_of_file"]
    plan = [row[3] for row in connection.execute(f"explain query plan {asked.sql}", dict.fromkeys(asked.parameters))]
    assert plan[0] == "SEARCH j USING INDEX jobs_by_input (input_file_id=?)", plan


async def test_a_process_that_wants_the_store_alone_waits_for_a_command_that_writes(tmp_path: Path) -> None:
    settings = load(None, tmp_path, {}, {}).settings
    async with storage.opened(settings):
        server = storage.opened(settings, is_alone=True)
        starting = asyncio.ensure_future(server.__aenter__())
        await asyncio.sleep(0)
        assert not starting.done()
    await starting
    assert storage.is_taken(settings)
    await server.__aexit__(None, None, None)
    assert not storage.is_taken(settings)


async def test_room_that_was_given_up_in_vain_is_reserved_again(tmp_path: Path) -> None:
    driver = SqliteDriver(tmp_path / "store.db", lambda: 0)
    store = Store(driver)
    await store.migrate()
    reserve = DiskReserve(tmp_path / "store.db")
    reserve.fill()
    # From here on the database may not grow, as on a disk that another program has filled.
    driver._writer.pragma("max_page_count", 1)

    async def write_much(tx: Tx) -> None:
        await tx.all("mode_override_put", name="large", value="x" * 1_000_000)

    with pytest.raises(StoreFull):
        await driver.free(write_much)
    assert reserve.size_bytes() == RESERVE_BYTES
    await store.close()
