"""The summary of a run at its end, for people and for scripts, from the same facts."""

from collections.abc import Sequence

import msgspec

from tidegate.cli.terminal import terminal
from tidegate.cli.terminal.failures import Cause
from tidegate.cli.terminal.input_file import Targets
from tidegate.core.answers.failed_place import split_place, with_place
from tidegate.core.nouns import Job
from tidegate.core.states import JobState
from tidegate.core.usage.prices import units_text
from tidegate.core.wording import in_words

ALL_SUCCEEDED, SOME_FAILED, UNUSABLE = 0, 1, 2
ERRORS_SHOWN_MAX = 10
CAUSES_SHOWN_MAX = 5
FUTILE = "each of the first requests failed, so no more are sent; --no-check goes on"
MESSAGE_CHARS_MAX = 120


class Ending(msgspec.Struct, frozen=True):
    """A finished run: the batch, the places of its files, how long this command worked on it, and
    how much was done before.

    - `is_futile`: the batch was to stop by itself if nothing succeeded.
    - `job_ids` are the batches that its results come from.
    - `unit` is what errors are counted in, such as lines.
    - `has_cost_bound`: this command gave `--max-cost`."""

    job: Job
    targets: Targets
    took_s: float
    found_done_count: int
    where: str = ""
    causes: tuple[Cause, ...] = ()
    is_futile: bool = False
    job_ids: tuple[str, ...] = ()
    unit: str = "line"
    has_cost_bound: bool = False

    @property
    def not_answered_count(self) -> int:
        return self.job.item_count - self.job.answered_count

    @property
    def exit_code(self) -> int:
        if self.job.state is JobState.FAILED and not self.job.item_count:
            return UNUSABLE
        return SOME_FAILED if self.not_answered_count or self.job.state is not JobState.COMPLETED else ALL_SUCCEEDED


def for_scripts(ending: Ending) -> dict[str, object]:
    """Return the summary as one JSON object."""
    job, targets = ending.job, ending.targets
    return {
        "batch": job.id,
        "status": str(job.state),
        "total": job.item_count,
        "succeeded": job.answered_count,
        "failed": ending.not_answered_count,
        "found_done": ending.found_done_count,
        "input_tokens": job.usage.input_tokens,
        "cached_tokens": job.usage.cached_tokens,
        "output_tokens": job.usage.output_tokens,
        "cost": units_text(job.cost_nano),
        "seconds": round(ending.took_s, 3),
        "results": targets.results_name,
        "errors_file": targets.errors_name if ending.not_answered_count else None,
        "failures": causes_for_scripts(ending.causes),
        "errors": [
            {"code": error.code, "message": error.message, "line": error.line, "param": error.param}
            for error in job.errors
        ],
        "exit_code": ending.exit_code,
    }


def causes_for_scripts(causes: Sequence[Cause]) -> list[dict[str, object]]:
    """Return each cause of failures with its count and an example."""
    return [
        {"cause": cause.words, "count": cause.count, "message": cause.message, "custom_id": cause.custom_id}
        for cause in causes
    ]


def of_nothing(targets: Targets) -> dict[str, object]:
    """Return the summary of a run with an empty input, with the same fields."""
    counts = ("total", "succeeded", "failed", "found_done", "input_tokens", "cached_tokens", "output_tokens")
    return {
        "batch": None,
        "status": str(JobState.COMPLETED),
        **dict.fromkeys(counts, 0),
        "cost": units_text(0),
        "seconds": 0.0,
        "results": targets.results_name,
        "errors_file": None,
        "failures": [],
        "errors": [],
        "exit_code": ALL_SUCCEEDED,
    }


def for_people(ending: Ending) -> str:
    """Return the summary as a few short lines."""
    job = ending.job
    if ending.exit_code == UNUSABLE:
        return _refused(ending)
    lines = [_counts(ending)]
    if job.usage.input_tokens or job.usage.output_tokens:
        cached = f" ({terminal.short(job.usage.cached_tokens)} from the cache)" if job.usage.cached_tokens else ""
        lines.append(
            f"tokens   {terminal.short(job.usage.input_tokens)} in{cached}, {terminal.short(job.usage.output_tokens)} out"
        )
    lines += cost_lines(job.cost_nano, has_bound=ending.has_cost_bound)
    if ending.targets.results_name is not None:
        lines.append(f"results  {ending.targets.results_name}")
    if ending.not_answered_count and ending.targets.errors_name is not None:
        lines.append(f"failed   {ending.targets.errors_name}")
    elif ending.not_answered_count:
        lines.append(f"failed   tidegate batches output {job.id} --errors{ending.where}   shows why")
    lines += _causes(ending)
    lines.append(f"batch    {job.id}")
    lines.append(f"next     tidegate verify {job.id}{ending.where}   checks it against every promise")
    return "\n".join(lines)


def cost_lines(cost_nano: int, *, has_bound: bool) -> list[str]:
    """Return the line with the cost of the answers. Without a price there is none, unless
    `--max-cost` was given."""
    if cost_nano:
        return [f"cost     {units_text(cost_nano)}"]
    return ["cost     0: no answer had a price, so --max-cost bounded nothing"] if has_bound else []


def cause_lines(causes: Sequence[Cause]) -> list[str]:
    """Return a line for each cause of failures with its count and an example, the most
    frequent first."""
    shown = causes[:CAUSES_SHOWN_MAX]
    width = max((len(f"{cause.count:,}") for cause in shown), default=0)
    lines = [f"         {cause.count:>{width},} x {cause.words}: {_example(cause)}" for cause in shown]
    if len(causes) > len(shown):
        lines.append(f"         and {in_words(len(causes) - len(shown), 'more cause')}")
    return lines


def _example(cause: Cause) -> str:
    message = cause.message
    if len(message) > MESSAGE_CHARS_MAX:
        # The place at the end of a message is worth more than the text that is cut off before it.
        text, place = split_place(message)
        cut = f"{text[:MESSAGE_CHARS_MAX].rstrip()}…"
        message = with_place(cut, place) if place else cut
    return f"{message} (as {cause.custom_id[:40]})" if cause.custom_id else message


def _causes(ending: Ending) -> list[str]:
    lines = cause_lines(ending.causes)
    if ending.job.stopped_by and ending.is_futile:
        lines.append(f"stopped  {FUTILE}")
    elif ending.job.stopped_by:
        lines += [f"stopped  {error.message}" for error in ending.job.errors[:1]]
        lines.append("         a larger bound or --retry-failed runs only what has no answer yet")
    return lines


def _counts(ending: Ending) -> str:
    job = ending.job
    if ending.found_done_count >= job.item_count > 0:
        when = "was done already"
    else:
        rate = (job.item_count - ending.found_done_count) / ending.took_s if ending.took_s > 0 else 0.0
        when = f"in {terminal.duration(ending.took_s)} ({terminal.pace(rate)})"
        if ending.found_done_count:
            when += f", {ending.found_done_count:,} done before"
    ended = "" if job.state is JobState.COMPLETED else f" [{job.state}]"
    failed = f", {ending.not_answered_count:,} failed" if ending.not_answered_count else ""
    return f"done     {job.answered_count:,} of {in_words(job.item_count, 'item')} succeeded{failed}{ended}, {when}"


def _refused(ending: Ending) -> str:
    job = ending.job
    lines = ["The input was refused; nothing was sent. Fix these lines and run the same command again:"]
    for error in job.errors[:ERRORS_SHOWN_MAX]:
        place = f"{ending.unit} {error.line}: " if error.line is not None else ""
        lines.append(f"  {place}{error.message} ({error.code})")
    if len(job.errors) > ERRORS_SHOWN_MAX:
        lines.append(f"  … and {len(job.errors) - ERRORS_SHOWN_MAX} more: tidegate batches show {job.id}{ending.where}")
    return "\n".join(lines)
