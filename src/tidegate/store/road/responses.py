"""Verbs about background responses: jobs of one item, created and started in one transaction."""

from tidegate.core.errors import StoreUnavailable
from tidegate.core.nouns import Caller, Job, JobRequest, JobStart, Quotas, ResponseInput, ResponseTerms
from tidegate.core.states import JobKind, JobState
from tidegate.core.wording import in_words
from tidegate.store.database.driver import Tx
from tidegate.store.database.rows import job_from
from tidegate.store.database.table import (
    Table,
    frees,
    idempotent_object,
    reads,
    refuse_forgotten,
    remember_object,
    writes,
)
from tidegate.store.jobs.jobs import cancel_open, over_quota, put_job
from tidegate.store.road.ingests import start_ingested
from tidegate.store.tenants.files import check_stored_bytes

_ROUTE = "responses"
_FILENAME = "response.jsonl"


class BackgroundResponses(Table):
    @writes
    async def create_response(
        self,
        tx: Tx,
        caller: Caller,
        request: JobRequest,
        start: JobStart,
        asked: ResponseInput,
        terms: ResponseTerms,
        worker_id: str,
    ) -> Job:
        """Create a response and start its job, or return the job of a known Idempotency-Key.

        Raise StoreUnavailable if this process has no live incarnation now.
        """
        if known := await tx.dicts("job_any", id=start.job_id):
            return job_from(known[0])
        await tx.one("tenant_lock", tenant_id=caller.tenant_id)
        if earlier := await idempotent_object(tx, caller.tenant_id, _ROUTE, asked.idempotency):
            made = [job_from(row) for row in await tx.dicts("job_any", id=earlier)]
            return made[0] if made and made[0].kind is JobKind.RESPONSE else refuse_forgotten()
        await _check_pending(tx, caller, terms.quotas)
        await check_stored_bytes(tx, caller, terms.quotas, start.plan.work_bytes)
        await put_job(tx, caller, start.job_id, request, terms.share_owner, 0)
        if terms.interactive_after_ms is not None:
            await tx.all("job_turns_interactive", id=start.job_id, after_ms=terms.interactive_after_ms)
        step = {"id": start.job_id, "state": JobState.VALIDATING, "worker_id": worker_id, "token": start.token}
        if await tx.one("job_take_step", **step) is None:
            raise StoreUnavailable("this process was declared gone and begins again")
        await start_ingested(tx, [start])
        await _show_input(tx, caller, start, asked, terms.keep_ms)
        await remember_object(tx, caller.tenant_id, _ROUTE, asked.idempotency, start.job_id)
        return job_from((await tx.dicts("job_any", id=start.job_id))[0])

    @frees
    async def delete_response(self, tx: Tx, tenant_id: str, job_id: str) -> bool:
        """Hide a response from its caller, and cancel it if it is open; False if there is none.

        `forget_job` removes it once it has ended.
        """
        await tx.one("job_halt", id=job_id)
        if await tx.one("job_delete_response", tenant_id=tenant_id, id=job_id) is None:
            return False
        await cancel_open(tx, tenant_id, job_id)
        return True

    @reads
    async def long_waiting_responses(self, tx: Tx, count_max: int) -> list[tuple[str, str]]:
        """Return ready responses that have waited until they go as interactive calls.

        Each is a job and a model. Those that waited longest come first.
        """
        return [(row[0], row[1]) for row in await tx.all("jobs_waiting_long", count_max=count_max)]

    @reads
    async def deleted_responses(self, tx: Tx, count_max: int) -> list[str]:
        """Return ended responses that their callers deleted: their records may be removed."""
        return [row[0] for row in await tx.all("jobs_deleted", count_max=count_max)]


async def _check_pending(tx: Tx, caller: Caller, quotas: Quotas) -> None:
    if not quotas.pending_responses_max:
        return
    [(pending,)] = await tx.all("responses_pending", tenant_id=caller.tenant_id)
    if pending >= quotas.pending_responses_max:
        raise over_quota(
            f"You have {in_words(pending, 'background response')} waiting or running; the limit is {quotas.pending_responses_max:,}.",
            10,
        )


async def _show_input(tx: Tx, caller: Caller, start: JobStart, asked: ResponseInput, keep_ms: int) -> None:
    """Show the request as a file, which remains after the job is done with its work file."""
    size_bytes = start.plan.work_bytes
    await tx.all(
        "file_put",
        id=asked.file_id,
        tenant_id=caller.tenant_id,
        job_id=start.job_id,
        purpose=JobKind.RESPONSE,
        filename=_FILENAME,
        state="ready",
        size_bytes=size_bytes,
        line_count=1,
        sha256=asked.sha256,
        expires_after_ms=keep_ms,
    )
    await tx.all(
        "extent_put", file_id=asked.file_id, at=0, size_bytes=size_bytes, blob_id=start.work_blob_id, blob_at=0
    )
    await tx.all("blob_share", id=start.work_blob_id)
