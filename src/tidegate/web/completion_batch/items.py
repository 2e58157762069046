"""Items of a job, put together: the request from the input file, the answer from a result file, the rest from the store.

A result line names its item, and the name says where the request lies (`inline_items`). An item without a result is found in the work file.
Nothing here holds more than a window of items at a time.
"""

from array import array
from bisect import bisect_right
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing

import msgspec
from msgspec import Raw

from tidegate.core.answers import answer as answers
from tidegate.core.answers.outcome_lines import DAMAGED, OutcomeLine
from tidegate.core.errors import BlobMissing
from tidegate.core.ids import item_id, split_item_id
from tidegate.core.nouns import Job, Usage
from tidegate.core.ports import Blobs
from tidegate.core.states import JOB_ENDED, JobState
from tidegate.store.file_bytes import file_bytes
from tidegate.store.jobs.job_events import ItemTries, OutcomePlace, RecordedTo
from tidegate.store.store import Store
from tidegate.web.completion_batch import shapes
from tidegate.web.completion_batch.inline_items import ItemName, estimated_tokens, read_name
from tidegate.web.completion_batch.shapes import DoorNotes, ItemEntity
from tidegate.web.jobs import stored_lines
from tidegate.web.jobs.stored_lines import PlacedLine, StoredLines, is_whole

OUTPUT, ERRORS = 1, 2
WINDOW_ITEMS = 256
WINDOW_BYTES = 2 << 20
# Reads of ranges that lie closer together become one.
GAP_BYTES = 32 << 10
_OK = 400
_NONE = Raw(b"")


class _ResponseOfItem(msgspec.Struct):
    status_code: int
    request_id: str
    body: Raw


class _ErrorOfItem(msgspec.Struct):
    code: str | None = None
    message: str = ""


class _ModelServerError(msgspec.Struct):
    error: _ErrorOfItem | None = None


class StoredResult(msgspec.Struct):
    id: str
    custom_id: str | None = None
    response: _ResponseOfItem | None = None
    error: _ErrorOfItem | None = None


class _LineOfItem(msgspec.Struct):
    custom_id: str | None = None
    body: Raw = _NONE


class _StoredModel(msgspec.Struct):
    model: str = ""


_decode_result = msgspec.json.Decoder(StoredResult).decode
_decode_input = msgspec.json.Decoder(_LineOfItem).decode
_decode_body = msgspec.json.Decoder(_StoredModel).decode
_decode_fields = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_error = msgspec.json.Decoder(_ModelServerError).decode


class OpenItems(msgspec.Struct, frozen=True):
    """How the items without a result stand: those in the hands of workers, and what is remembered of those that were tried."""

    leased: Sequence[tuple[int, int]] = ()
    tries: dict[int, int] = msgspec.field(default_factory=dict)
    waiting: frozenset[int] = frozenset()

    def is_running(self, number: int) -> bool:
        at = bisect_right(self.leased, (number, 1 << 62)) - 1
        is_leased = at >= 0 and number < self.leased[at][0] + self.leased[at][1]
        return is_leased and number not in self.waiting


class ItemReader:
    """Reads items of jobs that this door made."""

    def __init__(self, store: Store, blobs: Blobs) -> None:
        self._store = store
        self._blobs = blobs

    async def keeps_results(self, job: Job) -> bool:
        """Whether the results of a job are there: those of one that ended go with their files, by their owner or in time."""
        if job.state not in JOB_ENDED:
            return True
        for file_id, size_bytes in ((job.output_file_id, job.output_bytes), (job.error_file_id, job.error_bytes)):
            if file_id and size_bytes and await self._store.get_file(job.tenant_id, file_id) is None:
                return False
        return True

    async def one(self, job: Job, notes: DoorNotes, number: int) -> ItemEntity | None:
        """Return the item of this number as it stands; None when there is none, or nothing is known of it any more."""
        if not await self.keeps_results(job):
            return None
        # Before its result is looked for: an item that is done in between would else look as if it had not begun.
        state = open_items(await self._store.leased_spans(job.id), await self._store.item_tries(job.id, number, 1))
        for place in await self._store.item_places(job.id, number, 1):
            read = await self._result_lines(job, [place])
            moments = await self._store.recorded_moments(job.id)
            [entity] = await self.finished(job, notes, read, [when(moments, place)])
            return entity
        if job.work_blob_id is None and _is_over(job):
            async with aclosing(self._windows(job, _ResultPlaces(notes.total))) as windows:
                async for start, window in windows:
                    if number < start + len(window):
                        return _never_ingested(job, notes, number, window[number - start])
        found = await self._open_lines(job, number, 1)
        if not found:
            return None
        entity = _entity(job, notes, number, await self._request_in(job, found[0]))
        return _open_entity(job, entity, number, state)

    async def running(self, job: Job, notes: DoorNotes, first: int, count: int) -> list[ItemEntity]:
        """Return these items as they were when they began to run; none of them when nothing is known of them any more."""
        if not await self.keeps_results(job):
            return []
        lines = await self._open_lines(job, first, count)
        if len(lines) < count:
            # The job ended meanwhile: by now every item has a result, and that says where its request lies.
            places = await self._store.item_places(job.id, first, count)
            bodies = await self._requests_of(job, await self._result_lines(job, places))
            return [_entity(job, notes, one.number, body) for one, body in zip(places, bodies, strict=False)]
        bodies = [await self._request_in(job, line) for line in lines]
        return [_entity(job, notes, first + at, body) for at, body in enumerate(bodies)]

    async def finished(
        self, job: Job, notes: DoorNotes, read: Sequence[StoredResult], moments: Sequence[int]
    ) -> list[ItemEntity]:
        """Return the items of these results, which were recorded at these moments."""
        bodies = await self._requests_of(job, read)
        numbers = [_number_of(one) for one in read]
        tries = await self._tries(job, numbers)
        entities = []
        for one, number, body, moment_ms in zip(read, numbers, bodies, moments, strict=True):
            entity = _entity(job, notes, number, body, tries.get(number, 0))
            entities.append(_with_result(entity, one, moment_ms))
        return entities

    async def results(
        self, job: Job, file_id: str, start: int, end: int
    ) -> AsyncGenerator[tuple[PlacedLine, StoredResult], None]:
        """The results between two places of a result file, which are ends of lines; of a damaged one that it is."""
        name = stored_lines.OUTPUT if file_id == job.output_file_id else stored_lines.ERRORS
        stream = file_bytes(self._store, self._blobs, file_id, start, end)
        async with aclosing(stream), aclosing(StoredLines(self._store, job, name).all(start, stream)) as lines:
            async for stored in lines:
                yield stored, _result_of(stored.line, stored.text)

    async def all(self, job: Job, notes: DoorNotes, state: OpenItems) -> AsyncGenerator[bytes, None]:
        """Yield every item in the order of the create, each as JSON; nothing before ingest is done, nor once the results are gone. Of a job
        that ended before ingest, the input says all that there is to say. `state` is of the same moment as the job."""
        if not await self.keeps_results(job):
            return
        if job.work_blob_id is None:
            if _is_over(job):
                async with aclosing(self._windows(job, _ResultPlaces(notes.total))) as windows:
                    async for start, lines in windows:
                        for index, line in enumerate(lines, start):
                            yield msgspec.json.encode(_never_ingested(job, notes, index, line))
            return
        places = await self._places(job, notes.total)
        moments = await self._store.recorded_moments(job.id)
        async with aclosing(self._windows(job, places)) as windows:
            async for start, lines in windows:
                done = [index for index in range(start, start + len(lines)) if places.which[index]]
                texts = dict(zip(done, await self._result_texts(job, places, done), strict=True))
                for index, line in enumerate(lines, start):
                    body = _body_of(line, index)
                    if index in texts:
                        result = texts[index]
                        number = _number_of(result)
                        entity = _entity(job, notes, number, body, state.tries.get(number, 0))
                        place = OutcomePlace(0, "", places.at[index], 0)
                        moment_ms = when(moments, place, is_error=places.which[index] == ERRORS)
                        entity = _with_result(entity, result, moment_ms)
                    elif places.is_unreadable(index, job):
                        entity = _unreadable_entity(_entity(job, notes, places.number(index), body))
                    else:
                        number = places.number(index)
                        entity = _open_entity(job, _entity(job, notes, number, body), number, state)
                    yield msgspec.json.encode(entity)

    async def _places(self, job: Job, total: int) -> "_ResultPlaces":
        """Where the result of each item lies, by its index."""
        places = _ResultPlaces(total)
        for which, file_id, size_bytes in (
            (OUTPUT, job.output_file_id, job.output_bytes),
            (ERRORS, job.error_file_id, job.error_bytes),
        ):
            if file_id is None or not size_bytes:
                continue
            async with aclosing(self.results(job, file_id, 0, size_bytes)) as results:
                async for stored, result in results:
                    name, number = read_name(result.custom_id), _number_of(result)
                    if name is not None and name.place < total:
                        places.put(name.place, which, stored.at, len(stored.text))
                    else:
                        places.nameless.add(number)
        if places.missing and job.work_blob_id is not None:
            try:
                # Behind the work file's lines stands the line number of each item.
                trailer = await self._blobs.read(job.work_blob_id, job.work_bytes, 4 * job.item_count)
            except BlobMissing:
                # The work file goes with the end of its job: which of the nameless results is which is not known any more.
                places.number_by_order()
            else:
                places.number_by(trailer)
        return places

    async def _windows(self, job: Job, places: "_ResultPlaces") -> AsyncGenerator[tuple[int, list[bytes]], None]:
        """The lines of the input, some at a time, with the index of the first; empty ones once the input is gone."""
        file = await self._store.get_file(job.tenant_id, job.input_file_id)
        read = _no_lines(len(places.which))
        if file is not None:
            read = _lines(file_bytes(self._store, self._blobs, file.id, 0, file.size_bytes))
        total = len(places.which)
        start, size = 0, 0
        window: list[bytes] = []
        async with aclosing(read) as lines:
            async for line in lines:
                if start + len(window) == total:
                    # More lines than were taken in: their ends are damaged.
                    break
                window.append(line)
                size += len(line) + places.size[start + len(window) - 1]
                if len(window) >= WINDOW_ITEMS or size >= WINDOW_BYTES:
                    yield start, window
                    start, window, size = start + len(window), [], 0
        window += [b""] * (total - start - len(window))
        if window:
            yield start, window

    async def _result_texts(self, job: Job, places: "_ResultPlaces", indices: list[int]) -> list[StoredResult]:
        wanted = [
            OutcomePlace(
                index, "answered" if places.which[index] == OUTPUT else "failed", places.at[index], places.size[index]
            )
            for index in indices
        ]
        return await self._result_lines(job, wanted)

    async def _result_lines(self, job: Job, places: Sequence[OutcomePlace]) -> list[StoredResult]:
        """The results at these places."""
        found: dict[OutcomePlace, StoredResult] = {}
        for is_output, file_id in ((True, job.output_file_id), (False, job.error_file_id)):
            asked = [one for one in places if (one.outcome == "answered") is is_output]
            if asked and file_id is not None:
                ranges = [(one.at, one.at + one.size_bytes) for one in asked]
                read = await self._read_ranges(file_id, ranges)
                stored = StoredLines(self._store, job, stored_lines.OUTPUT if is_output else stored_lines.ERRORS)
                for one, data in zip(asked, read, strict=True):
                    text = data.rstrip(b"\n")
                    found[one] = _result_of(stored.one(item_id(job.id, one.number), text), text)
        return [found[one] for one in places if one in found]

    async def _requests_of(self, job: Job, read: Sequence[StoredResult]) -> list[bytes | None]:
        """The requests of these results; None for one that lost its name, and once the input is gone."""
        names = [read_name(one.custom_id) for one in read]
        known = iter(await self._requests(job, [name for name in names if name is not None]))
        return [next(known) if name is not None else None for name in names]

    async def _request_in(self, job: Job, line: bytes) -> bytes | None:
        """The request of a line of the work file; what ingest wrote about a bad one names it."""
        if not is_whole(line):
            return None
        read = _decode_input(line)
        if body := bytes(read.body):
            return body
        name = read_name(read.custom_id)
        return (await self._requests(job, [name]))[0] if name is not None else None

    async def _requests(self, job: Job, names: Sequence[ItemName]) -> list[bytes | None]:
        """The requests of these items; None where one is damaged, and once the input is gone."""
        file = await self._store.get_file(job.tenant_id, job.input_file_id) if names else None
        if file is None:
            return [None] * len(names)
        ranges = [(name.at, name.at + name.size_bytes) for name in names]
        return [body if is_whole(body) else None for body in await self._read_ranges(file.id, ranges)]

    async def _read_ranges(self, file_id: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """The bytes of these ranges of a file, in as few reads as their neighbourhood allows."""
        found: dict[tuple[int, int], bytes] = {}
        group: list[tuple[int, int]] = []
        for one in sorted(set(ranges)):
            if group and one[0] - group[-1][1] > GAP_BYTES:
                await self._read_group(file_id, group, found)
                group = []
            group.append(one)
        if group:
            await self._read_group(file_id, group, found)
        return [found[one] for one in ranges]

    async def _read_group(
        self, file_id: str, group: list[tuple[int, int]], found: dict[tuple[int, int], bytes]
    ) -> None:
        start, end = group[0][0], max(end for _, end in group)
        stream = file_bytes(self._store, self._blobs, file_id, start, end)
        data = b"".join([chunk async for chunk in stream])
        for one in group:
            found[one] = data[one[0] - start : one[1] - start]

    async def _open_lines(self, job: Job, first: int, count: int) -> list[bytes]:
        """The work file's lines of these items; fewer once the job ended."""
        if job.work_blob_id is None:
            return []
        found: list[bytes] = []
        for span in await self._store.work_spans(job.id, first, count):
            try:
                data = await self._blobs.read(job.work_blob_id, span.work_at, span.work_bytes)
            except BlobMissing:
                return []
            lines = data.split(b"\n")
            low, high = max(first, span.first), min(first + count, span.first + span.count)
            found += lines[low - span.read_first : high - span.read_first]
        return found

    async def _tries(self, job: Job, numbers: Sequence[int]) -> dict[int, int]:
        if not numbers:
            return {}
        low, high = min(numbers), max(numbers)
        return {one.number: one.count for one in await self._store.item_tries(job.id, low, high - low + 1)}


def open_items(leased: Sequence[tuple[int, int]], tried: Sequence[ItemTries]) -> OpenItems:
    """How the items without a result stand, by what workers hold and what was tried before."""
    waiting = frozenset(one.number for one in tried if one.wait_ms > 0)
    return OpenItems(leased, {one.number: one.count for one in tried}, waiting)


class _ResultPlaces:
    """Where results lie, by the items' indices: a few bytes for each."""

    def __init__(self, total: int) -> None:
        self.which = bytearray(total)
        self.at = array("Q", bytes(8 * total))
        self.size = array("I", bytes(4 * total))
        self.missing = total
        # Numbers of items whose results do not say whose they are.
        self.nameless: set[int] = set()
        self._numbers: array[int] = array("I")

    def put(self, index: int, which: int, at: int, size_bytes: int) -> None:
        self.which[index], self.at[index], self.size[index] = which, at, size_bytes
        self.missing -= 1

    def number_by(self, trailer: bytes) -> None:
        """Learn the items' numbers: `trailer` has the 1-based line of each number."""
        self._numbers = array("I", bytes(4 * len(self.which)))
        for number in range(len(trailer) // 4):
            line = int.from_bytes(trailer[4 * number : 4 * number + 4], "little")
            if line <= len(self.which):
                self._numbers[line - 1] = number

    def number_by_order(self) -> None:
        """Give the items without a place the numbers that are left, in order."""
        self._numbers = array("I", bytes(4 * len(self.which)))
        left = iter(sorted(self.nameless))
        for index, which in enumerate(self.which):
            if not which:
                self._numbers[index] = next(left, 0)

    def is_unreadable(self, index: int, job: Job) -> bool:
        """Whether an item without a place has a result that cannot be read."""
        return job.state in JOB_ENDED or self.number(index) in self.nameless

    def number(self, index: int) -> int:
        return self._numbers[index]


def when(moments: Sequence[RecordedTo], place: OutcomePlace, *, is_error: bool | None = None) -> int:
    """When the line at this place of a result file was recorded."""
    error = place.outcome != "answered" if is_error is None else is_error
    at = bisect_right(moments, place.at, key=lambda one: one.error_to if error else one.output_to)
    return moments[at].happened_at if at < len(moments) else 0


def _body_of(line: bytes, index: int) -> bytes | None:
    """The request in this line of the input; None where it is damaged, or another's because of damage before it, and once it is gone."""
    read = _decode_input(line) if line and is_whole(line) else None
    name = None if read is None else read_name(read.custom_id)
    return bytes(read.body) if read is not None and name is not None and name.place == index else None


async def _no_lines(count: int) -> AsyncGenerator[bytes, None]:
    for _ in range(count):
        yield b""


def _result_of(line: OutcomeLine, text: bytes) -> StoredResult:
    """What became of an item, by the line that was read and its bytes."""
    if not line.is_unreadable:
        return _decode_result(text)
    return StoredResult(line.id, line.custom_id, error=_ErrorOfItem(DAMAGED.code, DAMAGED.message))


def _unreadable_entity(entity: ItemEntity) -> ItemEntity:
    message = f"{DAMAGED.code}: {DAMAGED.message}"
    return msgspec.structs.replace(entity, status=shapes.FAILED, error_code=DAMAGED.code, error_message=message)


def _number_of(line: StoredResult) -> int:
    found = split_item_id(line.id)
    return found[1] if found is not None else 0


def _entity(job: Job, notes: DoorNotes, number: int, body: bytes | None, retry_count: int = 0) -> ItemEntity:
    """An item that began to run."""
    resource, tokens = "", 0
    if body is not None:
        resource, tokens = _decode_body(body).model, estimated_tokens(_decode_fields(body))
    return ItemEntity(
        workspace_id=notes.workspace,
        environment_id=notes.environment,
        item_id=item_id(job.id, number),
        batch_id=job.id,
        status=shapes.RUNNING,
        resource_id=resource,
        request=Raw(body) if body is not None else shapes.NULL,
        response=shapes.NULL,
        error_message=None,
        error_code=None,
        retry_count=retry_count,
        estimated_prompt_tokens=tokens,
        prompt_tokens=0,
        completion_tokens=0,
        output_tokens=0,
        total_tokens=0,
        created_at=shapes.moment(job.created_at),
        completed_at=None,
    )


def _open_entity(job: Job, entity: ItemEntity, number: int, state: OpenItems) -> ItemEntity:
    """An item without a result, as it stands."""
    tries = state.tries.get(number, 0)
    if state.is_running(number):
        return msgspec.structs.replace(entity, retry_count=tries)
    if job.closing is not JobState.CANCELLED:
        return msgspec.structs.replace(entity, status=shapes.PENDING, retry_count=tries)
    return _cancelled(job, msgspec.structs.replace(entity, retry_count=tries))


def _is_over(job: Job) -> bool:
    return job.closing is not None or job.state in JOB_ENDED


def _never_ingested(job: Job, notes: DoorNotes, index: int, line: bytes) -> ItemEntity:
    """An item of a job that was over before it was ingested: its place in the input is its number."""
    entity = _entity(job, notes, index, _body_of(line, index))
    if shapes.batch_status(job, 0) == shapes.CANCELLED:
        return _cancelled(job, entity)
    message = shapes.error_message(job) or "batch_failed: The batch ended before this item could run."
    code = "batch_expired" if job.state is JobState.EXPIRED else "batch_failed"
    return msgspec.structs.replace(entity, status=shapes.FAILED, error_code=code, error_message=message)


def _cancelled(job: Job, entity: ItemEntity) -> ItemEntity:
    return msgspec.structs.replace(
        entity,
        status=shapes.CANCELLED,
        error_code="batch_cancelled",
        error_message=shapes.CANCELLED_MESSAGE,
        completed_at=shapes.moment(job.cancelling_at) if job.cancelling_at is not None else None,
    )


def _with_result(entity: ItemEntity, line: StoredResult, moment_ms: int) -> ItemEntity:
    """An item with what became of it."""
    entity = msgspec.structs.replace(entity, completed_at=shapes.moment(moment_ms) if moment_ms else None)
    response, error = line.response, line.error
    if response is not None and response.status_code < _OK:
        headers = msgspec.json.encode({"x-request-id": response.request_id})
        answer = Raw(b'{"data":%b,"headers":%b}' % (bytes(response.body), headers))
        return shapes.completed(entity, answer, _usage_of(bytes(response.body)))
    status, code, message = shapes.FAILED, None, "There is no answer."
    if error is not None:
        status = shapes.CANCELLED if error.code == "batch_cancelled" else shapes.FAILED
        code, message = error.code, f"{error.code}: {error.message}"
    elif response is not None:
        error = _words_of(bytes(response.body))
        code, message = error.code, error.message or f"The model server answered {response.status_code}."
    return msgspec.structs.replace(entity, status=status, error_code=code, error_message=message)


def _usage_of(body: bytes) -> Usage:
    try:
        return answers.read("", body)[1]
    except answers.NotAnAnswer:
        return Usage()


def _words_of(body: bytes) -> _ErrorOfItem:
    """What a model server wrote, as far as it has the usual shape."""
    try:
        return _decode_error(body).error or _ErrorOfItem()
    except msgspec.MsgspecError:
        return _ErrorOfItem()


async def _lines(pieces: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """The lines of a file, without what ends them."""
    held: list[bytes] = []
    async for piece in pieces:
        *whole, last = piece.split(b"\n")
        for end in whole:
            yield b"".join((*held, end))
            held.clear()
        if last:
            held.append(last)
    if held:
        yield b"".join(held)
