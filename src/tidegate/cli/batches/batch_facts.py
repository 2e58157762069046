"""Finds batches in the store for commands, and describes them as commands print them."""

from typing import TYPE_CHECKING, Any

from tidegate.cli.terminal import options, server_client
from tidegate.core.errors import SettingsError
from tidegate.core.nouns import Job
from tidegate.core.states import JOB_ENDED, JobState
from tidegate.core.usage.prices import units_text

if TYPE_CHECKING:
    from tidegate.storage import Parts


async def job_of(parts: "Parts", org: str | None, batch: str) -> Job:
    """Return a batch, of any organization if none is named: a user who can read the
    store may see all batches."""
    options.check_batch_id(batch)
    job = await (
        parts.store.any_job(batch)
        if org is None
        else parts.store.get_job(await server_client.tenant(parts, org), batch)
    )
    if job is None:
        raise absent(batch, org)
    return job


async def owner_id(parts: "Parts", org: str | None, batch: str) -> str:
    """Return the id of the named organization, or of the one that owns the batch if
    none is named."""
    return (await job_of(parts, None, batch)).tenant_id if org is None else await server_client.tenant(parts, org)


def absent(batch: str, org: str | None) -> SettingsError:
    where = f" in organization {org}" if org is not None else ""
    return SettingsError(f"There is no batch {batch}{where}; see `tidegate batches list`.")


def facts(job: Job) -> dict[str, Any]:
    """Return a batch as commands print it, in the words of the API."""
    times = ("created", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
    return {
        "id": job.id,
        "status": str(job.state),
        "endpoint": job.endpoint,
        "model": job.model,
        "total": job.item_count,
        "completed": job.answered_count,
        "failed": job.done_count - job.answered_count,
        "input_file_id": job.input_file_id,
        "output_file_id": job.output_file_id if job.state in JOB_ENDED else None,
        "error_file_id": job.error_file_id if job.state in JOB_ENDED else None,
        "output_bytes": job.output_bytes,
        "error_bytes": job.error_bytes,
        **{f"{name}_at": _second(getattr(job, f"{name}_at")) for name in times},
        "expires_at": _second(job.expires_at),
        "usage": {
            "input_tokens": job.usage.input_tokens,
            "cached_tokens": job.usage.cached_tokens,
            "output_tokens": job.usage.output_tokens,
            "reasoning_tokens": job.usage.reasoning_tokens,
        },
        "prompt_bytes": job.prompt_bytes,
        "shared_prefix_bytes": job.shared_prefix_bytes,
        "metadata": job.metadata,
        "cost": units_text(job.cost_nano),
        **_controls(job),
        "retry_of": job.retry_of,
        "retried_by": list(job.retried_by),
        "merged_output_file_id": job.merged_file_id if job.state in JOB_ENDED else None,
        "errors": [
            {"code": error.code, "message": error.message, "line": error.line, "param": error.param}
            for error in job.errors
        ],
    }


def _controls(job: Job) -> dict[str, object]:
    controls, errors = job.controls, job.controls.max_errors
    share = None if errors is None or errors.share_ppm is None else errors.share_ppm / 1_000_000
    return {
        "priority": controls.priority,
        "not_before": _second(controls.not_before or None),
        "paused_at": _second(job.paused_at) if job.state not in JOB_ENDED else None,
        "max_cost": None if controls.max_cost_nano is None else units_text(controls.max_cost_nano),
        "max_errors": None
        if errors is None
        else {"count": errors.count, "share": share, "after": errors.after or None},
        "stopped_by": job.stopped_by,
        "canary": None
        if job.canary is None
        else {
            "items": job.canary.items,
            "max_error_share": job.canary.error_ppm / 1_000_000,
            "then": job.canary.then,
            "state": job.canary.state,
        },
    }


def _second(at_ms: int | None) -> int | None:
    return None if at_ms is None else at_ms // 1000


def exit_code(job: Job) -> int:
    return 0 if job.state is JobState.COMPLETED and job.answered_count == job.item_count else 1
