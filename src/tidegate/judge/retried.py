"""The lines of the input that a retry must run, by the error lines that it was made from."""

import json

from tidegate.core.answers.error_kinds import ErrorKind, fingerprint
from tidegate.judge.lines import JudgedInputLine, ResultLine
from tidegate.judge.records import RecordRow

_NEVER_RAN = {"batch_expired": "expired", "batch_cancelled": "cancelled"}


def retried_lines(job: RecordRow, lines: list[JudgedInputLine], errors: list[ResultLine]) -> list[JudgedInputLine]:
    """Return the input lines that these errors name and the job's choice picks.

    If several lines have the same custom_id, the first one counts.
    """
    choice = json.loads(job["retry_choice"])
    wanted = {line.custom_id for line in errors if line.custom_id is not None and _is_chosen(line, choice)}
    found = []
    for line in lines:
        if line.custom_id in wanted:
            wanted.discard(line.custom_id)
            found.append(line)
    return found


def _is_chosen(line: ResultLine, choice: dict[str, list[str]]) -> bool:
    code = line.code or line.named_refusal or f"http_{line.status}"
    if code == "duplicate_custom_id" or _NEVER_RAN.get(line.code or "", "failed") not in choice["outcomes"]:
        return False
    if choice["codes"] and code not in choice["codes"]:
        return False
    kinds = choice.get("kinds") or []
    kind = ErrorKind(code, line.status or 0, fingerprint(line.message if line.code else line.refusal_message))
    return not kinds or kind.id in kinds
