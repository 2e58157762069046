"""The answer to an interactive call, whole or while it comes.

A response is closed once, whatever happens: by its end, by its reader, or because it broke. Only then are its place and its
permit given back and its usage settled. It chooses no deployment and knows no client.
"""

from collections.abc import Callable

from tidegate.core.answers.redaction import EventRedactor
from tidegate.core.answers.stream_options import UsageChunkFilter
from tidegate.core.answers.stream_usage import UsageReader
from tidegate.core.errors import UpstreamError
from tidegate.upstream.budgets.call_receipt import CallReceipt
from tidegate.upstream.calls.admission import Admission, Admissions
from tidegate.upstream.http.streams import Stream
from tidegate.upstream.routing.key_slots import KeyPlace


class ReaderLeft(Exception):
    """The rest of an answer was not wanted."""


class UpstreamResponse:
    """`body` is a whole answer, and then nothing is left to close; without one it is read, by the task that opened it."""

    __slots__ = (
        "_admission",
        "_admissions",
        "_ended",
        "_filter",
        "_first",
        "_place",
        "_receipt",
        "_redactor",
        "_stream",
        "_usage",
        "body",
        "deployment",
        "headers",
        "status"
    )  # fmt: skip

    def __init__(
        self,
        admissions: Admissions,
        admission: Admission,
        stream: Stream,
        receipt: CallReceipt,
        *,
        body: bytes | None = None,
        first: bytes = b"",
        hides_usage: bool = False,
    ) -> None:
        self.status = stream.status
        self.headers = stream.headers
        self.deployment = admission.state.deployment
        self.body = body
        self._stream = stream
        self._receipt = receipt
        self._first = first
        self._usage = UsageReader()
        self._filter = UsageChunkFilter() if hides_usage else None
        self._redactor = EventRedactor(admission.state.key_redactor)
        self._admissions = admissions
        # None when nothing of the call is under way any more.
        self._admission = admission if body is None else None
        self._place: KeyPlace | None = None
        self._ended: Callable[[BaseException | None], None] | None = None

    def keep(self, place: KeyPlace) -> None:
        """Give this place back when nothing of the call is under way any more: at once, where that is so."""
        if self._admission is None:
            place.release_key_slots()
        else:
            self._place = place

    def when_ended(self, report: Callable[[BaseException | None], None]) -> None:
        """Report once how a stream ended: with None when it came whole, with ReaderLeft when its reader wanted no more of it."""
        self._ended = report

    @property
    def bytes_max(self) -> int:
        """How much of an answer may be kept here at once."""
        return self._stream.bytes_max

    async def read(self) -> bytes:
        """Return the next lines, as the upstream sent them but for our key and account; none at the end. Raise one UpstreamError when it
        breaks off."""
        while chunk := await self._read():
            if self._filter is not None:
                chunk = self._filter.feed(chunk)
            if shown := self._redactor.feed(chunk):
                return shown
        if self._filter is not None and (rest := self._redactor.feed(self._filter.end_stream())):
            return rest
        return self._redactor.end_stream()

    async def _read(self) -> bytes:
        if self._first:
            chunk, self._first = self._first, b""
        else:
            try:
                chunk = await self._stream.read()
            except UpstreamError as error:
                broken: UpstreamError | None = error
            else:
                broken = None
            if broken is not None:
                raise self._finish(broken, came_whole=False) or broken
        if chunk:
            self._usage.feed(chunk)
        else:
            self._finish(None, came_whole=True)
        return chunk

    def pause_timeout(self) -> None:
        """From here on the client is waited for."""
        self._stream.pause_timeout()

    def resume_timeout(self) -> None:
        self._stream.resume_timeout()

    def was_cut(self) -> bool:
        """Return whether this call was given up because the client took nothing for too long; asked once, after a cancellation."""
        return self._stream.was_cut()

    def close(self) -> None:
        """Close the connection at once, because the rest is not wanted; this is no failure of the deployment."""
        self._finish(None, came_whole=False)

    def _finish(self, error: UpstreamError | None, *, came_whole: bool) -> UpstreamError | None:
        admission, self._admission = self._admission, None
        if admission is None:
            return None
        self._stream.close()
        if self._first:
            # It arrived, though the reader did not take it.
            self._usage.feed(self._first)
        self._usage.end_stream()
        self._receipt.settle_answer(self._usage.usage, self._usage.uncounted_bytes)
        if self._place is not None:
            self._place.release_key_slots()
        if self._ended is not None:
            self._ended(error if error is not None or came_whole else ReaderLeft())
        return self._admissions.end_call(admission, error, answer_tokens=0 if came_whole else None)
