"""What a worker's answers used and cost is kept beside them: by the price of the deployment that gave them."""

from __future__ import annotations

import pytest

from tests.worker.world import BODY, Script, WorkerWorld, chat_lines, working
from tidegate.core.job_controls import JobControls
from tidegate.core.nouns import Answer, Call, Usage
from tidegate.core.usage.prices import Cost, Price, cost

pytestmark = pytest.mark.anyio

DAY_MS = 86_400_000


async def test_every_answer_is_paid_for_once_by_its_deployments_price(live: WorkerWorld) -> None:
    script = Script(live, "m")

    async def answer(call: Call) -> Answer:
        return Answer(200, BODY, Usage(1_000, 400, 10, 0), "dear" if call.number % 2 else "free")

    script.answers = answer
    job = await live.started(chat_lines(10), slice_items=3, caller=await live.key(team="red"))
    script.prices = {"dear": Price.of("2", "1", "4", "0.5")}
    async with working(live, script):
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


async def test_an_answer_is_priced_by_what_its_budgets_were_settled_with(live: WorkerWorld) -> None:
    script = Script(live, "m")

    async def answer(call: Call) -> Answer:
        return Answer(200, BODY, Usage(), "dear", priced=Usage(7, 2, 3, 0))

    script.answers = answer
    job = await live.started(chat_lines(2))
    script.prices = {"dear": Price.of("2", "1", "4")}
    async with working(live, script):
        ended = await live.ended(job)
    assert ended.cost_nano == 2 * (5 * 2_000 + 2 * 1_000 + 3 * 4_000)
    assert ended.usage == Usage(), "the tokens on record are those of the lines"


SAYS = b'{"choices":[{"message":{"role":"assistant","content":"%b"}}]}' % (b"word" * 50)


async def test_what_a_server_does_not_report_is_counted_by_its_text_and_stops_a_batch_at_its_max_cost(
    live: WorkerWorld,
) -> None:
    """Fifty tokens were written, and a prompt of so many bytes was read: four bytes are a token."""
    script = Script(live, "m")

    async def answer(call: Call) -> Answer:
        return Answer(200, SAYS, Usage(), "dear")

    script.answers = answer
    caller = await live.key()
    [line] = chat_lines(1)
    price = Price.of("1", None, "1")
    whole = await live.started([line], caller=caller)
    capped = await live.started(chat_lines(40), caller=caller, slice_items=2, controls=JobControls(max_cost_nano=200))
    script.prices = {"dear": price}
    async with working(live, script):
        await live.ended(whole)
        stopped = await live.ended(capped)
    [called] = [call for call in script.calls if call.job_id == whole.id]
    each = Usage(-(-len(called.body) // 4), 0, 50)
    [spent] = [
        one.spend
        for one in await live.store.usage(0, live.clock.now_ms() // DAY_MS + 1, by_job=True)
        if one.job == whole.id
    ]
    assert (spent.usage, spent.cost) == (Usage(), cost(each, price, batch=True)), "lines report no tokens"
    assert stopped.stopped_by == "max_cost"
    assert len(await live.file_lines(stopped.output_file_id)) < 40


@pytest.mark.parametrize(
    ("reported", "body", "priced"),
    [
        (Usage(9, 3, 7, 2), SAYS, Usage(9, 3, 7, 2)),
        (Usage(9, 3, 0, 0), SAYS, Usage(9, 3, 50, 0)),
        (Usage(9, 0, 0, 0), BODY, Usage(9, 0, 0, 0)),
    ],
    ids=["all of it", "no output", "nothing was written"],
)
async def test_what_a_server_reports_is_believed(
    live: WorkerWorld, reported: Usage, body: bytes, priced: Usage
) -> None:
    script = Script(live, "m")
    price = Price.of("1", "0.5", "1")

    async def answer(call: Call) -> Answer:
        return Answer(200, body, reported, "dear")

    script.answers = answer
    script.prices = {"dear": price}
    job = await live.started(chat_lines(1))
    async with working(live, script):
        await live.ended(job)
    [entry] = await live.store.usage(0, live.clock.now_ms() // DAY_MS + 1, by_job=True)
    assert (entry.spend.usage, entry.spend.cost) == (reported, cost(priced, price, batch=True))
