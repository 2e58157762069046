"""Rules about the lines of the input, output and error files."""

from collections import Counter

from tidegate.judge.case import GIVEN_UP, Case
from tidegate.judge.report import Finding, rule, shown
from tidegate.judge.rules_items import BILLED_REASONS, JUDGED_CODES, STATE_OF_CODE

# Reasons why a line is no request, for callers who asked for such lines in the error file.
LINE_CODES = frozenset(
    {
        "duplicate_custom_id",
        "invalid_custom_id",
        "invalid_json_line",
        "invalid_method",
        "invalid_request",
        "line_too_long",
        "missing_required_parameter",
        "model_mismatch",
        "model_not_found",
        "too_many_tasks",
        "unsupported_parameter",
        "url_mismatch",
    }
)
KEY_CODES = frozenset(
    {
        "budget_exceeded",
        "key_deleted",
        "key_expired",
        "key_revoked",
        "model_not_allowed",
        "resource_not_allowed",
    }
)
ITEM_CODES = (
    LINE_CODES
    | KEY_CODES
    | JUDGED_CODES
    | BILLED_REASONS
    | frozenset(STATE_OF_CODE)
    | {
        "chat_usage_missing",
        "file_url_unreadable",
        "internal_error",
        "schema_invalid",
        "upstream_refused",
        "worker_lost",
    }
)


@rule("line_shape", "P3", "Every result line has OpenAI's exact shape")
def line_shape(case: Case, found: Finding) -> None:
    if not case.has_results(found):
        return
    found.looked(f"{len(case.result_lines)} lines")
    for line in case.result_lines:
        for fault in line.faults:
            found.wrong(f"{line.where}: {fault}")


@rule("line_place", "P3", "Answers (2xx) are in the output file, everything else is in the error file")
def line_place(case: Case, found: Finding) -> None:
    if not case.has_results(found):
        return
    for line in case.result_lines:
        if line.name == "output" and not line.good:
            found.wrong(f"{line.where} has {_status_and_code(line.status, line.code)} and belongs in the error file")
        elif line.name == "error" and line.good:
            found.wrong(f"{line.where} has status {line.status} and belongs in the output file")


@rule("codes_known", "P3", "An item without an answer says why with a documented code")
def codes_known(case: Case, found: Finding) -> None:
    if not case.has_results(found):
        return
    codes = Counter(line.code for line in case.result_lines if line.code is not None)
    found.looked(
        ", ".join(f"{count} {shown(code)}" for code, count in codes.most_common(5)) or "every item has an answer"
    )
    for line in case.result_lines:
        if line.code is not None and line.code not in ITEM_CODES:
            found.wrong(f"{line.where} has the unknown code {shown(line.code)}")


def _status_and_code(status: int | None, code: str | None) -> str:
    return f"status {status}" if status is not None else f"error {shown(code)}"


@rule("line_ids", "P22", "The id of every result line is ours, names an item of this job, and stands on no other line")
def line_ids(case: Case, found: Finding) -> None:
    if not case.has_results(found):
        return
    first: dict[str, str] = {}
    for line in case.result_lines:
        if not line.id:
            found.wrong(f"{line.where} has no id")
            continue
        if line.job_part != case.part:
            found.wrong(f"{line.where}: {shown(line.id)} names no item of this job")
        elif not 0 <= line.number < case.job["item_count"]:
            found.wrong(f"{line.where} names item {line.number}, and there are {case.job['item_count']}")
        other = first.setdefault(line.id, line.where)
        if other != line.where:
            found.wrong(f"{line.where} has the id of {other}")


@rule("items_once", "P2 P3", "Every input line is in exactly one of output and error, once")
def items_once(case: Case, found: Finding) -> None:
    if not case.has_results(found):
        return
    if case.input.absent:
        _items_once_by_number(case, found)
        return
    asked = Counter(line.custom_id for line in case.input_lines)
    got = Counter(line.custom_id for line in case.result_lines)
    found.looked(f"{len(case.input_lines)} input lines, {len(case.result_lines)} result lines")
    found.need(
        len(case.input_lines) == case.job["item_count"],
        f"the input has {len(case.input_lines)} requests, the job {case.job['item_count']} items",
    )
    extra, missing = got - asked, asked - got
    never_ran = case.job["item_count"] - len(case.outcomes) if case.abandoned else 0
    if never_ran:
        found.looked(f"{len(case.input_lines)} input lines, {len(case.result_lines)} result lines; {GIVEN_UP}")
    if case.job["invalid_lines"] == "error_file":
        # If the id of a bad line cannot be read, its error line has null as custom_id.
        stand_ins = min(extra[None], missing.total())
        extra[None] -= stand_ins
        allowed_missing = stand_ins
    else:
        allowed_missing = 0
    for custom_id, count in (+extra).items():
        what = "is not in the input" if custom_id not in asked else f"is there {got[custom_id]} times"
        found.wrong(f"custom_id {shown(custom_id)} {what} ({count} too many)")
    if case.ended and missing.total() > allowed_missing + never_ran:
        lines = {line.custom_id: line.line for line in case.input_lines}
        for custom_id, count in missing.items():
            found.wrong(f"input line {lines[custom_id]}, custom_id {shown(custom_id)}, has no result ({count} missing)")


def _items_once_by_number(case: Case, found: Finding) -> None:
    found.looked(f"{case.input.absent}, so items are named by their numbers")
    counts = Counter(line.number for line in case.result_lines if line.job_part == case.part)
    for number, count in counts.items():
        found.need(count == 1, f"item {number} is there {count} times")
    if case.ended:
        wanted = len(case.outcomes) if case.abandoned else case.job["item_count"]
        found.need(len(counts) == wanted, f"{len(counts)} of {wanted} items have a result")


@rule("item_order", "-", "An ordered job's files are in the order of the input")
def item_order(case: Case, found: Finding) -> None:
    if not case.job["ordered"]:
        found.skip("the caller asked for no order")
        return
    if not case.ended:
        found.skip("order is made when the job is published")
        return
    if case.abandoned:
        found.skip(f"order is made when the job is published, and {GIVEN_UP}")
        return
    if not case.has_results(found):
        return
    if case.input.absent:
        found.skip(case.input.absent)
        return
    places: dict[str | None, list[int]] = {}
    for place in case.input_lines:
        places.setdefault(place.custom_id, []).append(place.line)
    for name in ("output", "error"):
        last = 0
        for line in case.lines(name):
            if line.custom_id is None:
                continue
            later = [place for place in places.get(line.custom_id, ()) if place > last]
            if not later:
                found.wrong(f"{line.where}, custom_id {shown(line.custom_id)}, stands behind input line {last}")
            else:
                last = later[0]


@rule("own_item", "P3", "Every result line carries the custom_id of the item that its id names")
def own_item(case: Case, found: Finding) -> None:
    if not case.has_results(found):
        return
    if case.work_ids is None:
        found.skip(case.work_absent)
        return
    found.looked(f"{len(case.work_ids)} lines of the work file")
    found.need(
        len(case.work_ids) == case.job["item_count"],
        f"the work file has {len(case.work_ids)} lines for {case.job['item_count']} items",
    )
    for line in case.result_lines:
        if line.job_part == case.part and 0 <= line.number < len(case.work_ids):
            wanted = case.work_ids[line.number]
            if line.custom_id != wanted:
                found.wrong(f"{line.where} is for {shown(line.custom_id)}, item {line.number} is {shown(wanted)}")


@rule(
    "parameters",
    "P3",
    "Every request that was sent has the batch's overrides, and its defaults where its line named none",
)
def parameters(case: Case, found: Finding) -> None:
    if not case.parameters:
        found.skip("the caller asked for no defaults or overrides")
        return
    if case.work_ids is None or case.input.absent:
        found.skip(case.input.absent or case.work_absent)
        return
    found.looked(f"{len(case.work_parameters)} lines of the work file")
    overrides = case.asked.get("overrides", {})
    for number, (custom_id, sent) in enumerate(zip(case.work_ids, case.work_parameters, strict=True)):
        item = f"item {number}, custom_id {shown(custom_id)},"
        own = case.input_parameters.get(custom_id)
        if sent is None or own is None:
            continue
        for name in case.parameters:
            wanted = overrides.get(name, own.get(name))
            if name not in sent:
                found.wrong(f"{item} lacks {shown(name)}")
            elif (
                (name in overrides or name in own)
                and sent[name] != wanted
                and (name in overrides or name not in case.allowance.overridden)
            ):
                found.wrong(f"{item} has another {shown(name)} than the override or its line")


@rule("canary", "-", "Of a job whose canary has not passed, nothing but the sample was sent or has a result of its own")
def canary(case: Case, found: Finding) -> None:
    state, sample = case.job["canary_state"], case.job["canary_items"]
    if state is None or not case.ingested:
        found.skip("the job has no canary" if state is None else "the job was not ingested")
        return
    if state == "passed" and case.job["stopped_by"] != "canary":
        found.skip("the canary has passed")
        return
    found.looked(f"{state}, a sample of {sample}")
    for line in case.result_lines:
        is_own = line.job_part == case.part and not line.copied
        if is_own and line.number >= sample and line.code not in STATE_OF_CODE:
            found.wrong(f"{line.where} is item {line.number}, beyond the sample of {sample}")
    calls = case.witness.calls if case.witness is not None else {}
    for number in calls:
        found.need(number < sample, f"item {number} was called, beyond the sample of {sample}")


RULES = (line_shape, line_place, line_ids, items_once, item_order, own_item, codes_known, parameters, canary)
