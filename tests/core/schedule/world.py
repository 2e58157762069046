"""A fluid world around the pure scheduler: workers look, choose, take and finish slices in virtual time, and service is charged."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tidegate.core.schedule import Choice, FlowView, JobView, ModelView, Policy, Snapshot, Turn, Why, choose

# Far enough that no work without end becomes urgent.
NEVER_MS = 10**12


@dataclass(slots=True)
class Job:
    """A job on one model. `slices` are the estimated units of those still ready."""

    id: str
    share_owner: str
    slices: deque[int]
    model: str = "m"
    queue: str = "default"
    created_at: int = 0
    expires_at: int = NEVER_MS
    priority: int = 0
    begin_by: int | None = None
    total: int = 0
    in_flight: int = 0
    leased_at: int | None = None
    leased_count: int = 0
    begun_at: int | None = None
    ended_at: int | None = None
    ready: int = 0

    def __post_init__(self) -> None:
        self.total = self.ready = sum(self.slices)

    def take_slice(self) -> int:
        """Take the next ready slice; returns its units."""
        units = self.slices.popleft()
        self.ready -= units
        self.in_flight += units
        return units

    def view(self) -> JobView:
        return JobView(
            self.id,
            self.model,
            self.share_owner,
            self.queue,
            self.created_at,
            self.expires_at,
            self.begin_by if self.leased_at is None else None,
            self.total,
            self.ready + self.in_flight,
            self.in_flight,
            max(1, -(-self.ready // len(self.slices))),
            self.leased_at,
            None,
            1,
            self.priority,
        )


def job(name: str, share_owner: str, count: int, units: int = 100, **rest: object) -> Job:
    return Job(name, share_owner, deque([units] * count), **rest)  # type: ignore[arg-type]


@dataclass(slots=True)
class Worker:
    slots: dict[str, int]
    slices_max: int
    held: int = 0
    turns: dict[str, Turn] = field(default_factory=dict)


@dataclass(order=True, slots=True)
class Flight:
    done_at: int
    number: int
    job: Job = field(compare=False)
    worker: Worker = field(compare=False)
    units: int = field(compare=False)
    cost: float = field(compare=False)
    why: Why = field(compare=False)


class ScheduleWorld:
    def __init__(
        self,
        jobs: Iterable[Job],
        policy: Policy,
        *,
        workers: int = 1,
        slots: int | dict[str, int] = 2,
        slices_max: int = 1_000,
        weights: dict[str, float] | None = None,
        units_per_s: int = 100,
        cost: Callable[[Job, int], float] = lambda job, units: units,
    ) -> None:
        self.policy, self.weights, self.units_per_s, self.cost = policy, weights or {}, units_per_s, cost
        self.jobs = {job.id: job for job in jobs}
        models = {job.model for job in self.jobs.values()}
        per_model = dict.fromkeys(models, slots) if isinstance(slots, int) else slots
        self.workers = [Worker(dict(per_model), slices_max) for _ in range(workers)]
        self.closed: dict[str, str] = {}
        self.now = self.number = 0
        self.served: dict[tuple[str, str], float] = {}
        self.flights: list[Flight] = []
        self.last_choice = Choice([], [])

    # -- the state, as a store would tell it

    def add(self, new: Job) -> None:
        """A job that comes later; its flow wakes with the least counter of those awake."""
        awake = [self.served[key] for key in self.backlogged() if key[0] == new.model and key in self.served]
        self.jobs[new.id] = new
        key = (new.model, new.share_owner)
        self.served[key] = max(self.served.get(key, 0.0), min(awake, default=0.0))

    def forget_ended(self) -> None:
        self.jobs = {job.id: job for job in self.jobs.values() if job.ended_at is None}

    def backlogged(self) -> set[tuple[str, str]]:
        return {(job.model, job.share_owner) for job in self.jobs.values() if job.slices}

    def weight(self, share_owner: str) -> float:
        return self.weights.get(share_owner, 1.0)

    def in_flight(self, model: str, share_owner: str | None = None, why: Why | None = None) -> int:
        return sum(
            flight.units
            for flight in self.flights
            if flight.job.model == model
            and (share_owner is None or flight.job.share_owner == share_owner)
            and (why is None or flight.why is why)
        )

    def counter(self, model: str, share_owner: str) -> float:
        """Served and being served, by weight: what the fairness bound speaks of."""
        return self.served.get((model, share_owner), 0.0) + self.in_flight(model, share_owner) / self.weight(
            share_owner
        )

    def look(self, worker: Worker) -> Snapshot:
        models = {
            model: ModelView(
                model,
                slots,
                self.closed.get(model),
                self.in_flight(model),
                {why: self.in_flight(model, why=why) for why in Why},
                float(self.units_per_s * sum(one.slots[model] for one in self.workers) + self._flying(model)) or None,
                turn=worker.turns.get(model),
            )
            for model, slots in worker.slots.items()
        }
        flows = [
            FlowView(
                model,
                share_owner,
                self.weight(share_owner),
                self.served.get((model, share_owner), 0.0),
                self.in_flight(model, share_owner),
            )
            for model, share_owner in sorted(self.backlogged())
        ]
        owners: dict[str, int] = {}
        for flight in self.flights:
            owners[flight.job.share_owner] = owners.get(flight.job.share_owner, 0) + flight.units
        jobs = [job.view() for job in self.jobs.values() if job.slices]
        return Snapshot(
            self.now, models, flows, jobs, owners, 1, worker.slices_max - worker.held, workers=len(self.workers)
        )

    def _flying(self, model: str) -> int:
        return self.units_per_s * sum(1 for flight in self.flights if flight.job.model == model)

    # -- what workers do

    def act(self, worker: Worker, look: Snapshot | None = None) -> int:
        """Choose and take; how many slices were got. With an old look, others may have been faster."""
        self.last_choice = choice = choose(look or self.look(worker), self.policy)
        worker.turns.update(choice.turns)
        got = 0
        for pick in choice.picks:
            for _ in range(pick.slice_count):
                got += self._take(worker, self.jobs[pick.job_id], pick.why)
        return got

    def _take(self, worker: Worker, taken: Job, why: Why) -> int:
        if not taken.slices:
            return 0
        units = taken.take_slice()
        self.number += 1
        done_at = self.now + max(1, 1_000 * units // self.units_per_s)
        heapq.heappush(self.flights, Flight(done_at, self.number, taken, worker, units, self.cost(taken, units), why))
        taken.leased_at = self.now
        taken.begun_at = self.now if taken.begun_at is None else taken.begun_at
        taken.leased_count += 1
        worker.slots[taken.model] -= 1
        worker.held += 1
        return 1

    def finish(self) -> Worker:
        """The next slice to be done is done and charged; whose it was."""
        flight = heapq.heappop(self.flights)
        self.now = max(self.now, flight.done_at)
        key = (flight.job.model, flight.job.share_owner)
        self.served[key] = self.served.get(key, 0.0) + flight.cost / self.weight(flight.job.share_owner)
        flight.job.in_flight -= flight.units
        flight.worker.slots[flight.job.model] += 1
        flight.worker.held -= 1
        if not flight.job.slices and not flight.job.in_flight:
            flight.job.ended_at = self.now
        return flight.worker

    def step(self) -> bool:
        """One slice ends and its worker chooses again. False when all is done."""
        if not self.flights:
            return sum(self.act(worker) for worker in self.workers) > 0
        self.act(self.finish())
        return bool(self.flights)

    def run(self, steps: int, each: Callable[[], None] = lambda: None) -> None:
        for worker in self.workers:
            self.act(worker)
        for _ in range(steps):
            if not self.step():
                return
            each()
