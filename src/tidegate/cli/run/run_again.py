"""Continues an earlier `tidegate run` of the same file: only lines without an answer run.

- Lines that were lost, by us or because the server did not answer, run again automatically.
- Lines that were refused run again only if the command asks for it.

Each time is a retry of an earlier batch, so the results of a run are those of all its
batches together.
"""

from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from tidegate.cli.terminal import input_file, results
from tidegate.core.answers.outcome_lines import NEVER_RAN, OutcomeLine, read_line
from tidegate.core.answers.whole_lines import whole_lines
from tidegate.core.errors import SettingsError
from tidegate.core.job_controls import EVERYTHING, JobControls, MaxErrors, RetryChoice
from tidegate.core.nouns import Job, Usage
from tidegate.core.states import JOB_ENDED, JobState
from tidegate.core.usage.prices import units_text
from tidegate.core.wording import in_words

if TYPE_CHECKING:
    from tidegate.storage import Parts

NO_ANSWER = RetryChoice(("failed", "expired", "cancelled"))
# If the first 20 results are all failures, the rest would only cost time and money.
ALL_FAILED = MaxErrors(share_ppm=EVERYTHING, after=20)
GAVE_UP = (JobState.FAILED, JobState.EXPIRED, JobState.CANCELLED, JobState.CANCELLING)
# Failures that are not the line's fault: the same request may succeed the next time.
_LOST = frozenset(code for code, _ in NEVER_RAN.values()) | {
    "internal_error",
    "upstream_ambiguous",
    "upstream_overloaded",
    "upstream_unavailable",
    "worker_lost",
}
_SERVER_FAILED = 500
# The outcome and the code by which a retry chooses lines.
FailureKind = tuple[str, str]


class UnansweredLines(msgspec.Struct, frozen=True):
    """The kinds of lines of one ended batch that have no answer and that no later batch ran again;
    True for kinds that were lost."""

    job: Job
    kinds: dict[FailureKind, bool]

    def choice(self, *, only_lost: bool) -> RetryChoice | None:
        """Return which of these lines to run again; None if there are none."""
        wanted = sorted(kind for kind, is_lost in self.kinds.items() if is_lost or not only_lost)
        if not wanted:
            return None
        if not only_lost and not self.job.retried_by:
            return NO_ANSWER
        return RetryChoice(tuple(sorted({kind[0] for kind in wanted})), tuple(sorted({kind[1] for kind in wanted})))


class History(msgspec.Struct, frozen=True):
    """The batches of one run, oldest first, and their lines without an answer."""

    jobs: tuple[Job, ...]
    rests: tuple[UnansweredLines, ...]

    @property
    def last(self) -> Job:
        return self.jobs[-1]

    @property
    def is_ended(self) -> bool:
        return self.last.state in JOB_ENDED

    async def error_lines(self, parts: "Parts") -> AsyncIterator[bytes]:
        """Yield the failed lines that no later batch ran again."""
        left = {rest.job.id: rest.kinds for rest in self.rests}
        for job in self.jobs:
            kinds = left.get(job.id, {})
            async for line in _lines(job, parts):
                kind = _kind(read_line(line))
                if kind is None or kind in kinds:
                    yield line + b"\n"

    async def settled_ids(self, parts: "Parts", again: Sequence[tuple[Job, RetryChoice]]) -> set[str]:
        """Return the custom_ids of lines that do not run again: they have an answer, or
        failed and were not chosen."""
        found: set[str] = set()
        left = {rest.job.id: rest.kinds for rest in self.rests}
        chosen = {job.id: choice for job, choice in again}
        for job in self.jobs:
            async for text in whole_lines(results.content(parts, job.output_file_id, job.output_bytes)):
                found.add(results.custom_id_of(text))
            async for text in _lines(job, parts):
                line = read_line(text)
                kind = _kind(line)
                if kind is None or (job.id in left and kind not in left[job.id]):
                    continue
                if line.custom_id is not None and not (job.id in chosen and _is_chosen(kind, chosen[job.id])):
                    found.add(line.custom_id)
        return found


async def history_from(first_id: str, parts: "Parts") -> History:
    """Read the history of a run, from its first batch on."""
    jobs, rests, to_read = [], [], [first_id]
    while to_read:
        job = await parts.store.get_job(parts.tenant_id, to_read.pop())
        if job is None:
            raise SettingsError("A batch of this run was deleted meanwhile; run the same command again.")
        jobs.append(job)
        if job.state not in JOB_ENDED or job.answered_count >= job.item_count:
            continue
        kinds = await _kinds(job, parts)
        left = dict(kinds)
        for job_id in reversed(job.retried_by):
            made = await parts.store.get_job(parts.tenant_id, job_id)
            if made is None or made.retry_choice is None or ran_nothing(made):
                continue
            ran = {kind for kind in kinds if _is_chosen(kind, made.retry_choice)}
            # Several batches made by hand may have run a line again: only the latest counts.
            if ran and ran <= left.keys():
                left = {kind: is_lost for kind, is_lost in left.items() if kind not in ran}
                to_read.append(made.id)
        rests.append(UnansweredLines(job, left))
    return History(tuple(sorted(jobs, key=lambda job: job.created_at)), tuple(rests))


async def _kinds(job: Job, parts: "Parts") -> dict[FailureKind, bool]:
    found: dict[FailureKind, bool] = {}
    async for text in _lines(job, parts):
        line = read_line(text)
        kind = _kind(line)
        if kind is not None:
            found[kind] = _is_lost(line) and found.get(kind, True)
    return found


def _lines(job: Job, parts: "Parts") -> AsyncIterator[bytes]:
    """Yield the failed lines of a batch."""
    return whole_lines(results.content(parts, job.error_file_id, job.error_bytes))


def _kind(line: OutcomeLine) -> FailureKind | None:
    """Return the kind of a failed line; None if no retry can name the line, because it has no
    custom_id of its own."""
    code = line.failure_code()
    if line.custom_id is None or code == "duplicate_custom_id":
        return None
    return str(line.failure_outcome()), code


def _is_lost(line: OutcomeLine) -> bool:
    if line.error is not None:
        return line.error.code in _LOST
    return line.response is not None and line.response.status_code >= _SERVER_FAILED


def _is_chosen(kind: FailureKind, choice: RetryChoice) -> bool:
    outcome, code = kind
    return outcome in choice.outcomes and (not choice.codes or code in choice.codes)


def ran_nothing(job: Job) -> bool:
    return job.state in JOB_ENDED and not job.item_count


def is_closing(job: Job) -> bool:
    """Return whether a batch ends, or is about to end, before its work is done."""
    return (job.closing or job.state) in GAVE_UP


def retries(
    history: History, run_options: input_file.RunOptions, *, retry_failed: bool
) -> list[tuple[Job, RetryChoice]]:
    """Return which lines of which batches run again now.

    Lost lines always do, unless a bound of this command stopped the run. Without that bound, or
    with a larger one, all lines without an answer of the last batch do.
    """
    last = history.last
    is_stopped = history.is_ended and last.stopped_by is not None
    if is_stopped and not retry_failed and not _is_lifted(last, run_options, whole(history.jobs).cost_nano):
        return []
    chosen = (
        (rest.job, rest.choice(only_lost=not retry_failed and not (is_stopped and rest.job is last)))
        for rest in history.rests
    )
    return [(job, choice) for job, choice in chosen if choice is not None]


def _is_lifted(job: Job, run_options: input_file.RunOptions, spent_nano: int) -> bool:
    """Return whether this command leaves out the bound that stopped a batch, or gives a
    larger one."""
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
    """Return the bounds of the batch that runs now. `max_cost` bounds all batches of the run
    together, but with `retry_failed` only the new one."""
    if asked.max_cost_nano is None or retry_failed:
        return asked
    return replace(asked, max_cost_nano=max(1, asked.max_cost_nano - whole(chain).cost_nano))


def whole(chain: Sequence[Job]) -> Job:
    """Return the last batch as if it had run every line, with the answers, tokens and
    cost of all."""
    if len(chain) == 1:
        return chain[0]
    return replace(
        chain[-1],
        item_count=chain[0].item_count,
        answered_count=sum(job.answered_count for job in chain),
        usage=Usage.total(job.usage for job in chain),
        cost_nano=sum(job.cost_nano for job in chain),
        output_bytes=sum(job.output_bytes for job in chain),
        error_bytes=sum(job.error_bytes for job in chain),
        # The answers of one batch come after those of another.
        ordered=False,
    )


def found_ended(chain: Sequence[Job]) -> str:
    """Return a sentence about a run that ended before and is not continued."""
    last, left_count = chain[-1], whole(chain).item_count - whole(chain).answered_count
    left = in_words(left_count, "line")
    if last.stopped_by is None:
        more = f"--retry-failed runs the {left} again that failed; " if left_count else ""
        return f"This run was done before; its results are copied again. {more}--fresh begins again."
    if last.stopped_by == "max_cost":
        why, more = f"its answers cost {units_text(whole(chain).cost_nano)}, above --max-cost", "A larger --max-cost"
    elif last.stopped_by == "max_errors":
        why, more = "more lines failed than --max-errors allows", "A larger --max-errors"
    else:
        why, more = "too much of its canary failed", "Leaving --canary out"
    return (
        f"This run was stopped before: {why}. Its results are copied again, and nothing is sent. "
        f"{more} or --retry-failed runs the {left} without an answer."
    )
