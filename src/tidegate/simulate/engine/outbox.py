"""The way out of the engine: each call is counted and logged before its answer is sent.

Answers of one turn of the event loop leave together at the start of the next turn, after one append
to the log. This keeps instant mode cheap, and the witness ahead of every answer. If the log cannot
be written, the engine stops.
"""

import asyncio
from hashlib import sha256
from time import time

import msgspec

from tidegate.simulate.engine import meters
from tidegate.simulate.engine.calls import CallLine, CallsLog
from tidegate.simulate.engine.http1 import SimulatedConnection
from tidegate.simulate.engine.messages import HttpRequest, SimulatedReply, encode

_OTHER = len(meters.ROUTES) - 1


class WitnessedCall(msgspec.Struct, frozen=True, gc=False):
    """One call for the calls log, beside its status.

    `tokens` are billed for its whole answer; `beside` is the number of other calls under way.
    """

    request: HttpRequest
    model: str | None = None
    route: int = _OTHER
    tokens: int = 0
    beside: int = 0


class Outbox:
    """The way out of one process.

    `number` is that of the next call. Once `failure` is done, no further answer is sent.
    """

    def __init__(
        self,
        log: CallsLog | None,
        counters: "memoryview[int]",
        index: int,
        stride: int,
        failure: "asyncio.Future[None]",
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._log = log
        self._counters = counters
        self._failure = failure
        # Each process starts at its index and adds the number of processes, so call numbers are
        # unique.
        self.number = index
        self._stride = stride
        self._waiting: list[tuple[SimulatedConnection, bytes, bool]] = []
        self._flush_due = False

    def record(self, call: WitnessedCall, status: int, fault: str = "") -> None:
        """Count a call and add it to the witness; `status` is its answer's, 0 for no answer."""
        self._counters[status] += 1
        self._counters[meters.ROUTE_AT + call.route] += 1
        number = self.number
        self.number += self._stride
        if self._log is None:
            return
        request = call.request
        key = request.headers.get(b"idempotency-key")
        self._log.add(
            CallLine(
                at=time(),
                path=request.path.decode("latin-1"),
                model=call.model,
                status=status,
                idempotency_key=None if key is None else key.decode("latin-1"),
                custom=sha256(request.body).hexdigest()[:16],
                n=number,
                fault=fault,
                tokens=call.tokens,
                beside=call.beside,
            )
        )
        self._flush_soon()

    def put(self, connection: SimulatedConnection, reply: SimulatedReply, *, keep_alive: bool) -> None:
        """Send a reply."""
        self.put_bytes(connection, encode(reply, keep_alive=keep_alive), keep_alive)

    def put_bytes(self, connection: SimulatedConnection, data: bytes, keep_alive: bool) -> None:
        """Send the bytes of a whole answer."""
        self._waiting.append((connection, data, keep_alive))
        self._flush_soon()

    def close(self) -> None:
        """Close the log, and drop the answers that were not sent."""
        self._waiting = []
        if self._log is not None:
            self._log.close()
            self._log = None

    def _flush_soon(self) -> None:
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_due = False
        waiting, self._waiting = self._waiting, []
        try:
            if self._log is not None:
                self._log.flush()
        except OSError as error:
            # After answers without a witness, the log would prove nothing.
            self._failure.set_exception(error)
        if self._failure.done():
            return
        for connection, data, keep_alive in waiting:
            connection.write(data)
            if not keep_alive:
                connection.transport.close()
