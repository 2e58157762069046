"""Rules about items that are not run but get a copy of another item's line."""

from tidegate.judge.case import Case
from tidegate.judge.lines import ResultLine
from tidegate.judge.report import Finding, rule, shown
from tidegate.judge.rules_items import STATE_OF_CODE

# Answers of these endpoints do not depend on chance.
EXACT_ENDPOINTS = frozenset(
    {"/v1/embeddings", "/v1/moderations", "/v1/score", "/v1/rerank", "/v1/classify", "/v1/pooling"}
)
# The code of an item whose source for a copy was lost.
LOST = "internal_error"


@rule("copies", "P3 P6", "An item that is not run was never called, and has the line of one that is the same request")
def copies(case: Case, found: Finding) -> None:
    run_count = case.job["item_count"] - case.copied_count
    calls = case.witness.calls if case.witness is not None else {}
    for number in calls:
        found.need(number < run_count, f"item {number} is not to be run, and was called")
    if not case.has_results(found):
        return
    by_id = {line.id: line for line in case.result_lines}
    for copied in ("deduplicated", "reused"):
        count, most = sum(line.copied == copied for line in case.result_lines), case.job[f"{copied}_count"]
        found.need(count <= most, f"{count} lines are {copied}, and {copied}_count is {most}")
    found.looked(f"{case.copied_count} items that are not run")
    for line in case.result_lines:
        if line.job_part != case.part:
            continue
        if line.number < run_count:
            found.need(not line.copied, f"{line.where} is a copy, and item {line.number} is to be run")
        elif line.copied:
            check = _check_reused if line.copied == "reused" else _check_copy
            check(case, found, line, by_id.get(line.copy_of))
        elif line.code not in STATE_OF_CODE and line.code != LOST:
            found.wrong(f"{line.where} has a result of its own, and item {line.number} is not to be run")


def _check_copy(case: Case, found: Finding, line: ResultLine, source: ResultLine | None) -> None:
    if source is None or source.copied or source.job_part != case.part:
        found.wrong(f"{line.where} is a copy of {shown(line.copy_of)}, which is no item of this job that was run")
        return
    if (line.name, line.content) != (source.name, source.content):
        found.wrong(f"{line.where} says something else than {source.where}, of which it is a copy")
    own, other = case.request_keys.get(line.custom_id), case.request_keys.get(source.custom_id)
    if own is None or other is None:
        return
    if (own.key, own.url or case.job["endpoint"]) != (other.key, other.url or case.job["endpoint"]):
        found.wrong(f"{line.where} is a copy of {source.where}, and their requests differ")
    if not _is_exact(case, own.url, own.temperature):
        found.wrong(f"{line.where} is a copy, and its request has temperature {shown(str(own.temperature))}")


def _check_reused(case: Case, found: Finding, line: ResultLine, own: ResultLine | None) -> None:
    """Compare a line with the earlier job that it is from, as far as that is still kept."""
    earlier = case.earlier
    if own is not None or line.name != "output":
        found.wrong(f"{line.where} is from {shown(line.copy_of)}, which is no answer of an earlier job")
    if earlier is None or not earlier.lines:
        return
    source = earlier.lines.get(line.copy_of)
    if source is None or (source.custom_id, source.content) != (line.custom_id, line.content):
        found.wrong(f"{line.where} is not what {shown(line.copy_of)} of the earlier job says")
    request, before = case.request_keys.get(line.custom_id), earlier.request_keys.get(line.custom_id)
    if request is not None and before is not None and request.key != before.key:
        found.wrong(f"{line.where} is from an earlier job, and its request was changed since")


def _is_exact(case: Case, url: str | None, temperature: object) -> bool:
    """Return whether a request always has the same answer.

    Parameters from its batch or the operator win over those of its line.
    """
    if (url or case.job["endpoint"]) in EXACT_ENDPOINTS:
        return True
    asked = case.asked
    temperature = asked.get("overrides", {}).get("temperature", temperature)
    if temperature is None:
        temperature = asked.get("defaults", {}).get("temperature")
    if "temperature" in case.allowance.overridden or (
        temperature is None and "temperature" in case.allowance.defaulted
    ):
        # The operator may have changed it since.
        return True
    return isinstance(temperature, int | float) and temperature == 0


RULES = (copies,)
