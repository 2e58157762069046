"""The PostgreSQL driver: servers that restart, connections that die or fall silent, settings that lie, poolers in between."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import asyncpg
import pytest

from tests.store.database.pooler import Pooler
from tests.support.postgres import PostgresServer
from tests.support.processes import Processes, wait_until_async
from tests.support.proxy import WiredDatabase
from tests.support.store_verbs import any_file, postgres_driver
from tidegate.core.errors import StoreRefused, StoreUnavailable
from tidegate.core.job_lists import JobFilter
from tidegate.store.database import postgres
from tidegate.store.database.driver import Tx
from tidegate.store.database.postgres import PostgresDriver
from tidegate.store.database.queries import for_postgres, statements
from tidegate.store.jobs.jobs import filter_columns
from tidegate.store.store import Store

pytestmark = pytest.mark.anyio


@contextlib.asynccontextmanager
async def opened(url: str, **options: Any) -> AsyncIterator[tuple[Store, PostgresDriver]]:
    # A test wants a driver with short time-outs, which are too short to migrate with.
    patient = Store(postgres_driver(url, pooler=options.get("pooler", "none")))
    await patient.migrate()
    await patient.close()
    driver = postgres_driver(url, **options)
    store = Store(driver)
    await store.require_schema()
    try:
        yield store, driver
    finally:
        await store.close()


async def eventually(store: Store, name: str) -> None:
    """Write until it works: StoreUnavailable is the only error that may come meanwhile."""

    async def write() -> bool:
        try:
            await store.put_tenant(name, name)
        except StoreUnavailable:
            return False
        return True

    await wait_until_async(write, what="the store to work again")


def through(url: str, port: int) -> str:
    """The same database, seen through another port."""
    return f"postgresql://postgres@127.0.0.1:{port}/{url.rsplit('/', 1)[1]}"


async def test_a_restart_under_load_loses_nothing_acknowledged(private_postgres_server: PostgresServer) -> None:
    url = private_postgres_server.create_database()
    async with opened(url, pool_size=4) as (store, _):
        await store.enlist_worker("w", "host", "1", 60_000)
        kept: list[str] = []
        failures: list[StoreUnavailable] = []
        stop = asyncio.Event()

        async def load(writer: int) -> None:
            number = 0
            while not stop.is_set():
                name = f"{writer}-{number}"
                try:
                    kept.append(await store.put_tenant(name, name))
                    await store.beat("w", 60_000)
                except StoreUnavailable as error:
                    failures.append(error)
                number += 1

        tasks = [asyncio.create_task(load(writer)) for writer in range(4)]
        await wait_until_async(lambda: len(kept) > 50, what="some load")
        await asyncio.to_thread(private_postgres_server.restart_immediate)
        before = len(kept)
        await wait_until_async(lambda: len(kept) > before + 50, what="load after the restart")
        stop.set()
        await asyncio.gather(*tasks)
        assert failures, "the restart must have been noticed"
        assert "store.url" in str(failures[0])
        missing = [name for name in kept if await store.tenant_by_name(name) is None]
        assert missing == []


async def test_no_server_at_all_is_unavailable(wired_database: WiredDatabase) -> None:
    url, proxy = wired_database
    proxy.refuse()
    store = Store(postgres_driver(url))
    for ask in (store.schema_version, store.now_ms, store.migrate):
        with pytest.raises(StoreUnavailable, match=r"store\.url"):
            await ask()
    with pytest.raises(StoreUnavailable):
        await store.beat("w", 1_000)
    proxy.heal()
    await store.migrate()
    await eventually(store, "acme")
    await store.close()


@pytest.mark.parametrize("url", ["postgresql://postgres@127.0.0.1:{port}/no_such_database"])
async def test_a_wrong_database_is_unavailable_with_its_name(postgres_url: str, url: str) -> None:
    port = postgres_url.rsplit(":", 1)[1].split("/")[0]
    store = Store(postgres_driver(url.format(port=port)))
    with pytest.raises(StoreUnavailable, match="no_such_database"):
        await store.now_ms()
    await store.close()


async def test_terminated_backends_are_replaced(postgres_url: str, postgres_server: PostgresServer) -> None:
    async with opened(postgres_url) as (store, _):
        await store.enlist_worker("w", "host", "1", 60_000)
        await asyncio.gather(*(store.now_ms() for _ in range(8)))
        ended = await asyncio.to_thread(postgres_server.terminate_backends, postgres_url.rsplit("/", 1)[1])
        assert ended >= 2
        await eventually(store, "acme")

        async def beats() -> bool:
            try:
                return await store.beat("w", 60_000) == []
            except StoreUnavailable:
                return False

        await wait_until_async(beats, what="the heartbeat's own connection to be replaced")
        assert await asyncio.gather(*(store.tenant_by_name("acme") for _ in range(8))) == ["acme"] * 8


SESSIONS = 4


async def end_session(tx: Tx, url: str) -> None:
    """End the session of this transaction from another one."""
    pid = await tx._connection.fetchval("select pg_backend_pid()")  # type: ignore[attr-defined]
    hand = await asyncpg.connect(url)
    try:
        await hand.fetch("select pg_terminate_backend($1, 60000)", pid)
    finally:
        await hand.close()


async def open_all_sessions(driver: PostgresDriver) -> None:
    """Have every connection of the pool open at once."""
    both = asyncio.Barrier(SESSIONS)

    async def look(tx: Tx) -> None:
        await tx.all("now")
        await both.wait()

    await asyncio.gather(*[driver.read(look) for _ in range(SESSIONS)])


@pytest.mark.parametrize("pooler", ["none", "transaction"])
async def test_every_connection_reads_and_writes_at_once_after_its_session_was_ended(
    postgres_url: str, postgres_server: PostgresServer, pooler: str
) -> None:
    database = postgres_url.rsplit("/", 1)[1]
    async with opened(postgres_url, pool_size=SESSIONS, pooler=pooler) as (store, driver):
        await store.enlist_worker("w", "host", "1", 60_000)
        await store.beat("w", 60_000)
        for asked in (
            store.tenant_by_name,
            lambda name: store.put_tenant(name, name),
            lambda name: store.beat("w", 60_000),
        ):
            await open_all_sessions(driver)
            # The event loop does not run meanwhile, so no connection knows of its end before it is used.
            assert postgres_server.terminate_backends(database) >= SESSIONS
            await asyncio.gather(*[asked(f"t{number}") for number in range(SESSIONS)])


@pytest.mark.parametrize("way", ["read", "write", "beat"])
async def test_what_was_not_committed_for_certain_is_asked_again_once_in_a_new_session(
    postgres_url: str, way: str
) -> None:
    async with opened(postgres_url, pool_size=1) as (store, driver):
        begun = 0

        async def body(tx: Tx) -> int:
            nonlocal begun
            begun += 1
            await tx.all("now")
            if begun <= deaths:
                await end_session(tx, postgres_url)
            await tx.all("now")
            return begun

        deaths = 1
        assert await getattr(driver, way)(body) == 2
        begun, deaths = 0, 99
        with pytest.raises(StoreUnavailable):
            await getattr(driver, way)(body)
        assert begun == 2
        assert await store.tenant_by_name("acme") is None


DIES_AT_COMMIT = """
create table doomed (number bigint);
create function die() returns trigger language plpgsql as
    $$ begin perform pg_terminate_backend(pg_backend_pid()); perform pg_sleep(60); return null; end $$;
create constraint trigger dies after insert on doomed deferrable initially deferred for each row execute function die();
"""


async def test_a_write_that_may_be_committed_is_not_made_again(postgres_url: str) -> None:
    async with opened(postgres_url, pool_size=1) as (_, driver):
        hand = await asyncpg.connect(postgres_url)
        await hand.execute(DIES_AT_COMMIT)
        await hand.close()
        begun = 0

        async def body(tx: Tx) -> None:
            nonlocal begun
            begun += 1
            await tx._connection.execute("insert into doomed values (1)")  # type: ignore[attr-defined]

        with pytest.raises(StoreUnavailable):
            await driver.write(body)
        assert begun == 1


@pytest.mark.parametrize("direction", ["both", "down"])
async def test_a_silent_network_is_given_up_and_comes_back(wired_database: WiredDatabase, direction: Any) -> None:
    """Without `down` the server gets the call and may commit; either way the caller learns within the time-out that nothing is known."""
    url, proxy = wired_database
    async with opened(url, timeout_ms=300, pool_size=2) as (store, _):
        await store.enlist_worker("w", "host", "1", 60_000)
        await asyncio.gather(store.now_ms(), store.now_ms())
        proxy.blackhole(direction)
        calls = [store.put_tenant("a", "a"), store.tenant_by_name("b"), store.beat("w", 60_000), store.now_ms()]
        async with asyncio.timeout(30):
            done = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(one) for one in done] == [StoreUnavailable] * 4
        proxy.heal()
        await eventually(store, "again")
        assert await store.tenant_by_name("again") == "again"


PAUSED = """
import asyncio, sys, time
from tidegate.store.database.postgres import PostgresDriver
from tidegate.store.database.queries import for_postgres, statements

async def main():
    driver = PostgresDriver(sys.argv[1], pool_size=2, statement_timeout_ms=500, pooler=sys.argv[2])

    async def body(tx):
        await tx.one("tenant_lock", tenant_id="t1")
        if sys.argv[3] == "half":
            await tx._connection.prepare("select 1")
        print("holding", flush=True)
        time.sleep(1000)

    await driver.write(body)

asyncio.run(main())
"""


@pytest.mark.parametrize("where", ["between", "half"])
@pytest.mark.parametrize("pooler", ["none", "transaction"])
async def test_a_process_that_stops_in_a_transaction_gives_its_locks_back(
    postgres_url: str, processes: Processes, pooler: str, where: str
) -> None:
    """Between two statements, and with half of one sent: the server calls only the first of them idle."""
    async with opened(postgres_url) as (store, driver):
        await store.put_tenant("t1", "acme")
        paused = processes.start([sys.executable, "-c", PAUSED, postgres_url, pooler, where])
        await asyncio.to_thread(paused.wait_for_line, "holding")

        async def body(tx: Tx) -> Any:
            return await tx.one("tenant_lock", tenant_id="t1")

        assert tuple(await driver.write(body)) == ("t1",)
        assert paused.running


async def test_a_server_that_may_forget_is_refused(private_postgres_server: PostgresServer) -> None:
    url = private_postgres_server.create_database()
    connection: Any = await asyncpg.connect(url)
    for setting in ("fsync", "full_page_writes", "synchronous_commit"):
        await turn(connection, setting, "off")
        store = Store(postgres_driver(url))
        for _ in range(2):
            with pytest.raises(StoreRefused, match=f"{setting} = off.*Turn it on"):
                await store.migrate()
        await turn(connection, setting, "on")
        await store.migrate()
        await store.close()
    await connection.close()


async def turn(connection: Any, setting: str, value: str) -> None:
    await connection.execute(f"alter system set {setting} = {value}")
    await connection.execute("select pg_reload_conf()")

    async def is_in_force() -> bool:
        return str(await connection.fetchval("select current_setting($1)", setting)) == value

    await wait_until_async(is_in_force, what=f"{setting} to be {value}")


async def test_a_role_that_may_forget_is_refused(postgres_url: str) -> None:
    connection = await asyncpg.connect(postgres_url)
    name = postgres_url.rsplit("/", 1)[1]
    await connection.execute(f"alter database {name} set synchronous_commit = off")
    await connection.close()
    store = Store(postgres_driver(postgres_url))
    with pytest.raises(StoreRefused, match="synchronous_commit"):
        await store.now_ms()
    await store.close()


async def test_more_rows_than_go_at_once_all_arrive(postgres_url: str) -> None:
    count = 2 * postgres._BULK_ROWS_MAX + 1
    async with opened(postgres_url) as (store, driver):

        async def body(tx: Tx) -> None:
            columns = ("job_id", "number", "outcome", "at", "size_bytes")
            await tx.copy("outcomes", columns, (("j", number, "failed", 0, 1) for number in range(count)))
            await tx.many("outcome_move", ((2 * number, "j", number) for number in range(count)))

        await driver.write(body)
        assert [row[::2] for row in await store.outcomes_page("j", 0, 2 * count)] == [(n, 2 * n) for n in range(count)]


@pytest.mark.parametrize("pooler", ["none", "transaction"])
async def test_a_transaction_of_many_rows_is_given_more_time(postgres_url: str, pooler: str) -> None:
    """As long a transaction as it takes to write them, longer than any other may be."""

    async def body(tx: Tx) -> None:
        columns = ("job_id", "number", "outcome", "at", "size_bytes")
        await tx.copy("outcomes", columns, (("j", number, "failed", 0, 1) for number in range(1_001)))
        await tx._connection.execute("select pg_sleep(2.5)", timeout=60)  # type: ignore[attr-defined]

    async with opened(postgres_url, timeout_ms=2_000, pooler=pooler) as (_, driver):
        await driver.write(body)


async def test_behind_a_transaction_pooler_every_way_of_asking_works(postgres_url: str) -> None:
    port = int(postgres_url.rsplit(":", 1)[1].split("/")[0])
    pooler = Pooler("127.0.0.1", port)
    url = through(postgres_url, await pooler.start())
    async with opened(url, pooler="transaction", pool_size=3) as (store, driver):
        await store.require_schema()
        await store.enlist_worker("w", "host", "1", 60_000)

        async def everything(number: int) -> None:
            name = f"t{number}"
            assert await store.put_tenant(name, name) == name
            assert await store.beat("w", 60_000) == []
            await store.begin_blobs([f"{name}-a", f"{name}-b"], "answers", "w")

            async def body(tx: Tx) -> list[Any]:
                rows = [(name, n, "answered", n, 1, None) for n in range(3)]
                new = await tx.many_returning("outcome_put", rows)
                columns = ("job_id", "number", "outcome", "at", "size_bytes")
                await tx.copy("outcomes", columns, [(name, 7, "failed", 0, 1)])
                return new

            assert [row[0] for row in await driver.write(body)] == [0, 1, 2]
            assert len(await store.outcomes_page(name, 0, 10)) == 4

        for _ in range(3):
            await asyncio.gather(
                *(everything(number) for number in range(pooler.transactions, pooler.transactions + 4))
            )
    assert pooler.transactions > 50
    assert not any(b"timeout" in startup or b"application_name" in startup for startup in pooler.startups)
    pooler.close()


async def test_the_pooler_of_this_suite_would_notice_prepared_statements(postgres_url: str) -> None:
    """With named statements the very same driver does not survive it."""
    port = int(postgres_url.rsplit(":", 1)[1].split("/")[0])
    pooler = Pooler("127.0.0.1", port)
    url = through(postgres_url, await pooler.start())
    driver = postgres_driver(url, pooler="none", pool_size=1)
    store = Store(driver)

    async def use() -> None:
        for _ in range(10):
            await store.migrate()
            await store.put_tenant("a", "a")

    with pytest.raises(asyncpg.PostgresError, match="prepared statement"):
        await use()
    await driver.close()
    pooler.close()


async def test_nothing_is_left_on_a_pooled_connection(postgres_url: str) -> None:
    async with opened(postgres_url, pooler="transaction", pool_size=1) as (store, driver):
        settings = "select name, setting from pg_settings where source = 'session' and name not like 'client_%'"
        async with driver._pool.acquire() as connection:
            before = await connection.fetch(settings)
        await store.put_tenant("t1", "acme")
        await store.begin_blobs(["a", "b"], "answers", "w")
        async with driver._pool.acquire() as connection:
            assert await connection.fetchval("select count(*) from pg_prepared_statements where name <> ''") == 0
            locks = "select count(*) from pg_locks where locktype = 'advisory' and pid = pg_backend_pid()"
            assert await connection.fetchval(locks) == 0
            assert await connection.fetch(settings) == before


async def test_a_cancelled_call_leaves_the_pool_usable_and_the_answers_in_order(postgres_url: str) -> None:
    async with opened(postgres_url, pool_size=2) as (store, driver):
        for number in range(12):

            async def slow(tx: Tx, number: int = number) -> str:
                await tx.all("tenant_put", id=f"cancelled-{number}", name=f"cancelled-{number}")
                await tx._connection.fetchval("select pg_sleep(30)")  # type: ignore[attr-defined]
                return "an answer that no caller waits for"

            call = asyncio.create_task(driver.write(slow))
            for _ in range(number * 3):
                await asyncio.sleep(0)
            call.cancel()
            names = [f"{number}-{n}" for n in range(4)]
            answers = await asyncio.gather(*(store.put_tenant(name, name) for name in names))
            assert answers == names
            with pytest.raises(asyncio.CancelledError):
                await call
        for number in range(12):
            assert await store.tenant_by_name(f"cancelled-{number}") is None


async def test_a_cancelled_heartbeat_does_not_answer_the_next_one(postgres_url: str) -> None:
    async with opened(postgres_url) as (store, _):
        await store.enlist_worker("w", "host", "1", 60_000)
        for turn in range(12):
            call = asyncio.create_task(store.beat("unknown", 60_000))
            for _ in range(turn):
                await asyncio.sleep(0)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            assert await store.beat("w", 60_000) == []


async def test_a_heartbeat_passes_when_the_pool_is_used_up(postgres_url: str) -> None:
    async with opened(postgres_url, pool_size=2) as (store, driver):
        await store.enlist_worker("w", "host", "1", 60_000)
        held = [await driver._pool.acquire() for _ in range(2)]
        assert await store.beat("w", 60_000) == []
        for connection in held:
            await driver._pool.release(connection)


async def test_a_pool_that_stays_used_up_is_unavailable_in_time(postgres_url: str) -> None:
    async with opened(postgres_url, pool_size=1, timeout_ms=1_000) as (store, driver):
        held = await driver._pool.acquire()
        with pytest.raises(StoreUnavailable):
            await store.now_ms()
        await driver._pool.release(held)
        await store.now_ms()


async def test_a_statement_that_takes_too_long_is_given_up(postgres_url: str) -> None:
    """The server and the driver give up at the same time. Where the driver's cancel is itself cancelled while it asks for TLS, asyncpg
    leaves a future behind that fails unseen, which the test's runner takes for a failure: so no TLS is asked for."""
    async with opened(f"{postgres_url}?sslmode=disable", timeout_ms=1_000) as (store, driver):

        async def slow(tx: Tx) -> None:
            await tx._connection.fetchval("select pg_sleep(30)")  # type: ignore[attr-defined]

        with pytest.raises(StoreUnavailable):
            await driver.write(slow)
        await store.now_ms()


async def test_a_migration_beside_a_running_process_is_ridden_out(postgres_url: str) -> None:
    """A plan that a new column outdated is made again; a process of version n goes on beside n + 1."""
    async with opened(postgres_url) as (store, _):
        await store.put_tenant("t1", "acme")
        assert await asyncio.gather(*(store.get_job("t1", "absent") for _ in range(6))) == [None] * 6
        connection = await asyncpg.connect(postgres_url)
        await connection.execute("alter table jobs add column later text; alter table files add column later text")
        await connection.close()
        assert await asyncio.gather(*(store.get_job("t1", "absent") for _ in range(6))) == [None] * 6
        assert await any_file(store, "absent") is None


async def test_a_deadlock_is_tried_again(postgres_url: str) -> None:
    async with opened(f"{postgres_url}?deadlock_timeout=20ms") as (store, driver):
        for name in ("a", "b"):
            await store.put_tenant(name, name)
        both = asyncio.Barrier(2)
        met: set[str] = set()

        async def lock(first: str, second: str) -> str:
            async def body(tx: Tx) -> str:
                await tx.one("tenant_lock", tenant_id=first)
                if first not in met:
                    met.add(first)
                    await both.wait()
                await tx.one("tenant_lock", tenant_id=second)
                return first

            return await driver.write(body)

        assert list(await asyncio.gather(lock("a", "b"), lock("b", "a"))) == ["a", "b"]


async def test_a_value_that_cannot_be_stored_is_our_mistake_and_not_an_outage(postgres_url: str) -> None:
    async with opened(postgres_url) as (store, _):
        for name in ("\ud800", "\0"):
            with pytest.raises(asyncpg.DataError):
                await store.put_tenant("t1", name)
        assert await store.put_tenant("t1", "acme") == "t1"


async def test_everything_is_unavailable_after_closing(postgres_url: str) -> None:
    async with opened(postgres_url) as (store, _):
        pass
    with pytest.raises(StoreUnavailable):
        await store.now_ms()


async def test_a_search_is_planned_for_the_filters_that_it_has_and_other_statements_once(postgres_url: str) -> None:
    async with opened(postgres_url, pool_size=1) as (_, driver):
        page = {"tenant_id": None, "count_max": 10, **filter_columns(JobFilter(), (1 << 62, ""))}

        async def plans(tx: Tx) -> dict[str, tuple[int, int]]:
            await tx.all("now")
            await tx.all("jobs_search", **page)
            asked = "select statement, generic_plans, custom_plans from pg_prepared_statements"
            counts = await tx._connection.fetch(asked)  # type: ignore[attr-defined]
            return {"jobs_search" if "from jobs j" in row[0] else row[0]: (row[1], row[2]) for row in counts}

        for _ in range(3):
            seen = await driver.write(plans)
        assert seen["jobs_search"] == (0, 3)
        assert seen[for_postgres(statements()["now"])] == (3, 0)


async def sent_by(driver: PostgresDriver, read: Callable[[], Awaitable[object]]) -> list[str]:
    """What a read sends to the server, on the pool's only connection."""
    sent: list[str] = []

    def note(record: Any) -> None:
        sent.append(record.query.split()[0].lower())

    async with driver._pool.acquire() as connection:
        connection.add_query_logger(note)
    await read()
    async with driver._pool.acquire() as connection:
        connection.remove_query_logger(note)
    return sent


async def test_a_read_of_one_statement_is_one_round_trip(postgres_url: str) -> None:
    async with opened(postgres_url, pool_size=1) as (store, driver):
        assert await sent_by(driver, lambda: store.tenant_by_name("acme")) == ["select"]
    async with opened(postgres_url, pool_size=1, pooler="transaction") as (store, driver):
        sent = await sent_by(driver, lambda: store.tenant_by_name("acme"))
        # A pooler loses the time-outs of a session, so they are set in a transaction.
        assert (sent[0], sent[-2:]) == ("begin", ["select", "commit;"])


async def test_several_statements_of_a_read_see_one_snapshot_from_the_first_time_on(postgres_url: str) -> None:
    async with opened(postgres_url, pool_size=2) as (store, driver):
        begun = 0

        async def twice(tx: Tx) -> list[Any]:
            nonlocal begun
            begun += 1
            name = f"t{begun}"
            before = await tx.one("tenant_by_name", name=name)
            await store.put_tenant(name, name)
            return [before, await tx.one("tenant_by_name", name=name)]

        assert await driver.read(twice) == [None, None]
        assert begun == 2, "run again in a transaction when it asked for its second statement"
        assert await driver.read(twice) == [None, None]
        assert begun == 3, "and known from then on"


async def test_a_read_writes_nothing(postgres_url: str) -> None:
    async with opened(postgres_url, pool_size=1) as (store, driver):
        for _ in range(2):
            with pytest.raises(StoreUnavailable, match="read-only"):
                await driver.read(lambda tx: tx.all("tenant_put", id="acme", name="acme"))
        assert await store.tenant_by_name("acme") is None
