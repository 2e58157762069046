"""What went wrong in a batch, grouped: error lines of one code and status, with how many and which requests. No text of a request or answer
is shown: that needs a scope of its own."""

from collections import Counter
from contextlib import aclosing
from dataclasses import dataclass, field

import msgspec

from tidegate.core.errors import BlobError
from tidegate.core.nouns import Job
from tidegate.core.ports import Blobs
from tidegate.store.file_bytes import file_bytes
from tidegate.store.store import Store

READ_BYTES_MAX = 1 << 20
EXAMPLES_MAX = 5


class _ErrorCode(msgspec.Struct):
    code: str | None = None


class _ErrorBodyOfLine(msgspec.Struct):
    error: _ErrorCode | None = None


class _ErrorResponseOfLine(msgspec.Struct):
    status_code: int = 0
    body: _ErrorBodyOfLine | None = None


class _ErrorLine(msgspec.Struct):
    custom_id: str | None = None
    response: _ErrorResponseOfLine | None = None
    error: _ErrorCode | None = None


@dataclass(slots=True)
class ErrorGroups:
    """`counts` by code and status, with the ids of a few; `is_partial` when only the beginning of the error file was read."""

    counts: Counter[tuple[str, int]] = field(default_factory=Counter)
    examples: dict[tuple[str, int], list[str]] = field(default_factory=dict)
    is_partial: bool = False


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
    for line in lines[:-1] if groups.is_partial else lines:
        if line:
            _add(groups, line)
    return groups


def _add(groups: ErrorGroups, line: bytes) -> None:
    try:
        found = msgspec.json.decode(line, type=_ErrorLine)
    except msgspec.MsgspecError:
        found = _ErrorLine()
    body = found.response.body if found.response else None
    inner = body.error if body else None
    code = (found.error and found.error.code) or (inner and inner.code) or "unknown"
    group = (code, found.response.status_code if found.response else 0)
    groups.counts[group] += 1
    examples = groups.examples.setdefault(group, [])
    if found.custom_id is not None and len(examples) < EXAMPLES_MAX:
        examples.append(found.custom_id)
