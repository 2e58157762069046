"""Verbs of operators across all tenants: look at everything, and repair stuck jobs.

No request of a tenant uses them.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from tidegate.core.errors import ApiProblem
from tidegate.core.job_lists import JobFilter, JobSort
from tidegate.core.nouns import FOREVER_MS, Job, LineError
from tidegate.core.schedule.autoscale import DueWork
from tidegate.core.states import JOB_ENDED, DeliveryState, JobState
from tidegate.core.webhooks import WebhookDelivery
from tidegate.store.database.driver import Row, Tx
from tidegate.store.database.rows import errors_text, job_from
from tidegate.store.database.table import Table, reads, writes
from tidegate.store.jobs.jobs import filter_columns, status_group
from tidegate.store.jobs.sorted_jobs import sorted_page
from tidegate.store.tenants.webhooks import deliveries_start, delivery_from

_LIST_START = (1 << 62, "")
RATE_MINUTES = 5
HISTORY_MINUTES = 60
MODELS_MAX = 1_000
STUCK_MAX = 20
LATELY_MS = 3_600_000
ENDED_MAX = 10_000
RUNS_MAX = 10
DUE_MAX = 10_000
SOON_MS = 600_000
FAILED_BY_OPERATOR = LineError("failed_by_operator", "An operator ended this batch.", None)


class OverviewRows(msgspec.Struct, frozen=True):
    """The data of an overview, each row by column name.

    `rates` are items and tokens a second, by model.
    """

    jobs: list[dict[str, Any]]
    ended: list[dict[str, Any]]
    models: list[dict[str, Any]]
    rates: dict[str, tuple[float, float]]
    stuck: list[dict[str, Any]]


class WaitingWork(msgspec.Struct, frozen=True):
    """The due work by model.

    `has_steps` is set while anything else waits for a worker: a job to ingest, end or publish, an
    operation, or a delivery. A paused job waits for nothing until its deadline.
    """

    due: dict[str, list[DueWork]]
    has_steps: bool


class OperatedStore(Table):
    @reads
    async def search_every_job(
        self,
        tx: Tx,
        org: str | None,
        wanted: JobFilter,
        *,
        after: str | None,
        count_max: int,
        sort: JobSort = JobSort.CREATED,
    ) -> list[tuple[Job, str]] | None:
        """Return a page of jobs with their organizations; None if `after` is no job."""
        start: Row | None = _LIST_START
        if after is not None:
            start = await tx.one("jobs_cursor", id=after)
        if start is None:
            return None
        owner = None if org is None else await tx.one("tenant_by_name", name=org)
        if org is not None and owner is None:
            return []
        place = (start[0], start[1]) if sort is JobSort.CREATED else _LIST_START
        page = {"tenant_id": owner and owner[0], "count_max": count_max, **filter_columns(wanted, place)}
        if sort is not JobSort.CREATED:
            return await sorted_page(tx, sort, page, after)
        rows = await tx.dicts(f"jobs_search{status_group(wanted)}", **page)
        return [(job_from(row), row["org"]) for row in rows]

    @reads
    async def job_of_anyone(self, tx: Tx, job_id: str) -> tuple[Job, str] | None:
        """Return a batch of any tenant, with its organization."""
        rows = await tx.dicts("job_of_anyone", id=job_id)
        return (job_from(rows[0]), rows[0]["org"]) if rows else None

    @reads
    async def runs_of_file(self, tx: Tx, tenant_id: str, file_id: str, count_max: int = RUNS_MAX) -> list[Job]:
        """Return a tenant's last batches of a file, newest first."""
        rows = await tx.dicts("runs_of_file", tenant_id=tenant_id, file_id=file_id, count_max=count_max)
        return [job_from(row) for row in rows]

    @writes
    async def retry_finalization(self, tx: Tx, job_id: str) -> Job | None:
        """Let a job whose publishing failed be published again at once.

        Return None if there is no such job.
        """
        done = await tx.one("job_retry_finalization", id=job_id)
        rows = await tx.dicts("job_any", id=job_id)
        if not rows:
            return None
        job = job_from(rows[0])
        if done is None:
            raise _refused(job, "batch_not_finalizing", "finalized again")
        return job

    @writes
    async def end_as_failed(self, tx: Tx, job_id: str) -> Job | None:
        """End a job as failed and keep its results; None if there is no such job.

        A repeat is harmless.
        """
        await tx.one("job_halt", id=job_id)
        errors = errors_text([FAILED_BY_OPERATOR])
        if await tx.one("job_fail_asked", id=job_id, errors=errors) is not None:
            await tx.all("job_models_close", job_id=job_id)
        rows = await tx.dicts("job_any", id=job_id)
        if not rows:
            return None
        job = job_from(rows[0])
        if JobState.FAILED not in (job.closing, job.state):
            raise _refused(job, "batch_not_failable", "ended as failed")
        return job

    @writes
    async def requeue_job(self, tx: Tx, job_id: str) -> Job | None:
        """Wake everything of a job that rests: slices, models, flows and steps.

        Return None if there is no such job. Slices that workers have leased stay with them.
        """
        await tx.one("job_halt", id=job_id)
        await tx.all("job_slices_wake", job_id=job_id, forever=FOREVER_MS)
        for statement in ("job_steps_wake", "job_models_wake", "job_flows_wake"):
            await tx.all(statement, job_id=job_id)
        rows = await tx.dicts("job_any", id=job_id)
        if not rows:
            return None
        job = job_from(rows[0])
        if job.state in JOB_ENDED:
            raise _refused(job, "batch_not_requeuable", "queued again")
        return job

    @reads
    async def overview(self, tx: Tx) -> OverviewRows:
        """Return open jobs, recently ended ones, waiting work by model, rates, and stuck jobs."""
        [(now_ms,)] = await tx.all("now")
        span_s = 60 * RATE_MINUTES + now_ms % 60_000 / 1000
        rates = await tx.all("overview_rates", minutes=RATE_MINUTES)
        return OverviewRows(
            await tx.dicts("overview_jobs"),
            await tx.dicts("overview_ended", since=now_ms - LATELY_MS, count_max=ENDED_MAX),
            await tx.dicts("overview_models", count_max=MODELS_MAX),
            {row[0]: (int(row[1]) / span_s, int(row[2]) / span_s) for row in rates},
            await tx.dicts("overview_stuck", soon_ms=SOON_MS, count_max=STUCK_MAX),
        )

    @reads
    async def minute_counts(self, tx: Tx) -> tuple[int, dict[int, tuple[int, int]]]:
        """Return the store's time, and the answered items and tokens by minute, up to this one."""
        rows = await tx.all("overview_minutes", minutes=HISTORY_MINUTES)
        now = await tx.one("now")
        assert now is not None
        return int(now[0]), {int(row[0]): (int(row[1]), int(row[2])) for row in rows}

    @reads
    async def due_work(self, tx: Tx) -> WaitingWork:
        """Return the work that is due for open deadlines."""
        due: dict[str, list[DueWork]] = {}
        for model, due_in_ms, units in await tx.all("due_work", count_max=DUE_MAX):
            due.setdefault(model, []).append(DueWork(due_in_ms, units))
        return WaitingWork(due, await tx.one("steps_waiting") is not None)

    @reads
    async def list_flows(self, tx: Tx, model: str | None, count_max: int) -> list[dict[str, Any]]:
        """Return flows by model, awake ones first, in order of their service."""
        return await tx.dicts("flows_shown", model=model, count_max=count_max)

    @writes
    async def refresh_flows(self, tx: Tx) -> int:
        """Let the next sweep look at all resting flows again. Return how many."""
        return len(await tx.all("flows_refresh"))

    @reads
    async def list_orgs(self, tx: Tx, *, after: str | None, count_max: int) -> list[dict[str, Any]] | None:
        """Return a page of organizations, newest first; None if `after` is no organization."""
        start: Sequence[Any] | None = _LIST_START
        if after is not None:
            start = await tx.one("org_cursor", id=after)
        if start is None:
            return None
        return await tx.dicts("org_page", created_at=start[0], id=start[1], count_max=count_max)

    @reads
    async def list_every_delivery(
        self, tx: Tx, org: str | None, state: DeliveryState | None, after: tuple[str, str] | None, count_max: int
    ) -> list[tuple[WebhookDelivery, str]] | None:
        """Return a page of deliveries with their organizations, newest first.

        Return None if there is no `after`. `after` is an event and an endpoint.
        """
        start = await deliveries_start(tx, after)
        if start is None:
            return None
        created_at, event_id, endpoint_id = start
        rows = await tx.dicts(
            "deliveries_page",
            org=org,
            state=state,
            created_at=created_at,
            event_id=event_id,
            endpoint_id=endpoint_id,
            count_max=count_max,
        )
        return [(delivery_from(row), row["org"]) for row in rows]

    @reads
    async def tenant_of_delivery(self, tx: Tx, event_id: str, endpoint_id: str) -> str | None:
        """Return the id of the tenant that owns this delivery."""
        rows = await tx.dicts("delivery_of_anyone", event_id=event_id, endpoint_id=endpoint_id)
        return rows[0]["tenant_id"] if rows else None


def _refused(job: Job, code: str, verb: str) -> ApiProblem:
    return ApiProblem(409, code, f"A batch with status '{job.state}' cannot be {verb}.", param="batch_id")
