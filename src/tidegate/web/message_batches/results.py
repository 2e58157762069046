"""The results of a message batch: lines of the result files in Anthropic's shape.

A job that ended before ingest has no result files: its results are derived from its input.
"""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import msgspec

from tidegate.core.answers.outcome_lines import OutcomeLine, salvaged_custom_id
from tidegate.core.answers.whole_lines import whole_lines
from tidegate.core.errors import ApiProblem
from tidegate.core.files import File
from tidegate.core.nouns import Job
from tidegate.core.ports import Blobs
from tidegate.core.states import JobState
from tidegate.core.translate import error_to_anthropic, is_error_of
from tidegate.store.file_bytes import file_bytes
from tidegate.store.store import Store
from tidegate.web.jobs.stored_lines import ERRORS, OUTPUT, StoredLines, is_whole

_PIECE_BYTES = 32_768
_BAD_REQUEST, _NOT_FOUND, _OURS = 400, 404, 500
# Codes of requests without an answer that are not at fault themselves.
_OURS_CODES = (
    "result_unreadable",
    "internal_error",
    "worker_lost",
    "batch_failed",
    "invalid_upstream_response",
    "upstream_",
)
_UNRUN = {"batch_expired": b"expired", "batch_cancelled": b"canceled"}


class _StoredResponse(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class _StoredError(msgspec.Struct):
    code: str
    message: str


class _StoredLine(msgspec.Struct):
    custom_id: msgspec.Raw
    response: _StoredResponse | None = None
    error: _StoredError | None = None


_decode = msgspec.json.Decoder(_StoredLine).decode


async def results(store: Store, blobs: Blobs, job: Job) -> AsyncGenerator[bytes, None]:
    """Yield every result of an ended job, in pieces of whole lines."""
    if job.work_blob_id is None:
        parts: list[tuple[str | None, Callable[[bytes], bytes]]] = [(job.input_file_id, _unrun_by(job))]
    else:
        parts = [(job.output_file_id, result_of), (job.error_file_id, result_of)]
    files = []
    for file_id, convert in parts:
        file = await store.get_file(job.tenant_id, file_id) if file_id is not None else None
        if file is not None:
            files.append((file, convert))
        elif file_id is not None and job.work_blob_id is not None:
            # Refuse before the first byte: a part of the results would look like all of them.
            message = "The results of this message batch are not kept any more. Read results while they are kept."
            raise ApiProblem(404, "file_not_found", message)
    for file, convert in files:
        piece = bytearray()
        async with aclosing(_lines_of(store, blobs, job, file)) as lines:
            async for line in lines:
                piece += convert(line)
                if len(piece) >= _PIECE_BYTES:
                    yield bytes(piece)
                    piece.clear()
        if piece:
            yield bytes(piece)


async def _lines_of(store: Store, blobs: Blobs, job: Job, file: File) -> AsyncGenerator[bytes, None]:
    """Yield the lines of an input or a result file.

    A damaged result is replaced by one that reports the damage.
    """
    async with aclosing(file_bytes(store, blobs, file.id, 0, file.size_bytes)) as stream:
        if file.id not in (job.output_file_id, job.error_file_id):
            async for text in whole_lines(stream):
                if text:
                    yield text
            return
        name = OUTPUT if file.id == job.output_file_id else ERRORS
        async with aclosing(StoredLines(store, job, name).all(0, stream)) as lines:
            async for stored in lines:
                yield _unreadable(stored.line) if stored.line.is_unreadable else stored.text


def _unreadable(line: OutcomeLine) -> bytes:
    """Return the line for a result that cannot be read. If it lost its custom_id, that is empty."""
    return msgspec.json.encode({"custom_id": line.custom_id or "", "error": line.error})


def result_of(line: bytes) -> bytes:
    """Return a result line in Anthropic's shape. The bytes of an answer stay."""
    stored = _decode(line)
    if stored.response is None:
        error = stored.error or _StoredError("internal_error", "This request has no result.")
        kind = _UNRUN.get(error.code)
        result = b'{"type":"%b"}' % kind if kind else _errored(_status_of(error.code), _error_body(error), None)
    elif stored.response.status_code < _BAD_REQUEST:
        result = b'{"type":"succeeded","message":%b}' % bytes(stored.response.body)
    else:
        result = _errored(stored.response.status_code, bytes(stored.response.body), stored.response.request_id)
    return b'{"custom_id":%b,"result":%b}\n' % (bytes(stored.custom_id), result)


def _unrun_by(job: Job) -> Callable[[bytes], bytes]:
    """Return a function that writes the result of each request of a job that ended before it
    began."""
    if job.state is JobState.FAILED:
        why = job.errors[0].message if job.errors else "The batch failed before it began."
        result = _errored(_OURS, _error_body(_StoredError("batch_failed", why)), None)
    else:
        result = b'{"type":"%b"}' % (b"expired" if job.state is JobState.EXPIRED else b"canceled")
    return lambda line: b'{"custom_id":%b,"result":%b}\n' % (_custom_id_of(line), result)


def _custom_id_of(line: bytes) -> bytes:
    """Return the custom_id in a line of the input, as JSON, even if the rest of the line is
    damaged.
    """
    return bytes(_decode(line).custom_id) if is_whole(line) else msgspec.json.encode(salvaged_custom_id(line) or "")


def _errored(status: int, body: bytes, request_id: str | None) -> bytes:
    stored = body if is_error_of(body, anthropic=True) else error_to_anthropic(status, body, request_id)
    return b'{"type":"errored","error":%b}' % stored


def _error_body(error: _StoredError) -> bytes:
    return msgspec.json.encode({"error": {"message": error.message, "code": error.code}})


def _status_of(code: str) -> int:
    """Return the HTTP status with which a request would have been refused for this reason."""
    if code == "model_not_found":
        return _NOT_FOUND
    return _OURS if code.startswith(_OURS_CODES) else _BAD_REQUEST
