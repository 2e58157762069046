"""What a worker leases, and what it leaves alone for a while."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.ports import HandClock
from tests.worker.test_leased_work import items, leased_work_of, slice_of
from tidegate.core.budgets.budget import Budget, Limit, LimitBound, Period
from tidegate.core.schedule import Pick, Reason, Why
from tidegate.worker.leased_work import SHORT_WAIT_MS
from tidegate.worker.leasing import HoldLimits, Leaser, LeaseRoom

pytestmark = pytest.mark.anyio


async def test_slices_that_a_life_leased_which_ended_meanwhile_are_not_taken_over_by_the_next() -> None:
    """They belong to the life that asked: the sweep gives them to others."""
    leased_work, me = leased_work_of(HandClock()), SimpleNamespace(id="first")

    async def lease_slices(worker_id: str, *_: Any) -> list[Any]:
        assert worker_id == "first"
        me.id = "second"
        return [(slice_of(1).slice, 60_000.0)]

    async def long_waiting() -> list[Pick]:
        return [Pick("job", "m", 1, Why.INTERACTIVE)]

    room = SimpleNamespace(give_back_resting=lambda: None, long_waiting=long_waiting, slices_max=lambda: 0)
    stage, trial = SimpleNamespace(lease_slices=lease_slices), SimpleNamespace(is_on=False)
    ports: Any = (stage, None, room, trial, me, leased_work, None)
    assert not await Leaser(*ports).fill()
    assert leased_work.state() == []


async def test_a_job_rests_in_the_store_only_while_its_budgets_are_spent_for_long() -> None:
    clock = HandClock()
    rested: list[tuple[str, str, int]] = []

    async def rest_job(job_id: str, model: str, wait_ms: int) -> None:
        rested.append((job_id, model, wait_ms))

    leased_work = leased_work_of(clock)
    budgets = (Budget(LimitBound.JOB, "job", (Limit(Period.HOUR, requests=1),)),)
    ports: Any = (
        SimpleNamespace(rest_job=rest_job),
        SimpleNamespace(spent_until_ms=lambda _: clock.monotonic_ms() + SHORT_WAIT_MS + 10),
        clock,
        leased_work,
        None,
        SimpleNamespace(settle_all=lambda: None),
        HoldLimits(1, 1),
    )
    room = LeaseRoom(*ports)
    for waited_ms, rests in ((0, [("job", "m", SHORT_WAIT_MS + 10)]), (10, [])):
        state = slice_of(1)
        state.budgets = budgets
        leased_work.add(state, items(1))
        room.give_back_spent(budgets)
        clock.advance(waited_ms)
        await room.rest_jobs()
        assert rested == rests
        rested.clear()


@pytest.mark.parametrize(("model", "reason"), [("m", Reason.UNKNOWN_CAPACITY), ("", None)])
def test_of_a_model_that_no_deployment_names_a_few_items_are_held_and_no_model_has_no_reason(
    model: str, reason: str | None
) -> None:
    upstream = SimpleNamespace(knows=lambda _: False)
    ports: Any = (None, upstream, HandClock(), leased_work_of(HandClock()), None, None, HoldLimits(1, 1))
    room, why = LeaseRoom(*ports).items(model)
    assert room > 0
    assert why == reason
