"""Items from a job's files: pages of result lines, and one item with its request and its response.

A page is a stretch of a result file, and an item's id leads to the place of its line, so a page
costs the same wherever it begins. At most a line and a piece of a file are in memory.
"""

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing

import msgspec
from msgspec import Raw

from tidegate.core.answers.outcome_lines import ItemError, OutcomeLine, readable_line
from tidegate.core.errors import ApiProblem
from tidegate.core.ids import job_part, split_item_id
from tidegate.core.nouns import Job
from tidegate.core.ports import Blobs
from tidegate.core.problems import no_such_file, shown_id
from tidegate.core.states import JOB_ENDED, Outcome
from tidegate.store.file_bytes import file_bytes
from tidegate.store.store import Store
from tidegate.web.http.tenant_slots import lookup_slots
from tidegate.web.jobs.stored_lines import ERRORS, OUTPUT, PlacedLine, StoredLines

MESSAGE_CHARS_MAX = 500
# The most bytes that are searched for one page; the rest is left to the next page.
LOOK_BYTES_MAX = 16 << 20
# There is no index of names: a search reads all of a job's files, so a tenant may have only a few
# at once.
LOOKUPS_MAX = 4
# Reads the custom_id of a line.
NameOf = Callable[[bytes], str | None]
_BOM = b"\xef\xbb\xbf"
_NULL = Raw(b"null")


class ItemShown(msgspec.Struct):
    """The outcome of one request of a batch."""

    id: str
    object: str
    batch_id: str
    custom_id: str | None
    outcome: str
    status_code: int | None
    error: ItemError | None


class ItemDetail(msgspec.Struct):
    """One request of a batch with its input line and its response; null for a part that does not
    exist yet or any more.
    """

    id: str | None
    object: str
    batch_id: str
    custom_id: str | None
    outcome: str | None
    status_code: int | None
    error: ItemError | None
    request: Raw
    response: Raw


class ItemFilter(msgspec.Struct, frozen=True):
    outcome: str | None = None
    code: str | None = None

    def files(self) -> list[str]:
        """Return the result files that may have such items."""
        if self.code is None and self.outcome in (None, Outcome.ANSWERED):
            return [OUTPUT, ERRORS] if self.outcome is None else [OUTPUT]
        return [] if self.outcome == Outcome.ANSWERED else [ERRORS]


class ItemPage(msgspec.Struct):
    """A page of items. `last_id` is the last item that was read: the next page begins after it."""

    items: list[ItemShown]
    last_id: str | None = None
    has_more: bool = False


class _ShownResponse(msgspec.Struct):
    response: Raw = _NULL


class _StoredId(msgspec.Struct):
    custom_id: str


_decode_response = msgspec.json.Decoder(_ShownResponse).decode
_decode_id = msgspec.json.Decoder(_StoredId).decode


class JobItems:
    """The reader of items of a tenant's jobs."""

    def __init__(self, store: Store, blobs: Blobs) -> None:
        self._store = store
        self._blobs = blobs
        self._lookups = lookup_slots(LOOKUPS_MAX)

    async def page(self, job: Job, wanted: ItemFilter, after: str | None, count_max: int) -> ItemPage | None:
        """Return a page of finished items; None if `after` is no finished item of the job."""
        start = (OUTPUT, 0)
        if after is not None:
            found = await self._place(job, after)
            if found is None:
                return None
            start = (found[0], found[2])
        page, looked_bytes = ItemPage([]), 0
        for name in wanted.files():
            if start[0] == ERRORS and name == OUTPUT:
                continue
            at = start[1] if name == start[0] else 0
            async with aclosing(self._lines(job, name, at)) as lines:
                async for line in lines:
                    if len(page.items) == count_max or looked_bytes > LOOK_BYTES_MAX:
                        page.has_more = True
                        return page
                    looked_bytes += len(line.text) + 1
                    item = _shown(job, line.line, name)
                    page.last_id = item.id
                    if _matches(item, wanted):
                        page.items.append(item)
        return page

    async def one(self, job: Job, name: str) -> ItemDetail:
        """Return the item with this custom_id or id, finished or not."""
        async with self._lookups.taken(job.tenant_id):
            return await self._one(job, name)

    async def _one(self, job: Job, name: str) -> ItemDetail:
        text, file_name = None, OUTPUT
        if (place := await self._place(job, name)) is not None:
            file_name, at, end = place
            file_id, _ = await self._file(job, file_name)
            pieces = file_bytes(self._store, self._blobs, file_id or "", at, end)
            text = b"".join([piece async for piece in pieces]).rstrip(b"\n")
        else:
            for file_name in (OUTPUT, ERRORS):
                file_id, size_bytes = await self._file(job, file_name)
                text = await self._find(file_id, size_bytes, name, _name_of_result)
                if text is not None:
                    break
        # With a place, the name is the item's id, even if its line is damaged.
        line = None if text is None else StoredLines(self._store, job, file_name).one(name if place else "", text)
        item = None if line is None else _shown(job, line, file_name)
        custom_id = name if item is None else item.custom_id
        request = None if custom_id is None else await self._request(job, custom_id)
        if item is None and request is None:
            raise _no_such_item(name)
        return ItemDetail(
            id=item.id if item else None,
            object="batch.item",
            batch_id=job.id,
            custom_id=custom_id,
            outcome=item.outcome if item else None,
            status_code=item.status_code if item else None,
            error=item.error if item else None,
            request=_NULL if request is None else Raw(request),
            response=_NULL if line is None or text is None or line.is_unreadable else _decode_response(text).response,
        )

    async def _place(self, job: Job, item_id: str) -> tuple[str, int, int] | None:
        """Return the result file of a finished item, and where its line begins and ends; None for
        any other id, and as long as the place is not final.
        """
        split = split_item_id(item_id)
        if split is None or split[0] != job_part(job.id) or _is_rewritten_later(job):
            return None
        for place in await self._store.item_places(job.id, split[1], 1):
            name = OUTPUT if place.outcome == Outcome.ANSWERED else ERRORS
            return name, place.at, place.at + place.size_bytes
        return None

    async def _file(self, job: Job, name: str) -> tuple[str | None, int]:
        """Return a result file and its final size so far: the files of an ordered job are rewritten
        at its end.
        """
        file_id, size_bytes = (
            (job.output_file_id, job.output_bytes) if name == OUTPUT else (job.error_file_id, job.error_bytes)
        )
        if _is_rewritten_later(job):
            return None, 0
        if job.state not in JOB_ENDED:
            return file_id, size_bytes
        if file_id is not None and await self._store.get_file(job.tenant_id, file_id) is None:
            raise no_such_file(file_id, "batch_id")
        return file_id, size_bytes if file_id is not None else 0

    async def _lines(self, job: Job, name: str, at: int) -> AsyncGenerator[PlacedLine, None]:
        """Yield the lines of a result file from this place on."""
        file_id, size_bytes = await self._file(job, name)
        if file_id is None or at >= size_bytes:
            return
        stream = file_bytes(self._store, self._blobs, file_id, at, size_bytes)
        async with aclosing(stream), aclosing(StoredLines(self._store, job, name).all(at, stream)) as lines:
            async for line in lines:
                yield line

    async def _request(self, job: Job, custom_id: str) -> bytes | None:
        """Return the caller's line; None once the input is gone."""
        for file_id in (job.input_file_id, *job.shape.more_inputs):
            file = await self._store.get_file(job.tenant_id, file_id)
            if (
                file is not None
                and (found := await self._find(file.id, file.size_bytes, custom_id, _name_of_request)) is not None
            ):
                return found.removeprefix(_BOM)
        return None

    async def _find(self, file_id: str | None, size_bytes: int, custom_id: str, name_of: NameOf) -> bytes | None:
        """Return the first line with this custom_id.

        Only lines that contain its letters are decoded, then lines with escapes.
        """
        if file_id is None or not size_bytes:
            return None
        spelled = dict.fromkeys((msgspec.json.encode(custom_id), json.dumps(custom_id).encode()))
        for needles in (tuple(spelled), (b"\\",)):
            stream = file_bytes(self._store, self._blobs, file_id, 0, size_bytes)
            async with aclosing(_whole_lines(stream)) as blocks:
                async for block in blocks:
                    for needle in needles:
                        if (line := _line_of(block, needle, custom_id, name_of)) is not None:
                            return line
        return None


def _is_rewritten_later(job: Job) -> bool:
    """Return whether no line of the job's files has its final place yet."""
    return job.ordered and job.state not in JOB_ENDED


async def _whole_lines(pieces: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """Yield a file in blocks of whole lines, each line with its end."""
    begun: list[bytes] = []
    async for piece in pieces:
        end = piece.rfind(b"\n") + 1
        if not end:
            begun.append(piece)
            continue
        yield b"".join((*begun, piece[:end]))
        begun = [piece[end:]] if end < len(piece) else []
    if begun:
        yield b"".join((*begun, b"\n"))


def _name_of_request(line: bytes) -> str | None:
    try:
        return _decode_id(line.removeprefix(_BOM)).custom_id
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _name_of_result(line: bytes) -> str | None:
    return readable_line(line).custom_id


def _line_of(block: bytes, needle: bytes, custom_id: str, name_of: NameOf) -> bytes | None:
    at = block.find(needle)
    while at >= 0:
        start, end = block.rfind(b"\n", 0, at) + 1, block.find(b"\n", at)
        line = block[start:end]
        if name_of(line) == custom_id:
            return line
        at = block.find(needle, end)
    return None


def _shown(job: Job, line: OutcomeLine, name: str) -> ItemShown:
    status = line.response.status_code if line.response is not None else None
    if name == OUTPUT:
        error = line.error if line.is_unreadable else None
        return ItemShown(line.id, "batch.item", job.id, line.custom_id, Outcome.ANSWERED, status, error)
    failure = line.failure()
    error = ItemError(line.failure_code(), "" if failure is None else failure.message[:MESSAGE_CHARS_MAX])
    return ItemShown(line.id, "batch.item", job.id, line.custom_id, line.failure_outcome(), status, error)


def _matches(item: ItemShown, wanted: ItemFilter) -> bool:
    if wanted.outcome is not None and item.outcome != wanted.outcome:
        return False
    return wanted.code is None or (item.error is not None and item.error.code == wanted.code)


def _no_such_item(name: str) -> ApiProblem:
    return ApiProblem(
        404,
        "item_not_found",
        f"No request of this batch has the custom_id or the id '{shown_id(name)}'. Its `/items` lists them all.",
        param="custom_id",
    )
