"""The choice of what a worker leases next: a look at the store, and the pure scheduler's decision.

This module leases nothing. Its memory of earlier decisions (the last turns, the paces of models)
may be lost at any time.
"""

import asyncio
import functools
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from hashlib import sha256

import structlog
from msgspec.structs import replace

from tidegate import metrics
from tidegate.core import schedule
from tidegate.core.nouns import ModelPace
from tidegate.core.policies import Policies
from tidegate.core.ports import Clock
from tidegate.core.schedule import ranking
from tidegate.core.schedule.policy import ModeOverride
from tidegate.store.road.leases import SnapshotBounds
from tidegate.store.store import Store
from tidegate.worker.trial import Trial

log = structlog.get_logger()

MODELS_MAX = 1_000
DUE_JOBS_MAX = 8
_PACE_KEEP_MS = 5_000
_PACES_MIN = 2
_PACES_PARTS = 50
_CAPS_KEEP_MS = 30_000
_WAKE_EVERY_MS = 500
_WAKE_MAX = 100
_TELL_EVERY_MS = 500
_FAULTS_LOGGED_MAX = 3
_FOLLOW_MS = 2_000

_EMPTY = metrics.work_lease_attempts.of("empty")
_PICKS = {why: metrics.scheduler_picks.of(why) for why in schedule.Why}
_DECISION_SECONDS = {mode: metrics.scheduler_decision_seconds.of(mode) for mode in schedule.Mode}

# Returns how many more items of a model this worker could hold, and the reason if none. Items of an
# unknown model can only fail, so for these it returns a number and a reason.
RoomOf = Callable[[str], tuple[int, str | None]]
Rooms = Mapping[str, tuple[int, str | None]]


def within_sight(snapshot: schedule.Snapshot, picks: list[schedule.Pick]) -> list[schedule.Pick]:
    """Give each flow at most one slice if the snapshot may not show all flows of its model.

    After one slice, a flow that was not shown may be next. The next look follows at once.
    """
    hiding = {name for name, model in snapshot.models.items() if model.hides_flows}
    if not hiding:
        return picks
    scopes = {(job.job_id, job.model): job.share_owner for job in snapshot.jobs}
    taken: set[tuple[str, str]] = set()
    kept = []
    for pick in picks:
        if pick.why is not schedule.Why.FAIR or pick.model not in hiding:
            kept.append(pick)
            continue
        flow = (pick.model, scopes[pick.job_id, pick.model])
        if flow not in taken:
            taken.add(flow)
            kept.append(schedule.Pick(pick.job_id, pick.model, 1, pick.why))
    return kept


def _has_room(rooms: Rooms) -> bool:
    return any(items > 0 for items, _ in rooms.values())


def _count_skips(skips: list[schedule.Skip]) -> None:
    for reason, count in Counter([skip.reason for skip in skips]).items():
        metrics.scheduler_skips.of(reason).inc(count)
    for (model, reason), count in Counter((skip.model, skip.reason) for skip in skips if not skip.share_owner).items():
        metrics.scheduler_model_skips.of(model, reason).inc(count)
    for reason, count in Counter(skip.reason for skip in skips if skip.share_owner).items():
        metrics.scheduler_flow_skips.of(reason).inc(count)


class WaitGauges:
    """The gauges of waiting work: the least slack, and how far apart the flows of each model are.

    A decision does not read models without room here, so these keep their last values while they
    have work.
    """

    def __init__(self) -> None:
        self._slacks_ms: dict[str, float] = {}
        self._gaps: dict[str, float] = {}

    def see(self, snapshot: schedule.Snapshot, policy: schedule.Policy) -> None:
        """Set the gauges from the snapshot of one decision."""
        read = {name for name, model in snapshot.models.items() if model.room_items > 0}
        kept = set(snapshot.awake) - read
        slacks_ms = {name: slack_ms for name, slack_ms in self._slacks_ms.items() if name in kept}
        for job in snapshot.jobs:
            model = snapshot.models.get(job.model)
            if model is not None and job.model in read and (job.rate or model.rate):
                slack_ms = ranking.slack_ms(job, model, snapshot.now, ranking.deadline_pace(model, 1.0, policy))
                slacks_ms[job.model] = min(slack_ms, slacks_ms.get(job.model, math.inf))
        gaps = {name: gap for name, gap in self._gaps.items() if name in kept}
        waiting = {(job.model, job.share_owner) for job in snapshot.jobs}
        for name in read:
            flows = [flow for flow in snapshot.flows if flow.model == name and (name, flow.share_owner) in waiting]
            if flows:
                gaps[name] = ranking.counter_gap(flows, snapshot.models[name].ratio)
        self._show(slacks_ms, gaps)

    def clear(self) -> None:
        """Clear the gauges, because no work waits."""
        if self._slacks_ms or self._gaps:
            self._show({}, {})

    def _show(self, slacks_ms: dict[str, float], gaps: dict[str, float]) -> None:
        self._slacks_ms, self._gaps = slacks_ms, gaps
        metrics.deadline_slack_seconds.set(min(slacks_ms.values(), default=math.inf) / 1000)
        metrics.scheduler_fairness_gap_tokens.forget()
        for name, gap in gaps.items():
            metrics.scheduler_fairness_gap_tokens.of(name).set(gap)


def _tell_config(policy: schedule.Policy) -> None:
    digest = sha256(repr(policy).encode()).hexdigest()[:12]
    metrics.scheduler_config_info.forget()
    metrics.scheduler_config_info.of(policy.mode, policy.shadow_mode or "none", digest).set(1)


class Scheduler:
    """The scheduler of a worker: it follows the operator's policy, and switches of the mode."""

    def __init__(
        self, store: Store, clock: Clock, policies: Policies, slice_items: int, follow_ms: int = _FOLLOW_MS
    ) -> None:
        """Choose slices of at most `slice_items` items; look for a switch every `follow_ms`."""
        self._store = store
        self._clock = clock
        self._policies = policies
        self._policy = policies.schedule_policy(ModeOverride())
        _tell_config(self._policy)
        self._override = ModeOverride()
        self._slice_items = slice_items
        self._follow_ms = follow_ms
        self._caps_at_ms: float | None = None
        self._turns: dict[str, schedule.Turn] = {}
        self._paces: dict[str, ModelPace] = {}
        self._paced_at_ms: dict[str, float] = {}
        self._wake_at_ms = 0.0
        self._tell_at_ms = 0.0
        self._gauges = WaitGauges()
        # The models that were awake at the last look. If none of them has room, the list is read
        # again.
        self._models: Sequence[str] = ()

    async def run(self) -> None:
        """Follow the operator's switch, without end."""
        while True:
            await self.follow()
            await asyncio.sleep(self._follow_ms / 1000)

    async def follow(self) -> None:
        """Take over the mode that an operator has switched to, if any."""
        override = await self._store.mode_override()
        if override != self._override:
            self._override = override
            policy = self._policies.schedule_policy(override)
            _tell_config(policy)
            self._policy = replace(policy, in_flight_units_by_tenant=self._policy.in_flight_units_by_tenant)
            log.info("scheduler_switched", mode=policy.mode, shadow_mode=policy.shadow_mode or "none")
        now_ms = self._clock.monotonic_ms()
        if self._caps_at_ms is None or now_ms >= self._caps_at_ms:
            # The operator may remove caps, and a tenant that the settings name may be created
            # later.
            caps = dict(self._policies.in_flight_caps)
            ids = await self._store.tenant_ids(caps) if caps else {}
            by_id = {tenant_id: caps[name] for name, tenant_id in ids.items()}
            self._policy = replace(self._policy, in_flight_units_by_tenant=by_id)
            self._caps_at_ms = now_ms + _CAPS_KEEP_MS

    async def choose(
        self, worker_id: str, room: RoomOf, slices_max: int, trial: Trial | None = None
    ) -> schedule.Choice:
        """Make one decision.

        Models without room are not read, so that they never hide one with room. `trial` decides
        whether suspects are shown; without a trial they are.
        """
        if self._caps_at_ms is None and self._policies.in_flight_caps:
            await self.follow()
        room = functools.partial(self._room_of, room)
        begun_ms = self._clock.monotonic_ms()
        if begun_ms >= self._wake_at_ms:
            self._wake_at_ms = begun_ms + _WAKE_EVERY_MS
            await self._store.wake_rested(_WAKE_MAX)
        rooms = {model: room(model) for model in self._models}
        if not _has_room(rooms):
            rooms = {model: room(model) for model in await self._store.awake_models(MODELS_MAX)}
            self._models = list(rooms)
        if not _has_room(rooms):
            return self._nothing(rooms)
        await self._refresh_paces(rooms)
        policy = self._policy
        snapshot = await self._look(worker_id, rooms, slices_max, trial)
        news = [model for model in snapshot.awake if model not in rooms]
        if news:
            # The awake models rarely change between two looks. A decision looks twice only if there
            # are new ones.
            rooms |= {model: room(model) for model in news}
            snapshot = await self._look(worker_id, rooms, slices_max, trial)
        self._models = snapshot.awake
        if asleep := rooms.keys() - set(self._models):
            awake = {model: view for model, view in snapshot.models.items() if model not in asleep}
            snapshot = replace(snapshot, models=awake)
        choice = schedule.choose(snapshot, policy)
        choice = replace(choice, picks=within_sight(snapshot, choice.picks), suspects=snapshot.suspects)
        turns = self._turns | dict(choice.turns)
        self._turns = {model: turn for model, turn in turns.items() if model in snapshot.models}
        self._say(snapshot, choice, begun_ms)
        if policy.shadow_mode is not None:
            self._shadow(snapshot, choice, policy.shadow_mode)
        return choice

    def _room_of(self, room: RoomOf, model: str) -> tuple[int, str | None]:
        """Return the room for a model; none for an unknown model that another worker may know."""
        items, reason = room(model)
        if items > 0 and reason is schedule.Reason.UNKNOWN_CAPACITY:
            return (0, reason) if self._policies.unknown_wait_ms(model) else (items, None)
        return items, reason

    async def _look(self, worker_id: str, rooms: Rooms, slices_max: int, trial: Trial | None) -> schedule.Snapshot:
        policy, paces, turns = self._policy, self._paces, self._turns
        bounds = SnapshotBounds(
            policy.flows_per_decision_max,
            policy.jobs_per_flow_max,
            DUE_JOBS_MAX,
            models_max=MODELS_MAX,
            shows_suspects=trial is None or not trial.hides_suspects,
            shows_kept=trial is not None and trial.wants_check,
        )
        known = {
            model: schedule.ModelRoom(items, reason or None, paces.get(model, schedule.NO_PACE), turns.get(model))
            for model, (items, reason) in rooms.items()
        }
        return await self._store.snapshot(
            worker_id, known, bounds, slice_items=self._slice_items, slices_max=slices_max
        )

    def _nothing(self, rooms: Rooms) -> schedule.Choice:
        """Return an empty choice: no model has work, or none with work has room."""
        if not rooms:
            _EMPTY.inc()
            self._gauges.clear()
        skips = [
            schedule.Skip(model, "", "", reason or schedule.Reason.NO_AVAILABLE_SLOTS)
            for model, (_, reason) in rooms.items()
        ]
        _count_skips(skips)
        return schedule.Choice([], skips)

    async def _refresh_paces(self, models: Collection[str]) -> None:
        """Ask for the unknown paces of models, or for a few of the oldest if all are known.

        To ask for all at once would make some decisions slow.
        """
        now_ms = self._clock.monotonic_ms()
        due = [model for model in models if model not in self._paces]
        if not due:
            old = [model for model in models if now_ms >= self._paced_at_ms[model] + _PACE_KEEP_MS]
            some = max(_PACES_MIN, len(models) // _PACES_PARTS)
            due = sorted(old, key=self._paced_at_ms.__getitem__)[:some]
        if due:
            found = await self._store.paces(due)
            # Callers choose the names of models, so the table must not grow without a limit.
            self._paces = {model: pace for model, pace in (self._paces | found).items() if model in models}
            paced_at = self._paced_at_ms | dict.fromkeys(found, now_ms)
            self._paced_at_ms = {model: paced_at[model] for model in self._paces}

    def _say(self, snapshot: schedule.Snapshot, choice: schedule.Choice, begun_ms: float) -> None:
        now_ms = self._clock.monotonic_ms()
        _DECISION_SECONDS[self._policy.mode].observe((now_ms - begun_ms) / 1000)
        if not choice.picks:
            _EMPTY.inc()
        for pick in choice.picks:
            _PICKS[pick.why].inc(pick.slice_count)
        _count_skips(choice.skips)
        for fault in choice.faults[:_FAULTS_LOGGED_MAX]:
            log.warning("scheduler_plugin_fault", fault=fault)
        # Gauges are read rarely, so they are not updated at every look.
        if now_ms >= self._tell_at_ms:
            self._tell_at_ms = now_ms + _TELL_EVERY_MS
            self._gauges.see(snapshot, self._policy)

    def _shadow(self, snapshot: schedule.Snapshot, choice: schedule.Choice, mode: schedule.Mode) -> None:
        differences = schedule.compare(snapshot, self._policy, choice, mode)
        metrics.scheduler_shadow_decisions.inc()
        if differences:
            metrics.scheduler_shadow_differences.inc()
            for one in differences[:_FAULTS_LOGGED_MAX]:
                log.info(
                    "scheduler_shadow_differs",
                    shadow=mode,
                    model=one.model,
                    job=one.job_id,
                    ours=one.ours,
                    theirs=one.theirs,
                    reason=one.reason,
                )
