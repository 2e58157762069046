"""Checks of `tidegate doctor` about capacity: budgets that never bind, Redis, queues, the engines'
own metrics, unknown tenants.

They only ask and never change anything; a server that does not answer is a finding, not an error.
"""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

import msgspec

from tidegate.core.budgets.budget import Limit, Period
from tidegate.core.deployments import Deployment, EngineKind, Queue, Resource, TideMode
from tidegate.core.queues import QueueAway, QueueState
from tidegate.core.wording import in_words
from tidegate.settings import Settings, Tenants, redacted, slot_caps
from tidegate.settings.capacity import ModelTerms
from tidegate.settings.models import MODEL_SLOTS, limits_of

if TYPE_CHECKING:
    from tidegate.storage import Parts

SCRAPE_TIMEOUT_S = 5.0
REDIS_TIMEOUT_S = 5.0
SCRAPE_BYTES_MAX = 2 << 20
TENANTS_MAX = 1_000
PREFILL_CHUNK_TOKENS = 512
_PREFIXES = {EngineKind.VLLM: "vllm:", EngineKind.SGLANG: "sglang:"}
_PRIORITY_FLAGS = {
    EngineKind.VLLM: "--scheduling-policy priority",
    EngineKind.SGLANG: "--enable-priority-scheduling --schedule-low-priority-values-first",
}
_STEP = re.compile(r'^vllm:iteration_tokens_total_bucket\{.*?le="([^"]+)".*?\} ([0-9.e+]+)$', re.MULTILINE)


class Grade(StrEnum):
    OK = "ok"
    WARNING = "warning"
    WRONG = "wrong"


class DoctorFinding(msgspec.Struct, frozen=True):
    """The result of one check; `to_do` is empty if nothing is wrong."""

    about: str
    grade: Grade
    text: str
    to_do: str = ""


def budgets(
    settings: Settings, served: Sequence[Deployment], named_routes: Sequence[Resource], models: Mapping[str, ModelTerms]
) -> Iterator[DoctorFinding]:
    """Yield a finding for each limit that can never bind because another limit of the
    same thing is reached first."""
    tenants = Tenants(settings)
    named: list[tuple[str, Sequence[Limit]]] = [(f"deployment {one.name}", one.limits) for one in served]
    named += [(f"resource {one.name}", one.limits) for one in named_routes]
    named += [(f"tenant {name}", tenants.of(name).limits) for name in sorted(tenants.names())]
    named += [(f"budgets.{name}", limits_of(getattr(settings.budgets, name))) for name in ("tenant", "user", "key")]
    for what, limits in named:
        for problem in _never_binding(limits):
            yield DoctorFinding(
                "limits", Grade.WARNING, f"{what}: {problem}", "lower the shorter one, or raise the longer one"
            )
    caps = slot_caps(settings) | {MODEL_SLOTS + name: one.in_flight_max for name, one in models.items()}
    for model in (*settings.models, *models):
        below = sum(one.background_in_flight_max for one in served if one.models == (model,))
        if caps.get(MODEL_SLOTS + model, 0) > below:
            problem = f"{model}: in_flight_max is above what its deployments take together ({below:,})"
            yield DoctorFinding("limits", Grade.WARNING, problem, "raise max_in_flight of its deployments, or lower it")


def _never_binding(limits: Sequence[Limit]) -> Iterator[str]:
    order = list(Period)
    active = sorted((limit for limit in limits if limit.enabled), key=lambda limit: order.index(limit.period))
    for kind in ("requests", "tokens"):
        counted = [(limit.period, getattr(limit, kind)) for limit in active if getattr(limit, kind) is not None]
        for index, (period, count) in enumerate(counted):
            for longer, most in counted[index + 1 :]:
                if most < count:
                    yield f"{count:,} {kind} a {period} are more than the {most:,} of its {longer}, so they never bind"


async def redis(settings: Settings) -> AsyncIterator[DoctorFinding]:
    """Check whether Redis, if it is configured, answers, and fast enough."""
    if settings.redis.url is None:
        return
    from redis import asyncio as client
    from redis.exceptions import RedisError

    where = redacted(settings.redis.location)
    connection = client.Redis.from_url(
        settings.redis.location, socket_connect_timeout=REDIS_TIMEOUT_S, socket_timeout=REDIS_TIMEOUT_S
    )
    try:
        info = await connection.info("server")
        began_s = time.monotonic()
        await connection.ping()
        took_ms = (time.monotonic() - began_s) * 1000
    except (RedisError, OSError, TimeoutError, ValueError) as error:
        problem = f"{where} does not answer: {str(error) or type(error).__name__}"
        to_do = "start it or fix redis.url; until then limits come from the store alone"
        yield DoctorFinding("redis", Grade.WARNING, problem, to_do)
        return
    finally:
        await connection.aclose()
    problem = f"{where} answers, version {info.get('redis_version', 'unknown')}; we are {settings.redis.name} there"
    if took_ms > settings.redis.timeout_ms:
        problem = f"{where} took {took_ms:.0f} ms to answer, more than redis.timeout_ms ({settings.redis.timeout_ms})"
        yield DoctorFinding("redis", Grade.WARNING, problem, "use one that is nearer, or raise redis.timeout_ms")
        return
    yield DoctorFinding("redis", Grade.OK, problem)


async def queues(served: Sequence[Deployment]) -> AsyncIterator[DoctorFinding]:
    """Check whether the queues of asynchronous deployments answer, keep what is in them, and are
    read by a processor."""
    from tidegate import service

    for one, state in await service.queue_states(served):
        assert one.queue is not None
        where = f"{one.name}: {one.queue.requests} at {redacted(one.queue.url.reveal())}"
        if isinstance(state, QueueAway):
            to_do = "start it or fix queue.url; until then this deployment's batch calls wait"
            yield DoctorFinding("queue", Grade.WRONG, f"{where} cannot be reached: {state}", to_do)
            continue
        for finding in _queue_findings(one.queue, where, state):
            yield finding


def _queue_findings(queue: Queue, where: str, state: QueueState) -> Iterator[DoctorFinding]:
    if state.evicts:
        problem = f"{where}: Redis throws keys away when it is full, requests and paid answers among them"
        yield DoctorFinding("queue", Grade.WRONG, problem, "set its maxmemory-policy to noeviction")
    if not state.is_persistent:
        problem = f"{where}: Redis does not write what it holds to a disk, so a restart loses it and it is called again"
        yield DoctorFinding("queue", Grade.WARNING, problem, "set appendonly to yes")
    if state.waiting and state.oldest_deadline_s < time.time():
        problem = f"{where}: {in_words(state.waiting, 'request waits', 'requests wait')}, some past their deadline: no processor takes them"
        yield DoctorFinding(
            "queue", Grade.WARNING, problem, "start llm-d's async processor at this queue, or look why it does not take"
        )
    if state.dead:
        problem = f"{where}: {in_words(state.dead, 'result')} could not be read or had no request"
        to_do = f"look at them with redis-cli LRANGE {queue.results}:dead 0 9, then delete that key"
        yield DoctorFinding("queue", Grade.WARNING, problem, to_do)
    unrecorded = in_words(state.results + state.unacknowledged, "result is", "results are")
    problem = (
        f"{where} answers; {in_words(state.waiting, 'request waits', 'requests wait')}, {unrecorded} not recorded yet"
    )
    yield DoctorFinding("queue", Grade.OK, problem)


async def tenants(parts: "Parts") -> AsyncIterator[DoctorFinding]:
    """Yield a finding for each tenant that the settings name and the store does not have."""
    for name in sorted(Tenants(parts.settings).names())[:TENANTS_MAX]:
        if await parts.store.tenant_by_name(name) is None:
            problem = f"`tenants` gives {name} a weight or budgets, but there is no such organization"
            yield DoctorFinding(
                "tenants", Grade.WARNING, problem, f"tidegate keys create --org {name}, or fix the name"
            )


async def engines(served: Sequence[Deployment]) -> AsyncIterator[DoctorFinding]:
    """Check whether the engines show the numbers that the tide needs, and how they could serve both
    kinds of work better."""
    asked = [one for one in served if one.tide is TideMode.AUTO and (one.engine in _PREFIXES or one.metrics_url)]
    for one, text in zip(asked, await asyncio.gather(*(_scraped(metrics_address(one)) for one in asked)), strict=True):
        for finding in _read(one, text):
            yield finding


def metrics_address(deployment: Deployment) -> str:
    """Return the URL of a deployment's metrics: as configured, or at the root of its
    own address."""
    if deployment.metrics_url:
        return deployment.metrics_url
    parts = urlsplit(deployment.url)
    return urlunsplit((parts.scheme, parts.netloc, "/metrics", "", ""))


async def _scraped(url: str) -> str | Exception:
    import aiohttp

    try:
        timeout = aiohttp.ClientTimeout(total=SCRAPE_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout, trust_env=False) as session, session.get(url) as response:
            if response.status != 200:
                return ValueError(f"it was answered with status {response.status}")
            return (await response.content.read(SCRAPE_BYTES_MAX)).decode(errors="replace")
    except (aiohttp.ClientConnectionError, TimeoutError, OSError):
        return ConnectionError("nothing answers there")
    except (aiohttp.ClientError, ValueError) as error:
        return error


def _read(one: Deployment, text: str | Exception) -> Iterator[DoctorFinding]:
    address = metrics_address(one)
    if isinstance(text, Exception):
        problem = f"{one.name}: no metrics at {address} ({text or type(text).__name__})"
        begin = ""
        if isinstance(text, ConnectionError):
            begin = "start the server, or "
        elif one.engine is EngineKind.SGLANG:
            begin = "start it with --enable-metrics, or "
        to_do = f"{begin}set metrics_url; until then the tide goes by latency and refusals alone"
        yield DoctorFinding("tide", Grade.WARNING, problem, to_do)
        return
    prefix = _PREFIXES.get(one.engine, "")
    names = [*one.metrics_names.values()] if one.metrics_names else [prefix]
    missing = [name for name in names if name and name not in text]
    if missing:
        problem = f"{one.name}: its metrics lack {', '.join(missing[:5])}"
        yield DoctorFinding(
            "tide", Grade.WARNING, problem, "check engine, metrics_url and metrics_names of the deployment"
        )
        return
    yield DoctorFinding("tide", Grade.OK, f"{one.name} shows its load at {address}")
    if (tokens := largest_step(text)) > PREFILL_CHUNK_TOKENS:
        problem = f"{one.name} runs steps of more than {PREFILL_CHUNK_TOKENS} tokens (up to {tokens:,}), which interactive users wait for"
        yield DoctorFinding(
            "tide", Grade.WARNING, problem, f"start it with --max-num-batched-tokens {PREFILL_CHUNK_TOKENS}"
        )
    if one.engine in _PREFIXES and not one.hints.priority_field:
        problem = f"{one.name} does not learn which calls are batch work"
        to_do = f"start it with {_PRIORITY_FLAGS[one.engine]}, then set hints.priority_field: priority"
        yield DoctorFinding("tide", Grade.WARNING, problem, to_do)


def largest_step(text: str) -> int:
    """Return the least bucket bound that 99 % of the engine's steps stay under, in
    tokens; 0 if the metrics lack it."""
    buckets: dict[float, float] = {}
    for bound, count in _STEP.findall(text):
        size = float("inf") if bound == "+Inf" else float(bound)
        buckets[size] = buckets.get(size, 0.0) + float(count)
    total = max(buckets.values(), default=0.0)
    finite = sorted(size for size in buckets if size != float("inf"))
    if not total or not finite:
        return 0
    return int(next((size for size in finite if buckets[size] >= 0.99 * total), finite[-1]))
