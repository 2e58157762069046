"""Verbs about operations: one action on all jobs that match a filter, a few jobs at a time.

One transaction changes a few jobs, writes their audit rows, and advances the operation. So no job
counts twice, and an operation that was cancelled or taken over changes nothing more.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from tidegate.core.errors import ApiProblem, LostRace
from tidegate.core.nouns import Job
from tidegate.core.operations import RETRY, Impact, JobOperation, OperationFailure, OperationScope
from tidegate.core.states import OperationState
from tidegate.store.database.driver import Row, Tx
from tidegate.store.database.rows import job_from
from tidegate.store.database.table import JoinedTransaction, Table, frees, reads, writes
from tidegate.store.jobs.jobs import filter_columns
from tidegate.store.jobs.retries import hold_retries
from tidegate.store.operators.audit import AuditNote, AuditWitness, NotedChange, put_changes
from tidegate.store.operators.changeable_jobs import ChangeableJobs
from tidegate.store.tenants.files import hold_blobs

_LIST_START = (1 << 62, "")
_EVERY_JOB = 1 << 40
# These actions also change the flows of a job.
_WAKING = ("resume", "requeue")
# This action shows result files, whose parts and merged files need the blobs of the whole.
_ABANDON = "abandon"
_GONE = ApiProblem(404, "batch_not_found", "The batch was deleted meanwhile.")

JobVerb = Callable[[ChangeableJobs, Job], Awaitable[Job | None]]


class OperationStep(msgspec.Struct, frozen=True):
    """A worker's step of an operation: its verb and its jobs, each with the id of an audit row."""

    operation: JobOperation
    worker_id: str
    verb: JobVerb
    jobs: Sequence[tuple[Job, str]]


class Operations(Table):
    @reads
    async def impact_of(self, tx: Tx, scope: OperationScope) -> Impact:
        """Return what an operation of this scope would change now."""
        return await _impact(tx, scope)

    @writes
    async def put_operation(self, tx: Tx, operation_id: str, actor: str, scope: OperationScope) -> JobOperation:
        """Write an operation, which workers begin at once. A repeat is harmless."""
        impact = await _impact(tx, scope)
        await tx.all(
            "operation_put",
            id=operation_id,
            actor=actor,
            action=scope.action,
            scope=msgspec.json.encode(scope).decode(),
            jobs=impact.jobs,
            items=impact.items,
            tokens=impact.tokens,
            nano=impact.cost_nano,
            first_due=impact.first_deadline,
            due_soon=impact.due_soon,
        )
        return _operation_from((await tx.dicts("operation_get", id=operation_id))[0])

    @reads
    async def get_operation(self, tx: Tx, operation_id: str) -> JobOperation | None:
        """Return an operation with its present state."""
        rows = await tx.dicts("operation_get", id=operation_id)
        return _operation_from(rows[0]) if rows else None

    @reads
    async def list_operations(self, tx: Tx, *, after: str | None, count_max: int) -> list[JobOperation] | None:
        """Return a page of operations, newest first; None if `after` is no operation."""
        start: Row | None = _LIST_START
        if after is not None:
            start = await tx.one("operation_cursor", id=after)
        if start is None:
            return None
        rows = await tx.dicts("operation_page", created_at=start[0], id=start[1], count_max=count_max)
        return [_operation_from(row) for row in rows]

    @frees
    async def cancel_operation(self, tx: Tx, operation_id: str) -> JobOperation | None:
        """Cancel an operation, so that no further job changes; None if there is no such operation.

        A repeat is harmless.
        """
        await tx.one("operation_cancel", id=operation_id)
        rows = await tx.dicts("operation_get", id=operation_id)
        if not rows:
            return None
        operation = _operation_from(rows[0])
        if operation.state is OperationState.COMPLETED:
            raise ApiProblem(409, "operation_ended", "The operation is completed: there is nothing left to cancel.")
        return operation

    @reads
    async def waiting_operation(self, tx: Tx, worker_id: str) -> str | None:
        """Return the id of an operation that this worker may carry out."""
        row = await tx.one("operation_waiting", worker_id=worker_id)
        return None if row is None else str(row[0])

    @writes
    async def take_operation(self, tx: Tx, operation_id: str, worker_id: str) -> JobOperation | None:
        """Take an operation until it ends or this worker does.

        Return None if it ended or a living worker has it.
        """
        if await tx.one("operation_take", id=operation_id, worker_id=worker_id) is None:
            return None
        return _operation_from((await tx.dicts("operation_get", id=operation_id))[0])

    @reads
    async def operation_jobs(self, tx: Tx, operation: JobOperation, count_max: int) -> list[Job]:
        """Return the next jobs of an operation."""
        columns = _columns(operation.scope, (operation.cursor_at, operation.cursor_id), count_max)
        rows = await tx.dicts(
            "operation_jobs_ended" if operation.scope.action == RETRY else "operation_jobs_open", **columns
        )
        return [job_from(row) for row in rows]

    @writes
    async def step_operation(self, tx: Tx, step: OperationStep) -> None:
        """Change the next jobs of an operation.

        A job that refuses is not changed and counts as failed.

        Raise LostRace, and change nothing, if the operation ended or another worker has it.
        """
        await _hold_jobs(tx, step)
        noted: list[NotedChange] = []
        failures = [failure for job, note_id in step.jobs if (failure := await _change(tx, step, job, note_id, noted))]
        last, _ = step.jobs[-1]
        moved = await tx.one(
            "operation_advance",
            id=step.operation.id,
            worker_id=step.worker_id,
            created_at=last.created_at,
            job_id=last.id,
            done=len(step.jobs) - len(failures),
            failed=len(failures),
            failure=msgspec.json.encode(failures[-1]).decode() if failures else None,
        )
        if moved is None:
            raise LostRace(f"{step.operation.id} ended, or another worker carries it out")
        await put_changes(tx, noted)

    @writes
    async def end_operation(self, tx: Tx, operation_id: str, worker_id: str) -> bool:
        """End an operation after its last job.

        Return False if it was cancelled, or another worker has it.
        """
        return await tx.one("operation_end", id=operation_id, worker_id=worker_id) is not None

    @frees
    async def prune_operations(self, tx: Tx, keep_ms: int) -> None:
        """Forget operations that ended longer ago than `keep_ms`."""
        if gone := await tx.all("operations_prune", keep_ms=keep_ms):
            await tx.many("operation_place_put", [(row[0], row[1]) for row in gone])


async def _impact(tx: Tx, scope: OperationScope) -> Impact:
    columns = _columns(scope, _LIST_START, _EVERY_JOB)
    rows = await tx.dicts("operation_impact_ended" if scope.action == RETRY else "operation_impact_open", **columns)
    row = rows[0]
    return Impact(row["jobs"], row["items"], row["tokens"], row["nano"], row["first_due"], row["due_soon"])


def _columns(scope: OperationScope, place: tuple[int, str], count_max: int) -> dict[str, Any]:
    columns = filter_columns(scope.jobs, place)
    return {**columns, "action": scope.action, "org": scope.org, "count_max": count_max}


async def _hold_jobs(tx: Tx, step: OperationStep) -> None:
    """Lock all rows that a step will change, in the order of all transactions.

    That order is tenants, jobs, files and blobs by id, then flows by model. An operation lists its
    jobs in another order, and the change of its first job may need the flow of the next.
    """
    action = step.operation.scope.action
    if action == RETRY:
        await hold_retries(tx, [job for job, _ in step.jobs])
        return
    job_ids = sorted((job.id,) for job, _ in step.jobs)
    await tx.many_returning("job_halt", job_ids)
    if action == _ABANDON:
        results = {one for job, _ in step.jobs for one in (job.output_file_id, job.error_file_id) if one}
        await tx.many_returning("file_lock", sorted((one,) for one in results))
        await hold_blobs(tx, results)
    if action in _WAKING:
        flows = {(row[0], row[1]) for row in await tx.many_returning("job_flows", job_ids)}
        await tx.many_returning("flow_halt", sorted(flows))


async def _change(
    tx: Tx, step: OperationStep, job: Job, note_id: str, noted: list[NotedChange]
) -> OperationFailure | None:
    """Change one job and collect its audit notes. If it refuses, undo what was written for it."""
    action = step.operation.scope.action
    note = AuditNote(note_id, f"operation:{step.operation.id}", f"batch.{action}", "batch", job.id)
    kept: list[NotedChange] = []
    await tx.all("change_begin")
    try:
        changed = await step.verb(ChangeableJobs(JoinedTransaction(tx), AuditWitness(note, kept)), job)
        refused = _GONE if changed is None else None
        noted.extend(kept)
    except ApiProblem as problem:
        await tx.all("change_undo")
        refused = problem
    return None if refused is None else OperationFailure(job.id, refused.code, refused.message)


def _operation_from(row: dict[str, Any]) -> JobOperation:
    failure = row["last_failure"]
    return JobOperation(
        id=row["id"],
        actor=row["actor"],
        scope=msgspec.json.decode(row["scope"], type=OperationScope),
        state=OperationState(row["state"]),
        created_at=row["created_at"],
        ended_at=row["ended_at"],
        impact=Impact(
            row["matched_jobs"],
            row["matched_items"],
            row["matched_tokens"],
            row["matched_nano"],
            row["matched_due"],
            row["matched_due_soon"],
        ),
        done=row["done_count"],
        failed=row["failed_count"],
        last_failure=None if failure is None else msgspec.json.decode(failure, type=OperationFailure),
        cursor_at=row["cursor_at"],
        cursor_id=row["cursor_id"],
    )
