"""Whose input is ingested next: fair between tenants by bytes, whatever sizes they bring and whenever they come."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tidegate.core.input.turns import (
    IngestLane,
    IngestLimits,
    IngestTurn,
    WaitingInput,
    WaitingTenant,
    choose_inputs,
    ingest_bytes,
)


class Queue:
    """Tenants with inputs that wait, served one turn at a time, as the store does it."""

    def __init__(self, **sizes: list[int]) -> None:
        self.inputs = {name: [self.input(name, n, size) for n, size in enumerate(own)] for name, own in sizes.items()}
        self.clock = 0
        self.places: dict[str, int] = {}

    @staticmethod
    def input(name: str, number: int, size: int) -> WaitingInput:
        return WaitingInput(f"{name}{number}", size, size)

    def next(self, count_max: int = 1) -> list[IngestTurn]:
        waiting = [
            WaitingTenant(name, self.places.get(name, 0), sorted(own, key=lambda one: one.rank))
            for name, own in self.inputs.items()
            if own
        ]
        turns = choose_inputs(waiting, self.clock, count_max)
        for turn in turns:
            self.inputs[turn.tenant_id] = [one for one in self.inputs[turn.tenant_id] if one.job_id != turn.job_id]
            self.clock, self.places[turn.tenant_id] = max(self.clock, turn.start), turn.end
        return turns


def test_one_small_input_behind_many_large_ones_of_another_tenant_is_next() -> None:
    queue = Queue(a=[95_000_000] * 20)
    assert [turn.tenant_id for turn in queue.next(3)] == ["a", "a", "a"]
    queue.inputs["b"] = [queue.input("b", 0, 700)]
    assert [turn.job_id for turn in queue.next()] == ["b0"]


def test_within_one_tenant_the_smallest_is_next() -> None:
    queue = Queue(a=[300, 100, 200])
    assert [turn.job_id for turn in queue.next(3)] == ["a1", "a2", "a0"]


@pytest.mark.parametrize("seed", range(20))
def test_backlogged_tenants_differ_by_at_most_their_largest_inputs(seed: int) -> None:
    chance = random.Random(seed)
    scales = {name: chance.choice([1_000, 50_000, 2_000_000]) for name in "abc"}
    queue = Queue(**{name: [chance.randint(1, scale) for _ in range(400)] for name, scale in scales.items()})
    largest = {name: max(one.ingest_bytes for one in own) for name, own in queue.inputs.items()}
    sizes = {one.job_id: one.ingest_bytes for own in queue.inputs.values() for one in own}
    served: Counter[str] = Counter()
    while all(queue.inputs.values()):
        for turn in queue.next(chance.randint(1, 5)):
            served[turn.tenant_id] += sizes[turn.job_id]
        if all(queue.inputs.values()):
            for one, other in (("a", "b"), ("b", "c"), ("a", "c")):
                assert abs(served[one] - served[other]) <= largest[one] + largest[other]


def test_a_turn_has_one_input_or_as_many_as_the_bytes_allow() -> None:
    waiting = [
        WaitingTenant("a", 0, [WaitingInput(f"a{number}", size, size) for number, size in enumerate((400, 500, 600))])
    ]
    assert [turn.job_id for turn in choose_inputs(waiting, 0, 16, 900)] == ["a0", "a1"]
    assert [turn.job_id for turn in choose_inputs(waiting, 0, 16, 300)] == ["a0"]


def test_a_tenant_that_had_nothing_for_a_while_saved_nothing_up() -> None:
    queue = Queue(a=[100] * 50)
    queue.next(30)
    queue.inputs["b"] = [queue.input("b", number, 100) for number in range(50)]
    assert Counter(turn.tenant_id for turn in queue.next(20)) == {"a": 10, "b": 10}


def test_a_tenant_that_was_alone_is_not_punished() -> None:
    queue = Queue(a=[100] * 50, b=[])
    queue.next(40)
    queue.inputs["b"] = [queue.input("b", 0, 100)]
    assert {turn.tenant_id for turn in queue.next(2)} == {"a", "b"}


def test_short_lines_cost_more_than_their_bytes_and_nothing_is_free() -> None:
    assert ingest_bytes(0, 0) == 1
    assert ingest_bytes(1_000, 1) == 1_512
    limits = IngestLimits(small_bytes_max=1_000, passes_max=3)
    assert (limits.sizes(IngestLane.SMALL)[1] + 1, limits.tenant_passes_max) == (limits.sizes(IngestLane.LARGE)[0], 2)
    assert IngestLimits(passes_max=1).tenant_passes_max == 1
