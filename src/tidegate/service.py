"""The composition root: makes a router, loops and a web app of opened parts. Only it and
`storage.py` pick a backend."""

import asyncio
import functools
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import msgspec
import structlog
from msgspec.structs import replace

from tidegate import __version__, failpoints, metrics, tracing
from tidegate.backends.callback_sender import CallbackSender
from tidegate.backends.counted_blobs import CountedBlobs
from tidegate.backends.noticed_wake import NoticedWake
from tidegate.backends.run_names import hold_names
from tidegate.backends.system import SystemClock, SystemEntropy
from tidegate.control import control_file
from tidegate.core.deployments import Deployment, Queue, Secret
from tidegate.core.errors import SettingsError, WorkerBroken
from tidegate.core.nouns import WorkerDuty
from tidegate.core.ports import Blobs, Callbacks, FileSource, Limits, Notices, RequestQueue
from tidegate.core.queues import QueueAway, QueueState
from tidegate.core.schedule.share_owner import run_owner
from tidegate.core.states import WorkerState
from tidegate.core.webhooks import EventBodies
from tidegate.live_config import LiveConfig
from tidegate.settings import Settings, deployments, resources
from tidegate.settings.collector import wants_traces
from tidegate.settings.models import model_caps, servers_name
from tidegate.settings.reload import SettingsFile
from tidegate.stages.accept import Reception
from tidegate.stages.deliver import WebhookDeliveries
from tidegate.stages.ingest.ingest_file import InputPasses
from tidegate.storage import Parts, ended, opened
from tidegate.store.limits import StoreLimits
from tidegate.upstream.calls.open_router import open_router
from tidegate.upstream.calls.router import Router
from tidegate.upstream.http.connections import make_room_for_connections
from tidegate.upstream.routing.deployment_state import DeploymentPolicy, RetryBudgetPolicy
from tidegate.upstream.routing.probe import Probe
from tidegate.upstream.routing.slots import Capacity
from tidegate.web.doors import DOORS, SCOPES
from tidegate.worker.kept_worker import KeptWorker, RunsItems
from tidegate.worker.options import worker_options
from tidegate.worker.policies import OperatorPolicies
from tidegate.worker.registration import Registration, beat_until
from tidegate.worker.reporting import Reporting
from tidegate.worker.unleased import Unleased
from tidegate.worker.worker import Worker, WorkerPorts

# A process loads only what it uses: `tidegate run` without the web app, Redis and S3
# starts in half the time.
if TYPE_CHECKING:
    from tidegate.web.app import Api
    from tidegate.web.context import WebContext
    from tidegate.web.jobs.validation import JobValidation

log = structlog.get_logger()

_PREDECESSORS_MAX = 100
TRACES_STOP_S = 3.0
NOTICE_TIMEOUT_S = 2.0
# The largest input that a run reads inside its own process, with 512 bytes for each line: about
# 80,000 lines of 1 kB.
RUN_INPUT_BYTES_MAX = 128 << 20
# Without a model server every batch would wait forever, so the start fails.
NO_MODEL_SERVER = (
    "No model server is known: name one with --upstream http://HOST:PORT/v1, list models in a --config file, or add one "
    "with `tidegate deployments add`. `tidegate simulate` is one to try with."
)


class Roles(msgspec.Struct, frozen=True):
    """The roles of a process: it answers the API, runs items, or both."""

    api: bool
    worker: bool


class Started(msgspec.Struct, frozen=True):
    """The id of a process that has started, and the addresses where it listens; an
    address is empty if it does not."""

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
    on_wait: Callable[[str], None] | None = None,
) -> None:
    """Run one process of Tidegate until `stop` is set, and follow changes of `file`. `on_wait` gets
    the process that the start waits for."""
    from tidegate.web.gauges import Gauges
    from tidegate.web.health import Health
    from tidegate.web.scrape import scraped

    failpoints.arm(settings.failpoints)
    metrics.pin(models=settings.models, deployments=[one.name for one in deployments(settings)])
    metrics.build_info.of(__version__).set(1)
    opening = opened(settings, is_alone=True, on_wait=on_wait)
    async with _traced(), opening as alone, _noticed(alone) as parts, AsyncExitStack() as stack:
        if roles.api:
            await _ready_keys(parts)
        await _bury_predecessors(parts)
        me = _incarnation(parts, WorkerDuty(runs_items=roles.worker))
        await me.enlist()
        router, live_config = await stack.enter_async_context(_router(parts, me, roles, file))
        if roles.worker and not router.status():
            raise SettingsError(NO_MODEL_SERVER)
        callbacks = await stack.enter_async_context(callback_sender(settings))
        make = functools.partial(build_worker, parts, me, router, live_config, callbacks)
        worker = _worker(make, parts, me, is_kept=roles.api) if roles.worker else None
        if worker is not None:
            bodies = _event_bodies(parts)
            deliveries = WebhookDeliveries(parts.store, callbacks, parts.clock, parts.entropy, lambda: me.id, bodies)
            stack.push_async_callback(ended, asyncio.create_task(deliveries.run()))
            reporting = Reporting(parts.store, parts.blobs, me, router.status, worker.trouble)
            stack.push_async_callback(ended, asyncio.create_task(reporting.run()))
        unleased = Unleased(parts.store, parts.clock, worker.is_idle_with_room if worker else None)
        stack.push_async_callback(ended, asyncio.create_task(unleased.watch()))
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
    """Agree with other API processes on the pepper, store the key that the settings name, and log
    if a first key is missing."""
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
    """Send traces if OTEL_* variables ask for them. If something is missing for that,
    log it and start anyway."""
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
    """Listen for callers, and for operators: on the same port if only this machine can reach it,
    else on `admin.port`.

    Yield both addresses; that of operators may be empty."""
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
    """Open the client that calls receivers and reads files that tenants name, under the
    operator's rules."""
    sender = CallbackSender(settings.callbacks.rules(), f"Tidegate/{__version__}")
    try:
        yield sender
    finally:
        await sender.close()


def _worker(make: Callable[[], Worker], parts: Parts, me: Registration, *, is_kept: bool) -> RunsItems:
    """Make a worker.

    With `is_kept` it is restarted after an internal error, because its process also serves callers.
    """
    return KeptWorker(make, me, parts.settings.worker.heartbeat_ms) if is_kept else make()


class Working(msgspec.Struct, frozen=True):
    """A worker beside the caller's own code, with its parts. It runs the jobs of `share_owner`, or
    all jobs if that is None."""

    parts: Parts
    incarnation: Registration
    worker: RunsItems
    router: Router
    share_owner: str | None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the worker during the block, and let it finish what is in flight at the end."""
        stop = asyncio.Event()
        task = asyncio.create_task(self.worker.run(stop))
        try:
            yield
        finally:
            stop.set()
            await task


@asynccontextmanager
async def working(settings: Settings, names: Sequence[str] = ()) -> AsyncIterator[Working]:
    """Open a worker that has not begun, in this process and without a server, for `tidegate run`.

    `names` are the names of the run, its jobs' name first. Over an embedded store no other process
    runs under any of them, and this one runs nothing else, because other runs may have other model
    servers. Without names the worker runs all jobs."""
    failpoints.arm(settings.failpoints)
    if not settings.store.is_postgresql:
        # No callers wait for this event loop, so it can read the input itself, without
        # starting a process for that.
        settings = replace(settings, ingest=replace(settings.ingest, small_bytes_max=RUN_INPUT_BYTES_MAX))
    has_owner = bool(names) and not settings.store.is_postgresql
    async with _traced(), opened(settings, is_alone=not has_owner) as alone, _noticed(alone) as parts:
        share_owner = run_owner(parts.tenant_id, names[0]) if has_owner else None
        async with _registered_run(parts, names, share_owner) as me, AsyncExitStack() as stack:
            files = await stack.enter_async_context(callback_sender(settings))
            roles = Roles(api=False, worker=True)
            router, live_config = await stack.enter_async_context(_router(parts, me, roles))
            make = functools.partial(build_worker, parts, me, router, live_config, files)
            yield Working(parts, me, _worker(make, parts, me, is_kept=True), router, share_owner)


@asynccontextmanager
async def _registered_run(parts: Parts, names: Sequence[str], share_owner: str | None) -> AsyncIterator[Registration]:
    """Register this process for one share owner, under these names. Declare the dead workers that
    had these names before gone."""
    if share_owner is None:
        await _bury_predecessors(parts)
        me = _incarnation(parts, WorkerDuty(servers=servers_name(parts.settings)))
        await me.enlist()
        yield me
        return
    with hold_names(parts.settings.data_dir / "runs", names) as locked:
        for worker_id in locked.dead_worker_ids:
            await parts.store.declare_gone(worker_id, leaving=True)
        me = _incarnation(parts, WorkerDuty(share_owner=share_owner, servers=servers_name(parts.settings)))
        await me.enlist()
        locked.note_worker(me.id)
        yield me


class Estimating(msgspec.Struct, frozen=True):
    """The parts that estimate a job and take in its input file."""

    parts: Parts
    reception: Reception
    validation: "JobValidation"


@asynccontextmanager
async def estimating(settings: Settings) -> AsyncIterator[Estimating]:
    """Open the check of jobs in this process, without a server and without a worker.
    Nothing is sent."""
    from tidegate.web.jobs.creation import JobCreation
    from tidegate.web.jobs.validation import JobValidation

    async with opened(settings) as alone, _noticed(alone) as parts:
        me = _incarnation(parts, WorkerDuty(runs_items=False))
        await me.enlist()
        async with (
            callback_sender(settings) as callbacks,
            _router(parts, me, Roles(api=False, worker=False)) as (router, _),
        ):
            context = _web_context(parts, me, router, callbacks, Secret(""))
            context = replace(context, servers=servers_name(settings))
            reception = Reception(parts.store, parts.blobs, parts.clock, parts.entropy, lambda: me.id)
            yield Estimating(parts, reception, JobValidation(context, JobCreation(context, reception)))


async def probe_upstreams(settings: Settings, more: Sequence[Deployment] = ()) -> list[Probe]:
    """Ask every deployment that is called from here whether it answers and which models it serves.
    No store is needed."""
    # A deployment with a queue is never called from here.
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
    """Ask every deployment that is called from here whether it knows this model by its
    name. No store is needed."""
    asked = [one for one in deployments(settings) if one.queue is None]
    router = open_router(settings.http.limits(), SystemClock(), SystemEntropy())
    try:
        router.serve(asked)
        return await router.knows_by_name(model)
    finally:
        await router.close()


async def queue_states(served: Iterable[Deployment]) -> list[tuple[Deployment, QueueState | QueueAway]]:
    """Return the state of the queue of each of these deployments that has one. No store
    is needed."""
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
    """Declare all other workers of an embedded store gone, without waiting for their leases: only
    this process has the store."""
    if parts.settings.store.is_postgresql:
        return
    for row in await parts.store.list_workers(_PREDECESSORS_MAX):
        if row["state"] == WorkerState.ALIVE:
            await parts.store.declare_gone(str(row["id"]), leaving=True)


def _incarnation(parts: Parts, duty: WorkerDuty) -> Registration:
    return Registration(
        parts.store,
        parts.clock,
        parts.entropy,
        host=socket.gethostname(),
        version=__version__,
        lease_ms=parts.settings.worker.lease_ms,
        duty=duty,
    )


@asynccontextmanager
async def _router(
    parts: Parts, me: Registration, roles: Roles, file: SettingsFile | None = None
) -> AsyncIterator[tuple[Router, LiveConfig]]:
    settings = parts.settings
    http = settings.http.limits(takes_interactive=roles.api)
    make_room_for_connections(http)
    async with AsyncExitStack() as stack:
        limits: Limits = StoreLimits(parts.store, parts.entropy.token_bytes(16).hex(), lambda: me.id)
        if parts.shared is not None:
            from tidegate.backends.limits_redis import RedisLimits

            dealt = RedisLimits(settings.redis.location, parts.installation, limits, settings.redis.timeout_ms / 1000)
            stack.push_async_callback(dealt.close)
            limits = dealt
        capacity = Capacity(
            limits=limits,
            # Over an embedded store each process counts its own slots: a server is alone there, and
            # each run has its own bound.
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
        stack.push_async_callback(ended, following)
        yield router, live_config


def _open_queue(named: Queue, *, owner: str) -> RequestQueue:
    from tidegate.backends.queue_redis import RedisQueue

    return RedisQueue(named, owner=owner)


@asynccontextmanager
async def _notices(parts: Parts) -> AsyncIterator[Notices | None]:
    """Open the channel of notices between processes: Redis if there is one, else the database,
    unless a transaction pooler hides listeners."""
    store = parts.settings.store
    if parts.shared is not None or not store.is_postgresql or store.pooler == "transaction":
        yield parts.shared
        return
    from tidegate.store.database.postgres_notices import PostgresNotices

    name = await parts.store.store_name(parts.entropy.token_bytes(16).hex())
    notices = PostgresNotices(store.location, name, NOTICE_TIMEOUT_S)
    notices.start()
    try:
        yield notices
    finally:
        await notices.close()


@asynccontextmanager
async def _noticed(parts: Parts) -> AsyncIterator[Parts]:
    """Yield the parts with wake-ups that also reach other processes, if there can be any."""
    async with _notices(parts) as notices:
        if notices is None:
            yield parts
            return
        me = parts.entropy.token_bytes(8).hex()
        noticed = {name: NoticedWake(notices, parts.clock, name, me) for name in ("inputs", "slices", "jobs")}
        if parts.shared is not None:
            # Redis already has a channel for inputs.
            del noticed["inputs"]
        for one in noticed.values():
            one.start()
        try:
            yield replace(parts, notices=notices, wakes=replace(parts.wakes, **noticed))
        finally:
            for one in noticed.values():
                await one.close()


def deployment_policy(settings: Settings) -> DeploymentPolicy:
    """Return the policy of deployments. None rests longer than `retry_after_ms_max`, or its items
    would come back while it rests."""
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
    """Build a worker over these parts; `files` reads the files that requests name."""
    return Worker(
        WorkerPorts(parts.store, _counted(parts, "processor"), router, parts.clock, parts.entropy, parts.wakes, files),
        me,
        worker_options(parts.settings, parts.scratch),
        OperatorPolicies(parts.settings, live_config),
        InputPasses(),
    )


def _event_bodies(parts: Parts) -> dict[str, EventBodies]:
    """Return the writers of job events, for the doors with event bodies of their own."""
    bytes_max = parts.settings.callbacks.body_bytes_max
    bodies: dict[str, EventBodies] = {}
    for door in DOORS:
        bodies.update(door.event_bodies(parts.store, parts.blobs, bytes_max))
    return bodies


def _counted(parts: Parts, component: str) -> Blobs:
    return CountedBlobs(parts.blobs, component, parts.settings.blobs.backend)


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
        scopes=SCOPES,
        control_token=token,
    )
