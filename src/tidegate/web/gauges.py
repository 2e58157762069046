"""The gauges, which are set when they are read.

They show the store's census, the deployments, and this process's use of resources.

A scrape shows what is known and starts a newer census in the background; only the first scrape
waits for one, for a moment at most. A census reads every job, so the result of a slow one is kept
longer.
"""

import asyncio
import os
import resource
from collections import Counter

import structlog

from tidegate import metrics
from tidegate.core.errors import StoreError
from tidegate.store.fleet.census import StoreCensus
from tidegate.web.context import WebContext

log = structlog.get_logger()

_CENSUS_KEEP_MS = 10_000
_CENSUS_SHARE = 0.02
# While the store does not answer, its last census is shown this long.
_CENSUS_STALE_MS = 60_000
_FIRST_CENSUS_WAIT_S = 0.01
_PAGE_BYTES = resource.getpagesize()
_DEFAULT_TIER = "default"
# Cleared before each scrape, because a deployment may be gone.
_OF_DEPLOYMENTS = (
    metrics.deployment_state,
    metrics.upstream_in_flight,
    metrics.model_in_flight,
    metrics.tide_calls_limit,
    metrics.tide_calls_max,
    metrics.tide_prompt_tokens_limit,
)


class Gauges:
    def __init__(self, context: WebContext) -> None:
        self._store = context.store
        self._router = context.router
        self._clock = context.clock
        self._tenants = context.tenants()
        self._census_until_ms: float | None = None
        self._counting: asyncio.Task[None] | None = None
        self._counted_ms = context.clock.monotonic_ms()
        self._cpu_s = 0.0

    async def refresh(self) -> None:
        """Bring every gauge up to date without waiting, except for the first census."""
        is_first = self._census_until_ms is None
        if self._counting is None and self._clock.monotonic_ms() >= (self._census_until_ms or 0.0):
            self._counting = asyncio.create_task(self._count())
        if is_first and self._counting is not None:
            await asyncio.wait({self._counting}, timeout=_FIRST_CENSUS_WAIT_S)
        self._show_deployments()
        self._show_process()

    async def _count(self) -> None:
        began_ms = self._clock.monotonic_ms()
        try:
            self._show_census(await self._store.census())
            self._counted_ms = self._clock.monotonic_ms()
        except StoreError as error:
            log.warning("census_failed", error=str(error))
            if self._clock.monotonic_ms() - self._counted_ms > _CENSUS_STALE_MS:
                # An autoscaler or an alert must not act on an old queue.
                for family in metrics.OF_STORE:
                    family.forget()
        finally:
            now_ms = self._clock.monotonic_ms()
            self._census_until_ms = now_ms + max(_CENSUS_KEEP_MS, (now_ms - began_ms) / _CENSUS_SHARE)
            self._counting = None

    def _show_census(self, census: StoreCensus) -> None:
        for state, count in census.jobs.items():
            metrics.jobs.of(state).set(count)
        for status, count in census.outcomes.items():
            metrics.items.of(status).set(count)
        waiting = sum(part.items for part in census.queue)
        metrics.items.of("pending").set(max(0, waiting - census.leased_items))
        metrics.items.of("in_progress").set(census.leased_items)
        queued = [part.age_ms for part in census.queue if part.status == "queued"]
        metrics.oldest_item_age_seconds.of("pending").set(max(queued, default=0) / 1000)
        metrics.oldest_item_age_seconds.of("in_progress").set(census.leased_age_ms / 1000)
        metrics.workers.of("alive").set(census.workers)
        metrics.workers.of("active").set(census.active_workers)
        for family in (metrics.queue_jobs, metrics.queue_work_units, metrics.oldest_job_age_seconds):
            family.forget()
        ages: Counter[tuple[str, ...]] = Counter()
        for part in census.queue:
            tier = self._tenants.tier(part.tenant) or _DEFAULT_TIER
            labels = (part.status, part.model, part.scope, tier, part.size_class)
            metrics.queue_jobs.of(*labels).inc(part.jobs)
            metrics.queue_work_units.of(*labels).inc(part.work_units)
            ages[labels] = max(ages[labels], part.age_ms)
        for oldest, age_ms in sorted(ages.items(), key=lambda pair: pair[1]):
            # Several models may share the label `other`: the oldest is set last, and stays.
            metrics.oldest_job_age_seconds.of(*oldest).set(age_ms / 1000)

    def _show_deployments(self) -> None:
        for family in _OF_DEPLOYMENTS:
            family.forget()
        for one in self._router.status():
            metrics.deployment_state.of(one.name, one.state).set(1)
            metrics.upstream_in_flight.of(one.name).inc(one.in_flight)
            for model in one.models:
                metrics.model_in_flight.of(model).inc(one.in_flight)
        for name, limit in self._router.tide_limits().items():
            metrics.tide_calls_limit.of(name).inc(limit.calls)
            metrics.tide_calls_max.of(name).set(limit.calls_max)
            metrics.tide_prompt_tokens_limit.of(name).inc(limit.prompt_tokens)

    def _show_process(self) -> None:
        times = os.times()
        cpu_s = times.user + times.system + times.children_user + times.children_system
        metrics.process_cpu_seconds.inc(max(0.0, cpu_s - self._cpu_s))
        self._cpu_s = cpu_s
        metrics.process_descriptors_max.set(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        with open("/proc/self/statm", "rb") as stream:
            metrics.process_resident_bytes.set(int(stream.read().split()[1]) * _PAGE_BYTES)
        metrics.process_descriptors.set(len(os.listdir("/proc/self/fd")))
