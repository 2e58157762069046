"""What must hold of the search for an item that kills its workers: how it narrows, and which losses may fail an item.

The losses are counted at the witness, from the calls that were in flight when a worker was lost. How far a group of suspects is halved is
watched where nothing else kills workers; what one process may hold of them, where there is no other one.
"""

import math
from collections.abc import Callable
from typing import Any

import apsw

from tests.simulation.world.plan import Plan
from tests.simulation.world.witness import Witnessed
from tidegate.store.road.leases import SUSPECT_AFTER

# So many more losses may pass while several slices lost the same number of owners.
_SLACK = 2
# One that runs alone may have others at hand to be compared with.
_COMPARED_MAX = 3

_HELD = "select job_id, first, lost_count from slices where state = 'leased' and worker_id = ? and lost_count >= ?"
_READY = "select count(*) from slices where state = 'ready' and lost_count = ?"


class Search:
    def __init__(
        self, plan: Plan, connection: apsw.Connection, calls: list[Witnessed], broken: Callable[[str], None]
    ) -> None:
        self._plan = plan
        self._connection = connection
        self._calls = calls
        self._broken = broken
        self._held: dict[str, set[tuple[str, int]]] = {}
        self._survivors: set[str] = set()
        self._watches = plan.kinds == ["poison"] and plan.strength("poison") == 1

    def after_commit(self) -> None:
        """A worker that has survived no suspect yet takes at most half of those that lost the most owners."""
        if not self._watches or self._plan.process_count > 1:
            return
        alive: list[Any] = self._connection.execute("select id from workers where state = 'alive'").fetchall()
        for (worker_id,) in alive:
            rows: list[Any] = self._connection.execute(_HELD, (worker_id, SUSPECT_AFTER)).fetchall()
            held = {(job_id, first) for job_id, first, _ in rows}
            if self._held.get(worker_id, set()) - held:
                self._survivors.add(worker_id)
            self._held[worker_id] = held
            if rows and worker_id not in self._survivors:
                self._check_half(worker_id, [lost_count for *_, lost_count in rows])

    def _check_half(self, worker_id: str, losses: list[int]) -> None:
        rows: list[Any] = self._connection.execute(_READY, (max(losses),)).fetchall()
        ready = rows[0][0]
        half = (losses.count(max(losses)) + ready + 1) // 2
        if len(losses) > max(half, _COMPARED_MAX):
            self._broken(
                f"poison: {worker_id} holds {len(losses)} suspects although {ready} others lost as many owners"
            )

    def judge(self, calls: list[Witnessed]) -> None:
        """Each loss halves the group, until the poison item runs alone."""
        plan = self._plan
        if not self._watches:
            return
        halvings = math.ceil(math.log2(plan.slice_count_max)) + math.ceil(math.log2(plan.slice_items))
        deadly = [call for call in calls if call.mood == "poison" and not call.aborted]
        for call in deadly[SUSPECT_AFTER + halvings + _SLACK :]:
            if not self._was_lost_alone(call):
                self._broken(f"poison: call {call.serial} killed its worker in company, after {len(deadly)} losses")

    def count_alone_losses(self, calls: list[Witnessed]) -> int:
        """The first loss of an item alone counts; a later one counts if its worker had run another item before, which survived."""
        lost = [call for call in calls if self._was_lost_alone(call)]
        return sum(call is lost[0] or self._was_checked(call) for call in lost)

    def was_beside_culprits_alone(self, call: Witnessed) -> bool:
        """Whether nothing innocent waited when this call was sent. Then its loss proves nothing, and its item runs until its deadline, or
        until something innocent comes."""
        known_jobs = {other.job_id for other in self._calls if other.sent_s < call.sent_s}
        culprits = {(other.job_id, other.number) for other in self._calls if other.mood == "poison"}
        return not any(
            other.sent_s > call.sent_s and other.job_id in known_jobs and (other.job_id, other.number) not in culprits
            for other in self._calls
        )

    def _was_checked(self, call: Witnessed) -> bool:
        return any(
            other.incarnation == call.incarnation
            and (other.job_id, other.number) != (call.job_id, call.number)
            and other.received_s is not None
            and other.received_s <= call.sent_s
            for other in self._calls
        )

    def _was_lost_alone(self, call: Witnessed) -> bool:
        """Whether a call's worker was lost while nothing else was in flight from it."""
        lost_s = next((lost_s for lost_s in call.process.lost_at_s if lost_s >= call.sent_s), None)
        if lost_s is None or not _is_open_at(call, lost_s):
            return False
        return not any(
            other is not call and other.incarnation == call.incarnation and _is_open_at(other, lost_s)
            for other in self._calls
        )


def _is_open_at(call: Witnessed, at_s: float) -> bool:
    return call.sent_s <= at_s and not call.aborted and (call.received_s is None or call.received_s > at_s)
