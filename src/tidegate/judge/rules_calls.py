"""Rules that compare the store's records with the witness: the calls that the upstream got."""

from itertools import pairwise

from tidegate.judge.case import Case
from tidegate.judge.lines import ResultLine
from tidegate.judge.report import Finding, rule
from tidegate.judge.rules_items import BILLED_REASONS, DENIED_CODES, JUDGED_CODES, tries_on_record
from tidegate.judge.witness import Seen

_NO_WITNESS = "no witness was given"
# The clocks of a store and an engine on one machine may differ by this much.
_CLOCKS_MS = 1_000


def _calls(case: Case, found: Finding) -> dict[int, list[Seen]]:
    """Return the witness's calls by item; skip the rule if there is no witness."""
    if case.witness is None:
        found.skip(_NO_WITNESS)
        return {}
    count = sum(len(calls) for calls in case.witness.calls.values())
    found.looked(f"{count} calls of {case.witness.call_count} in the log")
    return case.witness.calls


# Codes of a 400 that the gateway itself answers with, before it sends anything.
OWN_REFUSALS = frozenset(
    {
        "duplicate_parameter",
        "file_too_large",
        "invalid_file_url",
        "invalid_request",
        "invalid_schema",
        "max_tokens_required",
        "media_not_allowed",
        "missing_required_parameter",
        "parameter_not_allowed",
        "request_exceeds_limit",
        "surcharge_unpriced",
        "unsupported_endpoint",
        "unsupported_parameter",
    }
)


@rule("calls_known", "P6", "Every call of this job in the witness names one of its items")
def calls_known(case: Case, found: Finding) -> None:
    for number, calls in _calls(case, found).items():
        if not 0 <= number < case.job["item_count"]:
            found.wrong(f"witness line {calls[0].line} names item {number}, and there are {case.job['item_count']}")


@rule("results_called", "P6", "Every result that an upstream gave was called for, and a call had that status")
def results_called(case: Case, found: Finding) -> None:
    calls = _calls(case, found)
    if case.witness is None or not case.has_results(found):
        return
    for number, line in case.by_number().items():
        seen = calls.get(number, [])
        if line.copied:
            continue
        if any(call.shared and 200 <= call.status <= 299 for call in seen):
            # The shared answer holds this item's own status.
            continue
        if line.status == 400 and not seen and line.refusal in OWN_REFUSALS:
            continue
        if line.status is not None and all(call.status != line.status for call in seen):
            found.wrong(
                f"item {number} has status {line.status} ({line.where}), and the witness saw {_statuses(seen)}: "
                "is this the calls log of the engine that served the batch?"
            )
        elif line.code in BILLED_REASONS and not seen:
            found.wrong(f"item {number} failed with {line.code} ({line.where}), and the witness saw no call")


def _statuses(calls: list[Seen]) -> str:
    return f"calls with {sorted({call.status for call in calls})}" if calls else "no call"


@rule(
    "repeats_have_reasons",
    "P5 P6",
    "A call is repeated after one that may have been billed only with a reason on record",
)
def repeats_have_reasons(case: Case, found: Finding) -> None:
    counted = {row["number"]: row["count"] + row["hand_backs"] + tries_on_record(row) for row in case.attempts}
    leased, lost = _slices_of_items(case)
    for number, calls in _calls(case, found).items():
        if number in leased:
            # Its worker may not have committed its reasons yet.
            continue
        pairs = [(before, after) for before, after in pairwise(calls) if before.maybe_billed]
        unexplained = [pair for pair in pairs if not _owner_was_lost(case, *pair)]
        # After a shared call without an answer the item is tried alone once; that needs no other
        # reason.
        isolated = next((pair for pair in unexplained if pair[0].shared and not pair[1].shared), None)
        unexplained = [pair for pair in unexplained if pair is not isolated]
        reasons = counted.get(number, 0) + lost.get(number, 0)
        if len(unexplained) > reasons:
            before, after = unexplained[0]
            found.wrong(
                f"item {number} was called {len(calls)} times (witness lines {before.line} and {after.line}, status "
                f"{before.status} before), and {reasons} repeats have a reason on record"
            )


def _slices_of_items(case: Case) -> tuple[set[int], dict[int, int]]:
    """Return the items that a worker has leased now, and the number of lost owners by item."""
    leased: set[int] = set()
    lost: dict[int, int] = {}
    for row in case.slices:
        numbers = range(row["first"], row["first"] + row["count"])
        if row["state"] == "leased":
            leased.update(numbers)
        if row["lost_count"]:
            lost.update((number, row["lost_count"]) for number in numbers)
    return leased, lost


def _owner_was_lost(case: Case, before: Seen, after: Seen) -> bool:
    """Return whether a worker of the first call was gone by the second, when another one lived."""
    for gone in case.workers:
        is_gone = gone["state"] == "gone" or gone["alive_until"] < case.now_ms
        if not is_gone or not _lived(gone, before.at_ms) or after.at_ms < gone["beat_at"] - _CLOCKS_MS:
            continue
        if any(other["id"] != gone["id"] and _lived(other, after.at_ms) for other in case.workers):
            return True
    return False


def _died_with_it(case: Case, call: Seen) -> bool:
    """Return whether a worker that lived at the call is gone, and another one lived longer."""
    return any(
        gone["state"] == "gone"
        and _lived(gone, call.at_ms)
        and any(other["alive_until"] > gone["alive_until"] for other in case.workers)
        for gone in case.workers
    )


def _lived(worker: dict[str, int], at_ms: int) -> bool:
    return worker["started_at"] - _CLOCKS_MS <= at_ms <= worker["alive_until"] + _CLOCKS_MS


@rule("no_repeats", "P5", "Without faults, every item is called exactly once")
def no_repeats(case: Case, found: Finding) -> None:
    if not case.allowance.expect_no_repeats:
        found.skip("repeats were not ruled out")
        return
    calls = _calls(case, found)
    for number, seen in calls.items():
        if len(seen) > 1:
            found.wrong(
                f"item {number} was called {len(seen)} times (witness lines {[call.line for call in seen][:5]})"
            )


@rule("calls_in_time", "P8 P9", "No call started after the deadline, nor later than 2 s after the job began to close")
def calls_in_time(case: Case, found: Finding) -> None:
    job, allowance = case.job, case.allowance
    limits = [(job["expires_at"], "its deadline")]
    for column in ("cancelling_at", "closing_at"):
        if job[column] is not None:
            limits.append((job[column] + allowance.cancel_ms, f"{column} + {allowance.cancel_ms} ms"))
    limit_ms, name = min(limits)
    for number, calls in _calls(case, found).items():
        late = calls[-1].at_ms - limit_ms
        if late > allowance.travel_ms:
            found.wrong(f"item {number} was called {late} ms after {name} (witness line {calls[-1].line})")


@rule("one_key", "P5", "All calls of one try that an item has to itself carry the same Idempotency-Key")
def one_key(case: Case, found: Finding) -> None:
    for number, calls in _calls(case, found).items():
        keys: dict[str, set[str]] = {}
        for call in calls:
            if not call.shared:
                # A key is the item's id, a hash of its body and, from the second try on, the try's
                # number.
                keys.setdefault(call.key.partition("-")[2].partition("-")[2], set()).add(call.key)
        for of_try in keys.values():
            if len(of_try) > 1:
                found.wrong(f"item {number} was called with {len(of_try)} keys: {', '.join(sorted(of_try)[:2])}")


@rule("answers_kept", "P4", "An item that was answered is answered in the output file")
def answers_kept(case: Case, found: Finding) -> None:
    calls = _calls(case, found)
    if case.witness is None or not case.has_results(found):
        return
    if case.job["closing"] != "completed" or not case.ended:
        found.skip("calls may still be on their way, or came after the job closed")
        return
    counted = {row["number"] for row in case.attempts if row["count"] or row["hand_backs"]}
    lines = case.by_number()
    for number, seen in calls.items():
        answered = [call for call in seen if call.clean]
        line: ResultLine | None = lines.get(number)
        if line is not None and (line.code in JUDGED_CODES or line.tries):
            # A guardrail or a hook did not let the answer pass, or it did not fit.
            continue
        if answered and line is not None and line.code in DENIED_CODES and _died_with_it(case, answered[-1]):
            # The answer was lost with its worker, and the item may not be sent again.
            continue
        if answered and (line is None or line.name != "output") and number not in counted:
            last = seen[-1]
            if last is answered[0] or not _owner_was_lost(case, answered[0], last):
                found.wrong(
                    f"item {number} was answered (witness line {answered[0].line}) and is not in the output file"
                )


RULES = (
    calls_known,
    results_called,
    repeats_have_reasons,
    no_repeats,
    calls_in_time,
    one_key,
    answers_kept,
)
