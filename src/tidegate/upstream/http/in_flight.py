"""The calls in flight, and the one sweep that ends those that take too long.

A timer per call and per received packet would cost more than everything else this layer does. So a call only counts its
steps (request begun, headers received, bytes received), and a sweep a few times a second notes since when each call has stood
still, and whether its request has been taken. Time-outs are exact to one sweep; the total deadline is exact.
"""

import asyncio

from aiohttp.base_protocol import BaseProtocol

from tidegate.core.deployments import HttpLimits

SWEEP_S = 0.25


class InFlightCall:
    """One request and its answer, as far as they have got."""

    __slots__ = (
        "_began_cancels",
        "_body_since",
        "_cut",
        "_held",
        "_received_bytes",
        "_seen_since",
        "_seen_step",
        "_speaking",
        "_step",
        "_task",
        "_writer",
        "_written",
        "deadline",
        "is_streamed",
        "read_timeout_s",
        "sent",
        "status",
    )

    def __init__(
        self, task: asyncio.Task[object], deadline: float, read_timeout_s: float, *, is_streamed: bool = False
    ) -> None:
        self._task = task
        self._began_cancels = task.cancelling()
        self._writer: BaseProtocol | None = None
        self._written = False
        self._cut: str | None = None
        self._step = 0
        self._seen_step = -1
        self._seen_since = 0.0
        self._speaking = False
        self._body_since: float | None = None
        self._received_bytes = 0
        self._held = False
        self.is_streamed = is_streamed
        self.deadline = deadline
        self.read_timeout_s = read_timeout_s
        self.sent = False
        self.status = 0

    def writing(self, writer: BaseProtocol) -> None:
        """From here on bytes may have reached the upstream."""
        self._writer = writer
        self.sent = True
        self._step += 1

    def answered(self, status: int) -> None:
        """The status and headers are here."""
        self.status = status
        self._written = True
        self._step += 1

    def received(self, chunk: bytes) -> None:
        # Some upstreams send blank lines while a request waits for its turn. They are signs of life, not a slow body.
        if self._speaking or chunk.strip():
            self._speaking = True
            self._received_bytes += len(chunk)
        self._step += 1

    def pause_timeout(self, held: bool) -> None:
        """Stop the clock of the upstream while its reader is waited for."""
        self._held = held
        self._step += 1

    def overdue(self, now: float, limits: HttpLimits) -> str | None:
        """Why this call must end now, if it must."""
        if now >= self.deadline:
            return "its deadline passed"
        if self._writer is not None and not self._written and not self._writer.writing_paused:
            self._written = True
            self._step += 1
        if self._step != self._seen_step:
            self._seen_step = self._step
            self._seen_since = now
        still_s = now - self._seen_since
        if self._held:
            slow = still_s >= limits.client_timeout_s
            return f"nothing of it was taken for {limits.client_timeout_s:g} s" if slow else None
        if self.sent and not self._written:
            if still_s >= limits.write_timeout_s:
                return f"the upstream did not take the request within {limits.write_timeout_s:g} s"
        elif self.sent and still_s >= self.read_timeout_s:
            return f"the upstream was silent for {self.read_timeout_s:g} s"
        if self._speaking and not self.is_streamed:
            if self._body_since is None:
                self._body_since = now
            speaking_s = now - self._body_since
            rate = limits.body_rate_min_bytes_per_s
            if speaking_s > limits.body_rate_grace_s and self._received_bytes < rate * speaking_s:
                return f"the answer came at less than {rate:g} bytes per second"
        return None

    def cut(self, why: str) -> None:
        self._cut = why
        self._task.cancel()

    def cut_reason(self) -> str | None:
        """Why we cut this call; None when its task was cancelled by someone else, whose wish goes first."""
        if self._cut is None or self._task.uncancel() > self._began_cancels:
            return None
        return self._cut


class TimeoutSweep:
    """Looks at every call in flight, and sleeps while there is none."""

    def __init__(self, loop: asyncio.AbstractEventLoop, limits: HttpLimits) -> None:
        self._loop = loop
        self._limits = limits
        shortest_s = min(limits.write_timeout_s, limits.read_timeout_s)
        self._period_s = min(SWEEP_S, max(shortest_s / 4, 0.01))
        self._exchanges: set[InFlightCall] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._next = 0.0

    def begin(self, total_s: float, read_timeout_s: float, *, is_streamed: bool = False) -> InFlightCall:
        task = asyncio.current_task(self._loop)
        assert task is not None, "a call is made inside a task"
        deadline = self._loop.time() + total_s
        flight = InFlightCall(task, deadline, read_timeout_s, is_streamed=is_streamed)
        self._exchanges.add(flight)
        if self._timer is None:
            self._schedule(min(deadline, deadline - total_s + self._period_s))
        elif deadline < self._next:
            self._timer.cancel()
            self._schedule(deadline)
        return flight

    def end(self, flight: InFlightCall) -> None:
        self._exchanges.discard(flight)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _schedule(self, at: float) -> None:
        self._next = at
        self._timer = self._loop.call_at(at, self._look)

    def _look(self) -> None:
        self._timer = None
        if not self._exchanges:
            return
        now = self._loop.time()
        next_at = now + self._period_s
        # A call that was cut is asked to end once, and leaves the set by itself; a second request could hit its clean-up.
        for flight in list(self._exchanges):
            why = flight.overdue(now, self._limits)
            if why is not None:
                self._exchanges.discard(flight)
                flight.cut(why)
            elif flight.deadline < next_at:
                next_at = flight.deadline
        self._schedule(next_at)
