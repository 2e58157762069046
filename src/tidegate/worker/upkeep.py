"""The sweeps of all workers: two services, so that lost workers' slices wait for no deletions."""

import asyncio

from tidegate import metrics
from tidegate.core.errors import StoreUnavailable
from tidegate.core.ports import Blobs, Entropy, Listener
from tidegate.stages.tend import compact_extents, retention
from tidegate.stages.tend.flows import FlowUpkeep
from tidegate.stages.tend.garbage import Garbage
from tidegate.stages.tend.lost_workers import LostWorkers
from tidegate.store.store import Store
from tidegate.worker.options import WorkerOptions
from tidegate.worker.registration import Registration

_UPKEEP_EVERY = 12


class Sweeping:
    """The service that frees the slices of lost workers, and puts flows to sleep or wakes them.

    While the store was away no worker could beat. After that, workers get `beats_ms` to beat before
    any is declared gone. Otherwise their slices would be leased again though they have the answers.
    """

    def __init__(
        self, lost_workers: LostWorkers, flows: FlowUpkeep, lease_wake: Listener, sweep_ms: int, beats_ms: int
    ) -> None:
        self._beats_ms = beats_ms
        self._was_away = False
        self._lost_workers = lost_workers
        self._flows = flows
        self._lease_wake = lease_wake
        self._sweep_ms = sweep_ms

    async def run(self) -> None:
        if self._was_away:
            # This question only finds out whether the store is back.
            await self._lost_workers.is_waiting()
            await asyncio.sleep(self._beats_ms / 1000)
            self._was_away = False
        try:
            await self._go_round()
        except StoreUnavailable:
            self._was_away = True
            raise

    async def _go_round(self) -> None:
        while True:
            reclaimed = await self._sweep()
            woken = await self._flows.tend()
            metrics.sweep_rows.of("refreshed").inc(woken)
            if reclaimed or woken:
                self._lease_wake.notify()
            # A log that another host may still deliver waits for one sweep only, so the next sweep
            # comes sooner.
            is_waiting = await self._lost_workers.is_waiting()
            await asyncio.sleep(self._sweep_ms / (10_000 if is_waiting else 1_000))

    async def _sweep(self) -> int:
        begun_s = asyncio.get_running_loop().time()
        try:
            reclaimed = await self._lost_workers.tend(self._sweep_ms)
        except Exception:
            metrics.sweep_runs.of("error").inc()
            raise
        metrics.sweep_runs.of("success").inc()
        metrics.sweep_rows.of("reclaimed").inc(reclaimed)
        metrics.sweep_seconds.observe(asyncio.get_running_loop().time() - begun_s)
        return reclaimed


class Upkeep:
    """The service of retention, joined extents and garbage collection, in small bounded passes."""

    def __init__(
        self,
        store: Store,
        blobs: Blobs,
        entropy: Entropy,
        me: Registration,
        garbage: Garbage,
        flows: FlowUpkeep,
        options: WorkerOptions,
    ) -> None:
        self._store = store
        self._blobs = blobs
        self._entropy = entropy
        self._me = me
        self._garbage = garbage
        self._flows = flows
        self._keep = options.keep
        self._every_ms = _UPKEEP_EVERY * options.sweep_ms

    async def run(self) -> None:
        while True:
            await retention.tend(self._store, self._keep)
            await compact_extents.tend(self._store, self._blobs, self._entropy, self._me.id)
            await self._garbage.tend()
            await self._flows.prune()
            await asyncio.sleep(self._every_ms / 1000)
