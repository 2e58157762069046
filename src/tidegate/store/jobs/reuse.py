"""The check of an earlier job whose answers a new one reuses: its files must exist and fit."""

from tidegate.core.errors import ApiProblem
from tidegate.core.nouns import Job, JobRequest
from tidegate.core.problems import batch_not_ended, no_such_batch
from tidegate.core.states import JOB_ENDED, JobKind
from tidegate.store.database.driver import Tx
from tidegate.store.database.rows import job_from

PARAM = "reuse_from"


def answers_file_of(job: Job) -> str | None:
    """Return the file with all answers of a job, and of the jobs that it is a retry of."""
    return job.output_file_id if job.retry_of is None else job.merged_file_id


async def reused_bytes(tx: Tx, tenant_id: str, request: JobRequest) -> int:
    """Return how many bytes of the earlier job are read. Refuse a job that does not fit."""
    job_id = request.shape.reuse_from
    if not job_id:
        return 0
    rows = await tx.dicts("job_get", tenant_id=tenant_id, id=job_id)
    if not rows or rows[0]["kind"] != JobKind.BATCH or rows[0]["door"] is not None:
        raise no_such_batch(job_id, PARAM)
    earlier = job_from(rows[0])
    if earlier.state not in JOB_ENDED:
        raise batch_not_ended(PARAM)
    if earlier.answers != request.answers:
        message = f"The answers of {job_id} were checked in another way: give both batches the same `answers`."
        raise ApiProblem(400, "invalid_parameter", message, param=PARAM)
    size_bytes = 0
    for file_id in (earlier.input_file_id, *earlier.shape.more_inputs, answers_file_of(earlier)):
        found = await tx.dicts("file_get", tenant_id=tenant_id, id=file_id or "")
        if not found:
            message = f"The input or the answers of {job_id} are gone, or it has none: leave `reuse_from` out."
            raise ApiProblem(400, "invalid_parameter", message, param=PARAM)
        size_bytes += found[0]["size_bytes"]
    return size_bytes
