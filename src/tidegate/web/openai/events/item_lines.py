"""The lines of a job's result files as events about items.

An event has the item's outcome and the place of its line, without the answer.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from tidegate.core.answers.outcome_lines import ItemError
from tidegate.core.nouns import Job
from tidegate.core.ports import Blobs
from tidegate.core.states import JOB_ENDED
from tidegate.store.file_bytes import file_bytes
from tidegate.store.store import Store
from tidegate.web.jobs.stored_lines import PlacedLine, StoredLines

MESSAGE_CHARS_MAX = 500


class ItemPlace(msgspec.Struct):
    """The place of a result line.

    `file` is `output` or `errors`, as in the routes of a growing batch.
    """

    file: str
    at: int
    bytes: int


class ItemEvent(msgspec.Struct):
    id: str
    object: str
    batch_id: str
    custom_id: str | None
    status_code: int | None
    error: ItemError | None
    line: ItemPlace


def readable_bytes(job: Job) -> tuple[int, int]:
    """Return the final sizes of both files so far: the files of an ordered job are rewritten at its
    end.
    """
    if job.ordered and job.state not in JOB_ENDED:
        return 0, 0
    return job.output_bytes, job.error_bytes


async def item_events(
    store: Store, blobs: Blobs, job: Job, name: str, start: int, end: int
) -> AsyncGenerator[ItemEvent, None]:
    """Yield an event for each line between two places of a result file; both must be line ends."""
    file_id = await _file_id(store, job, name) if start < end else None
    if file_id is None:
        return
    stream = file_bytes(store, blobs, file_id, start, end)
    async with aclosing(stream), aclosing(StoredLines(store, job, name).all(start, stream)) as lines:
        async for stored in lines:
            yield _event(job, stored)


async def is_line_end(store: Store, blobs: Blobs, job: Job, name: str, at: int) -> bool:
    """Return whether a line of this result file ends here. A reader's number may name any place."""
    if at == 0 or (file_id := await _file_id(store, job, name)) is None:
        return True
    if at > readable_bytes(job)[name != "output"]:
        return False
    return b"".join([chunk async for chunk in file_bytes(store, blobs, file_id, at - 1, at)]) == b"\n"


async def _file_id(store: Store, job: Job, name: str) -> str | None:
    """Return the id of a result file; None if there is none, or it was deleted since the job
    ended."""
    file_id = job.output_file_id if name == "output" else job.error_file_id
    if file_id is None or job.state not in JOB_ENDED:
        return file_id
    return file_id if await store.get_file(job.tenant_id, file_id) is not None else None


def _event(job: Job, stored: PlacedLine) -> ItemEvent:
    line, place = stored.line, ItemPlace(stored.file, stored.at, len(stored.text) + 1)
    error = line.error if place.file == "output" else line.failure()
    if error is not None:
        error = ItemError(error.code, error.message[:MESSAGE_CHARS_MAX])
    status = line.response.status_code if line.response is not None else None
    return ItemEvent(line.id, "batch.item", job.id, line.custom_id, status, error, place)
