"""`tidegate run --dry-run`: prints what a run would take, without sending or keeping anything."""

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import uvloop
from msgspec.structs import replace

from tidegate import storage
from tidegate.cli.run import run_again, run_changed, run_job
from tidegate.cli.terminal import estimates, input_file, summary, terminal
from tidegate.core.nouns import Caller
from tidegate.core.wording import in_words

if TYPE_CHECKING:
    from tidegate.storage import Parts
    from tidegate.web.jobs.validation import JobEstimate


class PartEstimate(msgspec.Struct, frozen=True):
    """The estimate for the run of one input, and the history of the same run."""

    name: str
    unit: str
    estimate: "JobEstimate"
    before: "run_again.History | None"

    @property
    def done_before(self) -> int:
        return 0 if self.before is None else run_again.whole(self.before.jobs).done_count

    @property
    def is_valid(self) -> bool:
        return not self.estimate.errors and not self.estimate.refused

    def for_scripts(self) -> dict[str, object]:
        facts = {"input": self.name, **msgspec.to_builtins(self.estimate)}
        return {**facts, "done_before": self.done_before, "valid": self.is_valid}

    def for_people(self) -> str:
        before = "" if self.before is None else f"before   {_left_before(self.before, self.estimate)}\n"
        return f"input    {self.name}\n{before}{estimates.for_people(self.estimate, is_valid=self.is_valid, unit=self.unit)}"


def report(errands: Iterable[run_job.Errand], *, as_json: bool, name: str = "") -> int:
    """Read each input, print what its run would take, and return the exit code. A large table,
    called `name`, has several inputs."""
    parts = []
    for errand in errands:
        part = PartEstimate(errand.source.name, errand.source.places.unit, *uvloop.run(_estimate(errand)))
        parts.append(part)
        if not as_json:
            terminal.say(part.for_people())
    exit_code = summary.ALL_SUCCEEDED if all(part.is_valid for part in parts) else summary.UNUSABLE
    if as_json:
        terminal.show_json({**_for_scripts(parts, name), "exit_code": exit_code})
        return exit_code
    if not parts:
        terminal.say(f"input    {name}\n{estimates.for_people(nothing_to_run(), is_valid=True)}")
    if len(parts) > 1:
        terminal.say(_total(parts, name))
    if exit_code:
        terminal.say("Nothing was sent; fix this and try again.")
    elif any(part.estimate.item_count for part in parts):
        terminal.say("Nothing was sent; leave --dry-run out to run it.")
    return exit_code


def _for_scripts(parts: Sequence[PartEstimate], name: str) -> dict[str, object]:
    """Return the facts of one input, or the sums of several with the facts of each."""
    if len(parts) == 1:
        return parts[0].for_scripts()
    from tidegate.web.jobs import validation

    total = validation.together([part.estimate for part in parts]) if parts else nothing_to_run()
    facts = {"input": name, **msgspec.to_builtins(total)}
    facts |= {"done_before": sum(part.done_before for part in parts), "valid": all(part.is_valid for part in parts)}
    return {**facts, "parts": [part.for_scripts() for part in parts]}


def _total(parts: Sequence[PartEstimate], name: str) -> str:
    """Return what all parts take together, without the errors of their lines, because
    each part lists its own."""
    from tidegate.web.jobs import validation

    total = validation.together([part.estimate for part in parts])
    is_valid = all(part.is_valid for part in parts)
    lines = [f"all      {len(parts):,} parts of {name}"]
    known = [run_again.whole(part.before.jobs) for part in parts if part.before is not None]
    if known:
        count = sum(job.item_count for job in known) + sum(
            part.estimate.item_count for part in parts if part.before is None
        )
        answered = f"{sum(job.answered_count for job in known):,} of {in_words(count, 'request')}"
        lines.append(f"before   {answered} have an answer; this is about what would still run")
    shown = estimates.for_people(replace(total, errors=(), bad_lines=()), is_valid=is_valid) if is_valid else ""
    return "\n".join([*lines, *([shown] if shown else [])])


async def _estimate(errand: run_job.Errand) -> "tuple[JobEstimate, run_again.History | None]":
    """Return what the run would take, and the history of the same run.

    Only lines that would run count: those without an answer if the file ran before, or those that
    changed if it was edited since."""
    from tidegate import service

    async with service.estimating(errand.settings) as estimating:
        parts = estimating.parts
        history = await run_job.find_history(errand, parts)
        outdated = await run_changed.find_outdated(parts, errand.series, errand.source.sha256)
        if answered := sum(job.answered_count for job in outdated):
            kept = in_words(answered, "answer")
            terminal.say(
                f"A run of an earlier version did not end: its {kept} are kept too, for lines that are the same."
            )
        with storage.passing_files(errand.settings) as scratch:
            if history is not None:
                rest = await _rest(errand, history, parts, scratch)
                if rest is None:
                    return nothing_to_run(), history
                errand = replace(errand, source=rest)
            wanted = await run_job.send_in(errand, parts, estimating.reception)
        validate = partial(estimating.validation.validate, Caller(parts.tenant_id))
        try:
            if history is not None:
                return await validate(wanted), history
            return await run_job.with_earlier_answers(errand, parts, wanted, validate), None
        finally:
            await estimating.reception.delete_file(parts.tenant_id, wanted.input_file_id)


async def _rest(
    errand: run_job.Errand, history: run_again.History, parts: "Parts", scratch: Path
) -> input_file.Input | None:
    """Write the lines that would still run, with empty lines for the others so that line numbers
    stay. Return None if all is done."""
    again = run_again.retries(history, errand.run_options, retry_failed=False)
    if history.is_ended and not again:
        return None
    settled = await history.settled_ids(parts, again)
    left = {number for custom_id, number in input_file.order_of(errand.source.path).items() if custom_id not in settled}
    path = scratch / "rest.jsonl"
    with errand.source.path.open("rb") as lines, path.open("wb") as rest:
        rest.writelines(line if number in left else b"\n" for number, line in enumerate(lines, 1))
    if not left:
        return None
    source = input_file.read_input(str(path), scratch, errand.settings.limits.file_bytes_max)
    return replace(source, name=errand.source.name, places=errand.source.places)


def nothing_to_run() -> "JobEstimate":
    """Return the estimate of a run whose lines are all done."""
    from tidegate.web.jobs import validation

    cost, no_time = validation.CostShown("0", "0", "0"), validation.EtaSeconds(0, 0)
    return validation.JobEstimate((), 0, 0, (), 0, 0, validation.NO_TOKENS, cost, no_time, None, [], [])


def _left_before(history: run_again.History, estimate: "JobEstimate") -> str:
    whole = run_again.whole(history.jobs)
    if not estimate.item_count and not estimate.errors and history.is_ended:
        return run_again.found_ended(history.jobs)
    count = in_words(whole.item_count, "request")
    return f"{whole.answered_count:,} of {count} have an answer; this is about what would still run"
