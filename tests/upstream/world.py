"""The world of tests of the road to a model server.

Real: the router with all that is below it, HTTP, and the sockets to servers whose answers a test scripts (`raw_server`).
Not real: the clock, which stands still until a test moves it, and chance, which always gives the middle of a range. There is no store;
limits, where a test gives some, are in memory (`limits`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

from yarl import URL

from tests.support.ports import FairDice, HandClock
from tests.upstream.raw_server import RawServer
from tidegate.core.deployments import Deployment, HttpLimits, Resource, Secret
from tidegate.core.errors import UpstreamError
from tidegate.core.nouns import Answer, Call
from tidegate.upstream.calls.open_router import open_router
from tidegate.upstream.calls.router import Router
from tidegate.upstream.http.transport import AiohttpClient, AiohttpTransport
from tidegate.upstream.routing.deployment_state import DeploymentPolicy
from tidegate.upstream.routing.slots import Capacity

CHAT_ENDPOINT = "/v1/chat/completions"


class RouterWorld:
    """Opens routers under one clock, and makes the calls that they are given."""

    def __init__(self) -> None:
        self.clock = HandClock()
        self.numbers = 0

    @contextlib.asynccontextmanager
    async def router(
        self,
        *deployments: Deployment,
        limits: HttpLimits | None = None,
        policy: DeploymentPolicy | None = None,
        resources: Iterable[Resource] = (),
        capacity: Capacity | None = None,
    ) -> AsyncIterator[Router]:
        router = open_router(limits or HttpLimits(), self.clock, FairDice(), policy, capacity)
        try:
            router.serve(deployments, resources)
            yield router
        finally:
            await router.close()

    def call(
        self,
        model: str = "m",
        *,
        key: str | None = None,
        attempt_count: int = 0,
        left_ms: float = 60_000,
        body: bytes = b'{"model":"m"}',
        **more: Any,
    ) -> Call:
        self.numbers += 1
        return Call(
            job_id="batch_1",
            number=self.numbers,
            endpoint=more.pop("endpoint", CHAT_ENDPOINT),
            model=model,
            body=body,
            idempotency_key=key or f"batch_1:{self.numbers}",
            deadline_ms=self.clock.monotonic + left_ms,
            attempt_count=attempt_count,
            **more,
        )


@contextlib.asynccontextmanager
async def line_to(
    server: RawServer, limits: HttpLimits | None = None, **more: Any
) -> AsyncIterator[tuple[AiohttpTransport, AiohttpClient, URL]]:
    """A transport of its own, its line to a deployment at this server, and the URL of its chat endpoint."""
    transport = AiohttpTransport(limits or HttpLimits())
    place = deployment(server.url, **more)
    try:
        yield transport, transport.client_for(place), URL(place.url_of(CHAT_ENDPOINT))
    finally:
        await transport.close()


async def together(router: Router, calls: Sequence[Call]) -> list[Answer | UpstreamError]:
    """Send all at once; what each got."""
    found = await asyncio.gather(*[router.send(call) for call in calls], return_exceptions=True)
    assert all(isinstance(one, Answer | UpstreamError) for one in found), found
    return found  # type: ignore[return-value]


def deployment(url: str, name: str = "one", **more: Any) -> Deployment:
    return Deployment(name=name, url=url, **more)


def secret() -> Secret:
    return Secret("sk-canary-77aa")
