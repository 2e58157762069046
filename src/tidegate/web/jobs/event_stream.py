"""A stream of server-sent events about one job, for every door.

It waits for news, passes them on, and reports why it ends.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, aclosing

import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tidegate.core.errors import ApiProblem, TidegateError
from tidegate.core.nouns import Job
from tidegate.web.http.content import while_the_client_stays
from tidegate.web.http.intake import OpenCall, refusal
from tidegate.web.http.parts import body_part
from tidegate.web.jobs.job_watch import JobFollower, JobWatch

log = structlog.get_logger()

HEARTBEAT_S = 15.0
# The pause before storage that failed is asked again.
RETRY_S = 2.0
HEADERS = {"X-Accel-Buffering": "no"}
MEDIA_TYPE = "text/event-stream; charset=utf-8"
_HEARTBEAT = b": heartbeat\n\n"


class EventSource(ABC):
    """The events that a door sends about one job, from one position on, each once."""

    opening = b""

    @property
    @abstractmethod
    def is_over(self) -> bool:
        """Return whether the end of the job was sent."""

    @abstractmethod
    def news(self, job: Job) -> AsyncGenerator[bytes, None]:
        """Yield what is new with the job in its present state, in pieces of whole events."""

    @abstractmethod
    def after_cut(self, problem: ApiProblem) -> bytes:
        """Return the last bytes when the caller's key stopped working."""

    @abstractmethod
    def after_slow(self, job: Job) -> bytes:
        """Return the last bytes for a reader that did not keep up: it can go on after its last
        event.
        """

    def after_stop(self) -> bytes:
        """Return the last bytes when this server stops."""
        return b""

    def after_loss(self) -> bytes | None:
        """Return the last bytes when storage fails; None to go on once it is back."""
        return None


class EventStream(Response):
    """The response to one reader.

    It sends no faster than the client reads, and holds one piece at a time.

    A client that reads again after a long pause gets a last event, and can go on from there with a
    new request. A client that does not read again is cut off.
    """

    def __init__(
        self, watch: JobWatch, slot: AbstractAsyncContextManager[object], job: Job, source: EventSource
    ) -> None:
        """Create the response. `slot` is held while the stream is open."""
        super().__init__(None, 200, HEADERS, MEDIA_TYPE)
        del self.headers["content-length"]
        self._watch = watch
        self._slot = slot
        self._job = job
        self._source = source
        self._is_slow = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        open_call: OpenCall | None = scope["tidegate.intake"].open_call
        async with self._slot:
            with self._watch.following(self._job) as follower:
                if open_call is not None:
                    open_call.when_cut(follower.wake)
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                async with while_the_client_stays(receive):
                    await self._say(send, self._source.opening)
                    await self._say(send, await self._tell(follower, open_call, send))
                    await send(body_part(b"", more=False))

    async def _tell(self, follower: JobFollower, open_call: OpenCall | None, send: Send) -> bytes:
        """Send everything until the job ends, the key stops working or this server stops.

        Return the last bytes to send.
        """
        has_news, is_behind = True, False
        while follower.job is not None:
            if open_call is not None and open_call.is_cut:
                return self._source.after_cut(refusal())
            if has_news or is_behind:
                is_behind = not await self._tell_news(follower.job, send)
                if is_behind and (last := self._source.after_loss()) is not None:
                    return last
            else:
                await self._say(send, _HEARTBEAT)
            if self._source.is_over:
                return b""
            if self._is_slow:
                return self._source.after_slow(follower.job)
            if follower.is_stopping:
                return self._source.after_stop()
            has_news = await follower.wait(RETRY_S if is_behind else HEARTBEAT_S)
        return b""

    async def _tell_news(self, job: Job, send: Send) -> bool:
        """Send what is new. Return False when storage failed, so that the rest is sent later."""
        try:
            async with aclosing(self._source.news(job)) as news:
                async for piece in news:
                    await self._say(send, piece)
                    if self._is_slow:
                        break
        except TidegateError as error:
            log.warning("event_stream_read_failed", job=job.id, error=str(error))
            return False
        return True

    async def _say(self, send: Send, piece: bytes) -> None:
        """Send whole events in one part, so that a client that reads part by part gets no half
        event. This waits while the client has not read enough of what was sent before.
        """
        if piece:
            loop = asyncio.get_running_loop()
            begun_s = loop.time()
            await send(body_part(piece, more=True))
            self._is_slow = self._is_slow or loop.time() - begun_s > self._watch.reader_patience_s
