"""A worker in a process with other work: after an internal error a new worker is made."""

import asyncio
from collections.abc import Callable
from typing import Protocol

import structlog

from tidegate.core.errors import StoreUnavailable, WorkerBroken
from tidegate.worker.registration import Registration

log = structlog.get_logger()

RESTART_S = 1.0
RESTART_S_MAX = 60.0


class RunsItems(Protocol):
    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop` is set.

        Raise WorkerBroken after an internal error, once its leased work was handed back.
        """

    def trouble(self) -> str | None:
        """Return why the worker takes no new work; None if it does."""

    def is_idle_with_room(self, model: str) -> bool:
        """Return whether the worker has no work and would take items of this model."""

    @property
    def in_flight(self) -> int:
        """Return the number of calls in flight."""


class KeptWorker:
    def __init__(self, make: Callable[[], RunsItems], me: Registration, heartbeat_ms: int) -> None:
        self._make = make
        self._me = me
        self._heartbeat_s = heartbeat_ms / 1000
        self._worker = make()

    @property
    def in_flight(self) -> int:
        return self._worker.in_flight

    def trouble(self) -> str | None:
        return self._worker.trouble()

    def is_idle_with_room(self, model: str) -> bool:
        return self._worker.is_idle_with_room(model)

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop` is set, with a new worker after each internal error.

        The wait before it grows with each error, and is short again if the last one was long ago.
        """
        loop = asyncio.get_running_loop()
        wait_s = RESTART_S
        while True:
            began_s = loop.time()
            try:
                await self._worker.run(stop)
                return
            except WorkerBroken as error:
                if loop.time() - began_s > RESTART_S_MAX:
                    wait_s = RESTART_S
                log.error("worker_restarting", error=str(error), wait_s=wait_s)
            await self._rest(stop, wait_s)
            if stop.is_set():
                return
            wait_s = min(2 * wait_s, RESTART_S_MAX)
            self._worker = self._make()

    async def _rest(self, stop: asyncio.Event, wait_s: float) -> None:
        """Keep this process alive in the store, under a new incarnation, while there is no worker.

        The process still receives uploads, and it must own them.
        """
        loop = asyncio.get_running_loop()
        end_s = loop.time() + wait_s
        has_begun = False
        while not stop.is_set() and (loop.time() < end_s or not has_begun):
            try:
                if not has_begun or await self._me.beat() is None:
                    await self._me.enlist()
                    has_begun = True
            except StoreUnavailable as error:
                log.warning("heartbeat_failed", error=str(error))
            try:
                async with asyncio.timeout(max(0.0, min(self._heartbeat_s, end_s - loop.time()))):
                    await stop.wait()
            except TimeoutError:
                pass
        if stop.is_set() and has_begun:
            await self._leave()

    async def _leave(self) -> None:
        try:
            await self._me.leave()
        except StoreUnavailable as error:
            log.warning(
                "worker_stop_timed_out",
                error=str(error),
                advice="the store misses this process when the lease runs out",
            )
