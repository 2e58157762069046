"""Planted bugs of pauses, delayed beginnings, thresholds, canaries, windows, priorities, retries and deletions."""

from typing import Any

from tests.simulation.world.planting import Mutant, both, patch, sql
from tidegate.core.schedule import deal
from tidegate.core.states import JobState
from tidegate.stages.ingest import chosen_lines
from tidegate.store.jobs import job_controls, jobs, retries
from tidegate.store.jobs.canaries import SampleEnd
from tidegate.store.road import outcomes

_PAUSED = "and j.paused_at is null"
_NOT_BEFORE = "and j.not_before <= now_ms()"


class _Everything(set[str | None]):
    """Contains each custom_id."""

    def __contains__(self, custom_id: object) -> bool:
        return custom_id is not None


async def _wake_none(*arguments: Any) -> None:
    """Leave every flow as it is."""


async def _let_go_always(tx: Any, job_id: str) -> SampleEnd:
    await tx.all("job_canary_set", id=job_id, state="passed")
    return SampleEnd.LET_GO


async def _no_retry_before(*arguments: Any) -> None:
    """Find no retry that was made before."""


async def _keep_extents(*arguments: Any) -> None:
    """Let go of nothing."""


CONTROLS: dict[str, Mutant] = {
    "pause_ignored_by_leases": Mutant(
        "paused",
        "a lease does not ask whether its job is paused",
        both(sql("job_open_for_lease", _PAUSED, ""), sql("job_open_to_begin", _PAUSED, "")),
    ),
    "pause_ignored_by_holders": Mutant(
        "paused",
        "a worker goes on with the slices of a paused job that it holds",
        sql("worker_leases", "j.paused_at is not null or", ""),
    ),
    "resumed_asleep": Mutant(
        "paused", "a job that is resumed does not wake its flows", patch(job_controls, "_wake", _wake_none)
    ),
    "begun_early": Mutant(
        "paused",
        "a lease does not ask whether its job may begin",
        both(
            sql("job_open_for_lease", _NOT_BEFORE, ""),
            sql("job_open_to_begin", _NOT_BEFORE, ""),
            sql("job_start", "as model_state, not_before,", "as model_state, 0 as not_before,"),
        ),
    ),
    "one_error_more": Mutant(
        "thresholds",
        "a job stops one error too late",
        sql("job_add", "failed_count > max_errors_count", "failed_count > max_errors_count + 1"),
    ),
    "cost_unbounded": Mutant(
        "thresholds", "a job does not stop at its maximum cost", sql("job_add", "cost_nano > max_cost_nano or", "")
    ),
    "error_share_unasked": Mutant(
        "thresholds",
        "a share of errors counts from the first item on",
        both(
            sql("job_add", ">= case when max_errors_after", ">= 0 * case when max_errors_after"),
            patch(job_controls, "min", lambda *numbers: 0),
        ),
    ),
    "others_beside_the_sample": Mutant(
        "canaries",
        "the slice after the sample runs beside it",
        sql("slices_hold_back", "first >= :first", "first > :first"),
    ),
    "sample_unjudged": Mutant(
        "canaries", "a canary passes whatever became of it", patch(outcomes, "end_sample", _let_go_always)
    ),
    "sample_forgotten": Mutant(
        "canaries",
        "what waits for a canary is never let go",
        sql("slices_let_go", "ready_at = :forever", "ready_at = :forever + 1"),
    ),
    "window_kept": Mutant(
        "windows",
        "a change of the window changes only its text",
        sql("job_change", "expires_at = :expires_at", "expires_at = expires_at"),
    ),
    "window_unscheduled": Mutant(
        "windows",
        "the scheduler goes by the first window of a job",
        sql("job_models_change", "expires_at = :expires_at", "expires_at = expires_at"),
    ),
    "priority_unasked": Mutant(
        "priorities",
        "what goes first within a flow does not depend on priority",
        both(
            patch(deal.Deal, "tier", lambda *arguments: 0),
            patch(deal.Deal, "prioritised", lambda self, line: line),
        ),
    ),
    "priority_kept": Mutant(
        "priorities",
        "the scheduler goes by the first priority of a job",
        sql("job_models_change", "priority = :priority", "priority = priority"),
    ),
    "answered_again": Mutant(
        "retried", "a retry runs answered items too", patch(chosen_lines, "_wanted", lambda chosen: _Everything())
    ),
    "retried_twice": Mutant(
        "retried", "the same request makes another retry", patch(retries, "_same_retry", _no_retry_before)
    ),
    "merged_without_own": Mutant(
        "retried",
        "a merged output holds only what was answered before",
        sql(
            "extents_share", "where e.file_id = :file_id", "where e.file_id = :file_id and cast(:from_at as bigint) = 0"
        ),
    ),
    "lent_bytes_uncounted": Mutant(
        "retried",
        "bytes that a retry shares do not count as used by it",
        sql("blob_lend", "uses = uses + :uses", "uses = uses + 0 * :uses"),
    ),
    "deleted_while_it_runs": Mutant(
        "deleted",
        "a job is deleted though it has not ended",
        both(
            patch(jobs, "JOB_ENDED", frozenset(JobState)),
            sql("job_forget", "and state in ('completed', 'failed', 'expired', 'cancelled')", ""),
        ),
    ),
    "deleted_bytes_kept": Mutant(
        "deleted", "the files of a deleted job keep their bytes", patch(jobs, "release_extents", _keep_extents)
    ),
    "deleted_for_others": Mutant(
        "deleted",
        "the bytes that a deleted job shares with others are let go of for all of them",
        sql("blob_release", "uses = uses - :uses", "uses = 0 * :uses"),
    ),
    "deleted_retry_named": Mutant(
        "deleted",
        "a retry that was deleted stays named by the first job",
        sql("job_retried", "retried_by = :retried_by", "retried_by = coalesce(:retried_by, retried_by)"),
    ),
    "deleted_events_dropped": Mutant(
        "deleted",
        "events of a deleted job that were not delivered are dropped",
        sql("webhook_deliveries_forget", " and d.state = 'delivered'", ""),
    ),
    "deleted_attempts_left": Mutant(
        "deleted",
        "what is known of failed items outlives their job",
        sql("attempts_forget", "job_id = :job_id", "job_id = :job_id and count > 100"),
    ),
}
