"""The named modes, the layers that they are composed of, and `choose`: a bounded snapshot in, picks
with their reasons out.

    fifo_v1            the oldest job takes all the room it can use, then the next
    slice_v1           jobs take turns, a slice each
    model_capacity_v1  and models take turns too: no model uses up a worker before another had its slice
    fair_share_v1      and within a model the flow that was served least goes next, its jobs in turn
    smart_v1           and within a flow small and old jobs go first, urgent ones ahead of all within their share

Within a flow, jobs of a higher priority go first in every mode; only an urgent one may go ahead of
them. In every mode a closed model is skipped, caps hold, and no room is left empty that a job could
use.
"""

from collections.abc import Callable, Mapping
from functools import partial
from heapq import heapify, heappop, heappush, heapreplace
from itertools import chain, groupby
from operator import attrgetter
from types import MappingProxyType

import msgspec

from tidegate.core.schedule import ranking
from tidegate.core.schedule.deal import Deal, Flow, Ground, Heap
from tidegate.core.schedule.policy import Mode, Policy
from tidegate.core.schedule.reasons import Reason
from tidegate.core.schedule.snapshot import Choice, JobView, ModelView, Skip, Snapshot, Why

Offer = tuple[JobView, Why]
Layer = Callable[[Deal, Ground], Offer | None]

_oldest = attrgetter("created_at", "job_id")
# More slices than one choice deals, so that an owner's lower priorities come after all of its
# highest.
_TIER = 1 << 32


def choose(snapshot: Snapshot, policy: Policy) -> Choice:
    """Return what to take now, slice by slice as the policy's mode deals them.

    The same snapshot and policy always give the same choice.
    """
    open_models, skips = _pass_gate(snapshot)
    deal = Deal(snapshot, policy, open_models)
    _MODES[policy.mode](deal)
    skips.extend(_passed_over(deal))
    return Choice(deal.picks(), skips, deal.turns(), deal.faults)


def _pass_gate(snapshot: Snapshot) -> tuple[dict[str, ModelView], list[Skip]]:
    """Return the open models, and a skip for each closed one.

    A closed model never blocks an open one. A model that jobs name but no view describes counts as
    closed.
    """
    open_models: dict[str, ModelView] = {}
    skips: list[Skip] = []
    for name, view in snapshot.models.items():
        if view.closed is not None:
            skips.append(Skip(name, "", "", view.closed))
        elif view.room_items <= 0:
            skips.append(Skip(name, "", "", Reason.NO_AVAILABLE_SLOTS))
        else:
            open_models[name] = view
    unknown = {model for model, _ in groupby(snapshot.jobs, attrgetter("model"))} - snapshot.models.keys()
    skips.extend(Skip(name, "", "", Reason.UNKNOWN_CAPACITY) for name in sorted(unknown))
    return open_models, skips


def _fifo(deal: Deal) -> None:
    grounds = tuple(deal.grounds.values())
    jobs = deal.jobs_by_queue(grounds)
    for queue in deal.queues(*grounds):
        for job in deal.prioritised(deal.line_up(jobs[queue], by_age)):
            while deal.open(deal.grounds[job.model]) and deal.takeable(job):
                deal.deal_slices(job, Why.FIFO)
            if deal.slices_left <= 0:
                return


def _slices(deal: Deal) -> None:
    rounds = Rounds(tuple(deal.grounds.values()))
    while deal.slices_left > 0:
        offer = rounds.next(deal)
        if offer is None:
            return
        deal.deal_slices(*offer)


def _model_capacity(deal: Deal) -> None:
    rounds = {name: Rounds((ground,)) for name, ground in deal.grounds.items()}
    _in_turn(deal, [lambda deal, ground: rounds[ground.view.model].next(deal)])


def _fair_share(deal: Deal) -> None:
    _in_turn(deal, [fair_longest_waiting])


def _smart(deal: Deal) -> None:
    _in_turn(deal, [urgent_lane(deal.policy), fast_lane(deal.policy), fair_smallest])


def _in_turn(deal: Deal, layers: list[Layer]) -> None:
    """Deal a slice to each open model in turn, longest without a turn first, until no layer offers
    anything.
    """
    turns = [(0, view.turn.at if view.turn else -1, name) for name, view in deal.open_models.items()]
    heapify(turns)
    while deal.slices_left > 0 and turns:
        dealt, at, name = turns[0]
        ground = deal.grounds[name]
        offer = _first_offer(deal, ground, layers) if ground.room_items > 0 else None
        if offer is None:
            heappop(turns)
        else:
            deal.deal_slices(*offer)
            heapreplace(turns, (dealt + 1, at, name))


def _first_offer(deal: Deal, ground: Ground, layers: list[Layer]) -> Offer | None:
    for layer in layers:
        offer = layer(deal, ground)
        if offer is not None:
            return offer
    return None


_MODES: Mapping[Mode, Callable[[Deal], None]] = MappingProxyType(
    {
        Mode.FIFO: _fifo,
        Mode.SLICE: _slices,
        Mode.MODEL_CAPACITY: _model_capacity,
        Mode.FAIR_SHARE: _fair_share,
        Mode.SMART: _smart,
    }
)


def _left(deal: Deal, flow: Flow) -> JobView | None:
    """Return a job of the flow of which nothing was taken."""
    for jobs in flow.jobs.values():
        for job in jobs:
            if not deal.was_dealt(job):
                return job
    return None


def _passed_over(deal: Deal) -> list[Skip]:
    """Return a skip for each flow with a job that was not picked.

    One skip stands for all such jobs, so the list is bounded.
    """
    mode = deal.policy.mode
    fair = mode in (Mode.FAIR_SHARE, Mode.SMART)
    skips = []
    for model, ground in deal.grounds.items():
        for share_owner, flow in ground.flows.items():
            left = _left(deal, flow)
            if left is None:
                continue
            # Check the cap first, because more room would not help. Where nothing of the model was
            # dealt, no other job went first.
            if deal.capped(left):
                reason = Reason.TENANT_IN_FLIGHT_MAX
            elif not ground.dealt:
                reason = Reason.WORKER_FULL
            elif not fair:
                reason = Reason.BEHIND_OTHER_JOBS
            else:
                reason = Reason.BEHIND_IN_FLOW if flow.dealt else Reason.FAIR_SHARE
            skips.append(Skip(model, share_owner, "", reason))
    return skips


# ---- layers: each offers the job that its rule would take next, or nothing


def _rounds(deal: Deal, jobs: list[JobView]) -> Heap:
    """Return jobs as a heap of turns.

    The order is: the owner's highest priority, fewest slices in this choice, longest wait, rank.
    """
    line = enumerate(deal.line_up(jobs, by_age))
    heap = [(_TIER * deal.tier(job), ranking.waiting_since(job), place, job) for place, job in line]
    heapify(heap)
    return heap


class Rounds(msgspec.Struct):
    """Round robin over jobs: fewest slices in this choice first, then the longest wait."""

    grounds: tuple[Ground, ...]
    heaps: dict[str, Heap] = msgspec.field(default_factory=dict)

    def build(self, deal: Deal) -> None:
        jobs = deal.jobs_by_queue(self.grounds)
        self.heaps = {queue: _rounds(deal, queued) for queue, queued in jobs.items()}

    def next(self, deal: Deal) -> Offer | None:
        if not self.heaps:
            self.build(deal)
        for queue in deal.queues(*self.grounds):
            heap = self.heaps[queue]
            while heap:
                dealt, since, place, job = heappop(heap)
                if deal.open(deal.grounds[job.model]) and deal.takeable(job):
                    heappush(heap, (dealt + 1, since, place, job))
                    return job, Why.FAIR
        return None


class ScheduleLane(msgspec.Struct):
    """A rule with a bounded share: it offers a job of the flow served least among those that have
    one for it.

    Queues do not matter to it.
    """

    why: Why
    share: float
    look: Callable[[Deal, Ground, Flow], list[JobView]]
    found: dict[str, list[tuple[float, str, Flow, list[JobView]]]] = msgspec.field(default_factory=dict)

    def __call__(self, deal: Deal, ground: Ground) -> Offer | None:
        if self.share <= 0:
            return None
        heap = self.found.get(ground.view.model)
        if heap is None:
            heap = [
                (flow.counter, share_owner, flow, jobs)
                for share_owner, flow in ground.flows.items()
                if (jobs := self.look(deal, ground, flow))
            ]
            heapify(heap)
            self.found[ground.view.model] = heap
        while heap:
            counter, share_owner, flow, jobs = heap[0]
            # Counters only grow during a choice, so an outdated entry belongs further down.
            if counter != flow.counter:
                heapreplace(heap, (flow.counter, share_owner, flow, jobs))
                continue
            job = next((job for job in jobs if self._may(deal, job)), None)
            if job is not None:
                # A job whose turn it is waits until it fits: smaller slices of others must not
                # overtake it.
                return (job, self.why) if deal.within(ground, self.why, self.share, job) else None
            heappop(heap)
        return None

    def _may(self, deal: Deal, job: JobView) -> bool:
        # Only the first slice of a job with a time to begin is urgent; the next snapshot shows
        # whether the rest is.
        return deal.takeable(job) and not (job.begin_by is not None and deal.was_dealt(job))


def urgent_lane(policy: Policy) -> ScheduleLane:
    return ScheduleLane(Why.URGENT, policy.urgent_share, _urgent)


def fast_lane(policy: Policy) -> ScheduleLane:
    return ScheduleLane(Why.FAST_LANE, policy.fast_lane_share if policy.fast_lane else 0.0, _small)


def _urgent(deal: Deal, ground: Ground, flow: Flow) -> list[JobView]:
    pace = ground.paces.get(flow.weight)
    if pace is None:
        pace = ranking.deadline_pace(ground.view, ranking.share_of(flow.weight, ground.weights), deal.policy)
        ground.paces[flow.weight] = pace
    queues = flow.jobs.values()
    jobs = next(iter(queues)) if len(queues) == 1 else chain.from_iterable(queues)
    return ranking.urgent_jobs(jobs, ground.view, deal.now, pace)


def _small(deal: Deal, ground: Ground, flow: Flow) -> list[JobView]:
    small = [job for queued in flow.jobs.values() for job in queued if ranking.is_small(job, deal.policy)]
    if deal.has_priorities:
        small = [job for job in small if deal.tier(job) == 0]
    return deal.line_up(small, _by_size) if small else []


def fair_share(deal: Deal, ground: Ground, head: Callable[[Deal, Flow, Ground, str], Offer | None]) -> Offer | None:
    """Return what `head` offers of the flow served least, in the best queue that has an offer."""
    for queue in deal.queues(ground):
        heap = ground.least_served.get(queue)
        if heap is None:
            heap = [
                (flow.counter, share_owner, flow) for share_owner, flow in ground.flows.items() if queue in flow.jobs
            ]
            heapify(heap)
            ground.least_served[queue] = heap
        while heap:
            counter, share_owner, flow = heap[0]
            if counter != flow.counter:
                heapreplace(heap, (flow.counter, share_owner, flow))
                continue
            offer = head(deal, flow, ground, queue)
            if offer is not None:
                return offer
            # Rooms and caps only shrink during a choice: a flow without an offer now has none
            # later.
            heappop(heap)
    return None


def longest_waiting(deal: Deal, flow: Flow, ground: Ground, queue: str) -> Offer | None:
    """Offer the job of a flow that waits longest for its next slice, so that jobs take turns."""
    key = (flow.share_owner, queue)
    if key not in ground.rounds:
        ground.rounds[key] = _rounds(deal, flow.jobs[queue])
    heap = ground.rounds[key]
    while heap:
        dealt, since, place, job = heap[0]
        if deal.takeable(job):
            heapreplace(heap, (dealt + 1, since, place, job))
            return job, Why.FAIR
        heappop(heap)
    return None


def smallest(deal: Deal, flow: Flow, ground: Ground, queue: str) -> Offer | None:
    """Offer the job that size and age put first among those of a flow's highest priority.

    A large job that had no slice for too long goes before it, at most every second slice of the
    flow.
    """
    key = (flow.share_owner, queue)
    if key not in ground.lined_up:
        ground.lined_up[key] = deal.prioritised(deal.line_up(flow.jobs[queue], _by_size))
        ground.due[key] = ranking.due_large(flow.jobs[queue], deal.now, deal.policy)
    job = _first(deal, ground.lined_up[key])
    if job is None:
        return None
    if ground.due[key] and flow.share_owner not in ground.large_owners:
        due = (one for one in ground.due[key] if one.priority == job.priority and not deal.was_dealt(one))
        large = next(filter(deal.takeable, due), job)
        if large is not job:
            return large, Why.LARGE
    return job, Why.FAIR


def _first(deal: Deal, line: list[JobView]) -> JobView | None:
    return next(filter(deal.takeable, line), None)


def by_age(deal: Deal, jobs: list[JobView]) -> list[JobView]:
    return sorted(jobs, key=_oldest)


def _by_size(deal: Deal, jobs: list[JobView]) -> list[JobView]:
    return ranking.ranked_by_size(jobs, deal.now, deal.policy)


fair_longest_waiting: Layer = partial(fair_share, head=longest_waiting)
fair_smallest: Layer = partial(fair_share, head=smallest)
