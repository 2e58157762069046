"""How many jobs a worker changes in one step of an operation, and whom it wakes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.ports import FairDice
from tidegate.core.errors import LostRace, StoreUnavailable
from tidegate.stages.operate import STEP_JOBS, OperateStage
from tidegate.store.operators.operations import OperationStep

pytestmark = pytest.mark.anyio


class Operation:
    """A store with one operation over so many jobs, whose steps may fail, and wake-ups that are counted."""

    def __init__(self, job_count: int) -> None:
        self.left = job_count
        self.failures: list[Exception] = []
        self.steps: list[int] = []
        self.woken: list[str] = []
        self.has_ended = False
        self.verbs: Any = {"pause": lambda store, job: None}
        wakes: Any = SimpleNamespace(
            **{
                name: SimpleNamespace(notify=lambda name=name: self.woken.append(name))
                for name in ("jobs", "slices", "inputs")
            }
        )
        self.stage = OperateStage(self, FairDice(), wakes, self.verbs)  # type: ignore[arg-type]

    async def waiting_operation(self, worker_id: str) -> str | None:
        return None if self.has_ended else "op"

    async def take_operation(self, operation_id: str, worker_id: str) -> Any:
        return SimpleNamespace(id=operation_id, scope=SimpleNamespace(action="pause"), done=0, failed=0)

    async def operation_jobs(self, operation: Any, count: int) -> list[Any]:
        return [SimpleNamespace(id=f"job {number}") for number in range(min(count, self.left))]

    async def step_operation(self, step: OperationStep) -> None:
        assert step.verb is self.verbs["pause"]
        assert len({audit_id for _, audit_id in step.jobs}) == len(step.jobs), "each change has an audit row of its own"
        self.steps.append(len(step.jobs))
        if self.failures:
            raise self.failures.pop(0)
        self.left -= len(step.jobs)

    async def end_operation(self, operation_id: str, worker_id: str) -> None:
        self.has_ended = True


async def test_an_operation_is_carried_out_step_by_step_and_then_ended() -> None:
    operation = Operation(STEP_JOBS + 3)
    assert [await operation.stage.next_step("w") for _ in range(4)] == [True, True, True, False]
    assert (operation.steps, operation.has_ended) == ([STEP_JOBS, 3], True)
    assert operation.woken == ["jobs", "slices", "inputs"] * 2


async def test_steps_that_a_slow_store_does_not_manage_are_halved_until_it_does() -> None:
    operation = Operation(1_000)
    operation.failures = [StoreUnavailable("it took too long")] * 6
    for _ in range(6):
        with pytest.raises(StoreUnavailable):
            await operation.stage.next_step("w")
    assert operation.woken == []
    for _ in range(7):
        assert await operation.stage.next_step("w")
    assert operation.steps == [20, 10, 5, 2, 1, 1, 1, 2, 4, 8, 16, 20, 20]


async def test_an_operation_that_another_worker_carries_out_now_is_left_to_it() -> None:
    operation = Operation(5)
    operation.failures = [LostRace("another worker carries it out")]
    assert await operation.stage.next_step("w")
    assert (operation.left, operation.has_ended) == (5, False)
