"""Verbs about retries: items of an ended job that run again as a new job."""

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from tidegate.core.files import File
from tidegate.core.follow_up import FollowUp
from tidegate.core.input.turns import ingest_bytes
from tidegate.core.nouns import Caller, Idempotency, Job, JobRequest, Quotas
from tidegate.core.problems import batch_not_ended, batch_not_retryable
from tidegate.core.schedule.share_owner import tenant_owner
from tidegate.core.states import JOB_ENDED, JobKind
from tidegate.store.database.driver import Tx
from tidegate.store.database.rows import file_from, job_from
from tidegate.store.database.table import Table, idempotent_object, refuse_forgotten, remember_object, writes
from tidegate.store.jobs.jobs import check_quotas, put_job
from tidegate.store.jobs.retry_files import put_retried_by, share_file
from tidegate.store.tenants.files import hold_blobs

_ROUTE = "retries"


class Retries(Table):
    @writes
    async def retry_job(
        self,
        tx: Tx,
        caller: Caller,
        retry: FollowUp,
        *,
        idempotency: Idempotency | None = None,
        quotas: Quotas | None = None,
        share_owner: str | None = None,
    ) -> Job | None:
        """Create a job in `validating` that runs items of an ended one again.

        Return None if that does not exist. Its two files are made of existing bytes. A repeat, or a
        known Idempotency-Key, returns the job that was made before.
        """
        if known := await tx.dicts("job_any", id=retry.job_id):
            return job_from(known[0])
        await tx.one("tenant_lock", tenant_id=caller.tenant_id)
        await tx.one("job_halt", id=retry.of)
        if earlier := await idempotent_object(tx, caller.tenant_id, _ROUTE, idempotency):
            made = await tx.dicts("job_any", id=earlier)
            return job_from(made[0]) if made else refuse_forgotten()
        rows = await tx.dicts("job_get", tenant_id=caller.tenant_id, id=retry.of)
        if not rows or rows[0]["kind"] != JobKind.BATCH:
            return None
        first = job_from(rows[0])
        job = await _same_retry(tx, first, retry)
        if job is None:
            await _put_retry(tx, caller, first, retry, share_owner or tenant_owner(caller.tenant_id), quotas)
            job = job_from((await tx.dicts("job_any", id=retry.job_id))[0])
        await remember_object(tx, caller.tenant_id, _ROUTE, idempotency, job.id)
        return job


async def hold_retries(tx: Tx, jobs: Sequence[Job]) -> None:
    """Lock all rows that retries of these jobs will need, in the order of all transactions.

    If each retry locked its own, the blobs of one would be locked before the tenant of the next.
    """
    await tx.many_returning("tenant_lock", sorted({(job.tenant_id,) for job in jobs}))
    await tx.many_returning("job_halt", sorted((job.id,) for job in jobs))
    results = {one for job in jobs for one in (job.error_file_id, _answers_id(job)) if one}
    inputs = {one for job in jobs for one in (job.input_file_id, *job.shape.more_inputs)}
    await tx.many_returning("file_lock", sorted((one,) for one in results | inputs))
    await hold_blobs(tx, results)


def _answers_id(first: Job) -> str | None:
    """Return the file of all answers so far: for a retry, those of its whole chain."""
    return first.output_file_id if first.retry_of is None else first.merged_file_id


async def _same_retry(tx: Tx, first: Job, retry: FollowUp) -> Job | None:
    """Return the earlier retry of the same items. One that ended before it ran does not count."""
    for job_id in first.retried_by:
        for row in await tx.dicts("job_any", id=job_id):
            made = job_from(row)
            if made.retry_choice == retry.choice and (made.state not in JOB_ENDED or made.item_count):
                return made
    return None


async def _put_retry(
    tx: Tx, caller: Caller, first: Job, retry: FollowUp, share_owner: str, quotas: Quotas | None
) -> None:
    count = _check_items(first, retry)
    inputs = [await _locked_file(tx, caller, one, "input") for one in (first.input_file_id, *first.shape.more_inputs)]
    size_bytes = sum(one.size_bytes for one in inputs)
    errors = await _locked_file(tx, caller, first.error_file_id, "error")
    answers_id = _answers_id(first)
    answers = None if answers_id is None else await _locked_file(tx, caller, answers_id, "output")
    await check_quotas(tx, caller, quotas, share_owner, (size_bytes, count))
    await hold_blobs(tx, (errors.id, answers_id))
    size = ingest_bytes(size_bytes, sum(one.line_count for one in inputs))
    await put_job(tx, caller, retry.job_id, _request(first, retry), share_owner, size)
    await share_file(tx, retry.job_id, errors, retry.retry_file_id, caller.tenant_id, "retry")
    await share_file(tx, retry.job_id, answers, retry.merged_file_id, caller.tenant_id, "merged")
    await tx.all(
        "job_retry_put",
        id=retry.job_id,
        retry_of=first.id,
        choice=msgspec.json.encode(retry.choice).decode(),
        retry_file_id=retry.retry_file_id,
        merged_file_id=retry.merged_file_id,
    )
    await put_retried_by(tx, first.id, [*first.retried_by, retry.job_id])


def _check_items(first: Job, retry: FollowUp) -> int:
    """Return how many items may run again; refuse a job without any."""
    if first.state not in JOB_ENDED:
        raise batch_not_ended()
    if first.door is not None:
        raise batch_not_retryable("It was created through another API, which names its items: create a new one there.")
    counts = {"failed": first.failed_count, "expired": first.expired_count, "cancelled": first.cancelled_count}
    count = sum(counts[outcome] for outcome in retry.choice.outcomes)
    if not count and not first.item_count:
        raise batch_not_retryable(
            "Its input was refused, so no request ran: correct the input, and create a new batch."
        )
    if not count:
        left = ", ".join(f"{count:,} {outcome}" for outcome, count in counts.items() if count)
        has = f"It has {left}: name them in `outcomes`." if left else "Every request that ran has an answer."
        raise batch_not_retryable(f"None of its requests is {' or '.join(retry.choice.outcomes)}. {has}")
    return count


async def _locked_file(tx: Tx, caller: Caller, file_id: str | None, name: str) -> File:
    """Return a file of the first job, and lock it so that it is neither deleted nor rewritten."""
    rows = await tx.dicts("file_get", tenant_id=caller.tenant_id, id=file_id or "")
    if not rows or await tx.one("file_lock", id=file_id) is None:
        raise batch_not_retryable(f"Its {name} file is deleted or expired: upload what is to run as a new batch.")
    return file_from(rows[0])


def _request(first: Job, retry: FollowUp) -> JobRequest:
    """Return the request of the first job for its retry, which counts from now on."""
    webhook = None if first.webhook is None else replace(first.webhook, secret=retry.webhook_secret)
    return JobRequest(
        endpoint=first.endpoint,
        input_file_id=first.input_file_id,
        window_ms=first.expires_at - first.created_at,
        window_text=first.window_text,
        begin_within_ms=None if first.begin_by is None else first.begin_by - first.created_at,
        metadata=first.metadata,
        output_expires_after_s=first.output_expires_after_s,
        ordered=first.ordered,
        prefix_order=first.prefix_order,
        invalid_lines=first.invalid_lines,
        queue=first.queue,
        limits=first.limits,
        webhook=webhook,
        controls=retry.controls or replace(first.controls, not_before=0),
        canary=retry.canary,
        shape=replace(first.shape, reuse_from="", retry=retry.retry or first.shape.retry),
        answers=retry.answers or first.answers,
        traceparent=retry.traceparent,
    )
