"""Items whose calls the tide took back: made again, remembered over leases, and not one attempt the poorer for it."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from tests.worker.world import BODY, Script, WorkerWorld, chat_lines, until, working
from tidegate.core.errors import Ambiguous, HandedBack
from tidegate.core.nouns import Answer, Call, Usage
from tidegate.core.retry import RetryPolicy

pytestmark = pytest.mark.anyio

ATTEMPTS = "select number, count, reason, hand_backs from attempts where job_id = ? order by number"
ASLEEP = "select 1 from flows where state = 'asleep' and wakes_at is not null"


async def test_an_item_that_came_back_is_run_again_and_uses_up_no_attempt(live: WorkerWorld) -> None:
    """Two hand-backs and then two failures: with three attempts, the third call that counts still answers it."""
    script, tries = Script(live, "m"), Counter[int]()

    async def answers(call: Call) -> Answer:
        tries[call.number] += 1
        assert call.hand_backs == min(tries[call.number] - 1, 2)
        assert call.attempt_count == max(0, tries[call.number] - 3)
        if tries[call.number] <= 2:
            raise HandedBack("a user needed the engine")
        if tries[call.number] <= 4:
            raise Ambiguous("broke")
        return Answer(200, BODY, Usage(1, 0, 1, 0), "here")

    script.answers = answers
    job = await live.started(chat_lines(6))
    async with working(live, script):
        await live.completed(job)
    done = await live.look(job)
    assert (done.answered_count, done.failed_count) == (6, 0)
    assert set(tries.values()) == {5}
    assert len({call.idempotency_key for call in script.calls}) == 6, "each repeat carries the same key"


async def test_how_often_it_came_back_is_kept_over_a_release_and_the_next_lease(live: WorkerWorld) -> None:
    script, came_back = Script(live, "m"), 0
    slow = RetryPolicy(backoff_ms=1, backoff_ms_max=1, deferral_ms=600_000)

    async def answers(call: Call) -> Answer:
        nonlocal came_back
        if call.number:
            return Answer(200, BODY, Usage(1, 0, 1, 0), "here")
        came_back += 1
        raise HandedBack("a user needed the engine")

    async def rests() -> bool:
        """It is on record, and with nothing else to do its flow sleeps until then."""
        return bool(await live.rows(ATTEMPTS, job.id)) and bool(await live.rows(ASLEEP))

    script.answers = answers
    job = await live.started(chat_lines(4), slice_items=1)
    async with working(live, script, retries=slow):
        await until(rests, "the reason on record")
    assert (came_back, await live.rows(ATTEMPTS, job.id)) == (1, [(0, 0, "handed_back", 1)])
    await live.rows("update attempts set not_before = 0")
    await live.rows("update slices set ready_at = 0")
    await live.rows("update flows set wakes_at = 0")
    counts = asyncio.get_running_loop().create_future()

    async def last(call: Call) -> Answer:
        if not call.number and not counts.done():
            counts.set_result((call.hand_backs, call.attempt_count))
        return Answer(200, BODY, Usage(1, 0, 1, 0), "here")

    script.answers = last
    async with working(live, script):
        await live.completed(job)
    assert await counts == (1, 0)
