"""How often a queue is looked at, and what is logged of it: what each look finds is written down here, and no time passes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from tidegate import metrics
from tidegate.core.ports import RequestQueue
from tidegate.core.queues import Found, QueueAway, QueueKind, Sorted
from tidegate.upstream.queue.mailbox import AWAY_S, LOOK_S_MAX, LOOK_S_MIN, Mailbox

pytestmark = pytest.mark.anyio

AWAY = QueueAway("no route", is_unsure=False)
ANSWER = Found("r", QueueKind.ANSWERED, b"{}")


class WrittenQueue:
    """A queue that says what was written for each look; after the last one the mailbox waits for good."""

    def __init__(self, *looks: Sorted | QueueAway, late: int = 0) -> None:
        self.looks = list(looks)
        self.late = late
        self.over = asyncio.Event()

    async def collect(self, ids: Sequence[str], result_bytes_max: int, *, look: bool) -> Sorted:
        if not self.looks:
            self.over.set()
            await asyncio.Event().wait()
        found = self.looks.pop(0)
        if isinstance(found, QueueAway):
            raise found
        return found

    async def sweep(self) -> int:
        late, self.late = self.late, 0
        return late


async def look(queue: WrittenQueue) -> list[dict[str, Any]]:
    """Wait for one answer until all looks were made, and return what was logged."""
    mailbox = Mailbox(cast(RequestQueue, queue), 1_000)
    waiting = mailbox.wait_for("r")
    with capture_logs() as logged:
        assert await waiting == ANSWER
        await queue.over.wait()
    mailbox.stop_waiting("r", waiting)
    await mailbox.close()
    return [dict(line) for line in logged]


def counted(kind: str) -> float:
    return metrics.REGISTRY.get_sample_value("tidegate_queue_results_total", {"outcome": kind}) or 0.0


async def test_a_queue_without_news_is_looked_at_ever_more_rarely(pauses: list[float]) -> None:
    quiet = [Sorted()] * 12
    await look(WrittenQueue(*quiet, Sorted(has_more=True), *quiet[:2], Sorted((ANSWER,)), Sorted()))
    growing = pauses[: len(quiet)]
    assert growing[:2] == pytest.approx([LOOK_S_MIN * 1.5, LOOK_S_MIN * 2.25])
    assert growing == sorted(growing)
    assert growing[-1] == LOOK_S_MAX
    after_news = pauses[len(quiet) : len(quiet) + 4]
    assert after_news == pytest.approx([LOOK_S_MIN, LOOK_S_MIN * 1.5, LOOK_S_MIN * 2.25, LOOK_S_MIN])


async def test_an_outage_is_logged_once_and_so_is_its_end(pauses: list[float]) -> None:
    logged = await look(WrittenQueue(AWAY, AWAY, AWAY, Sorted(), Sorted((ANSWER,)), Sorted()))
    assert [line["event"] for line in logged] == ["queue_unreachable", "queue_reachable"]
    assert pauses[:3] == [AWAY_S] * 3


async def test_every_kind_of_result_is_counted_and_dead_letters_are_logged(pauses: list[float]) -> None:
    kinds = ("answered", "garbage", "unknown", "duplicate", "late")
    before = [counted(kind) for kind in kinds]
    logged = await look(WrittenQueue(Sorted((ANSWER,), garbage=2, unknown=3, duplicate=4), late=5))
    assert [counted(kind) - had for kind, had in zip(kinds, before, strict=True)] == [1, 2, 3, 4, 5]
    assert {(line["what"], line["count"]) for line in logged if line["event"] == "queue_dead_letters"} == {
        ("garbage", 2),
        ("unknown", 3),
        ("late", 5),
    }


async def test_a_result_goes_to_every_call_that_waits_for_it() -> None:
    """A lease was lost and taken again here: the call of the first is under way as long as that of the second."""
    mailbox = Mailbox(cast(RequestQueue, WrittenQueue(Sorted((ANSWER,)))), 1_000)
    waiting = [mailbox.wait_for("r") for _ in range(2)]
    async with asyncio.timeout(10):
        assert await asyncio.gather(*waiting) == [ANSWER, ANSWER]
    await mailbox.close()
