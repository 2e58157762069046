"""Verbs about ingest: the next inputs, their sources, and the start of ingested jobs."""

from collections.abc import Mapping, Sequence
from typing import Any

from tidegate.core.errors import LostRace
from tidegate.core.input.turns import BYTES_MAX, IngestLane, IngestTurn, WaitingInput, WaitingTenant, choose_inputs
from tidegate.core.nouns import IngestSource, JobStart
from tidegate.store.database.driver import Row, Tx
from tidegate.store.database.rows import job_from, searched_text
from tidegate.store.database.table import SLICE_COLUMNS, Table, reads, writes
from tidegate.store.jobs.canaries import begin_sample
from tidegate.store.jobs.flows import wake_flows

BYTES_ANY = (0, BYTES_MAX)
# The sums that `job_add` adds to a job of which no item is run.
NOTHING_ADDED = (0,) * 12


class Ingests(Table):
    @reads
    async def jobs_waiting_ingest(self, tx: Tx, count_max: int, sizes: tuple[int, int] = BYTES_ANY) -> list[str]:
        """Return jobs that no worker ingests now, and whose ingest costs bytes within `sizes`."""
        rows = await tx.all("jobs_waiting_ingest", bytes_min=sizes[0], bytes_max=sizes[1], count_max=count_max)
        return [row[0] for row in rows]

    @writes
    async def take_ingests(
        self,
        tx: Tx,
        lane: IngestLane,
        sizes: tuple[int, int],
        count_max: int,
        worker_id: str,
        token: str,
        passed_over: frozenset[str] = frozenset(),
    ) -> list[str]:
        """Take the ingest of the next jobs of a lane, all under one token.

        `passed_over` are tenants that get none now.
        """
        if taken := await tx.all("ingest_taken", worker_id=worker_id, token=token):
            return [row[0] for row in taken]
        [(locked,)] = await tx.all("ingest_clock_hold", lane=lane)
        clock = int(locked)
        bounds = {"bytes_min": sizes[0], "bytes_max": sizes[1], "worker_id": worker_id}
        # Tenants come in the order of the clock, so only the first of them can have a turn now.
        tenants_max = count_max + len(passed_over)
        places = await tx.all("ingest_tenants", lane=lane, clock=clock, tenants_max=tenants_max, **bounds)
        waiting = [
            WaitingTenant(tenant_id, place, await _waiting_inputs(tx, tenant_id, count_max, bounds))
            for tenant_id, place in places
            if tenant_id not in passed_over
        ]
        # All inputs of a turn start together, so the small ones together cost no more than one may
        # cost.
        turns = choose_inputs(waiting, clock, count_max, sizes[1])
        rows = await tx.many_returning("ingest_take", sorted((token, worker_id, turn.job_id) for turn in turns))
        mine = {row[0] for row in rows}
        await _advance(tx, lane, [turn for turn in turns if turn.job_id in mine])
        return [turn.job_id for turn in turns if turn.job_id in mine]

    @writes
    async def give_back_ingests(self, tx: Tx, worker_id: str, token: str) -> None:
        """Give back the steps of this token. Steps that ended are not changed."""
        await tx.all("ingest_give_back", worker_id=worker_id, token=token)

    @reads
    async def ingest_sources(self, tx: Tx, job_ids: Sequence[str]) -> list[IngestSource]:
        """Return the sources for the ingest of these jobs, without jobs that are gone."""
        found = [await _source(tx, job_id) for job_id in job_ids]
        return [source for source in found if source is not None]

    @writes
    async def start_jobs(self, tx: Tx, starts: Sequence[JobStart]) -> set[str]:
        """Start ingested jobs in one transaction.

        Return those that were closed or taken over meanwhile.

        This writes slices and hidden result files, wakes flows, and moves the jobs to
        `in_progress`. Raise LostRace, and start none, if a work file was collected.
        """
        return await start_ingested(tx, starts)


async def start_ingested(tx: Tx, starts: Sequence[JobStart]) -> set[str]:
    """Start jobs whose work files are durable.

    Return those that were closed or taken over meanwhile.
    """
    by_id = {start.job_id: start for start in sorted(starts, key=lambda start: start.job_id)}
    rows = await tx.many_returning("job_start", [_start_row(start) for start in by_id.values()])
    places = {row[0]: row[1:] for row in rows}
    lost = {
        job_id
        for job_id, start in by_id.items()
        if job_id not in places and not await _was_started(tx, job_id, start.work_blob_id)
    }
    await _keep_work_files(tx, [by_id[job_id] for job_id in places])
    await _put_result_files(tx, [(by_id[job_id], *place[:2]) for job_id, place in places.items()])
    flows = await _put_slices(tx, [(by_id[job_id], (place[0], *place[2:])) for job_id, place in places.items()])
    for job_id in places:
        if (count := by_id[job_id].plan.sample_count) is not None:
            await begin_sample(tx, job_id, count)
    idle = [job_id for job_id in places if not by_id[job_id].plan.slices]
    if idle:
        # No item of these jobs runs, so they are done.
        await tx.many_returning("job_add", [(*NOTHING_ADDED, job_id) for job_id in idle])
    # All transactions wake flows in this order, so that they never deadlock.
    for model, share_owner in sorted(flows):
        await wake_flows(tx, [model], share_owner, *flows[model, share_owner])
    return lost


async def _waiting_inputs(tx: Tx, tenant_id: str, count_max: int, bounds: Mapping[str, Any]) -> list[WaitingInput]:
    rows = await tx.all("ingest_candidates", tenant_id=tenant_id, count_max=count_max, **bounds)
    return [WaitingInput(*row) for row in rows]


async def _advance(tx: Tx, lane: IngestLane, turns: Sequence[IngestTurn]) -> None:
    if not turns:
        return
    places = {turn.tenant_id: turn.end for turn in turns}
    await tx.many("ingest_place_put", [(lane, tenant_id, place) for tenant_id, place in places.items()])
    # No turn starts before the clock.
    clock = max(turn.start for turn in turns)
    await tx.all("ingest_clock_set", lane=lane, clock=clock)
    await tx.all("ingest_places_forget", lane=lane, clock=clock)


async def _source(tx: Tx, job_id: str) -> IngestSource | None:
    rows = await tx.dicts("ingest_source", id=job_id)
    if not rows:
        return None
    row = rows[0]
    job = job_from(row)
    more = await tx.all("ingest_more", id=job_id) if job.shape.more_inputs else ()
    return IngestSource(
        job=job,
        sha256=row["input_sha256"],
        blob_id=row["input_blob_id"],
        tenant=row["tenant_name"],
        key_names=None if row["key_models"] is None else (row["key_models"], row["key_resources"]),
        more=tuple((one[0], one[1], one[2]) for one in more),
    )


def _start_row(start: JobStart) -> tuple[Any, ...]:
    """Return the parameters of `job_start` in its order."""
    plan = start.plan
    return (
        plan.model,
        searched_text(sorted({one.model for one in plan.slices})),
        plan.item_count,
        start.output_file_id,
        start.error_file_id,
        start.work_blob_id,
        plan.work_bytes,
        plan.prompt_bytes,
        plan.shared_prefix_bytes,
        plan.copied.deduplicated,
        plan.copied.reused,
        plan.copied.work_at,
        start.job_id,
        start.token,
    )


async def _was_started(tx: Tx, job_id: str, work_blob_id: str) -> bool:
    """Return whether this call is the replay of one that was committed."""
    rows = await tx.dicts("job_any", id=job_id)
    return bool(rows) and rows[0]["work_blob_id"] == work_blob_id


async def _keep_work_files(tx: Tx, starts: Sequence[JobStart]) -> None:
    rows = [(start.plan.work_bytes + 4 * start.plan.item_count, 1, start.work_blob_id) for start in starts]
    if len(await tx.many_returning("blob_keep", rows)) < len(rows):
        raise LostRace("a work file was collected while its job was ingested")


async def _put_result_files(tx: Tx, owned: Sequence[tuple[JobStart, str, str]]) -> None:
    """Write the two files of each job, hidden until it ends.

    Each job comes with its tenant and kind.
    """
    rows = [
        (file_id, tenant_id, start.job_id, f"{kind}_output", f"{start.job_id}_{name}.jsonl", "growing", 0, 0, "", None)
        for start, tenant_id, kind in owned
        for file_id, name in ((start.output_file_id, "output"), (start.error_file_id, "error"))
    ]
    await tx.many("file_put", rows)


async def _put_slices(tx: Tx, placed: Sequence[tuple[JobStart, Row]]) -> dict[tuple[str, str], tuple[str, int | None]]:
    """Write the slices of jobs, and their sums for each model.

    A place is the row of `job_start` for a job: its tenant and share owner first, then the columns
    that each of its models gets. Return the flows by model and share owner, each with its tenant
    and weight.
    """
    [(now,)] = await tx.all("now")
    slices: list[tuple[Any, ...]] = []
    models: dict[tuple[str, str], list[Any]] = {}
    flows: dict[tuple[str, str], tuple[str, int | None]] = {}
    for start, (tenant_id, *place) in placed:
        for s in start.plan.slices:
            counts = (s.first, s.work_at, s.work_bytes, s.work_units)
            slices.append((start.job_id, s.first, s.count, s.model, s.endpoint, "ready", now, 0, 0, *counts))
            sums = models.setdefault((start.job_id, s.model), [0, 0, 0, *place])
            sums[0] += s.count
            sums[1] += 1
            sums[2] += s.work_units
            flows[s.model, place[0]] = (tenant_id, start.weight_milli)
    await tx.copy("slices", SLICE_COLUMNS, slices)
    await tx.many("job_model_put", [(*name, *sums) for name, sums in models.items()])
    return flows
