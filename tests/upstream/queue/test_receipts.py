"""Results are acknowledged when their items are recorded: all of them, each once, and in spite of an outage."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from tidegate.core.ids import item_id
from tidegate.core.ports import RequestQueue
from tidegate.core.queues import QueueAway
from tidegate.upstream.queue.receipts import Receipts

pytestmark = pytest.mark.anyio

JOB = "batch_0123456789ABCDEFabcdef"


class NotedQueue:
    """A queue that notes what is acknowledged, and is away the first few times."""

    def __init__(self, outages: int = 0) -> None:
        self.outages = outages
        self.acknowledged: list[list[str]] = []
        self.was_called = asyncio.Event()

    async def acknowledge(self, ids: Sequence[str]) -> None:
        if self.outages:
            self.outages -= 1
            raise QueueAway("no route", is_unsure=False)
        self.acknowledged.append(list(ids))
        self.was_called.set()


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidegate.upstream.queue.receipts.AGAIN_S", 0)


def hold(receipts: Receipts, queue: NotedQueue, count: int, first: int = 0) -> list[str]:
    """Hold one result for each of so many items, and return the ids of the results."""
    ids = [f"r{number}" for number in range(first, first + count)]
    for number, request_id in enumerate(ids, first):
        receipts.hold(item_id(JOB, number), cast(RequestQueue, queue), request_id)
    return ids


async def end(receipts: Receipts) -> list[dict[str, Any]]:
    with capture_logs() as logged:
        await receipts.close()
    return [dict(line) for line in logged]


async def test_every_recorded_result_is_acknowledged_once_some_at_a_time() -> None:
    queue, receipts = NotedQueue(), Receipts()
    count = 513
    ids = hold(receipts, queue, count + 1)
    receipts.recorded((JOB, number) for number in range(count))
    receipts.recorded([(JOB, 0), (JOB, 10_000)])
    assert await end(receipts) == []
    assert [len(some) for some in queue.acknowledged] == [256, 256, 1]
    assert [one for some in queue.acknowledged for one in some] == ids[:count], "the last one is not recorded"


async def test_an_outage_of_one_queue_loses_nothing_and_holds_up_no_other() -> None:
    gone, there, receipts = NotedQueue(outages=3), NotedQueue(), Receipts()
    late, soon = hold(receipts, gone, 2), hold(receipts, there, 2, first=2)
    receipts.recorded((JOB, number) for number in range(4))
    await there.was_called.wait()
    assert (there.acknowledged, gone.acknowledged) == ([soon], [])
    assert await end(receipts) == []
    assert gone.acknowledged == [late]


async def test_the_oldest_result_is_forgotten_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidegate.upstream.queue.receipts.UNACKNOWLEDGED_MAX", 3)
    queue, receipts = NotedQueue(), Receipts()
    ids = hold(receipts, queue, 5)
    receipts.recorded((JOB, number) for number in range(5))
    assert await end(receipts) == []
    assert queue.acknowledged == [ids[2:]]


async def test_a_queue_that_stays_away_is_logged_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidegate.upstream.queue.receipts.CLOSE_S", 0)
    queue, receipts = NotedQueue(outages=1_000_000), Receipts()
    hold(receipts, queue, 2)
    receipts.recorded((JOB, number) for number in range(2))
    [line] = await end(receipts)
    assert (line["event"], line["count"]) == ("results_acknowledgement_failed", 2)
