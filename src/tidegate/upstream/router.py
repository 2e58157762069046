"""The Upstream port: each call goes to a deployment of its model that is fit for it, within that deployment's slots.

It chooses, hands the call to the transport, has the answer sorted, and lets the lane learn. It does not wait out a rest or a
retry: it says until when, and the engine decides what to do meanwhile. A call goes on to another deployment only when the
first can neither have done nor billed it.
"""

import asyncio
import math
from collections import deque
from collections.abc import Collection, Iterable

import structlog

from tidegate.core.deployments import Deployment, HttpLimits
from tidegate.core.errors import (
    KeyRejected,
    PoolExhausted,
    Refused,
    SettingsError,
    Throttled,
    Unavailable,
    UpstreamError,
)
from tidegate.core.nouns import Answer, Call
from tidegate.core.ports import Clock, Entropy
from tidegate.upstream import classify
from tidegate.upstream.breaker import BreakerState
from tidegate.upstream.lane import DeploymentStatus, Lane, LanePolicy
from tidegate.upstream.probe import Probe, ask_models, knock
from tidegate.upstream.transport import AiohttpTransport, Transport

log = structlog.get_logger(__name__)

# Probes and questions of `doctor` have a few connections of their own, so that a full pool cannot make a server look ill.
CONTROL_LIMITS = HttpLimits(
    connect_timeout_s=5,
    read_timeout_s=5,
    write_timeout_s=5,
    pool_timeout_s=2,
    connections_max=8,
    kept_alive_max=4,
    response_bytes_max=1024 * 1024,
)

RETRY_BUDGET_WAIT_MS = 5_000
PROBE_ANSWER_MS = 1_000


class Router:
    def __init__(
        self,
        deployments: Iterable[Deployment],
        transport: Transport,
        control: Transport,
        clock: Clock,
        entropy: Entropy,
        policy: LanePolicy | None = None,
        pool_timeout_s: float = 10.0,
    ) -> None:
        self._transport = transport
        self._control = control
        self._clock = clock
        self._entropy = entropy
        self._pool_timeout_s = pool_timeout_s
        policy = policy or LanePolicy()
        self._lanes: dict[str, Lane] = {}
        self._by_model: dict[str, list[Lane]] = {}
        self._for_any: list[Lane] = []
        self._waiting: deque[asyncio.Future[None]] = deque()
        for deployment in deployments:
            if deployment.name in self._lanes:
                raise SettingsError(f"two deployments are named {deployment.name!r}: give each a name of its own")
            lane = Lane(deployment, transport.line(deployment), control.line(deployment), policy)
            self._lanes[deployment.name] = lane
            for model in deployment.models:
                self._by_model.setdefault(model, []).append(lane)
            if not deployment.models:
                self._for_any.append(lane)

    # What the engine asks before it sends.

    def knows(self, model: str) -> bool:
        return bool(self._route(model))

    def free_slots(self, model: str) -> int:
        now_ms = self._clock.monotonic_ms()
        free = 0
        for lane in self._route(model):
            free += lane.free_slots(now_ms)
        return min(free, self._transport.free_slots()) if free else 0

    def rests_until_ms(self, model: str) -> float:
        lanes = self._route(model)
        if not lanes:
            return 0.0
        now_ms = self._clock.monotonic_ms()
        at_ms = min(self._rest_ends_ms(lane, now_ms) for lane in lanes)
        return at_ms if at_ms > now_ms else 0.0

    @staticmethod
    def _rest_ends_ms(lane: Lane, now_ms: float) -> float:
        """A probe that is out may bring its deployment back at any moment: the next one's time would be too long a rest."""
        at_ms = lane.ready_at_ms()
        return min(at_ms, now_ms + PROBE_ANSWER_MS) if lane.breaker.state is BreakerState.PROBING else at_ms

    # The call itself.

    async def send(self, call: Call) -> Answer:
        lanes = self._route(call.model)
        now_ms = self._clock.monotonic_ms()
        lane = self._choose(lanes, call, (), now_ms)
        if lane is None:
            lane = await self._wait_for_lane(lanes, call)
            now_ms = self._clock.monotonic_ms()
        tried: list[Lane] = []
        while True:
            try:
                return await self._send_to(lane, call, now_ms)
            except (Throttled, Unavailable, KeyRejected) as error:
                tried.append(lane)
                now_ms = self._clock.monotonic_ms()
                other = self._choose(lanes, call, tried, now_ms) if len(lanes) > len(tried) else None
                if other is None:
                    raise
                log.info(
                    "upstream_failover", deployment=lane.deployment.name, to=other.deployment.name, why=error.reason
                )
                lane = other

    def _route(self, model: str) -> list[Lane]:
        return self._by_model.get(model) or self._for_any

    def _choose(self, lanes: list[Lane], call: Call, tried: Collection[Lane], now_ms: float) -> Lane | None:
        """The least loaded fit lane; a probe that is due goes first, or a shut deployment beside a good one stays shut."""
        best: Lane | None = None
        for lane in lanes:
            if lane.free_slots(now_ms) < 1 or (tried and lane in tried):
                continue
            if call.attempt_count and not lane.budget.allows_retry(now_ms):
                continue
            if lane.breaker.is_open:
                return lane
            if best is None or lane.load() < best.load():
                best = lane
        return best

    async def _send_to(self, lane: Lane, call: Call, now_ms: float) -> Answer:
        left_s = (call.deadline_ms - now_ms) / 1000
        if left_s <= 0:
            raise Unavailable("the call's deadline passed before it was sent", code="deadline_passed")
        if now_ms >= call.begin_by_ms:
            raise Unavailable("the lease may be over before the call was sent", code="lease_over")
        is_probe = lane.breaker.is_open
        if is_probe:
            lane.breaker.begin_probe(now_ms)
        bucket = lane.budget.retry(now_ms) if call.attempt_count else lane.budget.first_attempt(now_ms)
        lane.in_flight += 1
        try:
            if is_probe:
                await knock(lane)
            status, headers, body = await lane.line.post(
                lane.url(call.endpoint),
                call.idempotency_key,
                call.body,
                min(left_s + call.grace_ms / 1000, lane.total_s),
            )
            line, usage = classify.accept(call.endpoint, status, headers, body, self._clock.now_ms)
        except UpstreamError as error:
            failed = self._learn(lane, call, error, bucket)
        else:
            if lane.succeeded():
                log.info("upstream_recovered", deployment=lane.deployment.name)
            return Answer(status, line, usage, lane.deployment.name)
        finally:
            lane.in_flight -= 1
            if is_probe:
                lane.breaker.end_probe()
            if self._waiting:
                self._wake_waiting()
        raise failed

    def _learn(self, lane: Lane, call: Call, error: UpstreamError, bucket: int) -> UpstreamError:
        """Let the lane learn from a failure; gives the error that the engine sees."""
        now_ms = self._clock.monotonic_ms()
        if not error.billed and not isinstance(error, Refused):
            # The upstream did not take it, so it was no attempt, neither a first nor another.
            (lane.budget.undo_retry if call.attempt_count else lane.budget.undo_first)(bucket)
        if isinstance(error, KeyRejected) and error.status == 403 and lane.blames_the_request(call.idempotency_key):
            lane.failures[Refused.reason] += 1
            return Refused("the upstream forbids this request (403), while others pass with the same key", status=403)
        if isinstance(error, PoolExhausted) or now_ms >= call.deadline_ms:
            # Our own ceiling or our own deadline: nobody's health is harmed.
            lane.failures[error.reason] += 1
        elif lane.failed(error, call.idempotency_key, now_ms, self._entropy.uniform(0.0, 1.0)):
            self._say_shut(lane, error)
        key = lane.deployment.api_key
        if key is not None and error.body:
            error.body = error.body.replace(key.reveal().encode(), b"***")
        if not isinstance(error, PoolExhausted):
            error.retry_after_ms = self._wait_ms(call.model, now_ms)
        return error

    def _say_shut(self, lane: Lane, error: UpstreamError) -> None:
        name = lane.deployment.name
        if isinstance(error, KeyRejected):
            log.error(
                "upstream_key_rejected", deployment=name, status=error.status, to_do="check the deployment's api_key"
            )
        else:
            log.warning("upstream_shut", deployment=name, why=error.message)

    def _wait_ms(self, model: str, now_ms: float) -> int | None:
        wait_ms = math.ceil(min(lane.ready_at_ms() for lane in self._route(model)) - now_ms)
        return wait_ms if wait_ms > 0 else None

    # When no lane is fit.

    async def _wait_for_lane(self, lanes: list[Lane], call: Call) -> Lane:
        """Wait, in line and not for long, while the only thing missing is a slot; otherwise say what is missing."""
        try:
            async with asyncio.timeout(self._pool_timeout_s):
                while True:
                    self._refuse_what_a_slot_cannot_help(lanes, call)
                    place = asyncio.get_running_loop().create_future()
                    self._waiting.append(place)
                    try:
                        await place
                    finally:
                        if place in self._waiting:
                            self._waiting.remove(place)
                    lane = self._choose(lanes, call, (), self._clock.monotonic_ms())
                    if lane is not None:
                        return lane
        except TimeoutError:
            pass
        raise PoolExhausted(
            f"every slot for model {call.model!r} stayed taken for {self._pool_timeout_s:g} s: "
            "raise max_in_flight of its deployments or lower the calls in flight",
            retry_after_ms=1000,
        )

    def _refuse_what_a_slot_cannot_help(self, lanes: list[Lane], call: Call) -> None:
        if not lanes:
            raise Unavailable(f"no deployment serves model {call.model!r}: add one under models, or set an upstream")
        now_ms = self._clock.monotonic_ms()
        fit = [lane for lane in lanes if lane.ready_at_ms() <= now_ms]
        if not fit:
            wait_ms = self._wait_ms(call.model, now_ms)
            resting = any(not lane.breaker.is_open for lane in lanes)
            kind = Throttled if resting else Unavailable
            raise kind(f"every deployment of model {call.model!r} rests or is shut", retry_after_ms=wait_ms)
        if call.attempt_count and not any(lane.budget.allows_retry(now_ms) for lane in fit):
            raise Throttled(
                "this retry waits: its deployment has had as many retries as it bears for now",
                code="retry_budget_spent",
                retry_after_ms=RETRY_BUDGET_WAIT_MS,
            )

    def _wake_waiting(self) -> None:
        # All of them, in order: the first may wait for another model than the one whose slot came free.
        waiting, self._waiting = self._waiting, deque()
        for place in waiting:
            if not place.done():
                place.set_result(None)

    # What people ask.

    def status(self) -> list[DeploymentStatus]:
        now_ms = self._clock.monotonic_ms()
        return [lane.status(now_ms) for lane in self._lanes.values()]

    async def probe(self, name: str) -> Probe:
        """Ask one deployment, through the control client, whether it is there and which models it serves."""
        return await ask_models(self._lanes[name], self._clock)

    async def close(self) -> None:
        await self._transport.close()
        await self._control.close()


def open_router(
    deployments: Iterable[Deployment],
    limits: HttpLimits,
    clock: Clock,
    entropy: Entropy,
    policy: LanePolicy | None = None,
) -> Router:
    """A router over aiohttp; to be called inside the running loop, and closed with it."""
    transport, control = AiohttpTransport(limits), AiohttpTransport(CONTROL_LIMITS)
    return Router(deployments, transport, control, clock, entropy, policy, limits.pool_timeout_s)
