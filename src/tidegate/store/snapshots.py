"""Verbs that only look: what a scheduler decides on, and what an estimate of a job's end is made from.

They turn rows into what `core.schedule` understands. They choose nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tidegate.core.nouns import Minute, ModelOutlook, Outlook, Pace
from tidegate.core.schedule.snapshot import FlowView, JobView, ModelView, Snapshot, Turn, Why
from tidegate.store.driver import Row, Tx
from tidegate.store.slices import SUSPECT_AFTER
from tidegate.store.table import Table

RATE_MINUTES = 15
OUTLOOK_JOBS_MAX = 10_000
# What separates the parts of a list that comes as text; no name holds one of them.
_WITHIN, _BETWEEN, _BEHIND = "\x1f", "\n", "\r"
_NOBODY_IS_SUSPECT = 1 << 62


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much of the store one look may show: flows per model beside those that are out, the oldest and the smallest jobs of each, and
    the jobs of a model that are due first."""

    flows_max: int = 10
    jobs_per_flow_max: int = 4
    due_jobs_max: int = 8


BOUNDS = Bounds()


@dataclass(slots=True)
class _Out:
    """What is in flight, summed up."""

    models: dict[str, dict[Why, int]] = field(default_factory=dict)
    scopes: dict[str, int] = field(default_factory=dict)
    flows: dict[tuple[str, str], FlowView] = field(default_factory=dict)
    jobs: dict[tuple[str, str], int] = field(default_factory=dict)
    holds_suspect: bool = False

    def add(self, row: Row) -> None:
        job_id, model, why, scope, weight_milli, served, units, lost_count = row
        by_why = self.models.setdefault(model, {})
        by_why[Why(why)] = by_why.get(Why(why), 0) + units
        self.scopes[scope] = self.scopes.get(scope, 0) + units
        self.jobs[job_id, model] = self.jobs.get((job_id, model), 0) + units
        before = self.flows.get((model, scope))
        in_flight = units + (before.in_flight_units if before else 0)
        self.flows[model, scope] = FlowView(model, scope, weight_milli / 1000, served, in_flight)
        self.holds_suspect = self.holds_suspect or lost_count >= SUSPECT_AFTER

    def most_flows(self) -> int:
        counts: dict[str, int] = {}
        for model, _ in self.flows:
            counts[model] = counts.get(model, 0) + 1
        return max(counts.values(), default=0)


class Snapshots(Table):
    async def awake_models(self, count_max: int) -> list[str]:
        """The models that have anything to do: what a worker finds its room for before it looks closer."""

        async def body(tx: Tx) -> list[str]:
            return [row[0] for row in await tx.all("awake_models", count_max=count_max)]

        return await self._driver.read(body)

    async def paces(self, models: list[str]) -> dict[str, Pace]:
        """How each model went in the last minutes, and who shares it."""

        async def body(tx: Tx) -> dict[str, Pace]:
            row = await tx.one("now")
            now = row[0] if row else 0
            return {model: await _pace(tx, model, now) for model in models}

        return await self._driver.read(body)

    async def snapshot(
        self,
        worker_id: str,
        room: Mapping[str, int],
        *,
        slice_items: int,
        slices_max: int,
        closed: Mapping[str, str] | None = None,
        paces: Mapping[str, Pace] | None = None,
        turns: Mapping[str, Turn] | None = None,
        bounds: Bounds = BOUNDS,
    ) -> Snapshot:
        """A bounded look at what could run now. `room` says how many items of each model the worker could take; a model without room is
        shown with the reason in `closed`, and nothing of it is read, so it hides nothing."""
        wanted = [model for model, items in sorted(room.items()) if items > 0]
        closed, paces, turns = closed or {}, paces or {}, turns or {}

        async def body(tx: Tx) -> tuple[int, int, _Out, list[Row]]:
            row = await tx.one("snapshot_now")
            now, workers = (row[0], row[1]) if row else (0, 0)
            out = _Out()
            for one in await tx.all("snapshot_in_flight", worker_id=worker_id):
                out.add(one)
            rows = await _look(tx, now, wanted, out, bounds) if wanted else []
            return now, workers, out, rows

        now, workers, out, rows = await self._driver.read(body)
        flows = {place: flow for place, flow in out.flows.items() if room.get(flow.model, 0) > 0}
        jobs: dict[tuple[str, str], JobView] = {}
        clocks: dict[str, int] = {}
        for model, clock, flows_text, due_text in rows:
            clocks[model] = clock
            for flow, lines in _flows_of(model, flows_text or "", out):
                flows[model, flow.scope] = flow
                jobs.update(_job(model, flow.scope, line, now, out) for line in lines)
            for line in _split(due_text or "", _BETWEEN):
                *of_job, scope, weight_milli, served = line.split(_WITHIN)
                place = (model, scope)
                flows.setdefault(place, FlowView(model, scope, int(weight_milli) / 1000, int(served), 0))
                jobs.update([_job(model, scope, _WITHIN.join(of_job), now, out)])
        models = {
            model: _model(model, items, closed.get(model), out, paces.get(model, Pace()), clocks.get(model, 0), turns)
            for model, items in room.items()
        }
        ordered = sorted(flows.values(), key=lambda flow: (flow.model, flow.served, flow.scope))
        shown = sorted(jobs.values(), key=lambda job: (job.created_at, job.job_id, job.model))
        return Snapshot(now, models, ordered, shown, out.scopes, slice_items, slices_max, max(1, workers))

    async def outlook(self, job_id: str) -> Outlook | None:
        """What an estimate of a job's end can be made from; None when there is no such job."""

        async def body(tx: Tx) -> Outlook | None:
            rows = await tx.dicts("job_any", id=job_id)
            row = await tx.one("snapshot_now")
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

        return await self._driver.read(body)


async def _look(tx: Tx, now: int, wanted: list[str], out: _Out, bounds: Bounds) -> list[Row]:
    # The flows in flight may be among the least served and yet not be next: they do not use up the places of the others.
    return await tx.all(
        "snapshot_models",
        now=now,
        models="".join(f"{_BETWEEN}{model}{_BEHIND}" for model in wanted),
        within=_WITHIN,
        between=_BETWEEN,
        behind=_BEHIND,
        lost_below=SUSPECT_AFTER if out.holds_suspect else _NOBODY_IS_SUSPECT,
        flows_max=bounds.flows_max + min(out.most_flows(), 2 * bounds.flows_max),
        jobs_max=bounds.jobs_per_flow_max,
        due_max=bounds.due_jobs_max,
    )


def _split(text: str, separator: str) -> list[str]:
    return text.split(separator) if text else []


def _flows_of(model: str, text: str, out: _Out) -> list[tuple[FlowView, list[str]]]:
    found = []
    for line in _split(text, _BEHIND):
        scope, weight_milli, served, jobs = line.split(_WITHIN, 3)
        known = out.flows.get((model, scope))
        flow = FlowView(model, scope, int(weight_milli) / 1000, int(served), known.in_flight_units if known else 0)
        found.append((flow, _split(jobs, _BETWEEN)))
    return found


def _job(model: str, scope: str, line: str, now: int, out: _Out) -> tuple[tuple[str, str], JobView]:
    job_id, *numbers, queue = line.split(_WITHIN)
    created_at, expires_at, begin_by, total, items, done, slices, leased_at, begun_at = map(int, numbers)
    done_units = total * done // max(1, items)
    elapsed_s = (now - begun_at) / 1000
    rate = done_units / elapsed_s if begun_at >= 0 and done_units and elapsed_s >= 1 else None
    view = JobView(
        job_id,
        model,
        scope,
        queue,
        created_at,
        expires_at,
        begin_by if begin_by >= 0 else None,
        total,
        max(1, total - done_units),
        out.jobs.get((job_id, model), 0),
        max(1, total // max(1, slices)),
        leased_at if leased_at >= 0 else None,
        rate,
        max(1, items // max(1, slices)),
    )
    return (job_id, model), view


def _model(
    model: str, room_items: int, closed: str | None, out: _Out, pace: Pace, clock: int, turns: Mapping[str, Turn]
) -> ModelView:
    by_why = out.models.get(model, {})
    return ModelView(
        model,
        room_items,
        closed,
        sum(by_why.values()),
        by_why,
        pace.rate,
        clock,
        pace.ratio,
        turns.get(model),
        pace.weights,
    )


async def _pace(tx: Tx, model: str, now: int) -> Pace:
    minutes = await _minutes(tx, model)
    shared = await tx.one("flows_weight", model=model)
    flow_count, weight_milli = (shared[0], shared[1]) if shared else (0, 0)
    units, tokens = sum(one.units for one in minutes), sum(one.tokens for one in minutes)
    # The minute under way has lasted only so long, and the model may have begun within it.
    seconds = max(1.0, now / 1000 - 60 * minutes[0].minute) if minutes else 1.0
    return Pace(units / seconds if units else None, tokens / units if units else 1.0, flow_count, weight_milli / 1000)


async def _minutes(tx: Tx, model: str) -> tuple[Minute, ...]:
    return tuple(Minute(*row) for row in await tx.all("rates_recent", model=model, minutes=RATE_MINUTES))


async def _model_outlook(tx: Tx, row: Row) -> ModelOutlook | None:
    model, total, items, done, _, state, weight_milli, ahead_units, in_flight_units = row
    if state != "open":
        return None
    shared = await tx.one("flows_weight", model=model)
    flow_count, weights_milli = (shared[0], shared[1]) if shared else (0, 0)
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
    )
