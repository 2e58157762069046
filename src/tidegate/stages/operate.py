"""The changes that an operator makes to jobs: to one job at once, or to all that match a filter.

The second is an operation, which workers carry out step by step.
"""

from collections.abc import Mapping

import structlog

from tidegate.core import ids
from tidegate.core.errors import LostRace, StoreUnavailable
from tidegate.core.follow_up import FollowUp
from tidegate.core.job_controls import RetryChoice
from tidegate.core.nouns import Caller, Job
from tidegate.core.operations import RETRY
from tidegate.core.ports import Entropy, Wakes
from tidegate.core.webhooks import SECRET_BYTES
from tidegate.failpoints import hit
from tidegate.store.operators.changeable_jobs import ChangeableJobs
from tidegate.store.operators.operations import JobVerb, OperationStep
from tidegate.store.store import Store

log = structlog.get_logger()

ABANDON = "abandon"
FAILED_ITEMS = RetryChoice(("failed",), ())
# A step locks its jobs until all of them are changed, and nothing can record their items meanwhile.
STEP_JOBS = 20


def job_verbs(entropy: Entropy, failed_keep_ms: int) -> Mapping[str, JobVerb]:
    """Return the changes that an operator can make to a job, by name.

    The results of an abandoned job are kept for `failed_keep_ms`.
    """
    return {
        "cancel": lambda store, job: store.cancel_job(job.tenant_id, job.id),
        "pause": lambda store, job: store.pause_job(job.tenant_id, job.id),
        "resume": lambda store, job: store.resume_job(job.tenant_id, job.id),
        "retry_finalization": lambda store, job: store.retry_finalization(job.id),
        "requeue": lambda store, job: store.requeue_job(job.id),
        "fail": lambda store, job: store.end_as_failed(job.id),
        ABANDON: lambda store, job: store.abandon_job(job.tenant_id, job.id, failed_keep_ms),
        RETRY: lambda store, job: retry(store, entropy, job, FAILED_ITEMS),
    }


async def retry(store: ChangeableJobs, entropy: Entropy, job: Job, choice: RetryChoice) -> Job | None:
    """Run items of an ended job again, as a job of its owner.

    No quota limits an operator's retry.
    """
    new_id, retry_file, merged_file = (
        ids.make(kind, entropy.token_bytes(ids.RANDOM_BYTES)) for kind in ("batch", "file", "file")
    )
    wanted = FollowUp(job.id, choice, new_id, retry_file, merged_file, entropy.token_bytes(SECRET_BYTES))
    return await store.retry_job(Caller(job.tenant_id, job.key_id), wanted, share_owner=job.share_owner)


class OperateStage:
    """The stage that carries out operations.

    One transaction changes a few jobs and advances the operation.
    """

    def __init__(self, store: Store, entropy: Entropy, wakes: Wakes, verbs: Mapping[str, JobVerb]) -> None:
        self._store = store
        self._entropy = entropy
        self._wakes = wakes
        self._verbs = verbs
        self._step_jobs = STEP_JOBS

    async def next_step(self, worker_id: str) -> bool:
        """Change the next jobs of an operation, or end it; False if none waits for this worker."""
        waiting = await self._store.waiting_operation(worker_id)
        operation = None if waiting is None else await self._store.take_operation(waiting, worker_id)
        if operation is None:
            return False
        jobs = await self._store.operation_jobs(operation, self._step_jobs)
        if not jobs:
            await self._store.end_operation(operation.id, worker_id)
            log.info("operation_completed", operation=operation.id, done=operation.done, failed=operation.failed)
            return True
        noted = [(job, ids.make("aud", self._entropy.token_bytes(ids.RANDOM_BYTES))) for job in jobs]
        try:
            await self._store.step_operation(
                OperationStep(operation, worker_id, self._verbs[operation.scope.action], noted)
            )
            await hit("operation_stepped")
            self._step_jobs = min(STEP_JOBS, 2 * self._step_jobs)
        except LostRace:
            log.info("operation_stopped", operation=operation.id)
        except StoreUnavailable:
            # A transaction has a time-out: a slow store may manage smaller steps.
            self._step_jobs = max(1, len(jobs) // 2)
            raise
        for wake in (self._wakes.jobs, self._wakes.slices, self._wakes.inputs):
            wake.notify()
        return True
