"""Removal of expired files and uploads, of jobs that ended long ago, and of unused rows."""

import structlog

from tidegate.core.errors import ApiProblem
from tidegate.core.nouns import KeepTimes
from tidegate.failpoints import hit
from tidegate.store.store import Store

log = structlog.get_logger()

_HOUR_MS = 3600 * 1000
_DAY_MS = 24 * _HOUR_MS


async def tend(store: Store, keep: KeepTimes) -> int:
    """Run one bounded pass and return how many objects were removed.

    An interrupted pass is repeated.
    """
    count_max = keep.scan_max
    await store.look_at_clock()
    gone = 0
    for tenant_id, file_id in await store.expired_files(count_max):
        try:
            gone += await store.delete_file(tenant_id, file_id)
        except ApiProblem:
            # A job has just begun to use the file: the next pass tries again.
            continue
    for tenant_id, upload_id in await store.overdue_uploads(count_max):
        gone += await store.expire_upload(tenant_id, upload_id)
    for job_id in (*await store.deleted_responses(count_max), *await store.ended_jobs(keep.metadata_ms, count_max)):
        await store.forget_job(job_id)
        await hit("job_forgotten")
        gone += 1
    await store.prune_files(keep.metadata_ms, count_max)
    await store.prune_uploads(keep.metadata_ms)
    await store.prune_webhooks(keep.metadata_ms, count_max)
    await store.prune_operations(keep.metadata_ms)
    await store.chain_audit(count_max)
    await store.prune_audit(keep.audit_ms, count_max)
    await store.prune_workers(_DAY_MS)
    await store.prune_sessions(_DAY_MS)
    await store.prune_budgets(_HOUR_MS, count_max)
    await store.prune_usage_writers()
    await store.forget_fleet_reports()
    return gone
