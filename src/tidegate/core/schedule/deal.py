"""One choice in the making: what is left of every room, cap, share and counter after each dealt
slice.

A `Deal` keeps the books for the layers and decides nothing. Room is per model first, then the
worker's own; an owner's cap holds over all models.
"""

from collections.abc import Callable
from itertools import groupby
from operator import attrgetter

import msgspec
from msgspec.structs import replace

from tidegate.core.schedule import ranking
from tidegate.core.schedule.policy import Policy
from tidegate.core.schedule.queues import QueueView, ordered
from tidegate.core.schedule.snapshot import FlowView, JobView, ModelView, Pick, Snapshot, Turn, Why

ShareKey = tuple[str, str]
# Entries: slices dealt in this choice (lower priorities begin higher), waiting since, place in the
# order, the job.
Heap = list[tuple[int, int, int, JobView]]
_PLACE = attrgetter("model", "share_owner", "queue")
_PRIORITY = attrgetter("priority")
# The rules that may take a bounded share of a model's work in flight.
_SHARED = frozenset({Why.URGENT, Why.FAST_LANE})


class Flow:
    """One share owner's queue for one model, with its jobs by named queue.

    A snapshot has many flows, so this holds little.
    """

    __slots__ = ("counter", "dealt", "jobs", "share_owner", "weight")

    def __init__(self, share_owner: str, weight: float, counter: float) -> None:
        self.share_owner, self.weight, self.counter = share_owner, weight, counter
        self.jobs: dict[str, list[JobView]] = {}
        self.dealt = 0


class Ground(msgspec.Struct):
    """The state of one open model in this choice.

    The orders within a flow are made at its first turn, by share owner and queue.
    """

    view: ModelView
    room_items: int
    in_flight_units: int
    by_why: dict[Why, int]
    weights: float
    last: Why | None
    large_owners: set[str]
    flows: dict[str, Flow] = msgspec.field(default_factory=dict)
    lined_up: dict[ShareKey, list[JobView]] = msgspec.field(default_factory=dict)
    due: dict[ShareKey, list[JobView]] = msgspec.field(default_factory=dict)
    rounds: dict[ShareKey, Heap] = msgspec.field(default_factory=dict)
    paces: dict[float, ranking.DeadlinePace] = msgspec.field(default_factory=dict)
    least_served: dict[str, list[tuple[float, str, Flow]]] = msgspec.field(default_factory=dict)
    dealt: int = 0


class Deal:
    def __init__(self, snapshot: Snapshot, policy: Policy, open_models: dict[str, ModelView]) -> None:
        self.snapshot, self.policy, self.now, self.open_models = snapshot, policy, snapshot.now, open_models
        self.slices_left = snapshot.slices_max
        self.faults: list[str] = []
        self.picked: dict[tuple[str, str, Why], int] = {}
        self.grounds = {name: _ground(view) for name, view in open_models.items()}
        self._ready: dict[ShareKey, int] = {}
        self._owner_units: dict[str, int] = dict(snapshot.owner_in_flight_units)
        self._queue_units: dict[ShareKey, int] = {}
        self._queue_names: dict[tuple[str, ...], list[str]] = {}
        self._queues: dict[tuple[str, ...], list[QueueView]] = {}
        self._has_caps = policy.in_flight_units_max > 0 or bool(policy.in_flight_units_by_tenant)
        self.has_priorities = any(map(_PRIORITY, snapshot.jobs))
        self._place_flows()

    def _place_flows(self) -> None:
        by_model: dict[str, list[FlowView]] = {}
        for view in self.snapshot.flows:
            if view.model in self.grounds:
                by_model.setdefault(view.model, []).append(view)
        for model, views in by_model.items():
            ground = self.grounds[model]
            counters = ranking.flow_counters(views, ground.view.ratio, self.snapshot.workers)
            ground.flows = {
                view.share_owner: Flow(view.share_owner, ranking.weight_of(view), counters[view.share_owner])
                for view in views
            }
            ground.weights = ground.view.weights or sum(flow.weight for flow in ground.flows.values())
        # A snapshot lists jobs flow by flow, so this loop runs once per flow; another order would
        # only be slower.
        for (model, share_owner, queue), jobs in groupby(self.snapshot.jobs, _PLACE):
            if model not in self.grounds:
                continue
            ground = self.grounds[model]
            flow = ground.flows.get(share_owner) or _unknown_flow(ground, share_owner)
            queued = flow.jobs.get(queue)
            if queued is None:
                flow.jobs[queue] = list(jobs)
            else:
                queued.extend(jobs)

    # -- what may be taken

    def ready(self, job: JobView) -> int:
        """Return about how many slices of a job are left to deal.

        A job in the snapshot has at least one ready.
        """
        left = self._ready.get((job.job_id, job.model))
        if left is not None:
            return left
        left = -((job.in_flight_units - job.left_units) // (job.slice_units or 1))
        return left if left > 1 else 1

    def capped(self, job: JobView) -> bool:
        """Return whether a job's share owner has as much in flight as allowed.

        An owner with nothing in flight may always have one slice, however large.
        """
        if not self._has_caps:
            return False
        most = self.policy.in_flight_units_max_of(job.share_owner)
        if most <= 0:
            return False
        out = self._owner_units.get(job.share_owner, 0)
        return out > 0 and out + job.slice_units > most

    def was_dealt(self, job: JobView) -> bool:
        return (job.job_id, job.model) in self._ready

    def takeable(self, job: JobView) -> bool:
        return self.ready(job) > 0 and not self.capped(job)

    def open(self, ground: Ground) -> bool:
        return ground.room_items > 0 and self.slices_left > 0

    def within(self, ground: Ground, why: Why, share: float, job: JobView) -> bool:
        """Return whether a rule may take one more slice within its share of a model's work in
        flight.

        The leases store the rule of each slice, so the share is counted from them. No slice would
        ever fit a share smaller than one slice. So a rule with nothing in flight may take one,
        unless a rule with a share took the last slice.
        """
        if share <= 0:
            return False
        units, taken = job.slice_units, ground.by_why.get(why, 0)
        return taken + units <= share * (ground.in_flight_units + units) or (taken == 0 and ground.last not in _SHARED)

    # -- taking

    def deal_slices(self, job: JobView, why: Why, count: int = 1) -> None:
        ground = self.grounds[job.model]
        flow = ground.flows[job.share_owner]
        units = job.slice_units * count
        self._ready[job.job_id, job.model] = self.ready(job) - count
        self._owner_units[job.share_owner] = self._owner_units.get(job.share_owner, 0) + units
        self._queue_units[job.model, job.queue] = self._queue_units.get((job.model, job.queue), 0) + units
        self.slices_left -= count
        ground.room_items -= count * self.slice_items(job)
        ground.in_flight_units += units
        ground.by_why[why] = ground.by_why.get(why, 0) + units
        ground.dealt += count
        ground.last = why
        if why is Why.LARGE:
            ground.large_owners.add(job.share_owner)
        else:
            ground.large_owners.discard(job.share_owner)
        flow.dealt += count
        flow.counter += count * ranking.slice_cost(job.slice_units, ground.view.ratio, flow.weight)
        key = (job.job_id, job.model, why)
        self.picked[key] = self.picked.get(key, 0) + count

    def slice_items(self, job: JobView) -> int:
        return max(1, job.slice_items or self.snapshot.slice_items)

    # -- order

    def line_up(self, jobs: list[JobView], own: Callable[["Deal", list[JobView]], list[JobView]]) -> list[JobView]:
        """Return jobs sorted by the plugged-in rank, or by the layer's own order when there is none
        or it fails.
        """
        rank = self.policy.rank
        if rank is not None:
            try:
                return sorted(jobs, key=lambda job: (rank(job), job.created_at, job.job_id))
            except Exception as fault:
                self.faults.append(f"rank failed: {type(fault).__name__}: {fault}")
        return own(self, jobs)

    def prioritised(self, line: list[JobView]) -> list[JobView]:
        """Return the line with the jobs of each owner sorted by priority among the owner's places
        in it.
        """
        if not self.has_priorities:
            return line
        owned: dict[str, list[JobView]] = {}
        for job in line:
            owned.setdefault(job.share_owner, []).append(job)
        turns = {owner: iter(sorted(jobs, key=_PRIORITY, reverse=True)) for owner, jobs in owned.items()}
        return [next(turns[job.share_owner]) for job in line]

    def tier(self, job: JobView) -> int:
        """Return how many different higher priorities the job's owner has among its jobs for the
        same model and queue.
        """
        if not self.has_priorities:
            return 0
        queued = self.grounds[job.model].flows[job.share_owner].jobs[job.queue]
        return len({one.priority for one in queued if one.priority > job.priority})

    def jobs_by_queue(self, grounds: tuple[Ground, ...]) -> dict[str, list[JobView]]:
        jobs: dict[str, list[JobView]] = {}
        for ground in grounds:
            for flow in ground.flows.values():
                for queue, queued in flow.jobs.items():
                    jobs.setdefault(queue, []).extend(queued)
        return jobs

    def queues(self, *grounds: Ground) -> list[str]:
        """Return the named queues of these models, best first after what was dealt so far."""
        models = tuple(ground.view.model for ground in grounds)
        if models not in self._queue_names:
            names = {queue for ground in grounds for flow in ground.flows.values() for queue in flow.jobs}
            self._queue_names[models] = sorted(names)
            if len(names) > 1:
                jobs = self.jobs_by_queue(grounds)
                self._queues[models] = [self._queue(queue, jobs[queue], grounds) for queue in sorted(names)]
        if models not in self._queues:
            return self._queue_names[models]
        views = [self._as_dealt(view, models) for view in self._queues[models]]
        return ordered(self.policy.queue_order, views, self.faults)

    def _queue(self, queue: str, jobs: list[JobView], grounds: tuple[Ground, ...]) -> QueueView:
        leased = [
            ground.view.turn.queue_at[queue]
            for ground in grounds
            if ground.view.turn and queue in ground.view.turn.queue_at
        ]
        return QueueView(
            queue,
            len(jobs),
            sum(job.left_units for job in jobs),
            sum(job.in_flight_units for job in jobs),
            min(job.created_at for job in jobs),
            max(leased, default=None),
        )

    def _as_dealt(self, view: QueueView, models: tuple[str, ...]) -> QueueView:
        """Return a queue's view with what this choice has dealt to it."""
        dealt = [self._queue_units[model, view.queue] for model in models if (model, view.queue) in self._queue_units]
        if not dealt:
            return view
        return replace(view, in_flight_units=view.in_flight_units + sum(dealt), leased_at=self.now)

    # -- what came of it

    def picks(self) -> list[Pick]:
        return [Pick(job_id, model, count, why) for (job_id, model, why), count in self.picked.items()]

    def turns(self) -> dict[str, Turn]:
        """Return the turns to remember for the next choice, for models of which something was
        dealt.
        """
        turns = {}
        for name, ground in self.grounds.items():
            if not ground.dealt:
                continue
            assert ground.last is not None, "a slice was dealt by some rule"
            present = {queue for flow in ground.flows.values() for queue in flow.jobs}
            before = ground.view.turn.queue_at if ground.view.turn else {}
            queue_at = {queue: at for queue, at in before.items() if queue in present}
            queue_at |= {queue: self.now for model, queue in self._queue_units if model == name}
            turns[name] = Turn(self.now, ground.last, queue_at, frozenset(ground.large_owners & ground.flows.keys()))
        return turns


def _ground(view: ModelView) -> Ground:
    last = view.turn.why if view.turn else None
    large_owners = set(view.turn.large_owners) if view.turn else set()
    return Ground(
        view, view.room_items, view.in_flight_units, dict(view.in_flight_by_why), view.weights, last, large_owners
    )


def _unknown_flow(ground: Ground, share_owner: str) -> Flow:
    """Add the flow of a job that the snapshot shows for its deadline without its flow.

    The snapshot leaves out the flows that were served most, so the new flow gets the highest
    counter.
    """
    most = max((flow.counter for flow in ground.flows.values()), default=0.0)
    flow = ground.flows[share_owner] = Flow(share_owner, 1.0, most)
    ground.weights += 0.0 if ground.view.weights else flow.weight
    return flow
