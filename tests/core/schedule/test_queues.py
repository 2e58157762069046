"""Queues and plugged-in orders: what each built-in order means, and that a bad plug-in loses nothing."""

from collections.abc import Sequence

import pytest

from tests.core.schedule.test_modes import slices
from tests.core.schedule.world import ScheduleWorld, job
from tidegate.core.schedule import Mode, Policy, QueueView, StrictOrder, Turn, WeightedOrder, Why

MODES = list(Mode)


@pytest.mark.parametrize("mode", MODES)
def test_strict_order_gives_a_later_queue_only_what_is_left(mode: Mode) -> None:
    jobs = [job("late", "a", 9, queue="bulk"), job("first", "b", 3, queue="vip", created_at=50)]
    world = ScheduleWorld(jobs, Policy(mode=mode, queue_order=StrictOrder(("vip", "bulk"))), slots=5)
    world.act(world.workers[0])
    assert slices(world.last_choice) == {("first", "m"): 3, ("late", "m"): 2}


@pytest.mark.parametrize("mode", [Mode.SLICE, Mode.MODEL_CAPACITY, Mode.FAIR_SHARE, Mode.SMART])
def test_weighted_order_keeps_work_in_flight_in_proportion(mode: Mode) -> None:
    jobs = [job("a", "t", 999, queue="bulk"), job("b", "t", 999, queue="vip")]
    world = ScheduleWorld(jobs, Policy(mode=mode, queue_order=WeightedOrder({"vip": 3.0})), slots=8)
    world.run(50)
    assert (world.jobs["a"].in_flight, world.jobs["b"].in_flight) == (200, 600)


def test_weighted_queues_take_turns_where_there_is_one_slot() -> None:
    jobs = [job(f"{queue}{number}", "t", 1, queue=queue) for queue in "xyz" for number in range(20)]
    world = ScheduleWorld(jobs, Policy(queue_order=WeightedOrder()), slots=1)
    world.run(15)
    assert {queue: sum(one.leased_count for one in jobs if one.queue == queue) for queue in "xyz"} in (
        {"x": 6, "y": 5, "z": 5},
        {"x": 5, "y": 5, "z": 5},
    )


def test_queues_that_are_not_listed_come_last_oldest_first() -> None:
    views = [QueueView(name, 1, 1, 0, at, None) for name, at in (("b", 5), ("a", 9), ("vip", 99))]
    assert StrictOrder(("vip",))(views) == ["vip", "b", "a"]


def test_an_order_of_queues_gets_the_oldest_job_and_the_last_turn_at_any_model() -> None:
    seen: list[QueueView] = []

    def order(views: Sequence[QueueView]) -> list[str]:
        seen.extend(views)
        return [view.queue for view in views]

    places = [("x", "m", 8), ("x", "n", 3), ("y", "m", 5)]
    jobs = [job(f"{at}", "t", 2, queue=queue, model=model, created_at=at) for queue, model, at in places]
    world = ScheduleWorld(jobs, Policy(mode=Mode.SLICE, queue_order=order))
    world.workers[0].turns = {model: Turn(at, Why.FIFO, {"x": at}) for model, at in (("m", 7), ("n", 9))}
    world.act(world.workers[0])
    assert seen[:2] == [QueueView("x", 2, 400, 0, 3, 9), QueueView("y", 1, 200, 0, 5, None)]


@pytest.mark.parametrize(
    "order", [lambda views: 1 / 0, lambda views: None, lambda views: ["made_up", 7], lambda views: []]
)
def test_a_broken_order_of_queues_is_reported_and_loses_nothing(order: object) -> None:
    jobs = [job("a", "t", 1, queue="x"), job("b", "t", 1, queue="y", created_at=1)]
    world = ScheduleWorld(jobs, Policy(queue_order=order), slots=5)  # type: ignore[arg-type]
    world.act(world.workers[0])
    assert slices(world.last_choice) == {("a", "m"): 1, ("b", "m"): 1}


@pytest.mark.parametrize("mode", [Mode.FIFO, Mode.SMART])
def test_a_rank_decides_within_a_flow(mode: Mode) -> None:
    jobs = [job("a", "t", 1, created_at=1), job("b", "t", 9, created_at=2), job("c", "t", 2, created_at=3)]
    world = ScheduleWorld(jobs, Policy(mode=mode, rank=lambda job: -job.left_units), slots=10)
    world.act(world.workers[0])
    assert slices(world.last_choice) == {("b", "m"): 9, ("c", "m"): 1}


def test_a_rank_that_fails_is_reported_and_ours_is_used() -> None:
    jobs = [job("a", "t", 9), job("b", "t", 1, created_at=1)]
    world = ScheduleWorld(jobs, Policy(rank=lambda job: 1 / 0), slots=1)
    world.act(world.workers[0])
    assert slices(world.last_choice) == {("b", "m"): 1}
    assert world.last_choice.faults == ["rank failed: ZeroDivisionError: division by zero"]
