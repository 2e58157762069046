"""What has outlived its time: expired files and uploads, records of jobs that ended long ago, rows without a use."""

import structlog

from tidegate.core.errors import ApiProblem
from tidegate.store.store import Store

log = structlog.get_logger()

_PASS_MAX = 200
_HOUR_MS = 3600 * 1000
_DAY_MS = 24 * _HOUR_MS


async def tend(store: Store, job_keep_ms: int) -> int:
    """One bounded pass. Says how many things went."""
    await store.look_at_clock()
    gone = 0
    for tenant_id, file_id in await store.expired_files(_PASS_MAX):
        try:
            gone += await store.delete_file(tenant_id, file_id)
        except ApiProblem:
            # A job began to read it in this very moment: the next pass sees to it.
            continue
    for tenant_id, upload_id in await store.overdue_uploads(_PASS_MAX):
        gone += await store.expire_upload(tenant_id, upload_id)
    for job_id in (*await store.deleted_responses(_PASS_MAX), *await store.ended_jobs(job_keep_ms, _PASS_MAX)):
        await store.forget_job(job_id)
        gone += 1
    await store.prune_files(job_keep_ms)
    await store.prune_uploads(job_keep_ms)
    await store.prune_workers(_DAY_MS)
    await store.prune_budgets(_HOUR_MS, _PASS_MAX)
    await store.prune_usage_writers()
    await store.forget_fleet_reports()
    return gone
