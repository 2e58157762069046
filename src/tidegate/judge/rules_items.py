"""Rules that compare records of items with the lines: counts, usage, outcomes, slices, attempts."""

import json
from collections import Counter

from tidegate.judge.case import ENDED, GIVEN_UP, NOT_INGESTED, Case
from tidegate.judge.records import RecordRow
from tidegate.judge.report import Finding, rule, shown

NEVER_RAN = {
    "expired": ("batch_expired", "This request could not be executed before the completion window expired."),
    "cancelled": ("batch_cancelled", "This request was not executed because the batch was cancelled."),
    "failed": ("batch_failed", "This request was not executed because the batch failed."),
}
STATE_OF_CODE = {code: state for state, (code, _) in NEVER_RAN.items()}
BILLED_REASONS = frozenset({"upstream_ambiguous", "invalid_upstream_response"})
FREE_REASONS = frozenset(
    {
        "upstream_throttled",
        "retry_budget_spent",
        "upstream_unavailable",
        "upstream_key_rejected",
        "upstream_pool_timeout",
        "owner_lost",
        "recorded_elsewhere",
        "handed_back",
        "budget_spent",
        "budget_reserved",
        "key_state_unknown",
        "max_parallel_requests_exceeded",
        "rate_limit_exceeded",
        "hook_deferred",
        "hook_unavailable",
    }
)
# An answer that did not fit was paid for, so it is one of the item's tries.
SCHEMA_INVALID = "schema_invalid"
# Codes of requests that were never sent, and of answers that were paid for.
JUDGED_CODES = frozenset(
    {
        "guardrail_length",
        "guardrail_pattern",
        "guardrail_unseen",
        "guardrail_schema",
        "guardrail_refused",
        "hook_refused",
        "hook_failed",
    }
)
# Codes of items with no answer on record whose request may not be sent any more.
DENIED_CODES = frozenset(
    {
        "key_deleted",
        "key_revoked",
        "key_expired",
        "model_not_allowed",
        "resource_not_allowed",
        "model_not_found",
        "budget_exceeded",
    }
)
HAND_BACKS_MAX = 2
_OUTCOMES = ("answered", "failed", "expired", "cancelled")
_NOT_BEFORE_SLACK_MS = 60_000


@rule("counts", "P3", "The counts on the job equal the lines in the files and the outcomes on record")
def counts(case: Case, found: Finding) -> None:
    job = case.job
    recorded = Counter(row["outcome"] for row in case.outcomes)
    job_counts = {outcome: job[f"{outcome}_count"] for outcome in _OUTCOMES}
    found.looked(", ".join(f"{count} {outcome}" for outcome, count in job_counts.items()))
    for outcome, count in job_counts.items():
        if recorded[outcome] != count:
            found.wrong(f"{outcome}_count is {count}, and {recorded[outcome]} outcomes are {outcome}")
    done = sum(job_counts.values())
    if done > job["item_count"]:
        found.wrong(f"{done} items are done of {job['item_count']}")
    if case.ended and case.ingested and done != job["item_count"] and not case.abandoned:
        found.wrong(f"the job ended with {done} of {job['item_count']} items done")
    if not case.ingested or case.output.absent or case.error.absent:
        return
    failures = done - job_counts["answered"]
    for content, count in ((case.output, job_counts["answered"]), (case.error, failures)):
        if content.line_count != count:
            found.wrong(f"{count} lines are counted for the {content.name} file, which has {content.line_count}")


@rule(
    "usage",
    "P3",
    "The tokens on the job are the sum of what the answers say, and more only where an answer was paid for and not let through",
)
def usage(case: Case, found: Finding) -> None:
    if not case.has_results(found):
        return
    paid = [line for line in case.lines("output") if not line.copied]
    answers = [*paid, *(line for line in case.lines("error") if line.tries)]
    paid_in_vain = any(line.code in JUDGED_CODES for line in case.lines("error"))
    for column in ("input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens"):
        total = sum(getattr(line.usage, column) for line in answers)
        if total > case.job[column] or (total < case.job[column] and not paid_in_vain):
            found.wrong(f"{column} is {case.job[column]} on record and {total} in the lines")
    found.looked(f"{case.job['input_tokens']} + {case.job['output_tokens']} tokens")


@rule("cost", "P3", "What the job cost is the sum of what its lines say they cost")
def cost(case: Case, found: Finding) -> None:
    if not case.has_results(found):
        return
    total = sum(line.cost_nano for name in ("output", "error") for line in case.lines(name))
    if total != case.job["cost_nano"]:
        found.wrong(f"the cost is {case.job['cost_nano']} billionths on record and {total} in the lines")
    found.looked(f"{total} billionths")


@rule(
    "ledger",
    "P3",
    "The ledger of usage says the same of the job's tokens and cost as the job does, and in its tenant's name",
)
def ledger(case: Case, found: Finding) -> None:
    for column in ("input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens", "cost_nano"):
        kept = case.ledger[column]
        found.need(kept == case.job[column], f"{column} is {kept} in the ledger and {case.job[column]} on the job")
    found.need(not case.ledger["strangers"], "the ledger has some of it in another tenant's name")
    found.looked(f"{case.ledger['input_tokens']} + {case.ledger['output_tokens']} tokens")


@rule("outcomes_whole", "P2", "Every item of an ended job has exactly one outcome, and there are no others")
def outcomes_whole(case: Case, found: Finding) -> None:
    count = case.job["item_count"]
    numbers = Counter(row["number"] for row in case.outcomes)
    found.looked(f"{len(case.outcomes)} outcomes of {count} items")
    for number, times in numbers.items():
        if times > 1:
            found.wrong(f"item {number} has {times} outcomes")
        if not 0 <= number < count:
            found.wrong(f"there is an outcome for item {number} of {count}")
    if case.abandoned:
        found.looked(f"{len(case.outcomes)} outcomes of {count} items; {GIVEN_UP}")
    elif case.ended:
        for number in range(count):
            if number not in numbers:
                found.wrong(f"item {number} has no outcome")


@rule("outcome_places", "P3", "Every outcome on record points exactly at its item's line, in the file of its kind")
def outcome_places(case: Case, found: Finding) -> None:
    if not case.has_results(found):
        return
    lines = case.by_number()
    for row in case.outcomes:
        number, name = row["number"], "output" if row["outcome"] == "answered" else "error"
        line = lines.get(number)
        if line is None:
            found.wrong(f"item {number} is {row['outcome']} on record and has no line")
        elif line.name != name:
            found.wrong(f"item {number} is {row['outcome']} on record, and its line is in the {line.name} file")
        elif (line.at, line.size_bytes) != (row["at"], row["size_bytes"]):
            found.wrong(
                f"item {number} is on record at {row['at']} with {row['size_bytes']} bytes, "
                f"its line is at {line.at} with {line.size_bytes} ({line.where})"
            )
    recorded = {row["number"] for row in case.outcomes}
    for line in case.result_lines:
        if line.number not in recorded:
            found.wrong(f"{line.where} belongs to no outcome on record")
        elif lines.get(line.number) is not line:
            found.wrong(f"{line.where} is a second line of item {line.number}")


@rule("lines_unchanged", "P3 P4", "Every line is, byte for byte, the one that was recorded")
def lines_unchanged(case: Case, found: Finding) -> None:
    if not case.has_results(found):
        return
    recorded = {row["number"]: row["crc32"] for row in case.outcomes if row["crc32"] is not None}
    found.looked(f"{len(recorded)} checksums")
    for line in case.result_lines:
        if line.job_part == case.part and recorded.get(line.number, line.crc32) != line.crc32:
            found.wrong(f"{line.where}, of item {line.number}, was changed since it was recorded")


@rule("never_ran", "P8 P9", "Lines of items that never ran carry the code of the job's end, and no other lines do")
def never_ran(case: Case, found: Finding) -> None:
    if not case.has_results(found):
        return
    state = case.job["state"]
    outcome_of = {row["number"]: row["outcome"] for row in case.outcomes}
    for line in case.result_lines:
        outcome = outcome_of.get(line.number)
        if line.code in STATE_OF_CODE:
            wanted = STATE_OF_CODE[line.code]
            if state != wanted:
                found.wrong(f"{line.where} says {line.code}, and the job is {state}")
            if outcome != wanted:
                found.wrong(f"{line.where} says {line.code}, and item {line.number} is {outcome} on record")
            if line.message != NEVER_RAN[wanted][1]:
                found.wrong(f"{line.where} says {line.code} in other words than documented")
        elif outcome in ("expired", "cancelled"):
            found.wrong(f"{line.where} has code {shown(line.code)}, and item {line.number} is {outcome} on record")
    for outcome in ("expired", "cancelled"):
        if case.job[f"{outcome}_count"] and state != outcome:
            found.wrong(f"{case.job[f'{outcome}_count']} items are {outcome}, and the job is {state}")


@rule("slices", "P2 P6", "What is not done lies in exactly one open slice; an ended job has no slices")
def slices(case: Case, found: Finding) -> None:
    found.looked(f"{len(case.slices)} slices")
    if case.job["state"] in ENDED or not case.ingested:
        if case.slices:
            found.wrong(f"{len(case.slices)} slices of a job that is {case.job['state']}")
        return
    done = {row["number"] for row in case.outcomes}
    waiting: Counter[int] = Counter()
    end = 0
    for row in case.slices:
        first, count = row["first"], row["count"]
        if first < end:
            found.wrong(f"the slice at {first} overlaps the one before it, which ends at {end}")
        end = first + count
        open_numbers = [number for number in range(first, end) if number not in done]
        if row["state"] == "done":
            found.need(not open_numbers, f"the slice at {first} is done, but {len(open_numbers)} of its items are not")
        else:
            waiting.update(open_numbers)
        has_lease = row["lease_token"] is not None and row["worker_id"] is not None
        if (row["state"] == "leased") != has_lease:
            found.wrong(
                f"the slice at {first} is {row['state']} and {'has' if has_lease else 'lacks'} a lease's token and owner"
            )
        if row["state"] == "leased" and row["lease_count"] < 1:
            found.wrong(f"the slice at {first} is leased but counts no lease")
    for number in range(case.job["item_count"] - case.copied_count):
        if number not in done and waiting[number] != 1:
            found.wrong(f"item {number} is not done and lies in {waiting[number]} open slices")


@rule("attempts", "P5", "Attempts on record are of items of this job, within the limit, with known reasons and moments")
def attempts(case: Case, found: Finding) -> None:
    if not case.ingested:
        found.skip(NOT_INGESTED)
        return
    job = case.job
    found.looked(f"{len(case.attempts)} items that failed at least once")
    for row in case.attempts:
        item = f"item {row['number']}"
        found.need(
            0 <= row["number"] < job["item_count"], f"{item} has attempts, and there are {job['item_count']} items"
        )
        limit = case.asked.get("retry", {}).get("attempts_max") or case.allowance.attempts_max
        if not 0 <= row["count"] < limit:
            found.wrong(f"{item} was to be tried again after {row['count']} attempts; {limit} are allowed in all")
        # A refusal is tried again only if the caller named its code.
        named = frozenset({"upstream_refused"}) if "codes" in case.asked.get("retry", {}) else frozenset()
        if row["reason"] not in BILLED_REASONS | FREE_REASONS | named | {SCHEMA_INVALID}:
            found.wrong(f"{item} has the unknown reason {shown(row['reason'])}")
        elif row["reason"] in BILLED_REASONS and not row["count"]:
            found.wrong(f"{item} has the reason {row['reason']} and no counted attempt")
        if row["reason"] == SCHEMA_INVALID and not tries_on_record(row):
            found.wrong(f"{item} has the reason {SCHEMA_INVALID} and no answer that did not fit")
        if not (row["reason"] == "handed_back") <= row["hand_backs"] <= HAND_BACKS_MAX:
            found.wrong(f"{item} was handed back {row['hand_backs']} times, and its reason is {row['reason']}")
        if not job["in_progress_at"] <= row["not_before"] <= job["expires_at"] + _NOT_BEFORE_SLACK_MS:
            found.wrong(f"{item} waits until {row['not_before']}, outside of the job's time")


def tries_on_record(row: RecordRow) -> int:
    """Return how many answers of an item did not fit, by its attempts."""
    return len(json.loads(row["tries"])) if row["tries"] else 0


@rule(
    "tries", "P5", "No item was asked for more answers than its batch allows, and those that never fitted are counted"
)
def tries(case: Case, found: Finding) -> None:
    terms = json.loads(case.job["answers"]) if case.job["answers"] else None
    allowed = 1 if terms is None else 1 + terms["tries_max"] + (terms["escalate_to"] is not None)
    for row in case.attempts:
        if tries_on_record(row) >= allowed:
            found.wrong(
                f"item {row['number']} has {tries_on_record(row)} answers that did not fit; {allowed} are allowed in all"
            )
    if not case.has_results(found):
        return
    found.looked(f"{sum(bool(line.tries) for line in case.result_lines)} items with several answers")
    for line in case.result_lines:
        if len(line.tries) > allowed:
            found.wrong(f"{line.where} has {len(line.tries)} answers, and {allowed} are allowed")
    filed = sum(line.code == SCHEMA_INVALID for line in case.lines("error"))
    counted = case.job["schema_invalid_count"]
    found.need(filed == counted, f"schema_invalid_count is {counted}, and {filed} lines say {SCHEMA_INVALID}")


RULES = (
    counts,
    usage,
    cost,
    ledger,
    outcomes_whole,
    outcome_places,
    lines_unchanged,
    never_ran,
    slices,
    attempts,
    tries,
)
