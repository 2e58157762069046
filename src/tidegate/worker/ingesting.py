"""Ingest accepted inputs, one turn after another."""

from collections.abc import Awaitable, Callable

from tidegate.core.ports import Wakes
from tidegate.worker.registration import Registration
from tidegate.worker.supervisor import Supervisor


class Ingesting:
    """The service of ingest.

    `ingest_next` takes one turn for an incarnation; False: no input waits.
    """

    def __init__(
        self,
        ingest_next: Callable[[str], Awaitable[bool]],
        me: Registration,
        wakes: Wakes,
        supervisor: Supervisor,
        poll_ms: int,
    ) -> None:
        self._ingest_next = ingest_next
        self._me = me
        self._wakes = wakes
        self._supervisor = supervisor
        self._poll_ms = poll_ms

    async def run(self) -> None:
        """Take turns without end. Several tasks may run this at once."""
        listener = self._wakes.inputs.listen()
        while True:
            if self._supervisor.is_working and await self._ingest_next(self._me.id):
                self._wakes.slices.notify()
                self._wakes.jobs.notify()
            else:
                await listener.wait(self._poll_ms / 1000)
