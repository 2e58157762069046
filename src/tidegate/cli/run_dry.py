"""`tidegate run --dry-run`: what a run would take, without sending anything and without keeping anything."""

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import uvloop

from tidegate.cli import run_again, run_changed, run_job, summary, terminal
from tidegate.core.nouns import Caller

if TYPE_CHECKING:
    from tidegate.web.jobs.validation import JobEstimate

ERRORS_SHOWN_MAX = 10


def report(errands: Iterable[run_job.Errand], *, as_json: bool) -> int:
    """Read each input through, print what a run of it would take, and return the exit code. A large table has several."""
    exit_code = summary.ALL_SUCCEEDED
    for errand in errands:
        estimate, history = uvloop.run(_estimate(errand))
        is_valid = not estimate.errors and not estimate.refused
        if not is_valid:
            exit_code = summary.UNUSABLE
        if as_json:
            shown = {"input": errand.source.name, **msgspec.to_builtins(estimate)}
            done_before = 0 if history is None else run_again.whole(history.jobs).done_count
            terminal.show_json({**shown, "done_before": done_before, "valid": is_valid, "exit_code": exit_code})
        else:
            before = "" if history is None else f"before   {_left_before(history)}\n"
            terminal.say(f"input    {errand.source.name}\n{before}{for_people(estimate, is_valid=is_valid)}")
    return exit_code


async def _estimate(errand: run_job.Errand) -> "tuple[JobEstimate, run_again.History | None]":
    """What the run would take, and what the same run left before. A file that was edited since is estimated by the lines that would run."""
    from tidegate import service

    async with service.estimating(errand.settings) as estimating:
        parts = estimating.parts
        history = await run_job.find_history(errand, parts)
        outdated = await run_changed.find_outdated(parts, errand.series, errand.source.sha256)
        if answered := sum(job.answered_count for job in outdated):
            kept = terminal.in_words(answered, "answer")
            terminal.say(
                f"A run of an earlier version did not end: its {kept} are kept too, for lines that are the same."
            )
        wanted = await run_job.send_in(errand, parts, estimating.reception)
        validate = partial(estimating.validation.validate, Caller(parts.tenant_id))
        try:
            if history is not None:
                return await validate(wanted), history
            return await run_job.with_earlier_answers(errand, parts, wanted, validate), None
        finally:
            await estimating.reception.delete_file(parts.tenant_id, wanted.input_file_id)


def _left_before(history: run_again.History) -> str:
    whole = run_again.whole(history.jobs)
    count = terminal.in_words(whole.item_count, "request")
    return f"{whole.done_count:,} of {count} were done; a run goes on from there, and this is about all of them"


def for_people(estimate: "JobEstimate", *, is_valid: bool) -> str:
    """The estimate as a few short lines."""
    lines = [f"requests {estimate.item_count:,}"]
    if estimate.bad_count:
        lines[0] += f", {estimate.bad_count:,} of them cannot be sent"
    if copied := estimate.reused + estimate.deduplicated:
        lines.append(f"run      {estimate.item_count - estimate.bad_count - copied:,} of them")
    if estimate.reused:
        lines.append(f"kept     {terminal.in_words(estimate.reused, 'answer')} of the last run")
    if estimate.deduplicated:
        lines.append(f"same     {terminal.in_words(estimate.deduplicated, 'request')} like another one")
    told = estimate.errors or estimate.bad_lines
    for error in told[:ERRORS_SHOWN_MAX]:
        place = f"line {error.line}: " if error.line is not None else ""
        lines.append(f"error    {place}{error.message} ({error.code})")
    if (more := max(len(told), estimate.bad_count) - ERRORS_SHOWN_MAX) > 0:
        lines.append(f"         and {more:,} more")
    if not estimate.errors:
        output, cost = estimate.tokens.output, estimate.cost
        short = terminal.short
        lines.append(
            f"tokens   {short(estimate.tokens.input)} in, about {short(output.p50)} out ({short(output.p5)} to {short(output.p95)})"
        )
        if cost.p95 != "0":
            lines.append(f"cost     about {cost.p50} ({cost.p5} to {cost.p95})")
        eta = estimate.eta
        time = "unknown until the model has answered something here"
        if eta is not None:
            time = f"about {terminal.duration(eta.p50)}, likely below {terminal.duration(eta.p95)}"
        lines.append(f"time     {time}")
        if estimate.shared_prefix_share:
            lines.append(f"shared   {100 * estimate.shared_prefix_share:.0f} % of the prompts repeat a beginning")
    lines += [f"limit    {one.bound} per {one.period} has too little left" for one in estimate.limits if one.binds]
    for refusal in estimate.refused:
        count = "" if refusal.count is None else f" ({terminal.in_words(refusal.count, 'request')})"
        lines.append(f"refused  {refusal.message} [{refusal.code}]{count}")
    after = "leave --dry-run out to run it" if is_valid else "fix this and try again"
    lines.append(f"Nothing was sent; {after}.")
    return "\n".join(lines)
