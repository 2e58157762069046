"""An answer that is read while it comes: its head is here, its body follows piece by piece, as fast as it is read.

What is not read yet stays in a small buffer, and beyond it with the upstream: a slow reader slows the upstream down. A stream that is
closed before its end closes its connection, so that the upstream sees it and stops. It knows no model, no client and no shape.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Protocol

from tidegate.core.answers.redaction import KeyRedactor, StreamRedactor
from tidegate.core.errors import UpstreamError
from tidegate.upstream.http import classify
from tidegate.upstream.http.in_flight import InFlightCall


class Payload(Protocol):
    """Where the bytes of an answer come from."""

    async def readany(self) -> bytes:
        """Wait for the next bytes; none at the end."""


class RedactedPayload:
    """The bytes of an answer without our key, also where it lies across two pieces."""

    __slots__ = ("_payload", "_redactor")

    def __init__(self, payload: Payload, key: KeyRedactor) -> None:
        self._payload = payload
        self._redactor = StreamRedactor(key)

    async def readany(self) -> bytes:
        while chunk := await self._payload.readany():
            if shown := self._redactor.feed(chunk):
                return shown
        return self._redactor.end_stream()


class Stream:
    """To be read and closed by the task that opened it. `end` is called once, and hears whether the answer came whole.

    `bytes_max` is how much of an answer is ever kept here at once.
    """

    __slots__ = ("_end", "_flight", "_over", "_payload", "bytes_max", "headers", "status")

    def __init__(
        self,
        status: int,
        headers: Mapping[str, str],
        payload: Payload,
        flight: InFlightCall,
        end: Callable[[bool], None],
        bytes_max: int,
    ) -> None:
        self.status = status
        self.headers = headers
        self._payload = payload
        self._flight = flight
        self._end = end
        self.bytes_max = bytes_max
        self._over = False

    async def read(self) -> bytes:
        """The next bytes, as they came; none at the end. Raises one UpstreamError when the answer breaks off."""
        if self._over:
            return b""
        failed: UpstreamError | None = None
        try:
            chunk = await self._payload.readany()
        except asyncio.CancelledError:
            # Either this layer cut a late call, or the reader was cancelled: then the cancellation goes on.
            cut = self._flight.cut_reason()
            self.close()
            if cut is None:
                raise
            failed = classify.failure(classify.CallCut(cut), sent=True)
        except Exception as wrong:
            # Whatever a hostile answer makes the client raise, it is one failed call; it is not chained, for it knows our key.
            self.close()
            failed = classify.failure(wrong, sent=True)
        if failed is not None:
            raise failed
        if chunk:
            self._flight.received(chunk)
        else:
            self._finish(whole=True)
        return chunk

    async def read_whole(self) -> bytes:
        """All that follows, if it is not too much."""
        chunks = []
        size = 0
        while chunk := await self.read():
            size += len(chunk)
            if size > self.bytes_max:
                self.close()
                raise classify.failure(classify.AnswerTooLarge(self.status, self.bytes_max), sent=True)
            chunks.append(chunk)
        return b"".join(chunks)

    def pause_timeout(self) -> None:
        """From here on we wait for the reader, not for the upstream."""
        self._flight.pause_timeout(True)

    def resume_timeout(self) -> None:
        self._flight.pause_timeout(False)

    def was_cut(self) -> bool:
        """Whether it was this stream's own time-out that cancelled the task; asked once, and answered for."""
        return self._flight.cut_reason() is not None

    def close(self) -> None:
        """Whatever has not come yet is not wanted: the connection is closed at once."""
        self._finish(whole=False)

    def _finish(self, *, whole: bool) -> None:
        if not self._over:
            self._over = True
            self._end(whole)
