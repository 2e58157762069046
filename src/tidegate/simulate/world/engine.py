"""What `service.py` does for a real process, for a simulated one: a worker over its ports. Ingest runs in the process itself."""

from pathlib import Path

from tidegate.backends.system import LocalWake
from tidegate.core import ids
from tidegate.core.errors import IngestFailed
from tidegate.core.lines import LineRules
from tidegate.core.nouns import IngestPlan, Job
from tidegate.core.retry import RetryPolicy
from tidegate.flow.incarnation import Incarnation
from tidegate.flow.ingest_file import ingest_file
from tidegate.flow.record import FlushLimits
from tidegate.simulate.world.disk import Disk, ProcessBlobs
from tidegate.simulate.world.plan import Plan
from tidegate.simulate.world.process import Process
from tidegate.simulate.world.provider import ProcessRouter, Provider
from tidegate.store.store import Store
from tidegate.worker import Worker, WorkerOptions

HELD_BYTES_MAX = 1 << 20
INGEST_S_MAX = 1.0


def build_worker(
    process: Process, store: Store, me: Incarnation, plan: Plan, scratch: Path, disk: Disk, provider: Provider
) -> Worker:
    async def new_blob(kind: str, worker_id: str) -> str:
        blob_id = ids.make("blob", process.token_bytes(16))
        await store.begin_blob(blob_id, kind, worker_id)
        return blob_id

    async def run_pass(input_path: Path, work_path: Path, rules: LineRules) -> IngestPlan:
        fails = process.weather.strikes("ingest")
        await process.ask(lambda: None, process.weather.dice.uniform(0, INGEST_S_MAX))
        if fails:
            raise IngestFailed("the ingest process was killed")
        return ingest_file(input_path, work_path, rules)

    def rules_for(job: Job) -> LineRules:
        return LineRules(job.endpoint, invalid_lines=job.invalid_lines, slice_count_max=plan.slice_items)

    return Worker(
        store,
        ProcessBlobs(process, disk),
        ProcessRouter(process, provider),
        process,
        process,
        LocalWake(),
        me,
        _options(plan, scratch),
        rules_for,
        run_pass,
        new_blob,
    )


def _options(plan: Plan, scratch: Path) -> WorkerOptions:
    return WorkerOptions(
        in_flight_max=plan.in_flight_max,
        slice_count_max=plan.slice_count_max,
        slice_items=plan.slice_items,
        heartbeat_ms=plan.heartbeat_ms,
        poll_ms=plan.poll_ms,
        sweep_ms=plan.sweep_ms,
        grace_ms=plan.grace_ms,
        flush=FlushLimits(plan.flush_ms, plan.flush_lines, HELD_BYTES_MAX, held_bytes_max=HELD_BYTES_MAX),
        retry=RetryPolicy(backoff_ms=200, backoff_ms_max=3_000, deferral_ms=500),
        scratch=scratch,
        result_expires_after_ms=None,
        job_keep_ms=86_400_000,
        garbage_safety_ms=plan.garbage_safety_ms,
    )
