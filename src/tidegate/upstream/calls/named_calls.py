"""A call for a name: within what its key may have at once, along the name's own deployments and then its fallbacks.

A call goes on to the next only if those before can neither have done nor billed it, or, where a user waits for it, were too busy. An item
goes alone or in a group, by its route. A call that a worker which is gone left in a queue is waited for there, and sent to no other.
"""

from collections.abc import Coroutine
from typing import Any, overload

import msgspec
import structlog

from tidegate.core.answers import answer as answers
from tidegate.core.deployments import EngineKind
from tidegate.core.errors import Ambiguous, KeyRejected, PoolExhausted, Throttled, Unavailable, UpstreamError
from tidegate.core.nouns import Answer, Call
from tidegate.core.ports import Clock
from tidegate.upstream.calls.call_path import CallPath
from tidegate.upstream.calls.response import UpstreamResponse
from tidegate.upstream.calls.traffic import Traffic, goes_on
from tidegate.upstream.calls.translation import ItemTranslation, Shaped
from tidegate.upstream.calls.view import View
from tidegate.upstream.grouping.groups import Groups
from tidegate.upstream.routing.deployment_state import DeploymentState
from tidegate.upstream.routing.key_slots import KeySlots
from tidegate.upstream.routing.routes import NameRoute

log = structlog.get_logger(__name__)


class NamedCalls:
    def __init__(self, path: CallPath, groups: Groups, key_slots: KeySlots, view: View, clock: Clock) -> None:
        self._path = path
        self._groups = groups
        self._key_slots = key_slots
        self._view = view
        self._clock = clock

    def send(self, route: NameRoute, call: Call) -> Coroutine[Any, Any, Answer]:
        """Send an item's call."""
        if call.parallel:
            return self._send_within(route, call)
        if not route.is_direct:
            return self._send(route, call)
        return self._path.open(route, call, None) if route.items_per_call == 1 else self._groups.send(route, call)

    def open(self, route: NameRoute, call: Call, traffic: Traffic) -> Coroutine[Any, Any, UpstreamResponse]:
        """Begin an interactive call: its answer, whole or from its first byte on."""
        if call.parallel:
            return self._open_within(route, call, traffic)
        return self._along(route, call, traffic) if route.fallbacks else self._path.open(route, call, traffic)

    async def send_interactive(self, route: NameRoute, call: Call, owner: str) -> Answer:
        """Send an item's call in front of background work, and read its whole answer."""
        now_s = self._clock.now_ms() // 1000
        translation: ItemTranslation | None = None

        def shape(engine: EngineKind) -> Shaped:
            nonlocal translation
            translation = ItemTranslation(call.endpoint, call.body, engine, now_s)
            return translation.shaped

        try:
            response = await self.open(route, call, Traffic(shape, is_stream=False, owner=owner, is_item=True))
        except UpstreamError as error:
            if translation is not None:
                translation.failed(error)
            raise
        assert translation is not None
        assert response.body is not None, "an answer that is not streamed is read whole"
        line, usage = answers.read(translation.shaped.endpoint, response.body)
        return Answer(response.status, translation.answer(line), usage, response.deployment.name)

    async def _open_within(self, route: NameRoute, call: Call, traffic: Traffic) -> UpstreamResponse:
        while True:
            place = await self._key_slots.take_slots(call.parallel)
            try:
                # An item's own moment is that of its lease, which ends no later.
                bound = msgspec.structs.replace(call, begin_by_ms=min(call.begin_by_ms, place.until_ms))
                response = await self._along(route, bound, traffic)
            except BaseException as error:
                place.release_key_slots()
                now_ms = self._clock.monotonic_ms()
                is_lost = isinstance(error, UpstreamError) and error.code == "lease_over"
                if not is_lost or not place.until_ms <= now_ms < call.begin_by_ms:
                    raise
            else:
                response.keep(place)
                return response

    async def _send_within(self, route: NameRoute, call: Call) -> Answer:
        place = await self._key_slots.take_slots(call.parallel)
        try:
            return await self._send(route, call)
        finally:
            place.release_key_slots()

    async def _send(self, route: NameRoute, call: Call) -> Answer:
        for one in (route, *route.fallbacks):
            if one.queued_states and (len(one.states) > 1 or route.fallbacks):
                state = await _out_at(one, call)
                if state is not None:
                    return await self._path.send_to(one, call, state)
        return await self._along(route, call, None)

    def _send_by(self, route: NameRoute, call: Call) -> Coroutine[Any, Any, Answer]:
        return self._groups.send(route, call) if route.items_per_call > 1 else self._path.open(route, call, None)

    @overload
    async def _along(self, route: NameRoute, call: Call, traffic: None) -> Answer: ...

    @overload
    async def _along(self, route: NameRoute, call: Call, traffic: Traffic) -> UpstreamResponse: ...

    async def _along(self, route: NameRoute, call: Call, traffic: Traffic | None) -> Answer | UpstreamResponse:
        """The name's own deployments, then the fallbacks that its key allows.

        A retry goes first to those that did not fail this call, or all its tries could go to the one deployment that is ill.
        """
        failed: UpstreamError | None = None
        ways = route.ways(call.models)
        if call.attempt_count:
            ways = tuple(sorted(ways, key=lambda one: one.has_failed(call)))
        for one, after in zip(ways, (*ways[1:], None), strict=True):
            try:
                if traffic is None:
                    return await self._send_by(one, call)
                return await self._path.open(one, call, traffic)
            except (Throttled, Unavailable, KeyRejected, PoolExhausted, Ambiguous) as error:
                if isinstance(error, Ambiguous) and not goes_on(error, traffic):
                    raise
                if not route.fallbacks or error.code in ("deadline_passed", "lease_over"):
                    raise
                if after is not None:
                    log.info(
                        "upstream_failover",
                        deployment=_names(one),
                        to=_names(after),
                        why=error.code,
                        model=call.model,
                    )
                failed = failed or error
        assert failed is not None
        if failed.retry_after_ms is None:
            # When it failed, those after it still took calls.
            failed.put_off(self._view.wait_ms(route, self._clock.monotonic_ms(), call))
        raise failed


def _names(route: NameRoute) -> str:
    return ", ".join(state.deployment.name for state in (route.states or route.interactive_states))


async def _out_at(route: NameRoute, call: Call) -> DeploymentState | None:
    """Where a worker that is gone left this very call."""
    for state in route.queued_states:
        line = state.queued_line
        if line is not None and await line.is_out(call.idempotency_key, call.attempt_count):
            return state
    return None
