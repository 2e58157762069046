"""What a wake-up sends to the other processes: each wake-up once, and that it is waited for only while it is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tests.support.ports import HandClock
from tests.support.processes import wait_until_async
from tidegate.backends.noticed_wake import WANT_EVERY_S, NoticedWake

pytestmark = pytest.mark.anyio


class SentNotices:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[str] = []

    def on_notice(self, listener: Callable[[str], None]) -> None:
        """Another process sends nothing by itself."""

    async def send_notice(self, text: str) -> None:
        self.sent.append(text)


async def test_a_wake_up_is_sent_once_and_a_wait_that_is_over_is_announced_no_more() -> None:
    notices, clock = SentNotices(), HandClock(0.0)
    wake = NoticedWake(notices, clock, "jobs", "a")
    wake.start()
    wake.notify()
    wake._take("jobs:want:b")
    wake.notify()
    await wait_until_async(lambda: bool(notices.sent), 30, "the wake-up to be sent")
    waiting = asyncio.create_task(wake.listen().wait(60))
    await wait_until_async(lambda: len(notices.sent) > 1, 30, "the wait to be announced")
    assert notices.sent == ["jobs:ring:a", "jobs:want:a"]
    wake.notify()
    await waiting
    clock.advance(1_000 * WANT_EVERY_S)
    await wait_until_async(lambda: len(notices.sent) > 2, 30, "the next wake-up to be sent")
    wake._announce()
    assert (notices.sent[2:], wake._due) == (["jobs:ring:a"], set())
    await wake.close()
