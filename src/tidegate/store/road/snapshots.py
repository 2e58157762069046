"""Verbs that only look: what a scheduler decides on, and what an estimate of a job's end is made from.

They turn rows into what `core.schedule` understands. They choose nothing.
"""

from collections import Counter
from collections.abc import Mapping, Set

import msgspec

from tidegate.core.nouns import ModelPace
from tidegate.core.schedule.outlooks import Minute, ModelOutlook, Outlook
from tidegate.core.schedule.snapshot import FlowView, JobView, ModelRoom, ModelView, Snapshot, Suspects, Why
from tidegate.store.database.driver import Row, Tx
from tidegate.store.database.table import Table, reads
from tidegate.store.road.slices import KEPT_FOR_CHECKS, SEARCH_LOSSES_MAX, SUSPECT_AFTER

RATE_MINUTES = 15
OUTLOOK_JOBS_MAX = 10_000
OUTLOOK_FLOWS_MAX = 64
_NONE_IS_SUSPECT = 1 << 62
_WHY = {why.value: why for why in Why}


class SnapshotBounds(msgspec.Struct, frozen=True):
    """What one look at the store may show: so many flows, the oldest and the smallest jobs of each, and the jobs of a model that are due
    first. Where there are many flows or models, fewer jobs of each are looked at.

    Without `shows_suspects` jobs are left out that have only suspect slices ready; `shows_kept` adds slices that are kept for checks."""

    flows_max: int = 50
    jobs_per_flow_max: int = 50
    due_jobs_max: int = 40
    jobs_max: int = 400
    models_max: int = 1_000
    shows_suspects: bool = True
    shows_kept: bool = False

    def flows_of_each(self, model_count: int, in_flight: int) -> int:
        """Flows that are out may be among the least served and yet not be next: they do not use up the places of the others."""
        share = max(1, self.flows_max // (2 * model_count))
        return share + min(in_flight, share)

    def jobs_of_each(self) -> int:
        return max(1, min(self.jobs_per_flow_max, self.jobs_max // self.flows_max))

    def due_of_each(self, model_count: int) -> int:
        return max(1, self.due_jobs_max // model_count)


BOUNDS = SnapshotBounds()


class _Out(msgspec.Struct):
    """What is in flight by model and rule, by share owner, by flow and by job and model. `lost_level` is how many owners the worst
    slice lost, and `others_level` how many the worst that another worker holds."""

    rules: dict[tuple[str, str], int] = msgspec.field(default_factory=dict)
    owners: dict[str, int] = msgspec.field(default_factory=dict)
    flows: dict[tuple[str, str], int] = msgspec.field(default_factory=dict)
    jobs: dict[tuple[str, str], int] = msgspec.field(default_factory=dict)
    lost_level: int = 0
    others_level: int = 0

    def add(self, rows: list[Row]) -> None:
        # As many rows as workers hold slices, at every look.
        rules, owners, flows, jobs = self.rules, self.owners, self.flows, self.jobs
        for job_id, model, why, share_owner, units, lost_count, is_mine in rows:
            rule, flow, job = (model, why), (model, share_owner), (job_id, model)
            rules[rule] = rules.get(rule, 0) + units
            owners[share_owner] = owners.get(share_owner, 0) + units
            flows[flow] = flows.get(flow, 0) + units
            jobs[job] = jobs.get(job, 0) + units
            if lost_count:
                self.lost_level = max(self.lost_level, lost_count)
                self.others_level = max(self.others_level, 0 if is_mine else lost_count)

    def by_rule(self, model: str) -> dict[Why, int]:
        return {rule: units for why, rule in _WHY.items() if (units := self.rules.get((model, why)))}

    def most_flows(self) -> int:
        """Of the model that has most of them."""
        return max(Counter(model for model, _ in self.flows).values(), default=0)


class Snapshots(Table):
    @reads
    async def awake_models(self, tx: Tx, count_max: int) -> list[str]:
        """The models that have anything to do: what a worker finds its room for before it looks closer."""
        return [row[0] for row in await tx.all("awake_models", count_max=count_max)]

    @reads
    async def unleased_models(self, tx: Tx, count_max: int) -> list[str]:
        """Models with work that is due, of which nothing is leased."""
        [(now,)] = await tx.all("now")
        return [one[0] for one in await tx.all("unleased_models", now=now, count_max=count_max)]

    @reads
    async def paces(self, tx: Tx, models: list[str]) -> dict[str, ModelPace]:
        """How each model went in the last minutes, and who shares it."""
        [(now,)] = await tx.all("now")
        return {model: await _pace(tx, model, now) for model in models}

    async def snapshot(
        self,
        worker_id: str,
        rooms: Mapping[str, ModelRoom],
        bounds: SnapshotBounds = BOUNDS,
        *,
        slice_items: int,
        slices_max: int,
    ) -> Snapshot:
        """Look at what could run now, within bounds. Nothing is read of a model without room, so it hides no other model. Awake models that
        `rooms` does not name are named in the answer."""
        seen = await self._look(worker_id, {model for model, room in rooms.items() if room.items > 0}, bounds)
        out = seen.out
        models = {model: _model(model, room, out, model in seen.hiding) for model, room in rooms.items()}
        return Snapshot(
            seen.now,
            models,
            list(seen.flows.values()),
            list(seen.jobs.values()),
            out.owners,
            slice_items,
            slices_max,
            max(1, seen.workers),
            seen.awake,
            Suspects(out.others_level, seen.level, seen.suspect_count, seen.is_searching),
        )

    @reads
    async def _look(self, tx: Tx, worker_id: str, wanted: Set[str], bounds: SnapshotBounds) -> "_SnapshotRows":
        """Read the awake models, and the flows and jobs of those that are wanted."""
        moment = await tx.one("snapshot_now", search_max=SEARCH_LOSSES_MAX, worker_id=worker_id)
        assert moment is not None, "it always gives a row"
        seen = _SnapshotRows(moment, _in_flight(await tx.all("snapshot_in_flight", worker_id=worker_id)))
        seen.awake = [row[0] for row in await tx.all("awake_models", count_max=bounds.models_max)]
        asked = [model for model in seen.awake if model in wanted]
        if not asked:
            return seen
        flows_max = bounds.flows_of_each(len(wanted), seen.out.most_flows())
        jobs_max = bounds.jobs_of_each()
        startable = {
            "now": seen.now,
            "lost_below": _NONE_IS_SUSPECT if bounds.shows_suspects else SUSPECT_AFTER,
            "is_searching": int(seen.is_searching and not bounds.shows_kept),
            "search_max": SEARCH_LOSSES_MAX,
            "kept": KEPT_FOR_CHECKS,
        }
        models = {"model": asked}
        bounded = startable | {"worker_id": worker_id}
        flows = await tx.for_each("snapshot_flows", models, flows_max=flows_max, jobs_max=jobs_max, **bounded)
        seen.add_flows(flows, flows_max)
        seen.add_jobs(await tx.for_each("snapshot_oldest", _places(flows), jobs_max=jobs_max, **startable))
        if long := [row for row in flows if row[4]]:
            seen.add_jobs(await tx.for_each("snapshot_smallest", _places(long), jobs_max=jobs_max, **startable))
        due_max = bounds.due_of_each(len(wanted))
        seen.add_due(await tx.for_each("snapshot_due", models, due_max=due_max, **bounded))
        return seen

    @reads
    async def outlook(self, tx: Tx, job_id: str) -> Outlook | None:
        """What an estimate of a job's end can be made from; None when there is no such job."""
        rows = await tx.dicts("job_any", id=job_id)
        row = await tx.one("snapshot_now", search_max=0, worker_id="")
        if not rows or row is None:
            return None
        job = rows[0]
        parts = [
            await _model_outlook(tx, part)
            for part in await tx.all("outlook_job", job_id=job_id, jobs_max=OUTLOOK_JOBS_MAX)
        ]
        models = tuple(part for part in parts if part is not None)
        times = (job["created_at"], job["expires_at"], job["begin_by"], job["begun_at"])
        return Outlook(row[0], *times, row[1], models)


def _places(flows: list[Row]) -> dict[str, list[str]]:
    return {"model": [row[0] for row in flows], "share_owner": [row[1] for row in flows]}


def _in_flight(rows: list[Row]) -> _Out:
    out = _Out()
    out.add(rows)
    return out


class _SnapshotRows:
    """One look: its moment, what is in flight, the awake models, and the flows and jobs of some of them, each once.

    `hiding` are the models of which more flows may be ready than were looked at."""

    def __init__(self, moment: Row, out: _Out) -> None:
        self.now, self.workers, self.level, self.suspect_count, recent_count = moment
        self.is_searching = recent_count > 0 or 0 < out.lost_level <= SEARCH_LOSSES_MAX
        self.out = out
        self.awake: list[str] = []
        self.hiding: set[str] = set()
        self.flows: dict[tuple[str, str], FlowView] = {}
        self.jobs: dict[tuple[str, str], JobView] = {}

    def add_flows(self, rows: list[Row], flows_max: int) -> None:
        for model, share_owner, weight_milli, served, _ in rows:
            self._add_flow(model, share_owner, weight_milli, served)
        counts = Counter(row[0] for row in rows)
        self.hiding = {model for model, count in counts.items() if count >= flows_max}

    def add_jobs(self, rows: list[Row]) -> None:
        for row in rows:
            self._add_job(row)

    def add_due(self, rows: list[Row]) -> None:
        for row in rows:
            self._add_flow(row[0], row[1], row[14], row[15])
            self._add_job(row[:14])

    def _add_flow(self, model: str, share_owner: str, weight_milli: int, served: int) -> None:
        place = (model, share_owner)
        if place not in self.flows:
            units = self.out.flows.get(place, 0)
            self.flows[place] = FlowView(model, share_owner, weight_milli / 1000, served, units)

    def _add_job(self, row: Row) -> None:
        (
            model,
            share_owner,
            job_id,
            created_at,
            expires_at,
            begin_by,
            total,
            items,
            done,
            slices,
            leased_at,
            begun_at,
            queue,
            priority,
        ) = row
        place = (job_id, model)
        if place in self.jobs:
            return
        done_units = total * done // items
        rate = None
        if done_units and begun_at is not None and self.now - begun_at >= 1000:
            rate = 1000 * done_units / (self.now - begun_at)
        self.jobs[place] = JobView(
            job_id,
            model,
            share_owner,
            queue,
            created_at,
            expires_at,
            begin_by,
            total,
            total - done_units or 1,
            self.out.jobs.get(place, 0),
            total // slices or 1,
            leased_at,
            rate,
            items // slices or 1,
            priority,
        )


def _model(model: str, room: ModelRoom, out: _Out, hides: bool) -> ModelView:
    by_why, pace = out.by_rule(model), room.pace
    return ModelView(
        model,
        room.items,
        room.closed,
        sum(by_why.values()),
        by_why,
        pace.rate,
        pace.ratio,
        room.turn,
        pace.weights,
        pace.flow_count,
        hides,
    )


async def _pace(tx: Tx, model: str, now: int) -> ModelPace:
    minutes = await _minutes(tx, model)
    [(flow_count, weight_milli)] = await tx.all("flows_weight", model=model)
    units, tokens = sum(one.units for one in minutes), sum(one.tokens for one in minutes)
    # The minute under way has lasted only so long, and the model may have begun within it.
    seconds = max(1.0, now / 1000 - 60 * minutes[0].minute) if minutes else 1.0
    return ModelPace(
        units / seconds if units else None, tokens / units if units else 1.0, flow_count, weight_milli / 1000
    )


async def _minutes(tx: Tx, model: str) -> tuple[Minute, ...]:
    return tuple(Minute(*row) for row in await tx.all("rates_recent", model=model, minutes=RATE_MINUTES, servers=""))


async def _model_outlook(tx: Tx, row: Row) -> ModelOutlook | None:
    model, total, items, done, share_owner, state, weight_milli, ahead_units, in_flight_units = row
    if state != "open":
        return None
    [(flow_count, weights_milli)] = await tx.all("flows_weight", model=model)
    [(changed_at,)] = await tx.all("flows_changed", model=model, share_owner=share_owner)
    left = max(0, total - total * done // max(1, items))
    return ModelOutlook(
        model,
        total,
        left,
        in_flight_units,
        ahead_units,
        weight_milli / 1000,
        weights_milli / 1000,
        flow_count,
        await _minutes(tx, model),
        await other_flows(tx, model, share_owner, flow_count, weights_milli - weight_milli),
        changed_at,
    )


async def other_flows(
    tx: Tx, model: str, share_owner: str, flow_count: int, weights_milli: int
) -> tuple[tuple[float, int | None], ...]:
    """The other flows of a model with what they have; those that were not looked at count as one that has enough."""
    rows = await tx.all(
        "flows_backlog", model=model, share_owner=share_owner, jobs_max=OUTLOOK_JOBS_MAX, flows_max=OUTLOOK_FLOWS_MAX
    )
    seen: list[tuple[float, int | None]] = [(row[0] / 1000, row[1]) for row in rows]
    unseen_milli = weights_milli - sum(row[0] for row in rows)
    if flow_count > len(rows) + 1 and unseen_milli > 0:
        seen.append((unseen_milli / 1000, None))
    return tuple(seen)
