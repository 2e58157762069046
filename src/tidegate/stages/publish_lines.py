"""The writers of publish: new blobs, and the lines of items that were not run.

These lines stand at the end of the result files. An item that never ran gets a line for the job's
end. An item that takes another item's line gets a copy of it, once that line is final.
"""

import os
from array import array
from collections.abc import AsyncIterator, Sequence
from itertools import compress
from pathlib import Path
from typing import NamedTuple

from tidegate.core import ids
from tidegate.core.answers.copied_lines import SourceLine, deduplicated_line, read_copy, read_source, reused_line
from tidegate.core.answers.outcome_lines import DAMAGE
from tidegate.core.answers.results import error_line, never_ran_line
from tidegate.core.answers.whole_lines import whole_lines
from tidegate.core.files import Placed
from tidegate.core.ids import item_id
from tidegate.core.nouns import Job, UnrunLines
from tidegate.core.ports import Blobs, BlobWriter, Entropy
from tidegate.core.states import JobState, Outcome
from tidegate.store.store import Store

WRITE_BYTES = 1 << 20
SCHEMA_INVALID = "schema_invalid"
OUTCOME_OF = {
    JobState.EXPIRED: Outcome.EXPIRED,
    JobState.CANCELLED: Outcome.CANCELLED,
    JobState.FAILED: Outcome.FAILED,
}


LOST = (
    "What this request's line is made of is lost: the storage of the gateway no longer has it. Send the request again."
)


class PublishBlobs:
    """The blobs that one try to publish a job begins. They can be given up together."""

    def __init__(self, store: Store, blobs: Blobs, entropy: Entropy, worker_id: str) -> None:
        self._store = store
        self._blobs = blobs
        self._entropy = entropy
        self._worker_id = worker_id
        self._begun: list[str] = []

    async def begin_blob(self) -> tuple[str, BlobWriter]:
        blob_id = ids.make("blob", self._entropy.token_bytes(16))
        await self._store.begin_blob(blob_id, "rest", self._worker_id)
        self._begun.append(blob_id)
        return blob_id, await self._blobs.create(blob_id)

    async def give_up(self, kept: frozenset[str] = frozenset()) -> None:
        """Give up all of these blobs except those in `kept`."""
        for blob_id in self._begun:
            if blob_id not in kept:
                await self._store.give_up_blob(blob_id)


class LineWriter:
    """A writer of lines to one blob, which is begun with the first line."""

    def __init__(self, blobs: PublishBlobs) -> None:
        self._blobs = blobs
        self._blob_id = ""
        self._writer: BlobWriter | None = None
        self._buffer = bytearray()
        self._size_bytes = 0
        self._numbers, self._outcomes, self._sizes = array("I"), list[Outcome](), array("I")
        self.schema_invalid = 0

    async def add(self, number: int, outcome: Outcome, line: bytes) -> None:
        if self._writer is None:
            self._blob_id, self._writer = await self._blobs.begin_blob()
        self._numbers.append(number)
        self._outcomes.append(outcome)
        self._sizes.append(len(line))
        self._buffer += line
        self._size_bytes += len(line)
        if len(self._buffer) >= WRITE_BYTES:
            await self._writer.write(bytes(self._buffer))
            self._buffer.clear()

    async def finish(self) -> UnrunLines | None:
        """Make the lines durable; None when there are none."""
        if self._writer is None:
            return None
        await self._writer.write(bytes(self._buffer))
        await self._writer.finish()
        placed = Placed(self._blob_id, 0, self._size_bytes)
        return UnrunLines(placed, self._numbers, self._outcomes, self._sizes, self.schema_invalid)

    async def abort(self) -> None:
        if self._writer is not None:
            await self._writer.abort()


class ResultCopy:
    """A result file as one plain local file, for random reads."""

    def __init__(self, descriptor: int, path: Path) -> None:
        self._descriptor = descriptor
        self._path = path

    @classmethod
    async def open(cls, blobs: Blobs, path: Path, extents: list[tuple[int, int, str, int]]) -> "ResultCopy":
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        source = cls(descriptor, path)
        try:
            for _, size_bytes, blob_id, blob_at in extents:
                async for leased in blobs.stream(blob_id, blob_at, size_bytes):
                    # A disk that is nearly full may write only a part of the data, and reports only
                    # the count.
                    left = memoryview(leased)
                    while left:
                        left = left[os.write(descriptor, left) :]
        except BaseException:
            source.close()
            raise
        return source

    def read(self, at: int, size_bytes: int) -> bytes:
        data = os.pread(self._descriptor, size_bytes, at)
        if len(data) != size_bytes:
            raise OSError(f"{self._path} ends before byte {at + size_bytes}")
        return data

    def close(self) -> None:
        os.close(self._descriptor)
        self._path.unlink(missing_ok=True)


class PlacesByItem:
    """The place of each item's line in a result file, in twelve bytes an item. No line is empty."""

    def __init__(self, item_count: int) -> None:
        self._at = array("q", bytes(8 * item_count))
        self._size_bytes = array("I", bytes(4 * item_count))

    def put(self, number: int, at: int, size_bytes: int) -> None:
        self._at[number] = at
        self._size_bytes[number] = size_bytes

    def __bool__(self) -> bool:
        return any(self._size_bytes)

    def get(self, number: int) -> tuple[int, int]:
        """Return where an item's line begins, and its size: 0 if it has no line in this file."""
        return self._at[number], self._size_bytes[number]

    def in_order(self, line_of: "array[int]") -> "array[int]":
        """Return the items with a line in this file, in the order of the input's lines."""
        numbers = compress(range(len(self._at)), self._size_bytes)
        # One integer for line and number takes half the memory of a list of pairs.
        keys = sorted([line_of[number] << 32 | number for number in numbers])
        return array("I", (key & 0xFFFFFFFF for key in keys))


class RunLines(NamedTuple):
    """The lines of one result file, of the items that were run."""

    copy: ResultCopy
    places: PlacesByItem
    is_answered: bool


class CopyWriter:
    """A writer of the lines of items that take another item's line."""

    def __init__(self, job: Job, answers: LineWriter, errors: LineWriter) -> None:
        self._job = job
        self._answers = answers
        self._errors = errors
        self._number = job.run_count
        self._leader: tuple[int, SourceLine] | None = None

    async def write(self, work: AsyncIterator[bytes], sources: Sequence[RunLines]) -> None:
        """Write a line for each of these lines of the work file.

        If the item whose line is taken is in none of `sources`, it never ran.
        """
        async for text in whole_lines(work):
            copy = read_copy(text)
            if copy.of is None:
                line = reused_line(item_id(self._job.id, self._number), copy)
                await self._answers.add(self._number, Outcome.ANSWERED, line)
            else:
                await self._write_copy(copy.of, bytes(copy.custom_id), sources)
            self._number += 1

    async def write_lost(self) -> None:
        """Write an error for each item that is left: the bytes of its line are gone for good."""
        for number in range(self._number, self._job.item_count):
            line = error_line(self._job.id, number, b"null", "internal_error", LOST)
            await self._errors.add(number, Outcome.FAILED, line)

    async def _write_copy(self, leader: int, custom_id: bytes, sources: Sequence[RunLines]) -> None:
        job, number = self._job, self._number
        found = [source for source in sources if source.places.get(leader)[1]]
        if not found:
            assert job.closing is not None
            outcome = OUTCOME_OF[job.closing]
            await self._errors.add(number, outcome, never_ran_line(job.id, number, custom_id, outcome))
            return
        [source] = found
        # Items that take the same item's line follow one another.
        if self._leader is None or self._leader[0] != leader:
            try:
                self._leader = (leader, read_source(source.copy.read(*source.places.get(leader))))
            except DAMAGE:
                line = error_line(job.id, number, custom_id, "internal_error", LOST)
                await self._errors.add(number, Outcome.FAILED, line)
                return
        line = deduplicated_line(item_id(job.id, number), custom_id, self._leader[1])
        if source.is_answered:
            await self._answers.add(number, Outcome.ANSWERED, line)
        else:
            self._errors.schema_invalid += self._leader[1].code == SCHEMA_INVALID
            await self._errors.add(number, Outcome.FAILED, line)
