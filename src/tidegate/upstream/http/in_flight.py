"""The calls in flight, and the one sweep that ends those that take too long.

A timer per call and per received packet would cost more than everything else this layer does. So a call only counts its
steps (request begun, headers received, bytes received), and a sweep a few times a second notes since when each call has stood
still, and whether its request has been taken. Time-outs are exact to one sweep; the total deadline is exact.
"""

import asyncio

import msgspec
from aiohttp.base_protocol import BaseProtocol

from tidegate.core.deployments import HttpLimits

SWEEP_S = 0.25


class InFlightCall(msgspec.Struct, eq=False):
    """One request and its answer, as far as they have got. `_began_cancels` is how often its task had been cancelled when it began."""

    _task: "asyncio.Task[object]"
    _began_cancels: int
    deadline: float
    read_timeout_s: float
    is_streamed: bool = False
    sent: bool = False
    status: int = 0
    _writer: BaseProtocol | None = None
    _written: bool = False
    _cut: str | None = None
    _step: int = 0
    _seen_step: int = -1
    _seen_since: float = 0.0
    _speaking: bool = False
    _body_since: float | None = None
    _received_bytes: int = 0
    _held: bool = False

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

    def watch_call(self, total_s: float, read_timeout_s: float, *, is_streamed: bool = False) -> InFlightCall:
        task = asyncio.current_task(self._loop)
        assert task is not None, "a call is made inside a task"
        deadline = self._loop.time() + total_s
        flight = InFlightCall(task, task.cancelling(), deadline, read_timeout_s, is_streamed)
        self._exchanges.add(flight)
        if self._timer is None:
            self._schedule(min(deadline, deadline - total_s + self._period_s))
        elif deadline < self._next:
            self._timer.cancel()
            self._schedule(deadline)
        return flight

    def forget_call(self, flight: InFlightCall) -> None:
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
