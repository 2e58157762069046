"""A queue that is away for a while: it is asked again at an easy pace, and not for ever."""

from __future__ import annotations

from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from tests.support.ports import HandClock
from tidegate.core.deployments import HttpLimits
from tidegate.core.errors import Ambiguous, RecordedElsewhere, Unavailable
from tidegate.core.ports import Entropy, RequestQueue
from tidegate.core.queues import Put, QueueAway, QueueRequest
from tidegate.upstream.queue.asynchronous import Office, QueueClient

pytestmark = pytest.mark.anyio

SURE, UNSURE = (QueueAway("no route", is_unsure=is_unsure) for is_unsure in (False, True))
NO_REQUEST = cast(QueueRequest, None)


class AwayQueue:
    """A queue that says what was written for each question, and that it is away behind the last."""

    def __init__(self, *replies: Put | QueueAway | None) -> None:
        self._replies = list(replies)
        self.asked = 0

    async def put(self, request: QueueRequest) -> Put:
        return cast(Put, self._next())

    async def withdraw(self, request_id: str) -> None:
        self._next()

    async def close(self) -> None: ...

    def _next(self) -> Put | None:
        self.asked += 1
        reply = self._replies.pop(0) if self._replies else SURE
        if isinstance(reply, QueueAway):
            raise reply
        return reply


def client_of(queue: AwayQueue) -> tuple[Office, QueueClient]:
    office = Office(lambda _: cast(RequestQueue, queue), HttpLimits(), HandClock(), cast(Entropy, None))
    return office, QueueClient(office, cast(Any, type("Place", (), {"queue": "q", "models": ("m",)})))


@pytest.mark.parametrize("outages", [0, 1, 19])
async def test_a_cancelled_request_is_withdrawn_when_the_queue_is_back(outages: int, pauses: list[float]) -> None:
    queue = AwayQueue(*[SURE] * outages, None)
    office, client = client_of(queue)
    office.withdraw_later(client._mailbox, "r")
    with capture_logs() as logged:
        await office.close()
    assert (queue.asked, pauses, logged) == (outages + 1, [0.5] * outages, [])


async def test_a_withdrawal_is_given_up_in_the_end_and_logged(pauses: list[float]) -> None:
    queue = AwayQueue()
    office, client = client_of(queue)
    office.withdraw_later(client._mailbox, "r")
    with capture_logs() as logged:
        await office.close()
    assert (queue.asked, pauses) == (20, [0.5] * 20)
    assert [line["event"] for line in logged] == ["request_withdrawal_failed"]


async def test_a_request_that_may_lie_there_is_laid_down_again_until_the_queue_says_so(pauses: list[float]) -> None:
    queue = AwayQueue(UNSURE, SURE, SURE, Put.OUT)
    _, client = client_of(queue)
    await client._put(NO_REQUEST)
    assert (queue.asked, pauses) == (4, [0.5] * 3)


async def test_a_request_that_surely_does_not_lie_there_was_never_sent(pauses: list[float]) -> None:
    queue = AwayQueue(SURE)
    with pytest.raises(Unavailable):
        await client_of(queue)[1]._put(NO_REQUEST)
    assert (queue.asked, pauses) == (1, [])
    with pytest.raises(RecordedElsewhere):
        await client_of(AwayQueue(Put.RECORDED))[1]._put(NO_REQUEST)


async def test_a_request_that_another_call_here_waits_for_is_not_taken_out_of_the_queue(pauses: list[float]) -> None:
    """One of the two was cancelled, or its time was over: a lease may be lost and taken again."""
    queue = AwayQueue()
    office, client = client_of(queue)
    waiting = client._mailbox.wait_for("r")
    office.withdraw_later(client._mailbox, "r")
    assert isinstance(await client._too_late("r", 1.0), Ambiguous)
    client._mailbox.stop_waiting("r", waiting)
    await office.close()
    assert queue.asked == 0
