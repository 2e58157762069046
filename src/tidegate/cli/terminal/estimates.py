"""Writes the estimate of a batch or a run as a few short lines for people."""

from typing import TYPE_CHECKING

from tidegate.cli.terminal import terminal
from tidegate.core.wording import in_words

if TYPE_CHECKING:
    from tidegate.web.jobs.validation import JobEstimate, TokenRange

ERRORS_SHOWN_MAX = 10


def for_people(estimate: "JobEstimate", *, is_valid: bool, unit: str = "line") -> str:
    """Return the estimate as a few short lines."""
    if not estimate.item_count and is_valid:
        return "requests 0: nothing would be sent"
    lines = [f"requests {estimate.item_count:,}"]
    if estimate.bad_count:
        lines[0] += f", {estimate.bad_count:,} of them cannot be sent"
    if copied := estimate.reused + estimate.deduplicated:
        lines.append(f"run      {estimate.item_count - estimate.bad_count - copied:,} of them")
    if estimate.reused:
        lines.append(f"kept     {in_words(estimate.reused, 'answer')} of the last run")
    if estimate.deduplicated:
        lines.append(f"same     {in_words(estimate.deduplicated, 'request')} like another one")
    reported = estimate.errors or estimate.bad_lines
    for error in reported[:ERRORS_SHOWN_MAX]:
        place = f"{unit} {error.line}: " if error.line is not None else ""
        lines.append(f"error    {place}{error.message} ({error.code})")
    if reported and (more := max(len(reported), estimate.bad_count) - ERRORS_SHOWN_MAX) > 0:
        lines.append(f"         and {more:,} more")
    if not estimate.errors:
        cost, tokens = estimate.cost, estimate.tokens
        lines.append(f"tokens   about {_range(tokens.input_range)} in, about {_range(tokens.output)} out")
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
        count = "" if refusal.count is None else f" ({in_words(refusal.count, 'request')})"
        lines.append(f"refused  {refusal.message} [{refusal.code}]{count}")
    return "\n".join(lines)


def _range(tokens: "TokenRange") -> str:
    return f"{terminal.short(tokens.p50)} ({terminal.short(tokens.p5)} to {terminal.short(tokens.p95)})"
