"""What must hold of the scheduler at every step: promise P18, the bound of urgent work, no worker idle that has work, no job passed over.

Flows are read from the database after each lease and each flush. Two of one model that both have something ready may not be further apart
than (workers + 1) slices, the largest item, and the error of the estimates in flight, which is known here: the seed says what items cost.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import apsw

from tests.simulation.world.customers import Order
from tests.simulation.world.disk import Disk
from tests.simulation.world.estate import Shape
from tests.simulation.world.plan import Plan
from tidegate.core.schedule import Mode
from tidegate.store.road.leases import SUSPECT_AFTER
from tidegate.store.road.outcomes import real_cost

_FAIR_MODES = (Mode.FAIR_SHARE, Mode.SMART)
_GIVEN_BACK = ("reclaim_slices", "release_slice", "release_tail", "declare_gone")
# How long a healthy installation may take beyond a sweep and a poll: latencies, and loops that wait for one another.
_SLACK_MS = 1_000
PASSED_OVER_S = 40.0
_TAG = re.compile(rb'"(?:content|input)":"(j[0-9]+-[0-9]+)')

_FLOWS = """
select f.model, f.share_owner, f.weight_milli, f.served, exists (
    select 1 from job_models m join jobs j on j.id = m.job_id
    where m.model = f.model and m.share_owner = f.share_owner and m.state = 'open' and m.rests_until <= now_ms() and m.expires_at > now_ms()
        and j.closing is null and exists (select 1 from slices s where s.job_id = m.job_id and s.model = m.model
            and s.state = 'ready' and s.ready_at <= now_ms() and s.lost_count < ?))
from flows f where f.state = 'awake' order by f.model, f.share_owner
"""
_OUT = """
select s.model, m.share_owner, s.work_units, s.leased_as, s.job_id, s.first, s.count, s.read_first, j.work_blob_id, s.work_at, s.work_bytes
from slices s
join job_models m on m.job_id = s.job_id and m.model = s.model
join jobs j on j.id = s.job_id
where s.state = 'leased' order by s.job_id, s.first
"""
_ASLEEP = """
select f.model, f.share_owner, s.job_id, s.first from flows f
join job_models m on m.model = f.model and m.share_owner = f.share_owner and m.state = 'open'
join jobs j on j.id = m.job_id and j.state = 'in_progress' and j.closing is null and j.expires_at > now_ms()
join slices s on s.job_id = m.job_id and s.model = m.model and s.state = 'ready'
where f.state = 'asleep' and s.ready_at <= now_ms() - ? and m.rests_until <= now_ms() - ? and f.changed_at <= now_ms() - ?
"""
_PROGRESS = """
select j.id, j.answered_count + j.failed_count,
    (select coalesce(sum(s.lease_count), 0) from slices s where s.job_id = j.id),
    exists (select 1 from slices s where s.job_id = j.id and s.state = 'ready' and s.ready_at <= now_ms())
    and not exists (select 1 from slices s where s.job_id = j.id and s.state = 'leased')
from jobs j where j.state = 'in_progress' and j.closing is null and j.paused_at is null and j.not_before <= now_ms()
"""


@dataclass(slots=True)
class _Flow:
    weight: float
    counter: float
    error: float = 0.0


class Fairness:
    def __init__(
        self,
        plan: Plan,
        connection: apsw.Connection,
        disk: Disk,
        orders: dict[str, Order],
        broken: Callable[[str], None],
    ) -> None:
        self._plan = plan
        self._disk = disk
        self._item_costs: dict[str, dict[int, int]] = {}
        self._connection = connection
        self._broken = broken
        self._orders = orders
        self._close: dict[tuple[str, str, str], tuple[float, float]] = {}
        self._moved: dict[str, tuple[object, float]] = {}
        self.watches = _is_fair(plan)
        self.pairs_seen = 0

    def _rows(self, sql: str, *parameters: object) -> list[tuple[Any, ...]]:
        return self._connection.execute(sql, parameters).fetchall()

    def after_commit(self, verb: str) -> None:
        if verb in _GIVEN_BACK:
            # What a flow had out counts no more, so it is behind until it was served again.
            self._close.clear()
        if verb not in ("lease_picks", "record_outcomes"):
            return
        if self.watches:
            self._check_gaps()
        if verb == "lease_picks" and self._plan.estate.policy.mode is Mode.SMART:
            self._check_urgent()

    # ---- the bound between two flows

    def _check_gaps(self) -> None:
        flows: dict[str, dict[str, _Flow]] = {}
        ready: set[tuple[str, str]] = set()
        for model, share_owner, weight_milli, served, is_ready in self._rows(_FLOWS, SUSPECT_AFTER):
            flows.setdefault(model, {})[share_owner] = _Flow(weight_milli / 1000, float(served))
            if is_ready:
                ready.add((model, share_owner))
        if len(ready) < 2:
            self._close.clear()
            return
        largest = self._add_what_is_out(flows)
        ((workers,),) = self._rows("select count(*) from workers where state = 'alive' and alive_until > now_ms()")
        seen = set()
        for model, scopes in flows.items():
            for one, other in combinations(
                sorted(share_owner for share_owner in scopes if (model, share_owner) in ready), 2
            ):
                seen.add((model, one, other))
                self._check_pair((model, one, other), scopes[one], scopes[other], workers, largest[model])
        for gone in self._close.keys() - seen:
            del self._close[gone]

    def _add_what_is_out(self, flows: dict[str, dict[str, _Flow]]) -> dict[str, tuple[float, float]]:
        """Add what is in flight to the counters; says what the largest slice and the largest item of each model cost."""
        ratios = {
            model: tokens / units if units else 1.0
            for model, units, tokens in self._rows("select model, sum(units), sum(tokens) from rates group by model")
        }
        largest = {model: self._largest(model, ratios.get(model, 1.0)) for model in flows}
        for model, share_owner, units, _, *place in self._rows(_OUT):
            flow = flows.get(model, {}).get(share_owner)
            if flow is None:
                continue
            estimated = units * ratios.get(model, 1.0) / flow.weight
            real = self._left(*place) / flow.weight
            flow.counter += estimated
            # The engine learns its ratio now and then, so what it believed lies between the estimate as made and as learned.
            flow.error += max(abs(estimated - real), abs(units / flow.weight - real))
        return largest

    def _left(self, job_id: str, first: int, count: int, read_first: int, blob_id: str, at: int, size: int) -> int:
        """What the items of a slice really cost that have no outcome yet."""
        known = self._item_costs.setdefault(job_id, {})
        if first not in known:
            lines = self._disk.read(blob_id, at, size).split(b"\n")[first - read_first :][:count]
            usages = self._orders[job_id].usages
            for number, line in enumerate(lines, start=first):
                tag = _TAG.search(line)
                known[number] = real_cost(usages[tag[1].decode()]) if tag else 0
        done = self._rows(
            "select number from outcomes where job_id = ? and number >= ? and number < ?", job_id, first, first + count
        )
        return sum(known[number] for number in range(first, first + count)) - sum(known[number] for (number,) in done)

    def _largest(self, model: str, ratio: float) -> tuple[float, float]:
        """What a slice and an item of a model cost at most, by the estimate or really."""
        items = [
            max(cost, units * max(ratio, 1.0))
            for order in self._orders.values()
            for cost, units, asked in order.sizes()
            if asked == model
        ]
        largest = max(items, default=0.0)
        return largest * self._plan.slice_items, largest

    def _check_pair(
        self, pair: tuple[str, str, str], one: _Flow, other: _Flow, workers: int, largest: tuple[float, float]
    ) -> None:
        weights = (one.weight, other.weight)
        gap = abs(one.counter - other.counter)
        error = one.error + other.error
        lightest = min(weights)
        if pair not in self._close:
            # The flow that was ahead is waited for; from where they have met they stay together.
            if gap <= largest[0] / lightest:
                self._close[pair] = weights
            return
        if self._close[pair] != weights:
            del self._close[pair]
            return
        self.pairs_seen += 1
        bound = ((workers + 1) * largest[0] + largest[1]) / lightest + error
        if gap > bound:
            self._broken(
                f"P18: {pair[1]} and {pair[2]} are {gap:.0f} apart on {pair[0]}, and may be {bound:.0f}"
                f" ({workers} workers, slices of {largest[0]:.0f}, error {error:.0f})"
            )

    # ---- urgent work

    def _check_urgent(self) -> None:
        share = self._plan.estate.policy.urgent_share
        out: dict[str, dict[str, int]] = {}
        most = 0
        for model, _, units, why, *_ in self._rows(_OUT):
            by_why = out.setdefault(model, {})
            by_why[why] = by_why.get(why, 0) + units
            most = max(most, units)
        for model, by_why in out.items():
            urgent = by_why.get("urgent", 0)
            # Each process may have chosen on a look that does not show what the others took, and one slice is always allowed.
            ((workers,),) = self._rows("select count(*) from workers where state = 'alive'")
            excused = (workers + 1) * most
            if urgent > share * sum(by_why.values()) + excused or (urgent and not share):
                self._broken(
                    f"urgent: {urgent} of {sum(by_why.values())} units out on {model} are urgent, above {share}"
                )

    def _passed_over_s(self) -> float:
        """No job waits longer than this. The owner of the largest items waits until the others were served as much, in smaller ones."""
        costs = [cost for order in self._orders.values() for cost, *_ in order.sizes()] or [1]
        return max(PASSED_OVER_S, _round_s(self._plan) * max(costs) * len(costs) / max(1, sum(costs)))

    # ---- now and then, when the weather is clear

    def tick(self, now_s: float, lost_s: float) -> None:
        """No worker with work is idle, and no job is passed over. While an item still kills workers, waiting counts from the last death at
        `lost_s`: what a dead worker held is free only when its lease has run out."""
        plan = self._plan
        late_ms = plan.sweep_ms + plan.poll_ms + _SLACK_MS
        asleep = self._rows(_ASLEEP, late_ms, late_ms, late_ms)
        if asleep:
            self._broken(f"asleep: flows sleep although they have had something to do for {late_ms} ms: {asleep[:3]}")
        if _is_limited(plan) or plan.estate.policy.mode is Mode.FIFO or plan.estate.override_mode is Mode.FIFO:
            return
        waiting: dict[str, tuple[object, float]] = {}
        for job_id, done_count, lease_count, is_waiting in self._rows(_PROGRESS):
            if is_waiting:
                before, since_s = self._moved.get(job_id, (None, now_s))
                if plan.strength("poison"):
                    since_s = max(since_s, lost_s)
                state = (done_count, lease_count)
                waiting[job_id] = (state, since_s if before == state else now_s)
                if now_s - waiting[job_id][1] > (most_s := self._passed_over_s()):
                    self._broken(f"passed over: nothing of {job_id} was taken up for {most_s:.0f} s")
        self._moved = waiting


def _round_s(plan: Plan) -> float:
    """How long a round takes at its slowest: a slice of each job and model, and for the lightest tenant's one as many of the heaviest's as
    it weighs more."""
    weights = [tenant.weight for tenant in plan.estate.tenants]
    slices = plan.job_count * len(plan.estate.models) * max(weights) / min(weights)
    return slices * plan.slice_items * plan.call_s_max / _calls_at_once(plan)


def _calls_at_once(plan: Plan) -> int:
    """How many calls of one model may be in flight: as many as the processes, its deployments and the caps allow."""
    estate = plan.estate
    slots = [sum(one.background_in_flight_max for one in estate.serving(model)) for model in estate.models]
    caps = [*estate.model_in_flight_max.values(), estate.in_flight_max_global]
    return min([plan.process_count * plan.in_flight_max, *slots, *(cap for cap in caps if cap)])


def _is_limited(plan: Plan) -> bool:
    estate = plan.estate
    return any(one.limits for one in estate.deployments) or bool(estate.resources) or _binds_somebody(plan)


def _binds_somebody(plan: Plan) -> bool:
    tenants = plan.estate.tenants
    return any(one.limits or one.user_limits or one.key_limits for one in tenants) or any(plan.estate.job_limits)


def _is_fair(plan: Plan) -> bool:
    """Whether nothing goes before fair share between flows that are ready: a flow whose budget or cap is spent is not."""
    if plan.shape is Shape.RACE:
        return False
    policy, override_mode = plan.estate.policy, plan.estate.override_mode
    modes = {policy.mode} | ({override_mode} if override_mode else set())
    if not modes <= set(_FAIR_MODES):
        return False
    has_fast_lane = policy.fast_lane or ("expire" in plan.kinds and policy.urgent_share > 0)
    return Mode.SMART not in modes or not has_fast_lane
