"""ingest: an accepted input becomes a work file, slices and two hidden result files.

That takes one pass and one transaction.

- The store chooses whose turn it is: fair between tenants by bytes, small inputs first within a
  tenant.
- Several small inputs are ingested together, with one transaction and inside this process.
- Each large input has its own pass in its own process. A few run at once, and the last of these
  places is kept for a tenant that has none.
- A read or write that fails is tried again, ever more rarely, until the job's deadline.
- If the pass crashes on an input several times in a row, the job fails.
"""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec
import structlog
from msgspec.structs import replace

from tidegate import metrics, tracing
from tidegate.core import ids
from tidegate.core.errors import BlobError, BlobMissing, IngestCrashed, IngestFailed, LostRace
from tidegate.core.input.lines import ChosenLines, LineRules
from tidegate.core.input.turns import IngestLane, IngestLimits
from tidegate.core.job_shape import InputPart
from tidegate.core.keys import models_from
from tidegate.core.nouns import IngestPlan, IngestSource, JobStart, LineError
from tidegate.core.policies import Policies
from tidegate.core.policy.policy_rules import names_allowed
from tidegate.core.ports import Blobs, Entropy
from tidegate.core.wording import in_words
from tidegate.failpoints import hit
from tidegate.stages.ingest.earlier_job import EarlierJobs, copy_file, earlier_gone, remove_earlier
from tidegate.stages.ingest.join_input import changed_input
from tidegate.store.store import Store

log = structlog.get_logger()

RETRY_MS = 2_000
CRASHES_MAX = 5
SMALL_AT_ONCE = 16
_CRASHED_MAX = 1_000

T = TypeVar("T")
RunPass = Callable[[Path, Path, LineRules, IngestLane], Awaitable[IngestPlan]]


class _IngestStep(msgspec.Struct, frozen=True):
    """The right to ingest one job, the job's source, and the path of its work file."""

    source: IngestSource
    token: str
    work_path: Path

    @property
    def job_id(self) -> str:
        return self.source.job.id


class IngestStage:
    """The stage that ingests inputs, as many at once as it has callers."""

    def __init__(
        self,
        store: Store,
        blobs: Blobs,
        entropy: Entropy,
        scratch: Path,
        policies: Policies,
        run_pass: RunPass,
        limits: IngestLimits | None = None,
    ) -> None:
        self._store = store
        self._blobs = blobs
        self._entropy = entropy
        self._scratch = scratch
        self._policies = policies
        self._run_pass = run_pass
        self._earlier = EarlierJobs(store, blobs, lambda job: policies.line_rules(job).levels)
        self._limits = limits or IngestLimits()
        self._crashes: OrderedDict[str, int] = OrderedDict()
        # Tokens of steps that ended here, though the store may not know it.
        self._leftovers: dict[str, str] = {}
        self._choosing = asyncio.Lock()
        self._large_passes: Counter[str] = Counter()

    async def next(self, worker_id: str) -> bool:
        """Ingest some small inputs, or else a large one; False if none waits."""
        return await self.next_small(worker_id) or await self.next_large(worker_id)

    async def next_small(self, worker_id: str) -> bool:
        """Ingest some small inputs together; False if none waits."""
        token = self._entropy.token_bytes(16).hex()
        with self._given_back(token, worker_id):
            steps = await self._take(IngestLane.SMALL, SMALL_AT_ONCE, worker_id, token)
            await self._ingest(steps, IngestLane.SMALL, worker_id)
        return bool(steps)

    async def next_large(self, worker_id: str) -> bool:
        """Ingest one large input; False if none waits that may be read now."""
        token = self._entropy.token_bytes(16).hex()
        with self._given_back(token, worker_id):
            async with self._choosing:
                most = self._limits.tenant_passes_max
                busy = frozenset(tenant for tenant, count in self._large_passes.items() if count >= most)
                steps = await self._take(IngestLane.LARGE, 1, worker_id, token, busy)
                self._large_passes.update(step.source.job.tenant_id for step in steps)
            try:
                await self._ingest(steps, IngestLane.LARGE, worker_id)
            finally:
                self._large_passes.subtract(step.source.job.tenant_id for step in steps)
                self._large_passes = +self._large_passes
        return bool(steps)

    @contextmanager
    def _given_back(self, token: str, worker_id: str) -> Iterator[None]:
        """Remember the steps of a failed try, so that they are given back."""
        try:
            yield
        except BaseException:
            self._leftovers[token] = worker_id
            raise

    async def _take(
        self, lane: IngestLane, count_max: int, worker_id: str, token: str, passed_over: frozenset[str] = frozenset()
    ) -> list[_IngestStep]:
        for leftover, owner in list(self._leftovers.items()):
            await self._store.give_back_ingests(owner, leftover)
            self._leftovers.pop(leftover, None)
        sizes = self._limits.sizes(lane)
        if not await self._store.jobs_waiting_ingest(1, sizes):
            return []
        job_ids = await self._store.take_ingests(lane, sizes, count_max, worker_id, token, passed_over)
        if not job_ids:
            return []
        await hit("ingest_taken")
        sources = await self._store.ingest_sources(job_ids)
        return [_IngestStep(source, token, self._scratch / f"{source.job.id}-{token}.work") for source in sources]

    async def _ingest(self, steps: Sequence[_IngestStep], lane: IngestLane, worker_id: str) -> None:
        """Read the inputs, make their work files durable, and start all jobs in one transaction."""
        try:
            plans = await _together(self._plan(step, lane) for step in steps)
            planned = [(step, plan) for step, plan in zip(steps, plans, strict=True) if plan is not None]
            if not planned:
                return
            blob_ids = [ids.make("blob", self._entropy.token_bytes(16)) for _ in planned]
            await self._store.begin_blobs(blob_ids, "work", worker_id)
            pairs = zip(planned, blob_ids, strict=True)
            starts = await _together(self._adopt(step, plan, blob_id) for (step, plan), blob_id in pairs)
            await self._start([start for start in starts if start is not None])
        finally:
            for step in steps:
                step.work_path.unlink(missing_ok=True)

    async def _plan(self, step: _IngestStep, lane: IngestLane) -> IngestPlan | None:
        """Run the pass over one input; None if the job ended by it, or waits for another try."""
        begun_s = asyncio.get_running_loop().time()
        try:
            with tracing.step_of(step.source.job):
                plan = await self._pass(step, lane)
                if any(error.code == changed_input().code for error in plan.errors):
                    # This ends the job, so look twice: the bytes may have been damaged only in
                    # transit.
                    plan = await self._pass(step, lane)
            took_s = asyncio.get_running_loop().time() - begun_s
            metrics.ingest_seconds.of(metrics.size_of(plan.item_count)).observe(took_s)
        except (BlobError, IngestFailed, OSError) as error:
            await self._after_failure(step, error)
            return None
        if not plan.errors:
            return plan
        await self._refuse(step, plan.errors)
        return None

    async def _pass(self, step: _IngestStep, lane: IngestLane) -> IngestPlan:
        """Read the whole input. If a file is gone, return a plan with that one error."""
        source = step.source
        parts: list[InputPart] = []
        joined_path = step.work_path.with_suffix(".input")
        errors_path = step.work_path.with_suffix(".errors") if source.job.retry_choice is not None else None
        try:
            for file_id, sha256, blob_id in ((source.job.input_file_id, source.sha256, source.blob_id), *source.more):
                path = await self._local_path(blob_id)
                if path is None:
                    return IngestPlan(0, None, [], 0, 0, 0, [_gone(file_id)])
                parts.append(InputPart(file_id, str(path), sha256))
            if errors_path is not None:
                assert source.job.retry_file_id is not None
                await copy_file(self._store, self._blobs, source.job.retry_file_id, errors_path)
            rules = self._rules(source, errors_path)
            if source.job.shape.reuse_from:
                earlier = await self._earlier.fetch(source.job.tenant_id, source.job.shape.reuse_from, step.work_path)
                if earlier is None:
                    return IngestPlan(0, None, [], 0, 0, 0, [earlier_gone(source.job.shape.reuse_from)])
                rules = replace(rules, earlier=earlier)
            if len(parts) == 1 and not rules.levels:
                return await self._run_pass(Path(parts[0].path), step.work_path, rules, lane)
            rules = replace(rules, parts=tuple(parts), input_sha256="")
            return await self._run_pass(joined_path, step.work_path, rules, lane)
        finally:
            remove_earlier(step.work_path)
            for path in (joined_path, errors_path or joined_path, *(Path(part.path) for part in parts)):
                if path.parent == self._scratch:
                    path.unlink(missing_ok=True)

    async def _local_path(self, blob_id: str | None) -> Path | None:
        """Return a local path to the bytes of an input; None if they are gone."""
        if blob_id is None:
            return None
        try:
            return await self._blobs.local_path(blob_id, self._scratch)
        except BlobMissing:
            return None

    def _rules(self, source: IngestSource, errors_path: Path | None) -> LineRules:
        """Return the rules for this input: the operator's, the job's, and its key's."""
        rules = self._policies.line_rules(source.job)
        shape = source.job.shape
        levels = (*rules.levels, *shape.levels())
        rules = replace(rules, input_sha256=source.sha256, levels=levels, dedupe=shape.dedupe)
        if shape.places is not None:
            rules = replace(rules, places=shape.places)
        if source.job.canary is not None:
            rules = replace(rules, sample=source.job.canary.items)
        if (choice := source.job.retry_choice) is not None:
            rules = replace(rules, chosen=ChosenLines(str(errors_path), choice.outcomes, choice.codes, choice.kinds))
        if source.key_names is None:
            return rules
        models, resources = map(models_from, source.key_names)
        return replace(rules, models=names_allowed(models, resources, self._policies.model_of))

    async def _adopt(self, step: _IngestStep, plan: IngestPlan, blob_id: str) -> JobStart | None:
        """Make the work file durable; None if that must be tried again."""
        try:
            with tracing.step_of(step.source.job):
                await self._blobs.adopt(blob_id, step.work_path)
        except (BlobError, OSError) as error:
            await self._store.give_up_blob(blob_id)
            await self._after_failure(step, error)
            return None
        return JobStart(
            step.job_id,
            step.token,
            plan,
            blob_id,
            output_file_id=ids.make("file", self._entropy.token_bytes(16)),
            error_file_id=ids.make("file", self._entropy.token_bytes(16)),
            weight_milli=max(1, round(1000 * self._policies.weight(step.source.tenant))),
        )

    async def _start(self, starts: Sequence[JobStart]) -> None:
        if not starts:
            return
        await hit("ingest_work_durable")
        try:
            lost = await self._store.start_jobs(starts)
        except LostRace:
            lost = {start.job_id for start in starts}
        for start in starts:
            if start.job_id in lost:
                await self._store.give_up_blob(start.work_blob_id)
                await self._end_lost(start.job_id, start.token)
            else:
                models = sorted({one.model for one in start.plan.slices if one.model})
                log.info("job_started", job=start.job_id, requests=start.plan.item_count, models=", ".join(models))
        await hit("ingest_committed")

    async def _refuse(self, step: _IngestStep, errors: Sequence[LineError]) -> None:
        """Fail a job because of these errors of its input."""
        if await self._store.refuse_job(step.job_id, step.token, list(errors)):
            job = await self._store.any_job(step.job_id)
            metrics.count_job_end(job)
            tracing.end_job(job)
            # Log no message: it may quote the line, which is private to its owner.
            first = errors[0]
            log.warning("job_failed", job=step.job_id, why=first.code, line=first.line, problems=len(errors))
        else:
            await self._end_lost(step.job_id, step.token)

    async def _end_lost(self, job_id: str, token: str) -> None:
        """End a job that closed while it was ingested, or give back its step."""
        log.info("ingest_lease_lost", job=job_id)
        if await self._store.end_unstarted(job_id, token):
            job = await self._store.any_job(job_id)
            metrics.count_job_end(job)
            tracing.end_job(job)
        else:
            await self._store.drop_step(job_id, token, 0)

    async def _after_failure(self, step: _IngestStep, error: Exception) -> None:
        """Try again later, until the job expires.

        Crashes in a row are blamed on the input and end the job.
        """
        job_id = step.job_id
        before = self._crashes.pop(job_id, 0)
        crashes = before + 1 if isinstance(error, IngestCrashed) else 0
        if crashes >= CRASHES_MAX:
            log.error("ingest_given_up", job=job_id, crashes=crashes, error=str(error))
            await self._refuse(step, [_unreadable(crashes)])
            return
        if crashes:
            self._crashes[job_id] = crashes
            if len(self._crashes) > _CRASHED_MAX:
                self._crashes.popitem(last=False)
        failures = await self._store.drop_step(job_id, step.token, RETRY_MS)
        tracing.postpone(step.source.job, error)
        metrics.jobs_processed.of("re_enqueued", "system_error").inc()
        log.warning("ingest_postponed", job=job_id, failures=failures, error=str(error))


async def _together(parts: Iterable[Awaitable[T]]) -> list[T]:
    """Wait for all parts, and only then raise the first exception among them."""
    results = await asyncio.gather(*parts, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


def _gone(file_id: str) -> LineError:
    return LineError(
        "input_file_gone",
        f"The input file {file_id} is gone. Upload it again and create a new batch.",
        "input_file_id",
    )


def _unreadable(crashes: int) -> LineError:
    return LineError(
        "ingest_failed",
        f"Reading the input file ended abnormally {in_words(crashes, 'time')} in a row, so the batch was given up. "
        "Split the file into smaller "
        "ones; if that does not help, tell the operator: the reason is in the worker's log.",
        "input_file_id",
    )
