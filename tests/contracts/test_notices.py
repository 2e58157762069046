"""Notices between processes: every listener gets them at once, a lost connection is replaced, and nothing is raised meanwhile."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable

import asyncpg
import pytest

from tests.support.proxy import WiredDatabase
from tests.upstream.raw_server import eventually
from tidegate.backends.noticed_wake import NoticedWake
from tidegate.backends.shared_redis import RedisShared
from tidegate.backends.system import SystemClock, SystemEntropy
from tidegate.store.database import postgres_notices
from tidegate.store.database.postgres_notices import PostgresNotices

pytestmark = pytest.mark.anyio

Another = Callable[[str], Awaitable["Process"]]
CUT = (
    "select pg_terminate_backend(pid) from pg_stat_activity"
    " where application_name = 'tidegate notices' and datname = current_database()"
)


class Process:
    """A process that sends notices and keeps what it receives."""

    def __init__(self, notices: PostgresNotices | RedisShared) -> None:
        self.notices = notices
        self.received: list[str] = []
        notices.on_notice(self.received.append)
        notices.start()

    async def says(self, text: str, *others: Process) -> None:
        """Send it until all of these received it: what is sent before a process listens is lost."""
        while not all(text in other.received for other in others):
            await self.notices.send_notice(text)
            await asyncio.sleep(0.01)


@pytest.fixture(params=["postgresql", "redis"])
async def another(request: pytest.FixtureRequest) -> AsyncIterator[Another]:
    """Makes one more process of the installation that is named."""
    url = request.getfixturevalue("postgres_url" if request.param == "postgresql" else "redis_url")
    run = secrets.token_hex(4)
    opened: list[Process] = []

    async def make(name: str) -> Process:
        if request.param == "postgresql":
            opened.append(Process(PostgresNotices(url, f"{run}_{name}", 5.0)))
        else:
            opened.append(Process(RedisShared(url, f"{run}_{name}", SystemClock(), SystemEntropy())))
        return opened[-1]

    yield make
    for one in opened:
        await one.notices.close()


async def test_a_notice_reaches_every_process_of_its_installation_and_no_other(another: Another) -> None:
    first, second, third, foreign = [await another(name) for name in ("a", "a", "a", "b")]
    await first.says("one user", second, third)
    await foreign.says("of another", foreign)
    await second.says('two "users" and ünïcode', first, third)
    assert "one user" not in foreign.received
    assert all("of another" not in one.received for one in (first, second, third))


async def test_a_lost_connection_is_replaced_and_sending_meanwhile_raises_nothing(postgres_url: str) -> None:
    first, second = [Process(PostgresNotices(postgres_url, "a", 5.0)) for _ in range(2)]
    try:
        await first.says("before", second)
        admin = await asyncpg.connect(postgres_url)
        try:
            # On a busy machine one may have connected a second time before its notice arrived.
            assert len(await admin.fetch(CUT)) >= 2
        finally:
            await admin.close()
        await eventually(lambda: first.notices._connection is None, "the connection to be lost")  # type: ignore[union-attr]
        await first.notices.send_notice("lost")
        await first.says("after", second)
        assert "lost" not in second.received
    finally:
        await first.notices.close()
        await second.notices.close()


async def test_a_connection_that_fell_silent_is_given_up(
    wired_database: WiredDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pause in ("_CHECK_S", "_AGAIN_S"):
        monkeypatch.setattr(postgres_notices, pause, 0.05)
    one = Process(PostgresNotices(wired_database.url, "a", 1.0))
    try:
        await one.says("before", one)
        wired_database.wire.blackhole()
        await eventually(lambda: one.notices._connection is None, "the connection to be given up")  # type: ignore[union-attr]
        wired_database.wire.heal()
        await one.says("after", one)
    finally:
        await one.notices.close()


async def test_a_database_that_is_away_at_the_start_is_found_later() -> None:
    one = Process(PostgresNotices("postgresql://127.0.0.1:1/none", "a", 1.0))
    await one.notices.send_notice("lost")
    await one.notices.close()
    assert one.received == []


async def test_a_wake_up_reaches_a_process_that_waits_and_costs_nothing_without_one(another: Another) -> None:
    """A wait that would last a minute ends at once; before anyone waits, and for other names, nothing is sent."""
    here, there = await another("wakes"), await another("wakes")
    await here.says("hello", there)
    ours, theirs = (NoticedWake(one.notices, SystemClock(), "jobs", name) for one, name in ((here, "a"), (there, "b")))
    other = NoticedWake(here.notices, SystemClock(), "inputs", "a")
    wakes = (ours, theirs, other)
    for wake in wakes:
        wake.start()
    try:
        for _ in range(20):
            ours.notify()
        await asyncio.sleep(0.1)
        assert [text for text in there.received if "ring" in text] == []
        waiting = asyncio.create_task(theirs.listen().wait(60))
        await eventually(lambda: any("want" in text for text in here.received), "a want")
        other.notify()
        await asyncio.sleep(0.05)
        assert not waiting.done()
        ours.notify()
        async with asyncio.timeout(20):
            await waiting
        # Its own wake-ups need no notice.
        alone = asyncio.create_task(ours.listen().wait(60))
        await asyncio.sleep(0)
        ours.notify()
        async with asyncio.timeout(20):
            await alone
    finally:
        for wake in wakes:
            await wake.close()


async def test_a_long_wait_is_announced_again_and_again(another: Another, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidegate.backends.noticed_wake.WANT_EVERY_S", 0.05)
    here, there = await another("again"), await another("again")
    await here.says("hello", there)
    wake = NoticedWake(there.notices, SystemClock(), "jobs", "b")
    wake.start()
    waiting = asyncio.create_task(wake.listen().wait(60))
    try:
        await eventually(lambda: sum("want" in text for text in here.received) > 3, "several wants")
    finally:
        waiting.cancel()
        await wake.close()
