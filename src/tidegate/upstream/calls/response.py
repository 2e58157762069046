"""One interactive call on its way: the place that it takes in its deployment, and its answer, whole or while it comes.

A response is closed once, whatever happens: by its end, by whoever passes it on, or because it broke. Only then are its place and its
permit given back and its usage settled. It chooses no deployment and knows no client.
"""

import asyncio
from collections.abc import Callable

from tidegate.core.answers.stream_options import UsageChunkFilter
from tidegate.core.answers.stream_usage import UsageReader
from tidegate.core.deployments import Deployment
from tidegate.core.errors import UpstreamError
from tidegate.core.nouns import Call
from tidegate.upstream.budgets.call_receipt import CallReceipt
from tidegate.upstream.http.streams import Stream
from tidegate.upstream.routing.deployment_state import DeploymentState
from tidegate.upstream.tide.tides import BackgroundFlight

# The first token of an answer that is not streamed cannot be seen; it is taken to have come by then.
UNSEEN_FIRST_TOKEN_S = 1.0


# Hears why a call broke, if it did, and whether its answer came whole; gives the error that the caller sees.
Closed = Callable[[UpstreamError | None, bool], UpstreamError | None]


class Admission:
    """What a call takes of its deployment while it is under way. A flex call's is batch's, and counts among batch's: in the tide too, which
    never takes it back, for somebody waits for it."""

    __slots__ = ("_changed", "_counted", "_flight", "_timer", "_waits", "is_flex", "number", "state")

    def __init__(
        self,
        state: DeploymentState,
        call: Call,
        *,
        is_flex: bool,
        counted: Callable[[int], None],
        changed: Callable[[DeploymentState], None],
    ) -> None:
        self.state = state
        self.is_flex = is_flex
        # Which of its deployment's calls it is, once it goes out.
        self.number = 0
        self._flight: BackgroundFlight | None = None
        self._counted = counted
        self._changed = changed
        self._waits = not is_flex
        self._timer: asyncio.TimerHandle | None = None
        if is_flex:
            state.in_flight += 1
            state.highest = max(state.highest, state.in_flight)
            counted(1)
            if state.tide is not None:
                self._flight = state.tide.begin(call.idempotency_key, call.body)
        else:
            state.interactive_in_flight += 1
            state.interactive_awaiting += 1
            changed(state)

    def is_not_streamed(self) -> None:
        if self._waits and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(UNSEEN_FIRST_TOKEN_S, self.first_token)

    def first_token(self) -> None:
        """The prompt is done with."""
        if self._waits:
            self._waits = False
            self.state.interactive_awaiting -= 1
            self._changed(self.state)
        elif self._flight is not None and self.state.tide is not None:
            self.state.tide.first_token(self._flight)

    def release(self, *, refused: bool = False) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self.is_flex:
            self.state.in_flight -= 1
            self._counted(-1)
            if self._flight is not None and self.state.tide is not None:
                self.state.tide.end(self._flight, None, refused=refused)
            return
        if self._waits:
            self._waits = False
            self.state.interactive_awaiting -= 1
        self.state.interactive_in_flight -= 1
        self._changed(self.state)


class UpstreamResponse:
    """`body` is a whole answer, and then nothing is left to close; without one it is read, by the task that opened it."""

    __slots__ = (
        "_closed",
        "_ended",
        "_filter",
        "_first",
        "_receipt",
        "_stream",
        "_usage",
        "body",
        "deployment",
        "headers",
        "status"
    )  # fmt: skip

    def __init__(
        self,
        deployment: Deployment,
        stream: Stream,
        receipt: CallReceipt,
        closed: Closed | None,
        *,
        body: bytes | None = None,
        first: bytes = b"",
        hides_usage: bool = False,
    ) -> None:
        self.status = stream.status
        self.headers = stream.headers
        self.deployment = deployment
        self.body = body
        self._stream = stream
        self._receipt = receipt
        self._first = first
        self._usage = UsageReader()
        self._filter = UsageChunkFilter() if hides_usage else None
        self._closed = closed
        self._ended: Callable[[], None] | None = None

    def when_ended(self, tell: Callable[[], None]) -> None:
        """Have this called once, when nothing of the call is under way any more: at once, where that is so."""
        if self._closed is None:
            tell()
        else:
            self._ended = tell

    @property
    def bytes_max(self) -> int:
        """How much of an answer may be kept here at once."""
        return self._stream.bytes_max

    async def read(self) -> bytes:
        """The next bytes, as the upstream sent them; none at the end. Raises one UpstreamError when it breaks off."""
        chunk = await self._read()
        if self._filter is None:
            return chunk
        while chunk:
            if shown := self._filter.feed(chunk):
                return shown
            chunk = await self._read()
        return self._filter.end()

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
        """Whether the client took nothing for so long that this call was given up; asked once, by whoever was cancelled."""
        return self._stream.was_cut()

    def close(self) -> None:
        """Nobody wants the rest: the upstream sees its connection closed at once, and nobody's health is harmed."""
        self._finish(None, came_whole=False)

    def _finish(self, error: UpstreamError | None, *, came_whole: bool) -> UpstreamError | None:
        closed, self._closed = self._closed, None
        if closed is None:
            return None
        self._stream.close()
        if self._first:
            # It came, though nobody read it.
            self._usage.feed(self._first)
        self._usage.end()
        self._receipt.settle(self._usage.usage, self._usage.uncounted_bytes)
        if self._ended is not None:
            self._ended()
        return closed(error, came_whole)
