"""The composition root: settings become a store, blobs, a router, loops and a web app. Only it picks a backend."""

import asyncio
import functools
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from tidegate import __version__, failpoints, metrics, tracing
from tidegate.backends.blobs_local import LocalBlobs
from tidegate.backends.callback_sender import CallbackSender
from tidegate.backends.counted_blobs import CountedBlobs
from tidegate.backends.disk import make_directories
from tidegate.backends.noticed_wake import NoticedWake
from tidegate.backends.scratch import scratch_directory
from tidegate.backends.system import LocalWake, SystemClock, SystemEntropy, boot_id, boot_ms
from tidegate.control import control_file
from tidegate.core import ids
from tidegate.core.deployments import Deployment, Queue, Secret
from tidegate.core.errors import SettingsError, StoreError, WorkerBroken
from tidegate.core.input.turns import IngestLimits
from tidegate.core.nouns import DEFAULT_TENANT, KeepTimes
from tidegate.core.ports import Blobs, Callbacks, Clock, Entropy, FileSource, Limits, Notices, RequestQueue, Wakes
from tidegate.core.queues import QueueAway, QueueState
from tidegate.core.states import WorkerState
from tidegate.live_config import LiveConfig
from tidegate.settings import Settings, deployments, local_path, resources
from tidegate.settings.added import Added, added
from tidegate.settings.collector import wants_traces
from tidegate.settings.models import model_caps
from tidegate.settings.reload import SettingsFile
from tidegate.stages.accept import Reception
from tidegate.stages.deliver import WebhookDeliveries
from tidegate.stages.ingest.ingest_file import InputPasses
from tidegate.stages.record import FlushLimits
from tidegate.stages.tend import clock as clock_tend
from tidegate.store.driver import Driver
from tidegate.store.limits import StoreLimits
from tidegate.store.sqlite import SqliteDriver
from tidegate.store.sqlite_clock import EmbeddedClock
from tidegate.store.store import Store
from tidegate.upstream.calls.router import Router, open_router
from tidegate.upstream.http.connections import make_room_for_connections
from tidegate.upstream.routing.deployment_state import DeploymentPolicy, RetryBudgetPolicy
from tidegate.upstream.routing.probe import Probe
from tidegate.upstream.routing.slots import Capacity
from tidegate.worker.kept_worker import KeptWorker, RunsItems
from tidegate.worker.options import WorkerOptions
from tidegate.worker.policies import OperatorPolicies
from tidegate.worker.registration import Registration, beat_until
from tidegate.worker.reporting import Reporting
from tidegate.worker.unleased import Unleased
from tidegate.worker.worker import Worker, WorkerPorts

# What a process does not use is not loaded: a `tidegate run` has no web app, no Redis and no S3, and starts in half the time.
if TYPE_CHECKING:
    from tidegate.backends.blobs_s3_client import Objects, S3Settings
    from tidegate.backends.shared_redis import RedisShared
    from tidegate.web.app import Api
    from tidegate.web.context import WebContext
    from tidegate.web.jobs.validation import JobValidation

    Bucket = Objects

log = structlog.get_logger()

_HELD_BYTES_MAX = 64 << 20
_PREDECESSORS_MAX = 100
TRACES_STOP_S = 3.0
NOTICE_TIMEOUT_S = 2.0
# Without one every batch would wait for ever: better to say so at the start.
NO_MODEL_SERVER = (
    "No model server is known: name one with --upstream http://HOST:PORT/v1, list models in a --config file, or add one "
    "with `tidegate deployments add`. `tidegate simulate` is one to try with."
)


@dataclass(frozen=True, slots=True)
class Parts:
    """What every command stands on."""

    settings: Settings
    store: Store
    blobs: Blobs
    clock: Clock
    entropy: Entropy
    wakes: Wakes
    tenant_id: str
    scratch: Path
    shared: "RedisShared | None" = None
    installation: str = ""
    notices: Notices | None = None


@asynccontextmanager
async def opened(settings: Settings, *, read_only: bool = False) -> AsyncIterator[Parts]:
    """Open the store and the blobs of these settings, at the current schema, and close them at the end."""
    clock, entropy = SystemClock(), SystemEntropy()
    if not read_only:
        # What callers send is theirs and the operator's: no other user of this machine may read it.
        make_directories(settings.data_dir)
        if not settings.store.is_postgresql:
            make_directories(local_path(settings.store.location).parent)
    store = Store(_driver(settings, clock, read_only=read_only))
    async with AsyncExitStack() as stack:
        stack.push_async_callback(store.close)
        await _ready_schema(store, settings, read_only=read_only)
        await store.look_at_clock()
        if not read_only:
            stack.push_async_callback(_ended, asyncio.create_task(clock_tend.watch(store)))
        blobs = _blobs(settings, read_only=read_only)
        stack.push_async_callback(blobs.close)
        tenant = await store.tenant_by_name(DEFAULT_TENANT)
        if tenant is None and not read_only:
            tenant = await store.put_tenant(ids.make("tenant", entropy.token_bytes(16)), DEFAULT_TENANT)
        scratch = settings.data_dir / "scratch"
        if not read_only:
            scratch = stack.enter_context(scratch_directory(scratch))
        parts = Parts(
            settings, store, blobs, clock, entropy, Wakes(LocalWake(), LocalWake(), LocalWake()), tenant or "", scratch
        )
        if settings.redis.location and not read_only:
            from tidegate.backends.shared_redis import RedisShared

            name = f"{settings.redis.name}:{await store.store_name(entropy.token_bytes(16).hex())}"
            shared = RedisShared(settings.redis.location, name, clock, entropy)
            shared.start()
            stack.push_async_callback(shared.close)
            parts = replace(parts, wakes=replace(parts.wakes, inputs=shared), shared=shared, installation=name)
        yield parts


async def _ready_schema(store: Store, settings: Settings, *, read_only: bool) -> None:
    """The embedded store keeps itself current, and an empty database gets its schema; an older one waits for the operator."""
    if not read_only and (not settings.store.is_postgresql or await store.schema_version() == 0):
        await store.migrate()
    await store.require_schema()


async def migrate(settings: Settings) -> list[int]:
    """Bring the store to this program's schema. Return which versions ran."""
    store = Store(_driver(settings, SystemClock(), read_only=False))
    try:
        return await store.migrate()
    finally:
        await store.close()


async def is_empty(settings: Settings) -> bool:
    """Return whether the database is there and has no schema yet."""
    store = Store(_driver(settings, SystemClock(), read_only=True))
    try:
        return await store.schema_version() == 0
    finally:
        await store.close()


def _driver(settings: Settings, clock: Clock, *, read_only: bool) -> Driver:
    if settings.store.is_postgresql:
        from tidegate.store.postgres import PostgresDriver

        return PostgresDriver(
            settings.store.location,
            pool_size=settings.store.pool_size,
            statement_timeout_ms=settings.store.statement_timeout_ms,
            pooler=settings.store.pooler,
            steady_ms=None if read_only else boot_ms,
        )
    embedded = EmbeddedClock(clock.now_ms, boot_ms, boot_id())
    return SqliteDriver(local_path(settings.store.location), embedded, read_only=read_only)


def _blobs(settings: Settings, *, read_only: bool) -> Blobs:
    if not settings.blobs.is_object_store:
        return LocalBlobs(local_path(settings.blobs.url))
    from tidegate.backends.blobs_s3 import S3Blobs
    from tidegate.backends.blobs_s3_client import MISSING_AFTER_MS

    bucket, _, prefix = settings.blobs.url.partition("://")[2].partition("/")
    reach = replace(_s3_settings(settings, bucket), is_azure=settings.blobs.backend == "az", prefix=prefix)
    missing_after_ms = 0 if read_only else MISSING_AFTER_MS
    return S3Blobs(replace(reach, missing_after_ms=missing_after_ms), settings.data_dir / "spool")


@asynccontextmanager
async def open_blobs(settings: Settings) -> AsyncIterator[Blobs]:
    """Where bytes lie, without a store beside it."""
    blobs = _blobs(settings, read_only=False)
    try:
        yield blobs
    finally:
        await blobs.close()


def passing_files(settings: Settings) -> AbstractContextManager[Path]:
    """A directory for what only passes through this process."""
    return scratch_directory(settings.data_dir / "scratch")


def open_bucket(settings: Settings, bucket: str, folder: str = "") -> "Bucket":
    """A bucket of the caller's own or a folder in it, at the address and with the keys of `blobs`."""
    from tidegate.backends.blobs_s3_client import Objects

    return Objects(replace(_s3_settings(settings, bucket), prefix=folder))


def _s3_settings(settings: Settings, bucket: str) -> "S3Settings":
    from tidegate.backends.blobs_s3_client import S3Settings

    key, secret = settings.blobs.access_key_id, settings.blobs.secret_access_key
    return S3Settings(
        bucket=bucket,
        endpoint=settings.blobs.endpoint or None,
        region=settings.blobs.region,
        access_key_id=key.reveal() if key else None,
        secret_access_key=secret.reveal() if secret else None,
        allow_http=settings.blobs.allow_http,
    )


@dataclass(frozen=True, slots=True)
class Roles:
    """What a process does: answer the API, run items, or both."""

    api: bool
    worker: bool


@dataclass(frozen=True, slots=True)
class Started:
    """What a process that has started is called and where it listens; empty where it does not."""

    worker_id: str
    api: str
    admin: str
    metrics: str


async def run(
    settings: Settings,
    roles: Roles,
    stop: asyncio.Event,
    on_ready: Callable[[Started], None],
    file: SettingsFile | None = None,
) -> None:
    """Run one process of Tidegate until `stop` is set. `on_ready` is called when it has started; changes of `file` are followed."""
    from tidegate.web.gauges import Gauges
    from tidegate.web.health import Health
    from tidegate.web.scrape import scraped

    failpoints.arm(settings.failpoints)
    metrics.pin(models=settings.models, deployments=[one.name for one in deployments(settings)])
    metrics.build_info.of(__version__).set(1)
    async with _traced(), opened(settings) as alone, _noticed(alone) as parts, AsyncExitStack() as stack:
        if roles.api:
            await _ready_keys(parts)
        await _bury_predecessors(parts)
        me = _incarnation(parts, runs_items=roles.worker)
        await me.begin()
        router, live_config = await stack.enter_async_context(_router(parts, me, roles, file))
        if roles.worker and not router.status():
            raise SettingsError(NO_MODEL_SERVER)
        callbacks = await stack.enter_async_context(callback_sender(settings))
        make = functools.partial(build_worker, parts, me, router, live_config, callbacks)
        worker = _worker(make, parts, me, is_kept=roles.api) if roles.worker else None
        if worker is not None:
            from tidegate.web.completion_batch.callbacks import CallbackBodies
            from tidegate.web.completion_batch.options import DOOR

            bodies = {DOOR: CallbackBodies(parts.store, parts.blobs, settings.callbacks.body_bytes_max)}
            deliveries = WebhookDeliveries(parts.store, callbacks, parts.clock, parts.entropy, lambda: me.id, bodies)
            stack.push_async_callback(_ended, asyncio.create_task(deliveries.run()))
            reporting = Reporting(parts.store, parts.blobs, me, router.status, worker.trouble)
            stack.push_async_callback(_ended, asyncio.create_task(reporting.run()))
        unleased = Unleased(parts.store, parts.clock, worker.is_idle_with_room if worker else None)
        stack.push_async_callback(_ended, asyncio.create_task(unleased.watch()))
        address = admin = ""
        token = Secret(parts.entropy.token_bytes(32).hex())

        def checks() -> dict[str, str | None]:
            stopping = "it is stopping and takes no new work" if stop.is_set() else None
            return {"process": stopping, **unleased.checks(worker.trouble if worker else None)}

        context = replace(_web_context(parts, me, router, callbacks, token), readiness=checks, stop=stop)
        if roles.api:
            from tidegate.interactive_usage import InteractiveUsageBook
            from tidegate.web.admin.operator_socket import operator_socket
            from tidegate.web.app import build_app

            book = InteractiveUsageBook(parts.store, parts.entropy)
            stack.push_async_callback(book.close)
            app = build_app(replace(context, live_config=live_config, book=book))
            address, admin = await stack.enter_async_context(_api_listening(app, parts, stop))
            await stack.enter_async_context(operator_socket(app, settings.data_dir))
            stack.enter_context(control_file(settings.data_dir, address, token))
        health = Health(context, serves_api=roles.api)
        shown = await stack.enter_async_context(scraped(settings, health.routes(), stop, Gauges(context)))
        on_ready(Started(me.id, address, admin, shown))
        if worker is not None:
            try:
                await worker.run(stop)
            except WorkerBroken:
                await reporting.report()
                raise
        else:
            await beat_until(stop, me, settings.worker.heartbeat_ms)


async def _ready_keys(parts: Parts) -> None:
    """Agree with other API processes on the pepper, keep the key that the settings name, and log that a first key is missing."""
    from tidegate.web.admin.audit import AuditTrail
    from tidegate.web.admin.keys import bootstrap_key
    from tidegate.web.http.loopback import is_loopback, require_key
    from tidegate.web.http.pepper import agreed_pepper

    settings = parts.settings
    pepper = await agreed_pepper(settings, parts.store)
    if settings.auth.bootstrap_key is not None:
        trail = AuditTrail(parts.store, parts.entropy, "settings")
        await bootstrap_key(trail, parts.entropy, pepper, settings.auth.bootstrap_key)
    if not is_loopback(settings.server.host):
        try:
            await require_key(parts.store)
        except SettingsError as missing:
            log.warning("key_missing", why=str(missing))


@asynccontextmanager
async def _traced() -> AsyncIterator[None]:
    """Send traces where OTEL_* variables ask for them. What is missing for that is logged, and no reason not to start."""
    wanted, problem = wants_traces()
    if wanted:
        try:
            tracing.start(__version__)
        except ImportError:
            problem = "OpenTelemetry is not installed: pip install 'tidegate[traces]'"
    if problem:
        log.warning("traces_off", why=problem)
    try:
        yield
    finally:
        await asyncio.to_thread(tracing.stop, TRACES_STOP_S)


@asynccontextmanager
async def _api_listening(app: "Api", parts: Parts, stop: asyncio.Event) -> AsyncIterator[tuple[str, str]]:
    """Listen for callers, and for operators on the same port where that is this machine's alone, else on `admin.port`.

    Yield the address of each; operators may have none."""
    from tidegate.web.app import AppPart
    from tidegate.web.http.loopback import is_loopback
    from tidegate.web.http.serving import ListenLimits, listen_limits, listening

    settings = parts.settings
    server, admin = settings.server, settings.admin
    async with AsyncExitStack() as stack:
        is_shared = is_loopback(server.host)
        admin_url = ""
        if not is_shared and admin.port:
            limits = ListenLimits(
                client_timeout_s=settings.http.client_timeout_s, grace_s=settings.worker.grace_ms / 1000
            )
            part = AppPart(app, is_admin=True)
            admin_url = await stack.enter_async_context(listening(part, admin.host, admin.port, limits, stop))
        public = app if is_shared else AppPart(app, is_admin=False)
        url = await stack.enter_async_context(
            listening(public, server.host, server.port, listen_limits(settings), stop)
        )
        yield url, url if is_shared else admin_url


@asynccontextmanager
async def callback_sender(settings: Settings) -> AsyncIterator[CallbackSender]:
    """The way to receivers and files that tenants name, under the rules that the operator set."""
    sender = CallbackSender(settings.callbacks.rules(), f"Tidegate/{__version__}")
    try:
        yield sender
    finally:
        await sender.close()


def _worker(make: Callable[[], Worker], parts: Parts, me: Registration, *, is_kept: bool) -> RunsItems:
    """Make a worker. With `is_kept` it is restarted after an internal error, because its process also serves callers."""
    return KeptWorker(make, me, parts.settings.worker.heartbeat_ms) if is_kept else make()


@dataclass(frozen=True, slots=True)
class Working:
    """A worker beside the caller's own code, and what it stands on."""

    parts: Parts
    incarnation: Registration
    worker: RunsItems
    router: Router

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Have the worker run what is there, and let it finish what is in flight at the end."""
        stop = asyncio.Event()
        task = asyncio.create_task(self.worker.run(stop))
        try:
            yield
        finally:
            stop.set()
            await task


@asynccontextmanager
async def working(settings: Settings) -> AsyncIterator[Working]:
    """A worker that has not begun, in this process and without a server: what `tidegate run` stands on."""
    failpoints.arm(settings.failpoints)
    async with _traced(), opened(settings) as alone, _noticed(alone) as parts:
        await _bury_predecessors(parts)
        me = _incarnation(parts)
        await me.begin()
        async with (
            callback_sender(settings) as files,
            _router(parts, me, Roles(api=False, worker=True)) as (router, live_config),
        ):
            make = functools.partial(build_worker, parts, me, router, live_config, files)
            yield Working(parts, me, _worker(make, parts, me, is_kept=True), router)


@dataclass(frozen=True, slots=True)
class Estimating:
    """What says how a job would go, and takes in the file that it is about."""

    parts: Parts
    reception: Reception
    validation: "JobValidation"


@asynccontextmanager
async def estimating(settings: Settings) -> AsyncIterator[Estimating]:
    """The check of a job in this process, without a server and without a worker: nothing is sent."""
    from tidegate.web.jobs.creation import JobCreation
    from tidegate.web.jobs.validation import JobValidation

    async with opened(settings) as alone, _noticed(alone) as parts:
        await _bury_predecessors(parts)
        me = _incarnation(parts, runs_items=False)
        await me.begin()
        async with (
            callback_sender(settings) as callbacks,
            _router(parts, me, Roles(api=False, worker=False)) as (router, _),
        ):
            context = _web_context(parts, me, router, callbacks, Secret(""))
            reception = Reception(parts.store, parts.blobs, parts.clock, parts.entropy, lambda: me.id)
            yield Estimating(parts, reception, JobValidation(context, JobCreation(context, reception)))


async def added_deployments(settings: Settings) -> Added:
    """What was added at run time, as this process could use it; nothing where there is no store yet, or it cannot be read."""
    if not settings.store.is_postgresql and not local_path(settings.store.location).exists():
        return Added()
    try:
        async with opened(settings, read_only=True) as parts:
            _, entries = await parts.store.routing()
    except StoreError:
        return Added()
    return added(settings, [(one.kind, one.name, one.document) for one in entries])


async def probe_upstreams(settings: Settings, more: Sequence[Deployment] = ()) -> list[Probe]:
    """Ask every deployment that is called from here whether it is there and which models it serves; needs no store."""
    # Nothing is sent from here to one that has a queue.
    asked = [one for one in deployments(settings) if one.queue is None]
    router = open_router(settings.http.limits(), SystemClock(), SystemEntropy())
    try:
        router.serve(asked)
        refused = router.replace([*asked, *(one for one in more if one.queue is None)], ())
        unasked = [Probe(name, False, 0, (), 0.0, why) for name, why in refused.items()]
        return unasked + await asyncio.gather(*(router.probe(status.name) for status in router.status()))
    finally:
        await router.close()


async def knows_model(settings: Settings, model: str) -> bool:
    """Ask every deployment that is called from here whether it knows this model by its name; needs no store."""
    asked = [one for one in deployments(settings) if one.queue is None]
    router = open_router(settings.http.limits(), SystemClock(), SystemEntropy())
    try:
        router.serve(asked)
        return await router.knows_by_name(model)
    finally:
        await router.close()


async def queue_states(served: Iterable[Deployment]) -> list[tuple[Deployment, QueueState | QueueAway]]:
    """How the queue of each of these stands that has one; needs no store."""
    found: list[tuple[Deployment, QueueState | QueueAway]] = []
    for one in served:
        if one.queue is None:
            continue
        queue = _open_queue(one.queue, owner="doctor")
        try:
            found.append((one, await queue.state()))
        except QueueAway as away:
            found.append((one, away))
        finally:
            await queue.close()
    return found


async def _bury_predecessors(parts: Parts) -> None:
    """Declare all other workers of an embedded store gone: it has one writer, this process, so their leases need not run out."""
    if parts.settings.store.is_postgresql:
        return
    for row in await parts.store.list_workers(_PREDECESSORS_MAX):
        if row["state"] == WorkerState.ALIVE:
            await parts.store.declare_gone(str(row["id"]), leaving=True)


def _incarnation(parts: Parts, *, runs_items: bool = True) -> Registration:
    return Registration(
        parts.store,
        parts.clock,
        parts.entropy,
        host=socket.gethostname(),
        version=__version__,
        lease_ms=parts.settings.worker.lease_ms,
        runs_items=runs_items,
    )


@asynccontextmanager
async def _router(
    parts: Parts, me: Registration, roles: Roles, file: SettingsFile | None = None
) -> AsyncIterator[tuple[Router, LiveConfig]]:
    settings = parts.settings
    http = settings.http.limits(takes_interactive=roles.api)
    make_room_for_connections(http)
    async with AsyncExitStack() as stack:
        limits: Limits = StoreLimits(parts.store, lambda: me.id)
        if parts.shared is not None:
            from tidegate.backends.limits_redis import RedisLimits

            dealt = RedisLimits(settings.redis.location, parts.installation, limits, settings.redis.timeout_ms / 1000)
            stack.push_async_callback(dealt.close)
            limits = dealt
        capacity = Capacity(
            limits=limits,
            # The embedded store has one process: there is no other to share slots with.
            worker_id=(lambda: me.id) if settings.store.is_postgresql else None,
            discovered=parts.store,
            rests=parts.shared,
            fleet=parts.store,
            notices=parts.notices,
            model_in_flight_max=model_caps(settings),
            in_flight_max_global=settings.worker.in_flight_max_global,
            in_flight_max=settings.worker.in_flight_max,
            runs_items=roles.worker,
            safe_until_ms=lambda: me.safe_until_ms,
        )
        router = open_router(
            http,
            parts.clock,
            parts.entropy,
            deployment_policy(settings),
            capacity,
            functools.partial(_open_queue, owner=me.id),
        )
        stack.push_async_callback(router.close)
        router.serve(deployments(settings), resources(settings))
        live_config = LiveConfig(parts.store, settings, router.replace, file)
        await live_config.look()
        following = asyncio.create_task(live_config.follow())
        stack.push_async_callback(_ended, following)
        yield router, live_config


def _open_queue(named: Queue, *, owner: str) -> RequestQueue:
    from tidegate.backends.queue_redis import RedisQueue

    return RedisQueue(named, owner=owner)


@asynccontextmanager
async def _notices(parts: Parts) -> AsyncIterator[Notices | None]:
    """What carries notices between processes: Redis where there is one, else the database, unless a pooler hides who listens."""
    store = parts.settings.store
    if parts.shared is not None or not store.is_postgresql or store.pooler == "transaction":
        yield parts.shared
        return
    from tidegate.store.postgres_notices import PostgresNotices

    name = await parts.store.store_name(parts.entropy.token_bytes(16).hex())
    notices = PostgresNotices(store.location, name, NOTICE_TIMEOUT_S)
    notices.start()
    try:
        yield notices
    finally:
        await notices.close()


@asynccontextmanager
async def _noticed(parts: Parts) -> AsyncIterator[Parts]:
    """The same parts, whose wake-ups also reach the other processes, where there can be any."""
    async with _notices(parts) as notices:
        if notices is None:
            yield parts
            return
        me = parts.entropy.token_bytes(8).hex()
        noticed = {name: NoticedWake(notices, parts.clock, name, me) for name in ("inputs", "slices", "jobs")}
        if parts.shared is not None:
            # Redis has a channel for these already.
            del noticed["inputs"]
        for one in noticed.values():
            one.start()
        try:
            yield replace(parts, notices=notices, wakes=replace(parts.wakes, **noticed))
        finally:
            for one in noticed.values():
                await one.close()


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def deployment_policy(settings: Settings) -> DeploymentPolicy:
    """A deployment rests no longer than the operator lets one ask for; otherwise its items would come back and find it resting."""
    return DeploymentPolicy(
        retry_budget=RetryBudgetPolicy(settings.retry.budget_share, settings.retry.budget_min),
        retry_after_ms_max=settings.retry.retry_after_ms_max,
        attempts_grouped=max(1, settings.retry.attempts_max - 1),
        model_rest_ms_min=settings.redis.model_rest_ms_min,
        model_rest_ms_max=settings.redis.model_rest_ms_max,
    )


def build_worker(
    parts: Parts, me: Registration, router: Router, live_config: LiveConfig, files: FileSource | None = None
) -> Worker:
    """A worker over these parts; `files` is the way to files that requests name."""
    return Worker(
        WorkerPorts(parts.store, _counted(parts, "processor"), router, parts.clock, parts.entropy, parts.wakes, files),
        me,
        worker_options(parts.settings, parts.scratch),
        OperatorPolicies(parts.settings, live_config, router.price_of),
        InputPasses(),
    )


def _counted(parts: Parts, component: str) -> Blobs:
    return CountedBlobs(parts.blobs, component, parts.settings.blobs.backend)


def worker_options(settings: Settings, scratch: Path) -> WorkerOptions:
    worker = settings.worker
    return WorkerOptions(
        in_flight_max=worker.in_flight_max,
        slice_count_max=worker.slice_count_max,
        slice_items=settings.ingest.slice_count_max,
        heartbeat_ms=worker.heartbeat_ms,
        poll_ms=worker.poll_ms,
        sweep_ms=worker.sweep_ms,
        grace_ms=worker.grace_ms,
        cancel_grace_ms=worker.cancel_grace_ms,
        flush=FlushLimits(
            worker.record_flush_ms, worker.record_lines_max, worker.record_bytes_max, held_bytes_max=_HELD_BYTES_MAX
        ),
        scratch=scratch,
        keep=KeepTimes(
            completed_ms=settings.retention.completed_s * 1000,
            failed_ms=settings.retention.failed_s * 1000,
            metadata_ms=settings.retention.metadata_s * 1000,
            audit_ms=settings.retention.audit_s * 1000,
            orphan_ms=settings.retention.orphan_s * 1000,
            scan_max=settings.retention.scan_max,
        ),
        ingest=IngestLimits(settings.ingest.small_bytes_max, settings.ingest.passes_max),
    )


def _web_context(parts: Parts, me: Registration, router: Router, callbacks: Callbacks, token: Secret) -> "WebContext":
    from tidegate.web.context import WebContext
    from tidegate.web.http.pepper import pepper_of

    return WebContext(
        store=parts.store,
        blobs=_counted(parts, "apiserver"),
        settings=parts.settings,
        clock=parts.clock,
        entropy=parts.entropy,
        wakes=parts.wakes,
        worker_id=lambda: me.id,
        pepper=pepper_of(parts.settings),
        router=router,
        callbacks=callbacks,
        scratch=parts.scratch,
        control_token=token,
    )
