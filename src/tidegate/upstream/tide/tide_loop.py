"""The loop around the tides of one process, which exchanges numbers of calls with other processes.

Twice a second this process writes its calls to the store and reads those of the others. A change of
its interactive calls also goes out as a notice at once, so that no worker sends a prompt in the way
of a user that it does not know of. The loop decides nothing.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable

import structlog

from tidegate.core.errors import StoreError
from tidegate.core.ports import Clock, Fleet, Notices
from tidegate.upstream.tide.peers import decode_notice, encode_notices
from tidegate.upstream.tide.tides import DeploymentTide

log = structlog.get_logger(__name__)

TICK_S = 0.2
TELL_MS, TELL_ALONE_MS = 500.0, 2_000.0
# At most a hundred notices a second from one process, however many calls it has.
NOTICE_GAP_S = 0.01


class TideLoop:
    """The loop that looks at all tides, and exchanges the numbers of calls with other processes."""

    def __init__(
        self,
        tides: Iterable[DeploymentTide],
        clock: Clock,
        fleet: Fleet | None,
        worker_id: Callable[[], str] | None,
        notices: Notices | None = None,
    ) -> None:
        self._is_shared = worker_id is not None
        self._tell_ms = TELL_MS if self._is_shared else TELL_ALONE_MS
        # Without other processes, the last report in the store is this process's own, from before
        # its restart.
        self._recalls = not self._is_shared
        self._silent: set[str] = set()
        self._tides: dict[str, DeploymentTide] = {}
        self._clock = clock
        self._fleet = fleet
        self._worker_id = worker_id or (lambda: "")
        self._reported_ms = 0.0
        self._is_reached = True
        self._looks: dict[DeploymentTide, asyncio.Task[None]] = {}
        self._reporter: asyncio.Task[None] | None = None
        self._notices = notices if self._is_shared else None
        self._changed: set[str] = set()
        self._has_changed = asyncio.Event()
        self._announcer: asyncio.Task[None] | None = None
        if self._notices is not None:
            self._notices.on_notice(self._take_notice)
        self._leaving: set[asyncio.Task[None]] = set()
        self.serve(tides)

    def serve(self, tides: Iterable[DeploymentTide]) -> None:
        """Look at these tides from now on, each in its own task.

        An engine or a store that does not answer must not stop the others.
        """
        self._tides = {tide.deployment.name: tide for tide in tides}
        for tide in self._looks.keys() - set(self._tides.values()):
            gone = self._looks.pop(tide)
            gone.cancel()
            self._leaving.add(gone)
            gone.add_done_callback(self._leaving.discard)
        for tide in self._tides.values():
            if tide not in self._looks:
                self._looks[tide] = asyncio.create_task(self._run(tide.look))
        if self._tides and self._reporter is None and self._fleet is not None:
            self._reporter = asyncio.create_task(self._run(self._report))

    def announce(self, deployment: str) -> None:
        """Notify other processes' workers at once that this process's interactive calls changed."""
        tide = self._tides.get(deployment)
        if self._notices is None or tide is None or not tide.yields or not tide.peers.has_listeners:
            return
        self._changed.add(deployment)
        self._has_changed.set()
        if self._announcer is None:
            self._announcer = asyncio.create_task(self._announce(self._notices))

    async def _announce(self, notices: Notices) -> None:
        """Send the number of interactive calls after each change. Fast changes share one notice."""
        while True:
            await self._has_changed.wait()
            self._has_changed.clear()
            names, self._changed = self._changed, set()
            users = {name: self._tides[name].users for name in sorted(names) if name in self._tides}
            try:
                for notice in encode_notices(self._worker_id(), users):
                    await notices.send_notice(notice)
            except Exception as error:
                # The next report to the store has the same numbers.
                log.error("tide_notice_failed", kind=type(error).__name__, why=str(error))
            await asyncio.sleep(NOTICE_GAP_S)

    def _take_notice(self, text: str) -> None:
        notice = decode_notice(text)
        if notice is None or notice.process == self._worker_id():
            return
        for name, users in notice.users.items():
            tide = self._tides.get(name)
            if tide is not None:
                tide.peers.notice(notice.process, users)
                tide.act()

    async def close(self) -> None:
        more = [task for task in (self._reporter, self._announcer) if task is not None]
        tasks = [*self._looks.values(), *more, *self._leaving]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, once: Callable[[], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                await once()
            except Exception as error:
                # Without the engine's metrics the tide uses what it learned from its own calls.
                log.error("tide_crashed", kind=type(error).__name__, why=str(error))

    async def _report(self) -> None:
        now_ms = self._clock.monotonic_ms()
        woke = any(name in self._silent and not tide.is_idle for name, tide in self._tides.items())
        if self._fleet is None or (now_ms - self._reported_ms < self._tell_ms and not woke):
            return
        mine = {
            name: tide.present() for name, tide in self._tides.items() if not (tide.is_idle and name in self._silent)
        }
        self._reported_ms = now_ms
        if not mine:
            return
        idle = {name for name, tide in self._tides.items() if tide.is_idle}
        try:
            if self._recalls:
                await self._recall(self._fleet)
            others = await self._fleet.report_to_fleet(self._worker_id(), mine)
        except StoreError as error:
            # Other processes use the last report for a while. This process reports again when the
            # store is back.
            if self._is_reached:
                log.warning("tide_report_failed", error=str(error))
            self._is_reached = False
            return
        self._silent, self._is_reached = idle, True
        for name, tide in self._tides.items() if self._is_shared else ():
            tide.peers.read(others.get(name, {}))

    async def _recall(self, fleet: Fleet) -> None:
        """Begin with the numbers that were learned before a restart.

        To learn them again would take several calls' time, at a fraction of the rate.
        """
        for name, calls in (await fleet.learned_calls(self._worker_id())).items():
            if name in self._tides:
                self._tides[name].begin_at(calls)
        self._recalls = False
