"""Verbs about jobs, from their creation to their end.

`outcomes.py` records what happens in between.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from tidegate.core.answer_terms import answers_text
from tidegate.core.errors import ApiProblem
from tidegate.core.files import File
from tidegate.core.ids import is_valid
from tidegate.core.input.turns import ingest_bytes
from tidegate.core.job_lists import JobFilter, JobSort
from tidegate.core.job_shape import parts_from, shape_text
from tidegate.core.nouns import Caller, Idempotency, Job, JobRequest, JobWebhook, LineError, PublishTurns, Quotas
from tidegate.core.problems import no_such_file
from tidegate.core.schedule.explain import ExplainInputs
from tidegate.core.schedule.share_owner import tenant_owner
from tidegate.core.states import JOB_ENDED, JobKind, JobState
from tidegate.core.webhooks import EndpointShape
from tidegate.core.wording import in_words
from tidegate.failpoints import hit
from tidegate.store.database.driver import Row, Tx
from tidegate.store.database.rows import controls_columns, errors_text, file_from, job_from, searched_text
from tidegate.store.database.table import (
    Table,
    frees,
    idempotent_object,
    reads,
    refuse_forgotten,
    remember_object,
    writes,
)
from tidegate.store.jobs.creation_quota import count_creation
from tidegate.store.jobs.job_controls import check_not_before
from tidegate.store.jobs.job_events import begin_events
from tidegate.store.jobs.retry_files import drop_retry_files, forget_retry
from tidegate.store.jobs.reuse import reused_bytes
from tidegate.store.jobs.sorted_jobs import sorted_page
from tidegate.store.tenants.files import hold_blobs, release_extents
from tidegate.store.tenants.webhooks import forget_some_deliveries, put_endpoint, put_events

_LIST_START = (1 << 62, "")
_HOUR_MS = 3600 * 1000


class Jobs(Table):
    @writes
    async def create_job(
        self,
        tx: Tx,
        caller: Caller,
        job_id: str,
        request: JobRequest,
        *,
        idempotency: Idempotency | None = None,
        quotas: Quotas | None = None,
        share_owner: str | None = None,
    ) -> Job:
        """Create a job in `validating`, or return the one that a known Idempotency-Key made before.

        It counts towards the share of `share_owner`; without one, towards its tenant's.
        """
        if known := await tx.dicts("job_any", id=job_id):
            return job_from(known[0])
        await tx.one("tenant_lock", tenant_id=caller.tenant_id)
        if earlier := await idempotent_object(tx, caller.tenant_id, "batches", idempotency):
            made = await tx.dicts("job_any", id=earlier)
            return job_from(made[0]) if made else refuse_forgotten()
        size_bytes, line_count = await _input_size(tx, caller.tenant_id, request)
        read_too = await reused_bytes(tx, caller.tenant_id, request)
        share = share_owner or tenant_owner(caller.tenant_id)
        if request.controls.not_before:
            await _check_not_before(tx, request)
        await check_quotas(tx, caller, quotas, share, (size_bytes, line_count))
        await put_job(tx, caller, job_id, request, share, ingest_bytes(size_bytes, line_count) + read_too)
        await remember_object(tx, caller.tenant_id, "batches", idempotency, job_id)
        return job_from((await tx.dicts("job_any", id=job_id))[0])

    @reads
    async def batch_inputs(self, tx: Tx, tenant_id: str, request: JobRequest) -> list[File]:
        """Return the input files of a job, or refuse them as `create_job` does."""
        await reused_bytes(tx, tenant_id, request)
        return [file_from(row) for row in await _inputs(tx, tenant_id, request)]

    @reads
    async def creation_problem(
        self, tx: Tx, caller: Caller, request: JobRequest, quotas: Quotas, share_owner: str
    ) -> ApiProblem | None:
        """Return why a job could not be created now; None if it could.

        Limits on creations in a period are not checked.
        """
        size = await _input_size(tx, caller.tenant_id, request)
        try:
            if request.controls.not_before:
                await _check_not_before(tx, request)
            await check_quotas(tx, caller, replace(quotas, creation=()), share_owner, size)
        except ApiProblem as problem:
            return problem
        return None

    @reads
    async def get_job(self, tx: Tx, tenant_id: str, job_id: str) -> Job | None:
        rows = await tx.dicts("job_get", tenant_id=tenant_id, id=job_id)
        return job_from(rows[0]) if rows else None

    @reads
    async def job_marks(self, tx: Tx, job_ids: Sequence[str]) -> dict[str, Row]:
        """Return marks by job id, which change with each visible change of a job.

        Jobs that are gone are left out.
        """
        if not all(is_valid("batch", job_id) for job_id in job_ids):
            raise ValueError("ids of jobs have a fixed length, by which the statement tells them apart")
        rows = await tx.all("job_marks", ids="".join(job_ids)) if job_ids else []
        return {row[0]: tuple(row) for row in rows}

    @reads
    async def any_job(self, tx: Tx, job_id: str) -> Job | None:
        """Return a job of any tenant, for the engine."""
        rows = await tx.dicts("job_any", id=job_id)
        return job_from(rows[0]) if rows else None

    @reads
    async def models_of_job(self, tx: Tx, job_id: str) -> list[str]:
        """Return the models of a job's lines, by name; none before it was ingested."""
        return [row[0] for row in await tx.all("job_models_named", job_id=job_id)]

    @reads
    async def list_jobs(
        self,
        tx: Tx,
        tenant_id: str,
        *,
        after: str | None = None,
        before: str | None = None,
        count_max: int,
        endpoint: str | None = None,
    ) -> list[Job] | None:
        """Return a page of a tenant's jobs, newest first.

        Return None if a cursor is no job of this tenant. The page has the jobs older than `after`,
        or the nearest ones newer than `before`. With `endpoint` it has only jobs for that.
        """
        start: Row | None = _LIST_START
        if cursor := after or before:
            start = await tx.one("job_cursor", tenant_id=tenant_id, id=cursor)
        if start is None:
            return None
        page = {"created_at": start[0], "id": start[1], "endpoint": endpoint, "count_max": count_max}
        if before:
            newer = await tx.dicts("job_list_newer", tenant_id=tenant_id, **page)
            return [job_from(row) for row in reversed(newer)]
        return [job_from(row) for row in await tx.dicts("job_list", tenant_id=tenant_id, **page)]

    @reads
    async def search_jobs(
        self,
        tx: Tx,
        tenant_id: str,
        wanted: JobFilter,
        *,
        after: str | None = None,
        count_max: int,
        sort: JobSort = JobSort.CREATED,
    ) -> list[Job] | None:
        """Return a page of a tenant's jobs that match, after `after`.

        Return None if that is no job of this tenant.
        """
        start: Row | None = _LIST_START
        if after:
            start = await tx.one("job_cursor", tenant_id=tenant_id, id=after)
        if start is None:
            return None
        place = (start[0], start[1]) if sort is JobSort.CREATED else _LIST_START
        page = {"tenant_id": tenant_id, "count_max": count_max, **filter_columns(wanted, place)}
        if sort is not JobSort.CREATED:
            found = await sorted_page(tx, sort, page, after)
            return None if found is None else [job for job, _ in found]
        if wanted.status is None:
            return [job_from(row) for row in await tx.dicts("job_search", **page)]
        return [job_from(row) for row in await tx.dicts(f"jobs_search{status_group(wanted)}", **page)]

    @frees
    async def cancel_job(self, tx: Tx, tenant_id: str, job_id: str) -> Job | None:
        """Cancel a job; None if there is no such job.

        A repeat is harmless. A job that ended or is ending otherwise is refused.
        """
        await tx.one("job_halt", id=job_id)
        # The change of a running job returns its row: one round trip less while the process is
        # busy.
        rows = await cancel_open(tx, tenant_id, job_id) or await tx.dicts("job_get", tenant_id=tenant_id, id=job_id)
        if not rows or rows[0]["kind"] == JobKind.DELETED:
            return None
        job = job_from(rows[0])
        if job.closing is not JobState.CANCELLED and job.state is not JobState.CANCELLED:
            is_over = job.state in JOB_ENDED or not job.closing
            # This is OpenAI's sentence, which clients match.
            message = f"Cannot cancel a batch with status '{job.state}'."
            if not is_over:
                message += f" It is about to be {job.closing}."
            raise ApiProblem(409, "batch_not_cancellable", message, param="batch_id")
        return job

    @writes
    async def fail_job(self, tx: Tx, job_id: str, error: LineError) -> bool:
        """Stop a running job and keep its results. Items that never ran become `batch_failed`."""
        await tx.one("job_halt", id=job_id)
        failed = await tx.one("job_fail_open", id=job_id, errors=errors_text([error])) is not None
        if failed:
            await tx.all("job_models_close", job_id=job_id)
        return failed

    async def overdue_jobs(self, count_max: int) -> list[str]:
        return await self._ids("jobs_overdue", count_max)

    @writes
    async def expire_job(self, tx: Tx, job_id: str) -> bool:
        """Let a job expire: no new call begins, and items that never ran become `batch_expired`."""
        await tx.one("job_halt", id=job_id)
        expired = await tx.one("job_expire", id=job_id) is not None
        if expired:
            await tx.all("job_models_close", job_id=job_id)
        return expired

    async def jobs_closing_unstarted(self, count_max: int) -> list[str]:
        return await self._ids("jobs_closing_unstarted", count_max)

    async def jobs_to_publish(self, turns: PublishTurns) -> list[str]:
        """Return closed jobs that no process publishes now, in turns by tenant."""
        bounds = {"bytes_min": turns.bytes_min, "bytes_max": turns.bytes_max, "tenant_max": turns.tenant_max}
        return await self._ids("jobs_to_publish", turns.count_max, **bounds)

    async def draining_jobs(self, grace_ms: int, count_max: int) -> list[str]:
        """Return closing jobs without leased slices, or whose grace has passed."""
        return await self._ids("jobs_draining", count_max, grace_ms=grace_ms)

    @reads
    async def _ids(self, tx: Tx, /, name: str, count_max: int, **parameters: int) -> list[str]:
        return [row[0] for row in await tx.all(name, count_max=count_max, **parameters)]

    @writes
    async def end_unstarted(self, tx: Tx, job_id: str, token: str | None = None) -> bool:
        """End a job that was closed before it was ingested. It has no result files."""
        ended = await tx.one("job_end_unstarted", id=job_id, token=token) is not None
        if ended:
            await drop_retry_files(tx, job_id)
            await put_events(tx, job_id)
        return ended

    @writes
    async def take_step(self, tx: Tx, job_id: str, state: JobState, worker_id: str, token: str) -> bool:
        """Take the lease of a job's ingest or publish step; False if another process has it."""
        return await tx.one("job_take_step", id=job_id, state=state, worker_id=worker_id, token=token) is not None

    @writes
    async def drop_step(self, tx: Tx, job_id: str, token: str, delay_ms: int) -> int:
        """Give back a step that failed. Return how often it has failed.

        Any process may try again after a delay, which grows with each failure.
        """
        row = await tx.one("job_drop_step", id=job_id, token=token, delay_ms=delay_ms)
        return int(row[0]) if row else 0

    @writes
    async def refuse_job(self, tx: Tx, job_id: str, token: str, errors: list[LineError]) -> bool:
        """Fail a job before it begins, because of errors in its input."""
        refused = await tx.one("job_refuse", id=job_id, token=token, errors=errors_text(errors)) is not None
        if refused:
            await drop_retry_files(tx, job_id)
            await put_events(tx, job_id)
        return refused

    @writes
    async def close_job(self, tx: Tx, job_id: str, grace_ms: int) -> bool:
        """Close a job: record refuses its lines, so its items without an outcome are fixed."""
        # A lease may be under way since record asked the job to close: after this lock, it is
        # visible.
        await tx.one("job_halt", id=job_id)
        return await tx.one("job_close", id=job_id, grace_ms=grace_ms) is not None

    async def ended_jobs(self, keep_ms: int, count_max: int) -> list[str]:
        """Return jobs that ended longer ago than their records are kept."""
        return await self._ids("jobs_ended_before", count_max, keep_ms=keep_ms)

    async def forget_job(self, job_id: str) -> None:
        """Remove a job's records and its result files, and the input that was made for a response.

        - Events that wait are still delivered, and removed then.
        - Deliveries that failed stay listed.
        - Completed deliveries are removed first, in pieces: a batch may have an event for each of
          its items, and no transaction should be long.
        """
        while await self._forget_deliveries(job_id):
            await hit("deliveries_deleted")
        await self._forget_records(job_id)

    @frees
    async def _forget_deliveries(self, tx: Tx, job_id: str) -> bool:
        return await forget_some_deliveries(tx, job_id)

    @frees
    async def _forget_records(self, tx: Tx, job_id: str) -> None:
        rows = await tx.dicts("job_any", id=job_id)
        if not rows or JobState(rows[0]["state"]) not in JOB_ENDED:
            return
        job = job_from(rows[0])
        for one in sorted({job_id, job.retry_of or job_id}):
            await tx.one("job_halt", id=one)
        own_input = rows[0]["input_file_id"] if JobKind(rows[0]["kind"]) is not JobKind.BATCH else None
        results = (job.output_file_id, job.error_file_id, job.merged_file_id)
        own_files = [one for one in (*parts_from(rows[0]["parts"]).all, own_input, *results) if one]
        file_ids = [*own_files, job.retry_file_id] if job.retry_file_id else own_files
        await tx.many_returning("file_lock", sorted((one,) for one in file_ids))
        await hold_blobs(tx, file_ids)
        await forget_retry(tx, job)
        for file_id in own_files:
            if await tx.one("file_delete", tenant_id=job.tenant_id, id=file_id):
                await release_extents(tx, file_id)
        # Deliveries may have been completed since the last piece.
        await forget_some_deliveries(tx, job_id)
        for name in (
            "outcomes_forget",
            "attempts_forget",
            "job_models_forget",
            "job_events_forget",
            "job_event_counts_forget",
            "slices_drop_job",
            "job_inputs_forget",
            "job_place_put",
            "job_forget",
            "webhook_endpoint_forget",
        ):
            await tx.all(name, job_id=job_id)

    @reads
    async def job_of_item(self, tx: Tx, job_part: str) -> str | None:
        """Return the job, open or closed, whose items' ids begin with these letters."""
        low = f"batch_{job_part}"
        rows = await tx.all("jobs_by_part", low=low, high=low + "~")
        return rows[0][0] if len(rows) == 1 else None

    @reads
    async def explain_inputs(self, tx: Tx, job_id: str) -> ExplainInputs | None:
        """Return the position of a job among the others; None if there is no such job."""
        row = await tx.one("job_explain_inputs", job_id=job_id)
        if row is None:
            return None
        reasons = await tx.all("attempts_waiting", job_id=job_id)
        waiting = tuple((reason[0], reason[1]) for reason in reasons)
        now, workers, ready, resting, rest_ends_in_ms, leased, ahead, step_failures, step_rests_ms = row
        return ExplainInputs(
            now,
            workers,
            ready,
            resting,
            rest_ends_in_ms,
            leased,
            ahead,
            waiting,
            step_failures=step_failures,
            step_rests_ms=step_rests_ms,
        )

    @reads
    async def state_counts(self, tx: Tx) -> dict[str, int]:
        return {row[0]: row[1] for row in await tx.all("jobs_state_counts")}


def status_group(wanted: JobFilter) -> str:
    """Return the suffix of the search statement for this status: of open or of ended jobs."""
    if wanted.status is None:
        return ""
    return "_ended" if JobState(wanted.status) in JOB_ENDED else "_open"


def filter_columns(wanted: JobFilter, place: tuple[int, str]) -> dict[str, Any]:
    """Return a filter and a place in the list as parameters of the statements that search jobs."""
    created_at, job_id = min(place, (wanted.to_ms, ""))
    names = ("pair", "pair2", "pair3", "pair4")
    pairs = [*wanted.metadata.items(), *[None] * (len(names) - len(wanted.metadata))]
    columns: dict[str, Any] = {
        "created_at": created_at,
        "id": job_id,
        "from_ms": wanted.from_ms,
        "status": wanted.status,
        "model": wanted.model,
        "model_words": None if wanted.model is None else "\n" + searched_text([wanted.model]),
        "error": None if wanted.error_code is None else f'"code":{_json(wanted.error_code)}',
        "words": None if wanted.words is None else wanted.words.casefold(),
    }
    for name, pair in zip(names, pairs, strict=True):
        columns[name] = None if pair is None else f",{_json(pair[0])}:{_json(pair[1])}"
        columns[f"{name}_words"] = None if pair is None else "\n" + searched_text(pair)
    return columns


async def _searched_words(tx: Tx, job_id: str, request: JobRequest) -> str:
    """Return the words by which a new job is found; empty for other kinds than batches.

    Ingest adds the job's models.
    """
    if request.kind is not JobKind.BATCH:
        return ""
    files = await tx.dicts("file_any", id=request.input_file_id)
    pairs = (text for pair in (request.metadata or {}).items() for text in pair)
    return "\n" + searched_text((job_id, request.endpoint, *(file["filename"] for file in files), *pairs))


async def put_job(
    tx: Tx, caller: Caller, job_id: str, request: JobRequest, share_owner: str, ingest_bytes: int
) -> None:
    """Write the rows of a new job and its webhook. `ingest_bytes` is what its ingest will count."""
    await tx.all(
        "job_put",
        id=job_id,
        tenant_id=caller.tenant_id,
        kind=request.kind,
        words=await _searched_words(tx, job_id, request),
        key_id=caller.key_id,
        user_name=caller.user,
        endpoint=request.endpoint,
        input_file_id=request.input_file_id,
        window_text=request.window_text,
        window_ms=request.window_ms,
        begin_within_ms=request.begin_within_ms,
        metadata=None if request.metadata is None else msgspec.json.encode(request.metadata).decode(),
        output_expires_after_s=request.output_expires_after_s,
        ordered=int(request.ordered),
        prefix_order=int(request.prefix_order),
        invalid_lines=request.invalid_lines,
        share_owner=share_owner,
        queue=request.queue,
        limits=msgspec.json.encode(request.limits).decode() if request.limits else None,
        ingest_bytes=ingest_bytes,
        webhook=await _put_webhook(tx, caller.tenant_id, job_id, request.webhook),
        door=request.door,
        shape=shape_text(request.shape),
        answers=answers_text(request.answers),
        traceparent=request.traceparent,
        **controls_columns(request.controls),
    )
    if request.shape.more_inputs:
        more = enumerate(request.shape.more_inputs, start=1)
        await tx.many("job_input_put", [(job_id, number, file_id) for number, file_id in more])
    if request.door is not None:
        await begin_events(tx, job_id)
    if (canary := request.canary) is not None:
        await tx.all("job_canary_put", id=job_id, items=canary.items, error_ppm=canary.error_ppm, then_do=canary.then)


async def cancel_open(tx: Tx, tenant_id: str, job_id: str) -> list[dict[str, Any]]:
    """Cancel an open job that does not close yet.

    Return its row if it runs. The caller has locked the row.
    """
    rows = await tx.dicts("job_cancel_running", tenant_id=tenant_id, id=job_id)
    if rows:
        await tx.all("job_models_close", job_id=job_id)
    else:
        await tx.one("job_cancel_waiting", tenant_id=tenant_id, id=job_id)
    return rows


async def _put_webhook(tx: Tx, tenant_id: str, job_id: str, webhook: JobWebhook | None) -> str | None:
    """Make the job's own webhook endpoint. Return the text for the job's row."""
    if webhook is None:
        return None
    endpoint_id = "whk_" + job_id.removeprefix("batch_")
    shape = EndpointShape(job_id, webhook.url, webhook.events, webhook.door, webhook.headers)
    await put_endpoint(tx, tenant_id, endpoint_id, shape, webhook.secret, job_id)
    return msgspec.json.encode({"url": webhook.url, "events": webhook.events}).decode()


def _json(text: str) -> str:
    return msgspec.json.encode(text).decode()


async def _inputs(tx: Tx, tenant_id: str, request: JobRequest) -> list[dict[str, Any]]:
    """Return the rows of a job's input files, in their order."""
    more = request.shape.more_inputs
    param = "input_file_ids" if more else "input_file_id"
    rows = []
    for file_id in (request.input_file_id, *more):
        found = await tx.dicts("file_get", tenant_id=tenant_id, id=file_id)
        _check_input(found[0]["purpose"] if found else None, file_id, param)
        rows.append(found[0])
    return rows


async def _input_size(tx: Tx, tenant_id: str, request: JobRequest) -> tuple[int, int]:
    """Return the bytes and the lines of all input files of a job."""
    rows = await _inputs(tx, tenant_id, request)
    return sum(row["size_bytes"] for row in rows), sum(row["line_count"] for row in rows)


def _check_input(purpose: str | None, file_id: str, param: str) -> None:
    if purpose is None:
        raise no_such_file(file_id, param)
    if purpose != "batch":
        raise ApiProblem(
            400,
            "invalid_file_purpose",
            f"The file {file_id} has purpose {purpose}; a batch needs an input that was uploaded with purpose=batch.",
            param=param,
        )


async def _check_not_before(tx: Tx, request: JobRequest) -> None:
    [(now,)] = await tx.all("now")
    begin_by = None if request.begin_within_ms is None else now + request.begin_within_ms
    check_not_before(request.controls.not_before, now + request.window_ms, begin_by)


async def check_quotas(tx: Tx, caller: Caller, quotas: Quotas | None, share: str, size: tuple[int, int]) -> None:
    """Refuse a job of this size if its caller's limits do not allow it."""
    if quotas is None:
        return
    size_bytes, line_count = size
    [pending] = await tx.all("job_pending", tenant_id=caller.tenant_id, share_owner=share, key_id=caller.key_id or "")
    jobs, key_jobs, items = map(int, pending)
    if quotas.pending_jobs_max and jobs >= quotas.pending_jobs_max:
        have = in_words(jobs, "batch", "batches")
        raise over_quota(f"You have {have} waiting or running; the limit is {quotas.pending_jobs_max:,}.", 60)
    if quotas.pending_jobs_per_key_max and caller.key_id and key_jobs >= quotas.pending_jobs_per_key_max:
        raise over_quota(
            f"Your key has {in_words(key_jobs, 'batch', 'batches')} waiting or running; the limit is {quotas.pending_jobs_per_key_max:,}.",
            60,
        )
    if quotas.queued_items_max and items + line_count > quotas.queued_items_max:
        raise over_quota(
            f"You have {in_words(items, 'request')} queued and this file has {line_count:,}; the limit is {quotas.queued_items_max:,}.",
            60,
        )
    if quotas.queued_units_max:
        [(units,)] = await tx.all("tenant_units", tenant_id=caller.tenant_id)
        if units >= quotas.queued_units_max:
            raise over_quota(
                f"You have {in_words(units, 'token')} of work queued; the limit is {quotas.queued_units_max:,}.", 60
            )
    for period_ms, jobs_max, bytes_max in (
        (_HOUR_MS, quotas.jobs_per_hour_max, 0),
        (24 * _HOUR_MS, 0, quotas.bytes_per_day_max),
    ):
        if not jobs_max and not bytes_max:
            continue
        [created] = await tx.all(
            "job_created_since", tenant_id=caller.tenant_id, period_ms=period_ms, user_name=caller.user
        )
        jobs, created_bytes = map(int, created)
        if jobs_max and jobs >= jobs_max:
            raise over_quota(f"You created {jobs} batches in the last hour, and {jobs_max} are allowed.", 600)
        if bytes_max and created_bytes + size_bytes > bytes_max:
            raise over_quota(
                f"You submitted {created_bytes:,} bytes in the last day, and {bytes_max:,} are allowed.", 3600
            )
    if quotas.creation:
        await count_creation(tx, quotas.creation, size_bytes)


def over_quota(message: str, retry_after_s: int) -> ApiProblem:
    return ApiProblem(
        429, "quota_exceeded", f"{message} Wait until some of them end, or cancel some.", retry_after_s=retry_after_s
    )
