"""The named modes, each a composition of layers, and `choose`: a bounded look in, picks with their reasons out.

fifo_v1            the oldest job takes all the room it can use, then the next
slice_v1           jobs take turns, a slice each
model_capacity_v1  and models take turns too: no model uses up a worker before another had its slice
fair_share_v1      and within a model the flow that was served least goes next, its jobs in turn
smart_v1           and within a flow small and old jobs go first, urgent ones ahead of all within their share

Of one flow, jobs of a higher priority go first in every mode; only an urgent one may go ahead of them.
In every mode a closed model is passed over, caps hold, and no room is left empty that a job could use.
"""

from collections.abc import Callable, Mapping
from heapq import heapify, heappop, heapreplace
from itertools import groupby
from operator import attrgetter
from types import MappingProxyType

from tidegate.core.schedule.deal import Deal, Flow, Ground
from tidegate.core.schedule.layers import (
    Layer,
    Offer,
    Rounds,
    by_age,
    fair_longest_waiting,
    fair_smallest,
    fast_lane,
    urgent_lane,
)
from tidegate.core.schedule.policy import Mode, Policy
from tidegate.core.schedule.reasons import Reason
from tidegate.core.schedule.snapshot import Choice, JobView, ModelView, Skip, Snapshot, Why


def choose(snapshot: Snapshot, policy: Policy) -> Choice:
    """What to take now, slice by slice as the policy's mode deals them. The same look and policy always give the same choice."""
    open_models, skips = _pass_gate(snapshot)
    deal = Deal(snapshot, policy, open_models)
    _MODES[policy.mode](deal)
    skips.extend(_passed_over(deal))
    return Choice(deal.picks(), skips, deal.turns(), deal.faults)


def _pass_gate(snapshot: Snapshot) -> tuple[dict[str, ModelView], list[Skip]]:
    """Return the open models, and a skip for each closed one: it never blocks an open one. A model that jobs name and no view describes is
    closed with a reason."""
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
    """A slice for each open model in turn, the one whose last turn was longest ago first, until no layer offers anything."""
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
    """A job of which nothing was taken."""
    for jobs in flow.jobs.values():
        for job in jobs:
            if not deal.was_dealt(job):
                return job
    return None


def _passed_over(deal: Deal) -> list[Skip]:
    """A skip for each flow of which something was left: it speaks for all of its jobs that were not picked, so it stays bounded."""
    mode = deal.policy.mode
    fair = mode in (Mode.FAIR_SHARE, Mode.SMART)
    skips = []
    for model, ground in deal.grounds.items():
        for share_owner, flow in ground.flows.items():
            left = _left(deal, flow)
            if left is None:
                continue
            # A cap comes first: room would not help. A worker that began full let no other job go first.
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
