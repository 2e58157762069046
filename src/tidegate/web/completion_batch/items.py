"""The items of a job.

The request comes from the input file, the answer from a result file, the rest from the store.

A result line names its item, and the name leads to the request (`inline_items`). An item without a
result is found in the work file. At most a window of items is in memory.
"""

from array import array
from bisect import bisect_right
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import msgspec
from msgspec import Raw

from tidegate.core.answers import answer as answers
from tidegate.core.answers.outcome_lines import DAMAGED, OutcomeLine
from tidegate.core.answers.whole_lines import whole_lines
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
# Ranges with smaller gaps are read at once.
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
    """The state of items without a result: spans that workers lease, tries so far, and items that
    wait for another try.
    """

    leased: Sequence[tuple[int, int]] = ()
    tries: dict[int, int] = msgspec.field(default_factory=dict)
    waiting: frozenset[int] = frozenset()

    def is_running(self, number: int) -> bool:
        at = bisect_right(self.leased, (number, 1 << 62)) - 1
        is_leased = at >= 0 and number < self.leased[at][0] + self.leased[at][1]
        return is_leased and number not in self.waiting


class ItemReader:
    """The reader of items of jobs that this door made."""

    def __init__(self, store: Store, blobs: Blobs) -> None:
        self._store = store
        self._blobs = blobs

    async def keeps_results(self, job: Job) -> bool:
        """Return whether a job's results still exist.

        Those of an ended job are deleted with their files, by the owner or by age.
        """
        if job.state not in JOB_ENDED:
            return True
        for file_id, size_bytes in ((job.output_file_id, job.output_bytes), (job.error_file_id, job.error_bytes)):
            if file_id and size_bytes and await self._store.get_file(job.tenant_id, file_id) is None:
                return False
        return True

    async def one(self, job: Job, notes: DoorNotes, number: int) -> ItemEntity | None:
        """Return the item with this number in its present state; None if there is none, or it is
        not known any more.
        """
        if not await self.keeps_results(job):
            return None
        # Read this before the result: otherwise an item that is done in between would look as if it
        # had not begun.
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
        """Return these items as they were when they began to run; none if they are not known any
        more.
        """
        if not await self.keeps_results(job):
            return []
        lines = await self._open_lines(job, first, count)
        if len(lines) < count:
            # The job ended meanwhile: by now every item has a result, which leads to its request.
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
        """Yield the results between two line ends of a result file.

        A damaged line gives a result that reports the damage.
        """
        name = stored_lines.OUTPUT if file_id == job.output_file_id else stored_lines.ERRORS
        stream = file_bytes(self._store, self._blobs, file_id, start, end)
        async with aclosing(stream), aclosing(StoredLines(self._store, job, name).all(start, stream)) as lines:
            async for stored in lines:
                yield stored, _result_of(stored.line, stored.text)

    async def all(self, job: Job, notes: DoorNotes, state: OpenItems) -> AsyncGenerator[bytes, None]:
        """Yield every item in the order of the create, each as JSON; nothing before ingest is done
        or once the results are deleted.

        The items of a job that ended before ingest are built from the input alone. `state` must be
        of the same moment as the job.
        """
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
        """Return the place of each item's result, by the item's index."""
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
                # After its lines the work file has the input line of each item.
                trailer = await self._blobs.read(job.work_blob_id, job.work_bytes, 4 * job.item_count)
            except BlobMissing:
                # The work file is deleted when its job ends, so the results without a name are
                # assigned in order.
                places.number_by_order()
            else:
                places.number_by(trailer)
        return places

    async def _windows(self, job: Job, places: "_ResultPlaces") -> AsyncGenerator[tuple[int, list[bytes]], None]:
        """Yield the lines of the input in windows, with the index of the first line; empty lines
        once the input is deleted.
        """
        file = await self._store.get_file(job.tenant_id, job.input_file_id)
        read = _no_lines(len(places.which))
        if file is not None:
            read = whole_lines(file_bytes(self._store, self._blobs, file.id, 0, file.size_bytes))
        total = len(places.which)
        start, size = 0, 0
        window: list[bytes] = []
        async with aclosing(read) as lines:
            async for line in lines:
                if start + len(window) == total:
                    # There are more lines than items, so line ends are damaged.
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
        """Return the results at these places."""
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
        """Return the requests of these results; None for a result without a name, and once the
        input is deleted.
        """
        names = [read_name(one.custom_id) for one in read]
        known = iter(await self._requests(job, [name for name in names if name is not None]))
        return [next(known) if name is not None else None for name in names]

    async def _request_in(self, job: Job, line: bytes) -> bytes | None:
        """Return the request of a line of the work file.

        A line that ingest wrote about a bad request only names it.
        """
        if not is_whole(line):
            return None
        read = _decode_input(line)
        if body := bytes(read.body):
            return body
        name = read_name(read.custom_id)
        return (await self._requests(job, [name]))[0] if name is not None else None

    async def _requests(self, job: Job, names: Sequence[ItemName]) -> list[bytes | None]:
        """Return the requests of these items; None for a damaged one, and once the input is
        deleted.
        """
        file = await self._store.get_file(job.tenant_id, job.input_file_id) if names else None
        if file is None:
            return [None] * len(names)
        ranges = [(name.at, name.at + name.size_bytes) for name in names]
        return [body if is_whole(body) else None for body in await self._read_ranges(file.id, ranges)]

    async def _read_ranges(self, file_id: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the bytes of these ranges of a file. Neighbouring ranges are read at once."""
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
        """Return these items' lines of the work file; fewer once the job ended."""
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
    """Return the state of items without a result, from the leased spans and the tries so far."""
    waiting = frozenset(one.number for one in tried if one.wait_ms > 0)
    return OpenItems(leased, {one.number: one.count for one in tried}, waiting)


class _ResultPlaces:
    """The places of results by their items' indices, in a few bytes for each."""

    def __init__(self, total: int) -> None:
        self.which = bytearray(total)
        self.at = array("Q", bytes(8 * total))
        self.size = array("I", bytes(4 * total))
        self.missing = total
        # Numbers of items whose results have lost their names.
        self.nameless: set[int] = set()
        self._numbers: array[int] = array("I")

    def put(self, index: int, which: int, at: int, size_bytes: int) -> None:
        self.which[index], self.at[index], self.size[index] = which, at, size_bytes
        self.missing -= 1

    def number_by(self, trailer: bytes) -> None:
        """Set the items' numbers. `trailer` has the 1-based input line of each number."""
        self._numbers = array("I", bytes(4 * len(self.which)))
        for number in range(len(trailer) // 4):
            line = int.from_bytes(trailer[4 * number : 4 * number + 4], "little")
            if line <= len(self.which):
                self._numbers[line - 1] = number

    def number_by_order(self) -> None:
        """Give the numbers of nameless results to the items without a place, in order."""
        self._numbers = array("I", bytes(4 * len(self.which)))
        left = iter(sorted(self.nameless))
        for index, which in enumerate(self.which):
            if not which:
                self._numbers[index] = next(left, 0)

    def is_unreadable(self, index: int, job: Job) -> bool:
        """Return whether an item without a place has a result that cannot be read."""
        return job.state in JOB_ENDED or self.number(index) in self.nameless

    def number(self, index: int) -> int:
        return self._numbers[index]


def when(moments: Sequence[RecordedTo], place: OutcomePlace, *, is_error: bool | None = None) -> int:
    """Return the moment at which the line at this place of a result file was recorded; 0 if it is
    not known.
    """
    error = place.outcome != "answered" if is_error is None else is_error
    at = bisect_right(moments, place.at, key=lambda one: one.error_to if error else one.output_to)
    return moments[at].happened_at if at < len(moments) else 0


def _body_of(line: bytes, index: int) -> bytes | None:
    """Return the request in this line of the input; None if the line is damaged, missing, or
    another item's because of damage before it.
    """
    read = _decode_input(line) if line and is_whole(line) else None
    name = None if read is None else read_name(read.custom_id)
    return bytes(read.body) if read is not None and name is not None and name.place == index else None


async def _no_lines(count: int) -> AsyncGenerator[bytes, None]:
    for _ in range(count):
        yield b""


def _result_of(line: OutcomeLine, text: bytes) -> StoredResult:
    """Return an item's result from its line; damage is reported as an error."""
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
    """Return an item in the state in which it began to run."""
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
    """Return an item without a result in its present state."""
    tries = state.tries.get(number, 0)
    if state.is_running(number):
        return msgspec.structs.replace(entity, retry_count=tries)
    if job.closing is not JobState.CANCELLED:
        return msgspec.structs.replace(entity, status=shapes.PENDING, retry_count=tries)
    return _cancelled(job, msgspec.structs.replace(entity, retry_count=tries))


def _is_over(job: Job) -> bool:
    return job.closing is not None or job.state in JOB_ENDED


def _never_ingested(job: Job, notes: DoorNotes, index: int, line: bytes) -> ItemEntity:
    """Return an item of a job that ended before ingest; its number is its index in the input."""
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
    """Return an item with its result."""
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
    """Return the error that a model server wrote, if it has the usual shape."""
    try:
        return _decode_error(body).error or _ErrorOfItem()
    except msgspec.MsgspecError:
        return _ErrorOfItem()
