"""Hard budgets in money and parallel calls of a key, over real workers and a real gateway, judged by what the engine was asked for.

Every token costs a thousandth, so the engine's own log says what was spent, whatever any worker believes.
"""

from __future__ import annotations

import asyncio
import json
from decimal import Decimal
from typing import Any

import pytest

from tests.acceptance.conftest import MakeCrew
from tests.support.crew import Crew
from tests.support.processes import wait_until
from tests.support.redis import RedisServer
from tests.support.tidegate import END_S, IN_FLIGHT, Site, behaving, chat_line, requests
from tidegate.core.usage.spending import row, sum_by
from tidegate.storage import opened
from tidegate.store.tenants.usage import DAY_S

PRICE = {"input": 1_000, "cached": 1_000, "output": 1_000}
EACH = Decimal("0.001")
BUDGET = Decimal("1.2")
INTERACTIVE = "select cast(coalesce(sum(calls), 0) as bigint) as calls from usage_interactive"


def config(url: str) -> dict[str, Any]:
    return {"models": {"m": {"deployments": [{"url": url, "price": PRICE, "max_in_flight": 8}]}}}


def most_of(line: str) -> Decimal:
    """The most that a line's request can cost: a token for each byte that is sent, and all that it may be answered with."""
    body = json.loads(line)["body"]
    return Decimal(len(json.dumps(body)) + body["max_tokens"]) * EACH


def witnessed(crew: Crew) -> Decimal:
    return Decimal(sum(call.get("tokens", 0) for call in crew.calls("m"))) * EACH


def cost_in(lines: list[dict[str, Any]]) -> Decimal:
    return sum((Decimal(line["tidegate"]["cost"]) for line in lines if "tidegate" in line), Decimal(0))


def used(crew: Crew, *by: str) -> list[dict[str, Any]]:
    async def ask() -> list[dict[str, Any]]:
        async with opened(crew.site.settings, read_only=True) as parts:
            today = parts.clock.now_ms() // (DAY_S * 1000)
            entries = await parts.store.usage(today - 1, today + 1, by_job="job" in by)
            return [row(entry, by) for entry in sum_by(entries, by)]

    return asyncio.run(ask())


def say(caller: Site, text: str = "say it", **more: Any) -> tuple[int, dict[str, Any]]:
    body = {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 8, **more}
    answer = caller.client().post("/v1/chat/completions", json=body)
    return answer.status_code, answer.json()


@pytest.mark.parametrize("kind", ["store", pytest.param("redis", marks=pytest.mark.soak)])
def test_a_budget_is_spent_to_the_last_call_that_fits_and_never_passed(
    make_crew: MakeCrew, request: pytest.FixtureRequest, kind: str
) -> None:
    """Two workers and the gateway spend one key's money. What is left fails for good, and everybody's sums are the same."""
    redis: RedisServer | None = request.getfixturevalue("private_redis") if kind == "redis" else None
    crew = make_crew(config, latency_ms=20, redis=redis, more={"TIDEGATE_WORKER_LEASE_MS": "8000"})
    crew.start(2)
    caller = crew.site.keyed(limits=[{"period": "lifetime", "cost": str(BUDGET)}], team="red")
    lines = requests(150)
    status, first = say(caller)
    assert status == 200
    batch_id = caller.submit(lines)
    results = caller.ended(batch_id)
    assert witnessed(crew) <= BUDGET
    assert BUDGET - witnessed(crew) < max(most_of(line) for line in lines)
    assert set(results.error_codes()) == {"budget_exceeded"}
    assert len(results.output) + len(results.errors) == len(lines)
    status, problem = say(caller, "say it " * 40)
    assert (status, problem["error"]["code"]) == (429, "insufficient_quota")
    status, problem = say(caller, max_tokens=None)
    assert (status, problem["error"]["code"]) == (400, "max_tokens_required")
    caller.verify(batch_id)
    # What the lines cost is what the batch cost, and with the one interactive call it is what the day cost.
    batch_cost = Decimal(results.batch["tidegate"]["cost"])
    assert batch_cost == cost_in(results.output)
    one = first["usage"]["total_tokens"] * EACH
    wait_until(lambda: crew.site.rows(INTERACTIVE)[0]["calls"], END_S, "the interactive call to be counted", poll_s=0.2)
    assert Decimal(used(crew)[0]["cost"]) == batch_cost + one
    assert batch_cost + one <= witnessed(crew)
    [whose] = used(crew, "organization", "team")
    assert (whose["organization"], whose["team"], whose["calls"]) == ("acme", "red", len(results.output) + 1)
    by_job = {entry["job"]: Decimal(entry["cost"]) for entry in used(crew, "job")}
    assert by_job == {batch_id: batch_cost, "": one}


def test_a_budget_below_one_items_worst_is_used_up_one_item_after_another(make_crew: MakeCrew) -> None:
    """Each item may cost 4.1 and costs 1.0: a budget of 3.6 pays for three of six."""
    crew = make_crew(config)
    crew.start(1)
    caller = crew.site.keyed(limits=[{"period": "lifetime", "cost": "3.6"}])
    lines = requests(6, lambda number: "sea " * 1_000 + f"question {number}")
    assert min(most_of(line) for line in lines) > Decimal("3.6")
    results = caller.ended(caller.submit(lines))
    assert (len(results.output), results.error_codes()) == (3, {"budget_exceeded": 3})
    assert Decimal(results.batch["tidegate"]["cost"]) == witnessed(crew) <= Decimal("3.6")


@pytest.mark.parametrize(
    "border", ["after_answer=5*kill", pytest.param("record_durable=2*kill", marks=pytest.mark.soak)]
)
def test_a_worker_that_is_killed_while_it_spends_does_not_let_the_others_spend_more(
    make_crew: MakeCrew, border: str
) -> None:
    """It dies with answers in its hands that were paid for and recorded nowhere: they are paid again, and the budget still holds. Those
    that were durable are adopted with what they cost. What it took with it is in flight no longer: those with too little left fail, and
    the batch ends by itself."""
    crew = make_crew(config, latency_ms=20)
    crew.start(1)
    budget = 2 * BUDGET
    caller = crew.site.keyed(limits=[{"period": "month", "cost": str(budget)}])
    victim = crew.add_worker({"TIDEGATE_FAILPOINTS": border})
    lines = requests(250)
    batch_id = caller.submit(lines)
    assert victim.wait() == -9
    crew.add_worker()
    results = caller.ended(batch_id)
    assert (results.batch["status"], set(results.error_codes())) == ("completed", {"budget_exceeded"})
    # What it had set aside and never settled is lost to everybody; all else is used.
    lost = (5 + 3 * IN_FLIGHT) * max(most_of(line) for line in lines)
    assert budget - lost <= witnessed(crew) <= budget
    status, problem = say(caller, "say it " * 60)
    assert (status, problem["error"]["code"]) == (429, "insufficient_quota")
    assert Decimal(results.batch["tidegate"]["cost"]) == cost_in(results.output) <= witnessed(crew)
    caller.verify(batch_id)


def test_a_key_has_only_so_many_calls_at_once_over_workers_and_the_gateway(make_crew: MakeCrew) -> None:
    # Longer than a busy machine may keep a worker from beating: the places of one that is taken for dead are given to others.
    crew = make_crew(config, latency_ms=100, more={"TIDEGATE_WORKER_LEASE_MS": "8000"})
    crew.start(2)
    narrow, wide = crew.site.keyed(parallel_max=2), crew.site.keyed("other")
    batch_id = narrow.submit([chat_line(f"c{number}", behaving("latency=50")) for number in range(40)])
    crew.until_called(4)
    codes = {status for status, _ in (say(narrow) for _ in range(6))}
    assert codes <= {200, 429}
    assert narrow.ended(batch_id).batch["request_counts"]["completed"] == 40
    assert crew.most_at_once("m") <= 2
    free = wide.submit([chat_line(f"c{number}", behaving("latency=400")) for number in range(24)])
    assert wide.ended(free).batch["request_counts"]["completed"] == 24
    assert crew.most_at_once("m") > 2, "no other key is held to it"


def test_a_key_creates_only_so_many_batches(make_crew: MakeCrew) -> None:
    crew = make_crew(config)
    crew.start(0)
    caller = crew.site.keyed(limits=[{"period": "day", "batches": 2, "bytes": 10_000_000}])
    files = [caller.upload(requests(2)).json()["id"] for _ in range(3)]
    assert [caller.create(file).status_code for file in files] == [200, 200, 429]
    refused = caller.create(files[2])
    assert refused.json()["error"]["code"] == "quota_exceeded"
    assert "2 batches per day" in refused.json()["error"]["message"]
    assert int(refused.headers["Retry-After"]) > 0
