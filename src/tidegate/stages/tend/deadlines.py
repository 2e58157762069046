"""The end of jobs whose window has passed, and of jobs that were closed before ingest."""

import structlog

from tidegate import metrics, tracing
from tidegate.store.store import Store

log = structlog.get_logger()

_PASS_MAX = 100


async def tend(store: Store) -> int:
    """Let overdue jobs expire, and end closed ones that never started. Return how many changed."""
    changed = 0
    for job_id in await store.overdue_jobs(_PASS_MAX):
        if await store.expire_job(job_id):
            log.info("job_overdue", job=job_id)
            changed += 1
    for job_id in await store.jobs_closing_unstarted(_PASS_MAX):
        if await store.end_unstarted(job_id):
            job = await store.any_job(job_id)
            metrics.count_job_end(job)
            tracing.end_job(job)
            changed += 1
    return changed
