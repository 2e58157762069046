"""What `service.py` does for a real process, for a simulated one: a worker over its ports. Ingest runs in the process itself."""

from dataclasses import dataclass
from pathlib import Path

from tests.simulation.world.disk import Disk, ProcessBlobs
from tests.simulation.world.plan import Plan
from tests.simulation.world.process import Process
from tests.simulation.world.provider import ProcessTransport, Provider
from tests.simulation.world.redis_server import url_of
from tidegate.backends.limits_redis import RedisLimits
from tidegate.backends.system import LocalWake
from tidegate.core.budgets.budget import Budget
from tidegate.core.errors import IngestFailed
from tidegate.core.input.lines import LineRules
from tidegate.core.input.turns import IngestLane
from tidegate.core.nouns import IngestPlan, Job, KeepTimes, LeasedSlice
from tidegate.core.policies import FixedTerms, Policies
from tidegate.core.ports import Wakes
from tidegate.core.retry import RetryPolicy
from tidegate.core.schedule import Policy
from tidegate.core.schedule.policy import ModeOverride
from tidegate.settings.policy import switched
from tidegate.settings.tenants import TenantPolicy
from tidegate.stages.ingest.ingest_file import ingest_file
from tidegate.stages.record import FlushLimits
from tidegate.store.limits import StoreLimits
from tidegate.store.store import Store
from tidegate.upstream.calls.router import Router
from tidegate.upstream.routing.deployment_state import DeploymentPolicy, RetryBudgetPolicy
from tidegate.upstream.routing.health import BreakerPolicy
from tidegate.upstream.routing.slots import Capacity
from tidegate.worker.options import WorkerOptions
from tidegate.worker.registration import Registration
from tidegate.worker.worker import Worker, WorkerPorts

UNFLUSHED_BYTES_MAX = 1 << 20
INGEST_S_MAX = 1.0
REDIS_TIMEOUT_S = 0.1
# Like everything else, what waits for a minute in the world waits for seconds here.
_LANE = DeploymentPolicy(
    breaker=BreakerPolicy(share_window_ms=6_000, probe_interval_ms=1_000),
    retry_budget=RetryBudgetPolicy(share=0.3, retries_min=3, window_s=6),
    throttle_backoff_ms=300,
    throttle_backoff_ms_max=3_000,
    patience_ms=600,
)


@dataclass(frozen=True, slots=True)
class Road:
    """The way from one process to the model servers."""

    router: Router
    dealt: RedisLimits | None

    async def close(self) -> None:
        await self.router.close()
        if self.dealt is not None:
            await self.dealt.close()


def build_road(process: Process, store: Store, me: Registration, plan: Plan, provider: Provider) -> Road:
    estate = plan.estate
    limits = StoreLimits(store, process.name, lambda: me.id)
    dealt = RedisLimits(url_of(process), "world", limits, REDIS_TIMEOUT_S) if estate.uses_redis else None
    capacity = Capacity(
        limits=dealt or limits,
        worker_id=lambda: me.id,
        discovered=store,
        fleet=store,
        model_in_flight_max=estate.model_in_flight_max,
        in_flight_max_global=estate.in_flight_max_global,
        safe_until_ms=lambda: me.safe_until_ms,
    )
    line = ProcessTransport(process, provider)
    router = Router(line, line, process, process, _LANE, capacity)
    router.serve(estate.deployments, estate.resources)
    return Road(router, dealt)


def build_worker(
    process: Process, store: Store, me: Registration, plan: Plan, scratch: Path, disk: Disk, router: Router
) -> Worker:
    async def run_pass(input_path: Path, work_path: Path, rules: LineRules, lane: IngestLane) -> IngestPlan:
        fails = process.weather.strikes("ingest")
        await process.ask(lambda: None, process.weather.dice.uniform(0, INGEST_S_MAX))
        if fails:
            raise IngestFailed("the ingest process was killed")
        return ingest_file(input_path, work_path, rules)

    blobs = ProcessBlobs(process, disk)
    ports = WorkerPorts(store, blobs, router, process, process, Wakes(LocalWake(), LocalWake(), LocalWake()))
    return Worker(ports, me, _options(plan, scratch), PlannedPolicies(plan), run_pass)


def _options(plan: Plan, scratch: Path) -> WorkerOptions:
    return WorkerOptions(
        in_flight_max=plan.in_flight_max,
        slice_count_max=plan.slice_count_max,
        slice_items=plan.slice_items,
        heartbeat_ms=plan.heartbeat_ms,
        poll_ms=plan.poll_ms,
        sweep_ms=plan.sweep_ms,
        grace_ms=plan.grace_ms,
        cancel_grace_ms=plan.cancel_grace_ms,
        flush=FlushLimits(
            plan.flush_ms, plan.flush_lines, UNFLUSHED_BYTES_MAX, unflushed_bytes_max=UNFLUSHED_BYTES_MAX
        ),
        scratch=scratch,
        keep=KeepTimes(orphan_ms=plan.garbage_safety_ms),
    )


class PlannedPolicies(Policies):
    """What a plan says of tenants, slices and retries."""

    tenants = FixedTerms(bind_calls=True)

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def schedule_policy(self, override: ModeOverride) -> Policy:
        return switched(self._plan.estate.policy, override)

    def line_rules(self, job: Job) -> LineRules:
        return LineRules(job.endpoint, invalid_lines=job.invalid_lines, slice_count_max=self._plan.slice_items)

    def weight(self, tenant: str) -> float:
        return _tenant(self._plan, tenant).weight

    def budgets(self, leased: LeasedSlice) -> tuple[Budget, ...]:
        return _tenant(self._plan, leased.tenant).budgets(
            leased.tenant_id, user=leased.user, key_id=leased.key_id, job_id=leased.job_id, job_limits=leased.limits
        )

    def retry(self, model: str) -> RetryPolicy:
        return RetryPolicy(backoff_ms=200, backoff_ms_max=3_000, deferral_ms=500)


def _tenant(plan: Plan, name: str) -> TenantPolicy:
    return plan.estate.tenants[int(name.removeprefix("tenant-"))]
