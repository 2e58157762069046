"""The limits that deployments reported, shared with other processes and kept for later starts.

Only changes are written, soon and in the background. A lost note costs a few refused calls, never a
wrong one. This module decides nothing.
"""

import asyncio
from collections.abc import Mapping

import structlog

from tidegate.core.errors import LimitsUnavailable, StoreError
from tidegate.core.ports import DiscoveredLimitsStore
from tidegate.upstream.routing.deployment_state import DeploymentState

log = structlog.get_logger(__name__)

READ_EVERY_S = 60.0
WRITE_AFTER_S = 1.0


class DiscoveredLimits:
    def __init__(self, kept: DiscoveredLimitsStore, states: Mapping[str, DeploymentState]) -> None:
        self._kept = kept
        self._states = states
        self._news: dict[str, DeploymentState] = {}
        self._rung = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    def note(self, state: DeploymentState) -> None:
        """Note that this deployment reported new limits."""
        self._news[state.deployment.name] = state
        self._rung.set()

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            try:
                await self._write()
                await self._read()
            except (LimitsUnavailable, StoreError) as error:
                log.warning("discovered_limits_save_failed", why=str(error))
            try:
                async with asyncio.timeout(READ_EVERY_S):
                    await self._rung.wait()
            except TimeoutError:
                continue
            self._rung.clear()
            # Answers that come together report the same limits, and one write is enough for all.
            await asyncio.sleep(WRITE_AFTER_S)

    async def _write(self) -> None:
        for name, state in list(self._news.items()):
            limit = state.discovered
            if limit is not None:
                await self._kept.put_discovered(name, limit)
            if state.discovered == limit:
                # Otherwise another limit was reported meanwhile, and the next write is for that.
                self._news.pop(name, None)

    async def _read(self) -> None:
        for name, limit in (await self._kept.discovered()).items():
            state = self._states.get(name)
            if state is not None and name not in self._news:
                state.discover(limit)
