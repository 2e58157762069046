"""What a worker with room should lease next: look at the store, let the pure scheduler decide, and say what it decided.

It takes nothing. What it remembers between two decisions (whose turn was last, how fast models went) may be forgotten at any time.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import structlog

from tidegate import metrics
from tidegate.core import schedule
from tidegate.core.nouns import Pace
from tidegate.core.ports import Clock
from tidegate.core.schedule import deadline, fair
from tidegate.core.schedule.switch import Switch
from tidegate.store.snapshots import Bounds
from tidegate.store.store import Store

log = structlog.get_logger()

MODELS_MAX = 1_000
DUE_JOBS_MAX = 8
_PACE_KEEP_MS = 5_000
_CAPS_KEEP_MS = 30_000
_WAKE_EVERY_MS = 500
_WAKE_MAX = 100
_FAULTS_LOGGED_MAX = 3

# How many more items of a model this worker could hold, and why none where it could not.
Room = Callable[[str], tuple[int, str | None]]


def within_sight(snapshot: schedule.Snapshot, picks: list[schedule.Pick], flows_each: int) -> list[schedule.Pick]:
    """Where a look may not have shown all flows of a model, none of those it showed gets more than a slice from it: others that it did not
    show may be next by then. The next look follows at once."""
    shown = Counter(flow.model for flow in snapshot.flows)
    scopes = {(job.job_id, job.model): job.scope for job in snapshot.jobs}
    taken: set[tuple[str, str]] = set()
    kept = []
    for pick in picks:
        if pick.why is not schedule.Why.FAIR or shown[pick.model] < flows_each:
            kept.append(pick)
            continue
        flow = (pick.model, scopes[pick.job_id, pick.model])
        if flow not in taken:
            taken.add(flow)
            kept.append(replace(pick, slice_count=1))
    return kept


class Chooser:
    """`policy_of` gives the policy for the mode as an operator switched it at run time; `caps` are those of tenants by name."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        policy_of: Callable[[Switch], schedule.Policy],
        slice_items: int,
        caps: Mapping[str, int] | None = None,
    ) -> None:
        self._store = store
        self._clock = clock
        self._policy_of = policy_of
        self._policy = policy_of(Switch())
        self._switch = Switch()
        self._slice_items = slice_items
        self._caps = caps or {}
        self._caps_at_ms = 0.0
        self._turns: dict[str, schedule.Turn] = {}
        self._paces: dict[str, Pace] = {}
        self._paces_until_ms = 0.0
        self._wake_at_ms = 0.0

    async def follow(self) -> None:
        """Take over the mode that an operator has switched to, if any."""
        switch = await self._store.scheduler_switch()
        if switch != self._switch:
            self._switch = switch
            self._policy = self._policy_of(switch)
            self._caps_at_ms = 0.0
            log.info("scheduler_switched", mode=self._policy.mode, shadow_mode=self._policy.shadow_mode or "none")
        now_ms = self._clock.monotonic_ms()
        if self._caps and now_ms >= self._caps_at_ms:
            # A tenant that the settings name may come into being later.
            self._caps_at_ms = now_ms + _CAPS_KEEP_MS
            ids = await self._store.tenant_ids(self._caps)
            by_id = {tenant_id: self._caps[name] for name, tenant_id in ids.items()}
            self._policy = replace(self._policy, in_flight_units_by_tenant=by_id)

    async def choose(self, worker_id: str, room: Room, slices_max: int) -> schedule.Choice:
        """One decision. Models without room are passed over unread, so that they never hide one that has some."""
        begun_ms = self._clock.monotonic_ms()
        if begun_ms >= self._wake_at_ms:
            self._wake_at_ms = begun_ms + _WAKE_EVERY_MS
            await self._store.wake_rested(_WAKE_MAX)
        models = await self._store.awake_models(MODELS_MAX)
        rooms = {model: room(model) for model in models}
        if not any(items > 0 for items, _ in rooms.values()):
            return self._nothing(rooms)
        await self._refresh_paces(models)
        policy = self._policy
        snapshot = await self._store.snapshot(
            worker_id,
            {model: items for model, (items, _) in rooms.items()},
            slice_items=self._slice_items,
            slices_max=slices_max,
            closed={model: reason for model, (_, reason) in rooms.items() if reason},
            paces=self._paces,
            turns=self._turns,
            bounds=Bounds(policy.flows_per_decision_max, policy.jobs_per_flow_max, DUE_JOBS_MAX),
        )
        choice = schedule.choose(snapshot, policy)
        wanted = sum(items > 0 for items, _ in rooms.values())
        choice = replace(choice, picks=within_sight(snapshot, choice.picks, policy.flows_per_decision_max // wanted))
        self._turns = {model: turn for model, turn in (self._turns | dict(choice.turns)).items() if model in rooms}
        self._say(snapshot, choice, self._clock.monotonic_ms() - begun_ms)
        if policy.shadow_mode is not None:
            self._shadow(snapshot, choice, policy.shadow_mode)
        return choice

    @staticmethod
    def _nothing(rooms: Mapping[str, tuple[int, str | None]]) -> schedule.Choice:
        """Every model that has work is full or closed: the store need not be read any further."""
        skips = [
            schedule.Skip(model, "", "", reason or schedule.Reason.NO_AVAILABLE_SLOTS)
            for model, (_, reason) in rooms.items()
        ]
        for skip in skips:
            metrics.scheduler_skips.of(skip.reason).inc()
        return schedule.Choice([], skips)

    async def _refresh_paces(self, models: Iterable[str]) -> None:
        now_ms = self._clock.monotonic_ms()
        if now_ms >= self._paces_until_ms:
            self._paces = await self._store.paces(list(models))
            self._paces_until_ms = now_ms + _PACE_KEEP_MS

    def _say(self, snapshot: schedule.Snapshot, choice: schedule.Choice, took_ms: float) -> None:
        metrics.scheduler_decision_seconds.observe(took_ms / 1000)
        for pick in choice.picks:
            metrics.scheduler_picks.of(pick.why).inc(pick.slice_count)
        for skip in choice.skips:
            metrics.scheduler_skips.of(skip.reason).inc()
        for fault in choice.faults[:_FAULTS_LOGGED_MAX]:
            log.warning("scheduler_plugin_fault", fault=fault)
        self._tell_slack(snapshot)
        waiting = {(job.model, job.scope) for job in snapshot.jobs}
        for name, model in snapshot.models.items():
            flows = [flow for flow in snapshot.flows if flow.model == name and (name, flow.scope) in waiting]
            if flows:
                metrics.scheduler_fairness_gap_tokens.of(name).set(fair.gap(flows, model.ratio))

    def _tell_slack(self, snapshot: schedule.Snapshot) -> None:
        slacks = [
            deadline.slack_ms(job, model, snapshot.now, deadline.pace(model, 1.0, self._policy))
            for job in snapshot.jobs
            if (model := snapshot.models.get(job.model)) is not None and (job.rate or model.rate)
        ]
        if slacks:
            metrics.deadline_slack_seconds.set(min(slacks) / 1000)

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
