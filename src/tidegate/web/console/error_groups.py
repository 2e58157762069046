"""What went wrong in a batch, grouped by fingerprint: error lines of one code and status whose messages are alike but for numbers, ids and
what stands in quotes. A whole message may repeat a request, so it is shown only on the page of that request, which needs a scope."""

import asyncio
import re
from collections import Counter, OrderedDict
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from tidegate.core.errors import BlobError
from tidegate.core.nouns import Job
from tidegate.core.ports import Blobs
from tidegate.store.file_bytes import file_bytes
from tidegate.store.store import Store

READ_BYTES_MAX = 1 << 20
EXAMPLES_MAX = 5
MESSAGE_CHARS_MAX = 300
FINGERPRINT_CHARS_MAX = 200
GROUPS_MAX = 200
FILES_KEPT = 16

# Each is bounded, because a hostile server chooses the text.
_QUOTED = re.compile(r"'[^']{0,200}'|\"[^\"]{0,200}\"|`[^`]{0,200}`|“[^”]{0,200}”|‘[^’]{0,200}’")
_ADDRESS = re.compile(r"\b[a-z][a-z0-9+.-]{0,20}://\S+", re.IGNORECASE)
# A word with a digit in it is a number, an id, a date or a hash.
_WORD = re.compile(r"[\w.,:/@+-]+")
_SPACES = re.compile(r"\s+")


class ErrorKind(NamedTuple):
    """What the errors of a group have in common; `text` is empty where they had no message."""

    code: str
    status: int
    text: str


class _ErrorCode(msgspec.Struct):
    code: str | None = None
    message: str | None = None


class _ErrorBodyOfLine(msgspec.Struct):
    error: _ErrorCode | None = None


class _ErrorResponseOfLine(msgspec.Struct):
    status_code: int = 0
    body: _ErrorBodyOfLine | None = None


class _ErrorLine(msgspec.Struct):
    id: str | None = None
    custom_id: str | None = None
    response: _ErrorResponseOfLine | None = None
    error: _ErrorCode | None = None


@dataclass(slots=True)
class ErrorGroups:
    """`counts` by kind, with the id and custom_id of a few; `is_partial` when only the beginning of the error file was read."""

    counts: Counter[ErrorKind] = field(default_factory=Counter)
    examples: dict[ErrorKind, list[tuple[str, str]]] = field(default_factory=dict)
    is_partial: bool = False

    def kinds_of(self, code: str) -> int:
        """Return how many groups share a code: a retry takes all of them."""
        return sum(kind.code == code for kind in self.counts)


def fingerprint(message: str) -> str:
    """Return a message without what differs from one request to the next."""
    text = _QUOTED.sub("…", message[:MESSAGE_CHARS_MAX])
    text = _WORD.sub(_without_digits, _ADDRESS.sub("#", text))
    return _SPACES.sub(" ", text).strip()[:FINGERPRINT_CHARS_MAX]


def _without_digits(word: re.Match[str]) -> str:
    return "#" if any(letter.isdigit() for letter in word[0]) else word[0]


class ErrorReader:
    """Reads error files for pages that are refreshed often: a file that has not grown is not read again."""

    def __init__(self, store: Store, blobs: Blobs) -> None:
        self._store = store
        self._blobs = blobs
        self._kept: OrderedDict[str, tuple[int, ErrorGroups]] = OrderedDict()

    async def groups_of(self, job: Job) -> ErrorGroups:
        """Return the errors of a batch so far."""
        size_bytes, groups = self._kept.get(job.id, (-1, ErrorGroups()))
        if size_bytes != min(job.error_bytes, READ_BYTES_MAX):
            groups = await error_groups(self._store, self._blobs, job)
            self._kept[job.id] = (min(job.error_bytes, READ_BYTES_MAX), groups)
        self._kept.move_to_end(job.id)
        if len(self._kept) > FILES_KEPT:
            self._kept.popitem(last=False)
        return groups


async def error_groups(store: Store, blobs: Blobs, job: Job) -> ErrorGroups:
    """Return the errors of a batch so far, from at most a megabyte of its error file."""
    groups = ErrorGroups()
    if job.error_file_id is None or not job.error_bytes:
        return groups
    end = min(job.error_bytes, READ_BYTES_MAX)
    groups.is_partial = end < job.error_bytes
    data = bytearray()
    try:
        async with aclosing(file_bytes(store, blobs, job.error_file_id, 0, end)) as stream:
            async for chunk in stream:
                data += chunk
    except BlobError:
        # Its bytes were deleted with their file, or are being moved: the page shows the rest.
        groups.is_partial = True
    lines = bytes(data).split(b"\n")
    # Hostile messages take a while, and other requests do not wait for that.
    await asyncio.to_thread(_add_all, groups, lines[:-1] if groups.is_partial else lines)
    return groups


def _add_all(groups: ErrorGroups, lines: list[bytes]) -> None:
    for line in lines:
        if line:
            _add(groups, line)


def _add(groups: ErrorGroups, line: bytes) -> None:
    try:
        found = msgspec.json.decode(line, type=_ErrorLine)
    except msgspec.MsgspecError:
        found = _ErrorLine()
    body = found.response.body if found.response else None
    inner = body.error if body else None
    error = found.error or inner or _ErrorCode()
    code = error.code or (inner and inner.code) or "unknown"
    status = found.response.status_code if found.response else 0
    kind = ErrorKind(code, status, fingerprint(error.message or ""))
    if kind not in groups.counts and len(groups.counts) >= GROUPS_MAX:
        # Messages that are all different are one group, by their code.
        kind = ErrorKind(code, status, "")
    groups.counts[kind] += 1
    examples = groups.examples.setdefault(kind, [])
    if found.custom_id is not None and len(examples) < EXAMPLES_MAX:
        examples.append((found.id or "", found.custom_id))
