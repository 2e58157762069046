"""The witness: the calls log of a simulated engine, which writes a line before each answer leaves.

- Only calls of one job are kept. The Idempotency-Key of a call names its item and a hash of what
  was sent.
- The key of a call that several items share has all their numbers. It counts as a call of each.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from tidegate.judge.jsonl import NotJson, read_json
from tidegate.judge.lines import split_item_id
from tidegate.judge.report import CannotJudge

# The upstream refused these before any work, so it cannot have billed them.
FREE_STATUSES = frozenset({401, 403, 429})
_KEY = re.compile(r"(batch_req_[0-9A-Za-z]{22})-([0-9a-f]{8,64})(?:-\d{1,2})?", re.ASCII)
_SHARED_KEY = re.compile(
    r"batch_grp_([0-9A-Za-z]{16})_(\d{1,9}(?:-\d{1,9})?(?:\.\d{1,9}(?:-\d{1,9})?)*)_[0-9a-f]{16}", re.ASCII
)
_SHARED_MAX = 10_000


@dataclass(frozen=True, slots=True)
class Seen:
    """One call to the engine.

    - `status` 0 means that no answer left.
    - `clean` means that a whole good answer left, as far as the engine knows.
    - The status of a `shared` call does not hold for each item, unless it means that none got an
      answer.
    """

    line: int
    at_ms: int
    status: int
    key: str
    clean: bool
    shared: bool = False

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
    """Read a calls log; raise CannotJudge if it is none.

    A last line without its newline is left out, because the engine is still writing it.
    """
    calls: dict[int, list[Seen]] = {}
    count = nameless = 0
    try:
        with path.open("rb") as log:
            for number, data in enumerate(log, 1):
                if not data.endswith(b"\n"):
                    break
                named, seen = _read_call(path, number, data)
                count += 1
                if seen is None:
                    nameless += 1
                    continue
                for part, item in named:
                    if part == job_part:
                        calls.setdefault(item, []).append(seen)
    except OSError as error:
        raise CannotJudge(f"the witness {path} cannot be read: {error.strerror}. Check --witness.") from error
    for seen_calls in calls.values():
        seen_calls.sort(key=lambda call: (call.at_ms, call.line))
    return Witness(calls, count, nameless)


def _read_call(path: Path, number: int, data: bytes) -> tuple[list[tuple[str, int]], Seen | None]:
    try:
        call = read_json(data)
    except NotJson as error:
        raise CannotJudge(f"line {number} of the witness {path} is no JSON ({error}): is it a calls log?") from None
    if not isinstance(call, dict) or type(call.get("status")) is not int or not isinstance(call.get("at"), int | float):
        raise CannotJudge(f"line {number} of the witness {path} is no call: `at` and `status` are needed.")
    key = call.get("idempotency_key")
    if not isinstance(key, str):
        return [], None
    clean = 200 <= call["status"] <= 299 and not call.get("fault")
    at_ms = int(call["at"] * 1000)
    if (found := _KEY.fullmatch(key)) is not None:
        split = split_item_id(found[1])
        return [split] if split is not None else [], Seen(number, at_ms, call["status"], key, clean)
    if (found := _SHARED_KEY.fullmatch(key)) is not None:
        # Conversations that share a call may fail one by one; inputs are embedded together or not
        # at all.
        clean = clean and call.get("path") == "/v1/embeddings"
        named = [(found[1], item) for item in _numbers(found[2])]
        return named, Seen(number, at_ms, call["status"], key, clean, shared=True)
    return [], None


def _numbers(runs: str) -> list[int]:
    numbers: list[int] = []
    for run in runs.split("."):
        first, _, last = run.partition("-")
        numbers += range(int(first), min(int(last or first), int(first) + _SHARED_MAX) + 1)
    return numbers
