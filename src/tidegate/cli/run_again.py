"""What an earlier `tidegate run` of the same file left, and how the same command goes on from it: only lines without an answer run.

Each time is a retry of the batch before it, so that its merged output holds the answers of all of them.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from tidegate.cli import input_file, terminal
from tidegate.core.job_controls import JobControls, MaxErrors, RetryChoice
from tidegate.core.nouns import Job, Usage
from tidegate.core.states import JOB_ENDED, JobState
from tidegate.core.usage.prices import units_text

if TYPE_CHECKING:
    from tidegate.service import Parts

NO_ANSWER = RetryChoice(("failed", "expired", "cancelled"))
# When each of so many first answers is a failure, the rest would only cost time and money.
ALL_FAILED = MaxErrors(share_ppm=999_999, after=20)
GAVE_UP = (JobState.FAILED, JobState.EXPIRED, JobState.CANCELLED, JobState.CANCELLING)


class _LineTrouble(msgspec.Struct):
    code: str | None = None


class _UnansweredLine(msgspec.Struct):
    custom_id: str | None = None
    error: _LineTrouble | None = None


async def chain_from(first: Job, parts: "Parts") -> list[Job]:
    """Return a batch and those that ran all of its lines without an answer again, oldest first."""
    chain = [first]
    while (after := await _retry_of(chain[-1], parts)) is not None:
        chain.append(after)
    return chain


async def _retry_of(job: Job, parts: "Parts") -> Job | None:
    counts = {"failed": job.failed_count, "expired": job.expired_count, "cancelled": job.cancelled_count}
    left = {outcome for outcome, count in counts.items() if count}
    for job_id in reversed(job.retried_by):
        made = await parts.store.get_job(parts.tenant_id, job_id)
        if made is None or made.retry_choice is None or ran_nothing(made):
            continue
        if not made.retry_choice.codes and left <= set(made.retry_choice.outcomes):
            return made
    return None


def ran_nothing(job: Job) -> bool:
    return job.state in JOB_ENDED and not job.item_count


def goes_on(chain: Sequence[Job], *, retry_failed: bool) -> bool:
    """Whether the same command is about these batches. One that ended early is begun again, unless answers would be paid for twice."""
    last = chain[-1]
    if (last.closing or last.state) not in GAVE_UP:
        return True
    is_kept = last.stopped_by is not None or last.retry_of is not None
    return is_kept or (retry_failed and last.state in JOB_ENDED and last.item_count > 0)


def is_wanted(chain: Sequence[Job], run_options: input_file.RunOptions, *, retry_failed: bool) -> bool:
    """Whether lines without an answer run now: asked for, or what stopped them no longer does."""
    last = chain[-1]
    if last.state not in JOB_ENDED or last.answered_count >= last.item_count:
        return False
    if retry_failed:
        return True
    if last.stopped_by is None:
        return last.state in GAVE_UP
    return _is_lifted(last, run_options, whole(chain).cost_nano)


def _is_lifted(job: Job, run_options: input_file.RunOptions, spent_nano: int) -> bool:
    """Whether this command leaves out the bound that stopped a batch, or gives a larger one."""
    asked, had = run_options.controls, job.controls.max_errors
    if job.stopped_by == "canary":
        return run_options.canary is None
    if job.stopped_by == "max_cost":
        return asked.max_cost_nano is None or asked.max_cost_nano > spent_nano
    if had is None or had == ALL_FAILED or asked.max_errors is None:
        return True
    most = asked.max_errors
    return (most.count or 0) > (had.count or 0) or (most.share_ppm or 0) > (had.share_ppm or 0)


def controls(chain: Sequence[Job], asked: JobControls, *, retry_failed: bool) -> JobControls:
    """The bounds of what runs now: a cost that was raised is that of all batches, one for failed lines is theirs alone."""
    if asked.max_cost_nano is None or retry_failed:
        return asked
    return replace(asked, max_cost_nano=max(1, asked.max_cost_nano - whole(chain).cost_nano))


def whole(chain: Sequence[Job]) -> Job:
    """The last batch as if it had run every line: with the answers, tokens and cost of all."""
    if len(chain) == 1:
        return chain[0]
    return replace(
        chain[-1],
        item_count=chain[0].item_count,
        answered_count=sum(job.answered_count for job in chain),
        usage=Usage.total(job.usage for job in chain),
        cost_nano=sum(job.cost_nano for job in chain),
        # Merged answers lie one batch behind the other.
        ordered=False,
    )


async def with_merged(job: Job, parts: "Parts") -> Job:
    """A whole batch with its merged output in place of its own."""
    if job.retry_of is None:
        return job
    merged = await parts.store.get_file(parts.tenant_id, job.merged_file_id or "")
    return replace(job, output_file_id=merged.id if merged else None, output_bytes=merged.size_bytes if merged else 0)


async def never_retried(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the error lines that no retry runs: those without a custom_id of their own."""
    decode = msgspec.json.Decoder(_UnansweredLine).decode
    rest = b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            failed = decode(line)
            if failed.custom_id is None or (failed.error and failed.error.code == "duplicate_custom_id"):
                yield line + b"\n"


def found_ended(chain: Sequence[Job]) -> str:
    """Say what became of a run that is not gone on with."""
    last = chain[-1]
    if last.stopped_by is None:
        return "This run was done before; its results are copied again. --fresh begins again."
    if last.stopped_by == "max_cost":
        why, more = f"its answers cost {units_text(whole(chain).cost_nano)}, above --max-cost", "A larger --max-cost"
    elif last.stopped_by == "max_errors":
        why, more = "more lines failed than --max-errors allows", "A larger --max-errors"
    else:
        why, more = "too much of its canary failed", "Leaving --canary out"
    left = terminal.in_words(whole(chain).item_count - whole(chain).answered_count, "line")
    return (
        f"This run was stopped before: {why}. Its results are copied again, and nothing is sent. "
        f"{more} or --retry-failed runs the {left} without an answer."
    )
