"""The witness: the calls log that a simulated engine writes before each answer leaves. The judge reads it by itself.

Only calls of one job are kept; which they are, their Idempotency-Key says: the item's id and a hash of what was sent.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from tidegate.judge.jsonl import NotJson, read_json
from tidegate.judge.lines import split_item_id
from tidegate.judge.report import CannotJudge

# What the upstream refused before it worked: nothing can have been billed.
FREE_STATUSES = frozenset({401, 403, 429})
_KEY = re.compile(r"(batch_req_[0-9A-Za-z]{22})-([0-9a-f]{8,64})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Seen:
    """One call. `status` 0 means that no answer left; `clean` that a whole good one did, as far as the engine knows."""

    line: int
    at_ms: int
    status: int
    key: str
    clean: bool

    @property
    def maybe_billed(self) -> bool:
        return self.status not in FREE_STATUSES


@dataclass(frozen=True, slots=True)
class Witness:
    """The calls of one job, by item number, in the order of time."""

    calls: dict[int, list[Seen]]
    call_count: int
    nameless_count: int


def read_witness(path: Path, job_part: str) -> Witness:
    """Read a calls log; CannotJudge when it is none. A last line without its newline is still being written."""
    calls: dict[int, list[Seen]] = {}
    count = nameless = 0
    try:
        with path.open("rb") as log:
            for number, data in enumerate(log, 1):
                if not data.endswith(b"\n"):
                    break
                key, seen = _read_call(path, number, data)
                count += 1
                if seen is None:
                    nameless += 1
                    continue
                split = split_item_id(key)
                if split is not None and split[0] == job_part:
                    calls.setdefault(split[1], []).append(seen)
    except OSError as error:
        raise CannotJudge(f"the witness {path} cannot be read: {error.strerror}. Check --witness.") from error
    for seen_calls in calls.values():
        seen_calls.sort(key=lambda call: (call.at_ms, call.line))
    return Witness(calls, count, nameless)


def _read_call(path: Path, number: int, data: bytes) -> tuple[str, Seen | None]:
    try:
        said = read_json(data)
    except NotJson as error:
        raise CannotJudge(f"line {number} of the witness {path} is no JSON ({error}): is it a calls log?") from None
    if not isinstance(said, dict) or type(said.get("status")) is not int or not isinstance(said.get("at"), int | float):
        raise CannotJudge(f"line {number} of the witness {path} is no call: `at` and `status` are needed.")
    key = said.get("idempotency_key")
    found = _KEY.fullmatch(key) if isinstance(key, str) else None
    if found is None:
        return "", None
    clean = 200 <= said["status"] <= 299 and not said.get("fault")
    return found[1], Seen(number, int(said["at"] * 1000), said["status"], found[0], clean)
