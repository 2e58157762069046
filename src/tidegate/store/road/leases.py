"""Verbs of leasing: the scheduler's snapshot of work that could run, and the lease of its picks.

A look turns rows into the nouns of `core.schedule`, and chooses nothing. `slices.py` has the verbs
about slices that are given back or lost.
"""

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from operator import itemgetter

import msgspec

from tidegate.core.answer_terms import answers_from
from tidegate.core.job_shape import shape_from
from tidegate.core.nouns import Attempts, LeasedSlice, ModelPace
from tidegate.core.schedule.outlooks import Minute
from tidegate.core.schedule.snapshot import FlowView, JobView, ModelRoom, ModelView, Pick, Snapshot, Suspects, Why
from tidegate.store.database.driver import Row, Tx
from tidegate.store.database.rows import limits_from, tries_from
from tidegate.store.database.table import Table, reads, writes
from tidegate.store.jobs.job_events import record_running

RATE_MINUTES = 15
# A slice that lost this many owners is suspected of having killed them. The statements have the
# same number, because their index must.
SUSPECT_AFTER = 3
ALL_SUSPECTS = 1 << 40
# How many of a job's slices that never lost an owner are left while a culprit is searched for in
# the job: an item that runs alone must be compared with others. After SEARCH_LOSSES_MAX losses of a
# slice, other slices do not wait for the search any more.
KEPT_FOR_CHECKS = 2
SEARCH_LOSSES_MAX = 16
_NONE_IS_SUSPECT = 1 << 62
_WHY = {why.value: why for why in Why}


class SnapshotBounds(msgspec.Struct, frozen=True):
    """The bounds of one look at the store.

    A look shows some flows, the oldest and the smallest jobs of each, and the jobs of a model that
    are due first. If there are many flows or models, it shows fewer jobs of each. Without
    `shows_suspects` it leaves out jobs that have only suspect slices ready. `shows_kept` adds
    slices that are kept for checks.
    """

    flows_max: int = 50
    jobs_per_flow_max: int = 50
    due_jobs_max: int = 40
    jobs_max: int = 400
    models_max: int = 1_000
    shows_suspects: bool = True
    shows_kept: bool = False

    def flows_of_each(self, model_count: int, in_flight: int) -> int:
        """Return how many flows of each model are looked at.

        Flows in flight may be among the least served without being next, so they get extra places.
        """
        share = max(1, self.flows_max // (2 * model_count))
        return share + min(in_flight, share)

    def jobs_of_each(self) -> int:
        return max(1, min(self.jobs_per_flow_max, self.jobs_max // self.flows_max))

    def due_of_each(self, model_count: int) -> int:
        return max(1, self.due_jobs_max // model_count)


BOUNDS = SnapshotBounds()


class _Out(msgspec.Struct):
    """The units in flight by model and rule, by share owner, by flow, and by job and model.

    `lost_level` is how many owners the worst slice lost. `others_level` is that of the worst slice
    that another worker has leased.
    """

    rules: dict[tuple[str, str], int] = msgspec.field(default_factory=dict)
    owners: dict[str, int] = msgspec.field(default_factory=dict)
    flows: dict[tuple[str, str], int] = msgspec.field(default_factory=dict)
    jobs: dict[tuple[str, str], int] = msgspec.field(default_factory=dict)
    lost_level: int = 0
    others_level: int = 0

    def add(self, rows: list[Row]) -> None:
        # Each look adds one row for each leased slice, so keep this fast.
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
        """Return the number of flows in flight of the model that has most."""
        return max(Counter(model for model, _ in self.flows).values(), default=0)


class Leases(Table):
    @reads
    async def awake_models(self, tx: Tx, count_max: int) -> list[str]:
        """Return the models that have work.

        A worker checks its room for them before it looks closer.
        """
        return [row[0] for row in await tx.all("awake_models", count_max=count_max)]

    @reads
    async def unleased_models(self, tx: Tx, count_max: int) -> list[str]:
        """Return the models with due work of which nothing is leased."""
        [(now,)] = await tx.all("now")
        return [one[0] for one in await tx.all("unleased_models", now=now, count_max=count_max)]

    @reads
    async def paces(self, tx: Tx, models: list[str]) -> dict[str, ModelPace]:
        """Return the pace of each model in the last minutes, and how many flows share it."""
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
        """Look at the work that could run now, within bounds.

        Nothing is read of a model without room, so it hides no other model. The snapshot names all
        awake models, also those that are not in `rooms`.
        """
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
        """Read the awake models, and the flows and jobs of the wanted ones."""
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

    @writes
    async def lease_picks(
        self,
        tx: Tx,
        worker_id: str,
        picks: Sequence[tuple[Pick, str]],
        suspects_max: int = ALL_SUSPECTS,
        *,
        keeps_rest: bool = False,
    ) -> list[LeasedSlice]:
        """Lease the picked slices, each pick under a token that the caller made.

        - A replay returns the same slices.
        - All picks go in one transaction: the sooner they are leases, the fewer workers pick the
          same.
        - Afterwards the worker has at most `suspects_max` suspect slices.
        - With `keeps_rest` it leaves a few slices that never lost an owner, for checks.
        """
        # Lock jobs first and write their models last, both in one order, so that no deadlock is
        # possible.
        doors = await _open(tx, worker_id, sorted(picks, key=lambda one: one[0].job_id))
        fresh = [(pick, token) for pick, token in picks if (door := doors.get(token)) and not door.is_replay]
        taken = await _lease(tx, worker_id, fresh, suspects_max, KEPT_FOR_CHECKS if keeps_rest else 0)
        leased: list[LeasedSlice] = []
        stamps: set[tuple[str, str]] = set()
        begun: set[str] = set()
        first_time: dict[str, list[tuple[int, int]]] = {}
        for pick, token in picks:
            door = doors.get(token)
            if door is None or door.is_replay:
                leased += await _leased_before(tx, worker_id, pick, token)
                continue
            rows = taken.get(token, [])
            leased += [await _leased(tx, pick, door, row) for row in rows]
            if door.has_item_events:
                first_time.setdefault(pick.job_id, []).extend((row[2], row[3]) for row in rows if row[-1] == 1)
            if rows and door.is_old:
                stamps.add((pick.job_id, pick.model))
            if rows and not door.has_begun:
                begun.add(pick.job_id)
        for job_id, spans in sorted(first_time.items()):
            await record_running(tx, job_id, spans)
        for job_id in sorted(begun):
            await tx.all("job_begin", job_id=job_id)
            await tx.all("job_models_begun", job_id=job_id)
        for job_id, model in sorted(stamps):
            await tx.all("job_models_leased", job_id=job_id, model=model)
        return leased

    @writes
    async def rest_job(self, tx: Tx, job_id: str, model: str, wait_ms: int) -> None:
        """Let this job and model rest for a while, because its own budgets allow nothing."""
        await tx.all("job_models_rest", job_id=job_id, model=model, wait_ms=wait_ms)


# ---- the look


def _places(flows: list[Row]) -> dict[str, list[str]]:
    return {"model": [row[0] for row in flows], "share_owner": [row[1] for row in flows]}


def _in_flight(rows: list[Row]) -> _Out:
    out = _Out()
    out.add(rows)
    return out


class _SnapshotRows:
    """The rows of one look.

    They are its moment, the units in flight, the awake models, and the flows and jobs of some of
    them, each once. `hiding` has the models that may have more ready flows than were looked at.
    """

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
    minutes = await rates_of(tx, model)
    [(flow_count, weight_milli)] = await tx.all("flows_weight", model=model)
    units, tokens = sum(one.units for one in minutes), sum(one.tokens for one in minutes)
    # Count the present minute only as far as it has passed, also if it is the model's first.
    seconds = max(1.0, now / 1000 - 60 * minutes[0].minute) if minutes else 1.0
    return ModelPace(
        units / seconds if units else None, tokens / units if units else 1.0, flow_count, weight_milli / 1000
    )


async def rates_of(tx: Tx, model: str) -> tuple[Minute, ...]:
    return tuple(Minute(*row) for row in await tx.all("rates_recent", model=model, minutes=RATE_MINUTES, servers=""))


# ---- the lease


class _Door(msgspec.Struct, frozen=True):
    """A job that is open for a lease.

    - `is_old`: its last lease was over a second ago.
    - `is_replay`: this is a replay of a lease that was made before.
    - `job`: the facts about the job that each leased slice gets.
    """

    has_begun: bool
    is_old: bool
    is_replay: bool
    job: Row

    @property
    def has_item_events(self) -> bool:
        """Return whether each item of the job has events."""
        return bool(self.job[-1])


async def _open(tx: Tx, worker_id: str, picks: Sequence[tuple[Pick, str]]) -> dict[str, _Door]:
    """Return the open jobs of these picks, by token."""
    asked = [(token, pick.model, pick.job_id, worker_id) for pick, token in picks]
    rows = await tx.many_returning("job_open_for_lease", asked)
    doors = {row[0]: _Door(True, bool(row[1]), bool(row[2]), row[3:]) for row in rows}
    for pick, token in picks:
        if token not in doors:
            row = await tx.one("job_open_to_begin", job_id=pick.job_id)
            if row is not None:
                doors[token] = _Door(False, True, False, row[1:])
    return doors


async def _lease(
    tx: Tx, worker_id: str, picks: Sequence[tuple[Pick, str]], suspects_max: int, kept: int
) -> dict[str, list[Row]]:
    """Lease slices for these picks. Return them by token, in order of number."""
    asked = [
        (
            pick.job_id,
            pick.model,
            suspects_max,
            worker_id,
            kept,
            SEARCH_LOSSES_MAX,
            pick.slice_count,
            token,
            pick.why.value,
        )
        for pick, token in picks
    ]
    taken: dict[str, list[Row]] = {}
    for row in sorted(await tx.many_returning("slices_lease", asked), key=itemgetter(2)):
        taken.setdefault(row[0], []).append(row)
    return taken


async def _leased_before(tx: Tx, worker_id: str, pick: Pick, token: str) -> list[LeasedSlice]:
    """Return the slices that an earlier lease still has, even if its job is closing."""
    rows = await tx.all("slices_of_token", job_id=pick.job_id, token=token, worker_id=worker_id)
    if not rows:
        return []
    job = await tx.one("job_of_lease", job_id=pick.job_id)
    assert job is not None, "a slice has a job"
    door = _Door(True, False, True, job[1:])
    return [await _leased(tx, pick, door, row) for row in rows]


async def _leased(tx: Tx, pick: Pick, door: _Door, row: Row) -> LeasedSlice:
    token, endpoint, first, count, read_first, work_at, work_bytes, work_units, lost_count, lease_count = row
    (
        tenant_id,
        work_blob_id,
        expires_in_ms,
        tenant,
        share_owner,
        key_id,
        user,
        team,
        limits,
        answers,
        shape,
        trace,
        interactive_in_ms,
        _,
    ) = door.job
    span = {"job_id": pick.job_id, "first": first, "count": count}
    done: frozenset[int] = frozenset()
    attempts: dict[int, Attempts] = {}
    if lease_count > 1:
        done = frozenset(found[0] for found in await tx.all("slice_outcomes", **span))
        for found in await tx.all("slice_attempts", **span):
            number, tried, wait_ms, reason, hand_backs, alone_losses, tries = found
            attempts[number] = Attempts(number, tried, wait_ms, reason, hand_backs, alone_losses, tries_from(tries))
    return LeasedSlice(
        pick.job_id,
        tenant_id,
        endpoint,
        pick.model,
        first,
        count,
        read_first,
        work_blob_id,
        work_at,
        work_bytes,
        work_units // count,
        lost_count,
        token,
        expires_in_ms,
        tenant,
        share_owner,
        key_id,
        user,
        team,
        limits_from(limits),
        done,
        attempts,
        answers_from(answers),
        shape_from(shape).retry,
        shape_from(shape).betas,
        trace,
        interactive_in_ms,
    )
