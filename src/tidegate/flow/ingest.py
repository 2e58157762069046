"""ingest: an accepted input becomes a work file, slices and two hidden result files, in one pass and one transaction.

The pass itself (`ingest_file`) runs in a process of its own; this stage takes the step, hands paths over, and tells the store. What
cannot be read or written now is tried again, ever more rarely, until the job's deadline; a pass that dies of its input each time ends
the job.
"""

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import structlog

from tidegate.core import ids
from tidegate.core.errors import BlobError, BlobMissing, IngestCrashed, IngestFailed, LostRace
from tidegate.core.keys import models_from
from tidegate.core.lines import LineRules
from tidegate.core.nouns import IngestPlan, Job, LineError
from tidegate.core.policy_rules import names_allowed
from tidegate.core.ports import Blobs, Entropy
from tidegate.core.states import JobState
from tidegate.failpoints import hit
from tidegate.flow.steps import Steps
from tidegate.store.store import Store

log = structlog.get_logger()

RETRY_MS = 2_000
CRASHES_MAX = 5
_WAITING_MAX = 4
_CRASHED_MAX = 1_000

RunPass = Callable[[Path, Path, LineRules], Awaitable[IngestPlan]]


class Ingest:
    """Takes one input at a time through the pass."""

    def __init__(
        self,
        store: Store,
        blobs: Blobs,
        entropy: Entropy,
        scratch: Path,
        rules_for: Callable[[Job], LineRules],
        run_pass: RunPass,
        weight_of: Callable[[str], float] = lambda tenant: 1.0,
        model_of: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._store = store
        self._blobs = blobs
        self._entropy = entropy
        self._scratch = scratch
        self._rules_for = rules_for
        self._run_pass = run_pass
        self._weight_of = weight_of
        self._model_of = model_of
        self._steps = Steps(store, entropy)
        self._crashes: OrderedDict[str, int] = OrderedDict()

    async def next(self, worker_id: str) -> bool:
        """Ingest the oldest job that waits for it; False when none does."""
        await self._steps.give_back_leftovers()
        for job_id in await self._store.jobs_waiting_ingest(_WAITING_MAX):
            token = await self._steps.take(job_id, JobState.VALIDATING, worker_id)
            if token is not None:
                await hit("ingest_taken")
                if await self._ingest(job_id, token, worker_id):
                    self._steps.end(token)
                return True
        return False

    async def _ingest(self, job_id: str, token: str, worker_id: str) -> bool:
        """True when the step ended here, however it ended; False when it must still be given back."""
        job = await self._store.any_job(job_id)
        if job is None:
            return True
        work_path = self._scratch / f"{job_id}-{token}.work"
        work_blob_id = ids.make("blob", self._entropy.token_bytes(16))
        try:
            plan = await self._pass(job, work_path)
            if plan.errors:
                return await self._store.refuse_job(job_id, token, plan.errors)
            await self._start(job, token, worker_id, plan, work_path, work_blob_id)
            return True
        except LostRace:
            log.info("ingest_lost", job=job_id)
            await self._store.give_up_blob(work_blob_id)
            return await self._store.end_unstarted(job_id, token)
        except (BlobError, IngestFailed, OSError) as error:
            await self._store.give_up_blob(work_blob_id)
            return await self._after_failure(job_id, token, error)
        finally:
            work_path.unlink(missing_ok=True)

    async def _pass(self, job: Job, work_path: Path) -> IngestPlan:
        """Read the input through; an input that is gone is a plan with that one error."""
        rules = await self._rules(job)
        # An uploaded file is one extent.
        extents = await self._store.list_extents(job.input_file_id, 0, 1)
        try:
            if not extents:
                raise BlobMissing(f"{job.input_file_id} has no bytes")
            input_path = await self._blobs.local_path(extents[0].blob_id, self._scratch)
        except BlobMissing:
            return IngestPlan(0, None, [], 0, 0, 0, [_gone(job)])
        try:
            return await self._run_pass(input_path, work_path, rules)
        finally:
            if input_path.parent == self._scratch:
                input_path.unlink(missing_ok=True)

    async def _rules(self, job: Job) -> LineRules:
        """What this input is held to: the operator's rules, its bytes at upload, and the models of the key that created the job."""
        file = await self._store.any_file(job.input_file_id)
        rules = replace(self._rules_for(job), input_sha256=file.sha256 if file else "")
        key = await self._store.get_key(job.key_id) if job.key_id else None
        if key is None:
            return rules
        models, resources = models_from(key["models"]), models_from(key["resources"])
        return replace(rules, models=names_allowed(models, resources, self._model_of))

    async def _start(
        self, job: Job, token: str, worker_id: str, plan: IngestPlan, work_path: Path, work_blob_id: str
    ) -> None:
        tenant = await self._store.tenant_name(job.tenant_id)
        await self._store.begin_blob(work_blob_id, "work", worker_id)
        await self._blobs.adopt(work_blob_id, work_path)
        await hit("ingest_work_durable")
        await self._store.start_job(
            job.id,
            token,
            plan,
            work_blob_id=work_blob_id,
            output_file_id=ids.make("file", self._entropy.token_bytes(16)),
            error_file_id=ids.make("file", self._entropy.token_bytes(16)),
            weight_milli=max(1, round(1000 * self._weight_of(tenant or ""))),
        )
        await hit("ingest_committed")

    async def _after_failure(self, job_id: str, token: str, error: Exception) -> bool:
        """A crash that repeats is the input's doing and ends the job; everything else passes, or the job expires first."""
        before = self._crashes.pop(job_id, 0)
        crashes = before + 1 if isinstance(error, IngestCrashed) else 0
        if crashes >= CRASHES_MAX:
            log.error("ingest_gives_up", job=job_id, crashes=crashes, error=str(error))
            return await self._store.refuse_job(job_id, token, [_unreadable(crashes)])
        if crashes:
            self._crashes[job_id] = crashes
            if len(self._crashes) > _CRASHED_MAX:
                self._crashes.popitem(last=False)
        failures = await self._store.drop_step(job_id, token, RETRY_MS)
        log.warning("ingest_waits", job=job_id, failures=failures, error=str(error))
        return True


def _gone(job: Job) -> LineError:
    return LineError(
        "input_file_gone",
        f"The input file {job.input_file_id} is gone. Upload it again and create a new batch.",
        "input_file_id",
    )


def _unreadable(crashes: int) -> LineError:
    return LineError(
        "ingest_failed",
        f"Reading the input file ended abnormally {crashes} times in a row, so the batch was given up. Split the file into smaller "
        "ones; if that does not help, tell the operator: the reason is in the worker's log.",
        "input_file_id",
    )
