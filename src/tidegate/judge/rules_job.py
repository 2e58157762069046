"""Rules about the job itself: its state, its moments and its progress."""

from typing import Any

from tidegate.judge.case import END_STAMPS, ENDED, Case
from tidegate.judge.jsonl import NotJson, read_json
from tidegate.judge.records import RecordRow
from tidegate.judge.report import Finding, rule, shown

# The states that may follow each state, with any steps between.
LATER = {
    "validating": ("in_progress", "cancelling", "finalizing", *ENDED),
    "in_progress": ("cancelling", "finalizing", *ENDED),
    "cancelling": ("finalizing", "cancelled"),
    "finalizing": ENDED,
}
_STUCK_AFTER_MS = 60_000
_BYTES_AWAY_MS = 24 * 3600 * 1000
_GROWING = (
    "item_count", "answered_count", "failed_count", "expired_count", "cancelled_count", "unused_count", "input_tokens",
    "cached_tokens", "output_tokens", "reasoning_tokens", "output_bytes", "error_bytes",
)  # fmt: skip
_SET_ONCE = ("in_progress_at", "finalizing_at", "cancelling_at", *END_STAMPS, "closing", "closing_at", "begun_at")
_NEVER_CHANGED = (
    "tenant_id", "endpoint", "input_file_id", "created_at", "expires_at", "ordered", "invalid_lines", "shape",
)  # fmt: skip


@rule("moments", "P10", "The job's moments are those of its state and follow one another in order")
def moments(case: Case, found: Finding) -> None:
    job = case.job
    state = job["state"]
    if state not in LATER and state not in ENDED:
        found.wrong(f"{shown(str(state))} is no state")
        return
    found.looked(state)
    for stamp in END_STAMPS:
        wanted = stamp == f"{state}_at"
        if (job[stamp] is not None) != wanted:
            found.wrong(f"the job is {state}, and {stamp} is {job[stamp]}")
    _check_closing(case, found)
    beyond = case.ingested and (case.ended or state == "finalizing")
    found.need(
        case.ingested or case.ended or state == "validating", f"the job is {state}, and in_progress_at is not set"
    )
    found.need(not (case.ingested and state == "validating"), "the job is validating, and in_progress_at is set")
    found.need(
        (job["finalizing_at"] is not None) == beyond, f"the job is {state}, and finalizing_at is {job['finalizing_at']}"
    )
    found.need(job["expires_at"] > job["created_at"], "the job expires before it was created")
    end = next((stamp for stamp in END_STAMPS if job[stamp] is not None), "now")
    _in_order(job | {"now": case.now_ms}, ("created_at", "in_progress_at", "closing_at", "finalizing_at", end), found)
    _in_order(job | {"now": case.now_ms}, ("created_at", "cancelling_at", "finalizing_at", end), found)
    _in_order(job, ("in_progress_at", "begun_at"), found)
    if state == "expired" and job["closing_at"] is not None:
        due = min(job["expires_at"], job["begin_by"] or job["expires_at"])
        found.need(job["closing_at"] >= due, f"the job was closed as expired at {job['closing_at']}, before {due}")


@rule("database_sound", "P1", "The database finds nothing wrong with itself")
def database_sound(case: Case, found: Finding) -> None:
    for fault in case.faults:
        found.wrong(shown(fault))
    found.looked("its pages and indexes")


def _check_closing(case: Case, found: Finding) -> None:
    """Check `closing`, the state that a job will end in, and the moment when that was decided."""
    job = case.job
    state, closing = job["state"], job["closing"]
    found.need(
        (closing is None) == (job["closing_at"] is None), f"closing is {closing}, and closing_at is {job['closing_at']}"
    )
    if case.ended and (case.ingested or state != "failed"):
        found.need(closing == state, f"the job was closing as {closing} and ended as {state}")
    if state in ("finalizing", "cancelling"):
        found.need(closing is not None, f"the job is {state}, and nothing says as what it closes")
    # A job may have been cancelled before an operator gave up publishing it, which closes it as
    # failed.
    found.need(
        case.abandoned or (job["cancelling_at"] is not None) == (closing == "cancelled"),
        f"closing is {closing}, cancelling_at is {job['cancelling_at']}",
    )
    if state == "in_progress":
        found.need(closing in (None, "expired", "failed"), f"the job is in_progress and closes as {closing}")


def _in_order(row: RecordRow, stamps: tuple[str, ...], found: Finding) -> None:
    last: Any = None
    for stamp in stamps:
        if row[stamp] is None:
            continue
        if last is not None and row[stamp] < row[last]:
            found.wrong(f"{stamp} ({row[stamp]}) is before {last} ({row[last]})")
        last = stamp


@rule(
    "monotone", "P10", "Between two looks the state moved only forward, nothing counted shrank and what was set stayed"
)
def monotone(case: Case, found: Finding) -> None:
    before, after = case.job, case.job_later
    if after is None:
        found.need(case.ended, "the job vanished between two looks though it had not ended")
        return
    if before["state"] == after["state"]:
        found.looked(f"still {after['state']}")
    elif after["state"] in LATER.get(before["state"], ()):
        found.looked(f"{before['state']}, then {after['state']}")
    else:
        found.wrong(f"the job was {before['state']} and then {after['state']}")
    for column in _GROWING:
        if after[column] < before[column]:
            found.wrong(f"{column} was {before[column]} and then {after[column]}")
    for column in _SET_ONCE:
        if before[column] is not None and after[column] != before[column]:
            found.wrong(f"{column} was {before[column]} and then {after[column]}")
    fixed = _NEVER_CHANGED + (("output_file_id", "error_file_id") if case.ended else ())
    for column in fixed:
        if after[column] != before[column]:
            found.wrong(f"{column} was {before[column]} and then {after[column]}")


@rule("not_stuck", "P7", "The job ended by its deadline, the grace for calls in flight and 60 s, or still has time")
def not_stuck(case: Case, found: Finding) -> None:
    job = case.job
    due = job["expires_at"] + case.allowance.grace_ms + _STUCK_AFTER_MS
    if job["state"] == "finalizing" and job["step_failures"]:
        # If bytes cannot be written, a job may stay in finalizing for a day longer.
        due += _BYTES_AWAY_MS
    ended_at = next((job[stamp] for stamp in END_STAMPS if job[stamp] is not None), case.now_ms)
    if ended_at <= due:
        return
    if case.ended:
        found.skip(f"it ended {ended_at - due} ms late, and it is not known any more whether a worker was alive")
    elif not any(worker["state"] == "alive" and worker["alive_until"] >= case.now_ms for worker in case.workers):
        found.skip("no worker is alive")
    else:
        found.wrong(f"the job is {job['state']} {case.now_ms - job['expires_at']} ms after its deadline")


@rule("refusal", "P2", "A job that ended before ingest has no results, and one that was refused says why")
def refusal(case: Case, found: Finding) -> None:
    job = case.job
    if case.ingested or not case.ended:
        found.skip("the job was ingested" if case.ingested else "the job waits for ingest")
        return
    for column in (
        "item_count",
        "answered_count",
        "failed_count",
        "expired_count",
        "cancelled_count",
        "output_bytes",
        "error_bytes",
    ):
        found.need(job[column] == 0, f"{column} is {job[column]}")
    found.need(not case.outcomes, f"{len(case.outcomes)} outcomes are on record")
    if job["state"] != "failed":
        return
    try:
        errors = read_json(job["errors"].encode())
    except NotJson:
        errors = None
    if not isinstance(errors, list) or not errors:
        found.wrong("the job failed before ingest without a reason in `errors`")
        return
    found.looked(f"{len(errors)} errors")
    line_count = max(content.line_count for content in case.inputs)
    for error in errors:
        line = error.get("line") if isinstance(error, dict) else None
        if not isinstance(error, dict) or not error.get("code") or not error.get("message"):
            found.wrong("an entry of `errors` lacks a code or a message")
        elif line is not None and not case.input.absent and not 1 <= line <= max(1, line_count):
            found.wrong(f"an error names line {line} of an input with {line_count} lines")


RULES = (database_sound, moments, monotone, not_stuck, refusal)
