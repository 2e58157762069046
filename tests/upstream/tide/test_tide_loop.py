"""The loop around the tides tells the other processes of users at once, again after each change, and takes their reports."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest

from tidegate.backends.system import SystemClock
from tidegate.core.ports import Notices
from tidegate.upstream.tide.peers import Users, decode_notice, encode_notices
from tidegate.upstream.tide.tide_loop import TideLoop
from tidegate.upstream.tide.tides import DeploymentTide

pytestmark = pytest.mark.anyio


class NotedNotices:
    """Notices that go nowhere: what was sent is kept, and the first of them can fail."""

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self.sent: asyncio.Queue[str] = asyncio.Queue()
        self.receive: Callable[[str], None] = lambda _: None

    def on_notice(self, take: Callable[[str], None]) -> None:
        self.receive = take

    async def send_notice(self, text: str) -> None:
        if self.failures:
            self.failures -= 1
            raise OSError("no route")
        self.sent.put_nowait(text)

    async def next_users(self) -> dict[str, Users]:
        notice = decode_notice(await self.sent.get())
        assert notice is not None
        assert notice.process == "me"
        return dict(notice.users)


class NotedTide:
    """As much of a tide as the loop asks of it."""

    def __init__(self, name: str) -> None:
        self.deployment = SimpleNamespace(name=name)
        self.users = Users(0, 0)
        self.yields = True
        self.received: list[tuple[str, Users]] = []
        self.peers = SimpleNamespace(has_listeners=True, notice=lambda *notice: self.received.append(notice))
        self.acts = 0

    def act(self) -> None:
        self.acts += 1

    async def look(self) -> None:
        """There is no engine."""


async def test_every_change_of_users_is_sent_though_one_notice_failed() -> None:
    notices, tide = NotedNotices(failures=1), NotedTide("a")
    loop = TideLoop([cast(DeploymentTide, tide)], SystemClock(), None, lambda: "me", cast(Notices, notices))
    tide.users = Users(1, 0)
    loop.announce("a")
    loop.announce("unknown")
    while notices.failures:  # noqa: ASYNC110 - nothing announces that it failed
        await asyncio.sleep(0)
    for users in (Users(2, 1), Users(3, 0)):
        tide.users = users
        loop.announce("a")
        assert await notices.next_users() == {"a": users}
    for process in ("me", "other"):
        for text in encode_notices(process, {"a": Users(5, 4), "unknown": Users(1, 1)}):
            notices.receive(text)
    assert (tide.received, tide.acts) == ([("other", Users(5, 4))], 1), "a process takes no notices from itself"
    await loop.close()


async def test_an_engine_whose_deployment_is_gone_is_looked_at_no_more() -> None:
    tide = cast(DeploymentTide, NotedTide("a"))
    loop = TideLoop([tide], SystemClock(), None, None)
    looking = loop._looks[tide]
    loop.serve([])
    assert await asyncio.wait({looking}, timeout=10) == ({looking}, set())
    await loop.close()
