"""The metrics over HTTP.

They are at a separate small listener, away from the public port, and beside the admin API for
programs on this machine.

A scraper learns how much is done, but not for which tenant: `metrics.py` lists the labels.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tidegate import metrics
from tidegate.settings import Settings
from tidegate.web.gauges import Gauges
from tidegate.web.http.door import PlainDoor
from tidegate.web.http.loopback import FORWARDED, is_local_program, is_loopback
from tidegate.web.http.serving import ListenLimits, listening

PATH = "/metrics"


def local_route(gauges: Gauges) -> Route:
    """Return the route beside the admin API. It answers 404 to all but programs on this machine."""

    async def shown_here(request: Request) -> Response:
        if not _is_from_here(request) or any(name in request.headers for name in FORWARDED):
            raise HTTPException(404)
        return await _shown(gauges)

    return Route(PATH, shown_here)


@asynccontextmanager
async def scraped(
    settings: Settings,
    health: Sequence[Route] = (),
    stop: asyncio.Event | None = None,
    gauges: Gauges | None = None,
) -> AsyncIterator[str]:
    """Serve metrics and health at `metrics.port`; yields the address, or an empty text if the port
    is off.

    A scraper that does not read its answer is cut off at the end of the grace, which begins with
    `stop`.
    """
    if not settings.metrics.port:
        yield ""
        return

    async def shown(request: Request) -> Response:
        """Show metrics to anyone who can connect, except to a web page in a browser on this
        machine.
        """
        if request.client is not None and is_loopback(request.client.host) and not _is_from_here(request):
            raise HTTPException(403)
        return await _shown(gauges)

    app = PlainDoor(Starlette(routes=[Route(PATH, shown), *health]))
    limits = ListenLimits(grace_s=settings.worker.grace_ms / 1000)
    async with listening(app, settings.metrics.host, settings.metrics.port, limits, stop) as address:
        yield address


def _is_from_here(request: Request) -> bool:
    return request.client is not None and is_local_program(request.client.host, request.headers)


async def _shown(gauges: Gauges | None) -> Response:
    if gauges is not None:
        await gauges.refresh()
    return Response(metrics.text(), media_type=metrics.CONTENT_TYPE)
