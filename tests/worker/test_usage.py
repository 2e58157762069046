"""What a worker's answers used and cost is kept beside them: by the price of the deployment that gave them."""

from __future__ import annotations

import pytest

from tests.worker.world import BODY, Script, WorkerWorld, chat_lines, working
from tidegate.core.nouns import Answer, Call, Usage
from tidegate.core.usage.prices import Cost, Price

pytestmark = pytest.mark.anyio

DAY_MS = 86_400_000


async def test_every_answer_is_paid_for_once_by_its_deployments_price(live: WorkerWorld) -> None:
    script = Script(live, "m")

    async def answer(call: Call) -> Answer:
        return Answer(200, BODY, Usage(1_000, 400, 10, 0), "dear" if call.number % 2 else "free")

    script.answers = answer
    job = await live.started(chat_lines(10), slice_items=3, caller=await live.key(team="red"))
    async with working(live, script, prices={"dear": Price.of("2", "1", "4", "0.5")}):
        await live.ended(job)
    today = live.clock.now_ms() // DAY_MS
    entries = await live.store.usage(today - 1, today + 1, by_job=True)
    # A run may stand on two days: they add up.
    paid = {name: [one.spend for one in entries if one.deployment == name] for name in ("dear", "free")}
    assert sum(one.calls for one in paid["dear"]) == sum(one.calls for one in paid["free"]) == 5
    # 600 fresh tokens at 2 a million, 400 cached at 1, 10 out at 4, and half of that for batch work.
    each = Cost(600_000, 200_000, 20_000)
    assert sum(one.cost.total_nano for one in paid["dear"]) == 5 * each.total_nano
    assert sum(one.cost.cached_nano for one in paid["dear"]) == 5 * each.cached_nano
    assert sum(one.cost.total_nano for one in paid["free"]) == 0
    assert {(one.organization, one.team, one.key, one.job, one.model) for one in entries} == {
        ("acme", "red", "k1", job.id, "m")
    }
