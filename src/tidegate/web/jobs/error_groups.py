"""The errors of a batch by kind.

A whole message may quote a request, so only the page of that request shows it, which needs a scope.
"""

import asyncio
from collections import Counter, OrderedDict
from contextlib import aclosing

import msgspec

from tidegate.core.answers.error_kinds import ErrorKind
from tidegate.core.answers.outcome_lines import readable_line
from tidegate.core.errors import BlobError
from tidegate.core.nouns import Job
from tidegate.core.ports import Blobs
from tidegate.store.file_bytes import file_bytes
from tidegate.store.store import Store

READ_BYTES_MAX = 1 << 20
EXAMPLES_MAX = 5
GROUPS_MAX = 200
FILES_KEPT = 16
# Above GROUPS_MAX, the rest of the messages is one group for each code.
REST = "(more messages, all different)"


class ErrorKindShown(msgspec.Struct, frozen=True):
    """Errors of one kind in one batch.

    `message` is the common part of their messages, and `examples` are the custom_ids of a few.
    """

    id: str
    object: str
    code: str
    status: int | None
    message: str
    requests: int
    examples: list[str]


class ErrorKinds(msgspec.Struct, frozen=True):
    """The kinds of errors of a batch, most frequent first.

    `is_partial` is set when only the beginning of its error file was read.
    """

    object: str
    batch_id: str
    data: list[ErrorKindShown]
    is_partial: bool


class ErrorGroups(msgspec.Struct):
    """Errors of a batch: `counts` by kind, and the id and custom_id of a few examples.

    `is_partial` is set when only the beginning of the error file was read.
    """

    counts: Counter[ErrorKind] = msgspec.field(default_factory=Counter)
    examples: dict[ErrorKind, list[tuple[str, str]]] = msgspec.field(default_factory=dict)
    is_partial: bool = False

    def shown(self, batch_id: str) -> ErrorKinds:
        kinds = [
            ErrorKindShown(kind.id, "error_kind", kind.code, kind.status or None, kind.text, count, examples)
            for kind, count in self.counts.most_common()
            for examples in ([custom_id for _, custom_id in self.examples[kind]],)
        ]
        return ErrorKinds("list", batch_id, kinds, self.is_partial)

    def is_rest(self, kind: ErrorKind) -> bool:
        """Return whether this kind stands for all other messages of its code, so that a retry takes
        the whole code.
        """
        return kind.text == REST


class ErrorReader:
    """The reader of error files for pages that are refreshed often.

    A file that has not grown is not read again.
    """

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
        # The bytes were deleted with their file, or are being moved: the page shows the rest.
        groups.is_partial = True
    lines = bytes(data).split(b"\n")
    # In a thread, because hostile messages take a while.
    await asyncio.to_thread(_add_all, groups, lines[:-1] if groups.is_partial else lines)
    return groups


def _add_all(groups: ErrorGroups, lines: list[bytes]) -> None:
    for line in lines:
        if line:
            _add(groups, line)


def _add(groups: ErrorGroups, text: bytes) -> None:
    line = readable_line(text)
    kind = line.failure_kind()
    if kind not in groups.counts and len(groups.counts) >= GROUPS_MAX:
        kind = ErrorKind(kind.code, kind.status, REST)
    groups.counts[kind] += 1
    examples = groups.examples.setdefault(kind, [])
    if line.custom_id is not None and len(examples) < EXAMPLES_MAX:
        examples.append((line.id, line.custom_id))
