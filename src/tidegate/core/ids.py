"""Ids that callers see: a prefix and 22 base62 characters, made from 128 random bits that the
caller of `make` draws.

A file's id begins with `file-`, as OpenAI's does; older files are stored as `file_…` and stay
readable.

An item's id is its job's id cut short plus the item's number, so a finished line in a log names its
item without an index beside it.
"""

import re
from collections.abc import Iterable

_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_VALUES = {letter: value for value, letter in enumerate(_ALPHABET)}
_PAIRS = tuple(high + low for high in _ALPHABET for low in _ALPHABET)
_BODY_LENGTH = 22
_JOB_PART_LENGTH = 16
_JOB_PART = slice(len("batch_"), len("batch_") + _JOB_PART_LENGTH)

RANDOM_BYTES = 16
KINDS = (
    "file",
    "batch",
    "batch_req",
    "req",
    "blob",
    "worker",
    "tenant",
    "whk",
    "evt",
    "resp",
    "upload",
    "part",
    "aud",
    "op",
)
PREFIXES = {kind: "file-" if kind == "file" else f"{kind}_" for kind in KINDS}
PATTERNS = {
    kind: re.compile(rf"{'file[-_]' if kind == 'file' else prefix}[0-9A-Za-z]{{{_BODY_LENGTH}}}", re.ASCII)
    for kind, prefix in PREFIXES.items()
}


def make(kind: str, random_bytes: bytes) -> str:
    """Return an id of this kind, made from 16 random bytes."""
    if kind not in PATTERNS or len(random_bytes) != RANDOM_BYTES:
        raise ValueError(
            f"an id needs a known kind and {RANDOM_BYTES} random bytes, not {kind!r} and {len(random_bytes)}"
        )
    number = int.from_bytes(random_bytes, "big")
    letters = []
    for _ in range(_BODY_LENGTH // 2):
        number, digits = divmod(number, 3844)
        letters.append(_PAIRS[digits])
    return f"{PREFIXES[kind]}{''.join(reversed(letters))}"


def is_valid(kind: str, text: str) -> bool:
    """Return whether this text could be an id of this kind; checked before any id from outside is
    used.
    """
    return PATTERNS[kind].fullmatch(text) is not None


def item_id(job_id: str, number: int) -> str:
    """Return the id of one item, as the output and error lines carry it."""
    # This runs for every item: `divmod` and a call of `job_part` would take twice as long.
    rest = number // 3844
    return f"batch_req_{job_id[_JOB_PART]}{_PAIRS[rest // 3844]}{_PAIRS[rest % 3844]}{_PAIRS[number % 3844]}"


def job_part(job_id: str) -> str:
    """Return the letters that an item's id shares with its job's."""
    return job_id[_JOB_PART]


def group_id(job_id: str, numbers: Iterable[int]) -> str:
    """Return the id of a call with several items of one job: the numbers as runs, `0-7.9` for eight
    neighbours and one more.
    """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    ranges = ".".join(f"{first}-{last}" if last > first else f"{first}" for first, last in runs)
    return f"batch_grp_{job_part(job_id)}_{ranges}"


def split_item_id(item: str) -> tuple[str, int] | None:
    """Return the job part and the number that an item's id was made from; None for anything
    else."""
    if not is_valid("batch_req", item):
        return None
    body = item[len("batch_req_") :]
    number = 0
    for letter in body[_JOB_PART_LENGTH:]:
        number = number * 62 + _VALUES[letter]
    return body[:_JOB_PART_LENGTH], number
