"""The web app: every route behind one door.

It gets everything it needs and opens no socket itself.
"""

from collections.abc import Iterable, Sequence
from typing import TypeVar

from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tidegate.stages.accept import Reception
from tidegate.stages.running_keys import RunningKeys
from tidegate.web import scrape
from tidegate.web.admin.audit import AuditRoutes
from tidegate.web.admin.autoscale import AutoscaleRoutes
from tidegate.web.admin.batches import AdminBatchRoutes
from tidegate.web.admin.budgets import BudgetRoutes
from tidegate.web.admin.deliveries import DeliveryRoutes
from tidegate.web.admin.deployments import DeploymentRoutes
from tidegate.web.admin.items import AdminItemRoutes
from tidegate.web.admin.keys import KeyRoutes
from tidegate.web.admin.operations import OperationRoutes
from tidegate.web.admin.overview import OverviewRoutes
from tidegate.web.admin.scheduler import SchedulerRoutes
from tidegate.web.admin.usage import UsageRoutes
from tidegate.web.background.routes import BackgroundRoutes
from tidegate.web.console.pages import ConsolePages
from tidegate.web.context import WebContext
from tidegate.web.doors import DOORS
from tidegate.web.gateway.gateway import GatewayRoutes
from tidegate.web.gauges import Gauges
from tidegate.web.health import Health
from tidegate.web.http.auth import Authenticator, guarded_routes
from tidegate.web.http.door import HIDDEN, RequestDoor
from tidegate.web.http.inbound import ListenedApp
from tidegate.web.http.intake import BodyRoom
from tidegate.web.http.pages import static_route
from tidegate.web.http.tenant_slots import stream_slots, upload_slots
from tidegate.web.jobs.creation import JobCreation
from tidegate.web.jobs.front_door import DoorParts
from tidegate.web.jobs.job_wait import JobWait
from tidegate.web.jobs.job_watch import JobWatch
from tidegate.web.jobs.limit_rooms import LimitRooms
from tidegate.web.openapi.pages import DocumentPages

T = TypeVar("T")

# The names of operators' calls in metrics, by the beginning of their paths.
ADMIN_NAMES = (("/admin/", "admin"), ("/control/", "admin"))
# Paths for operators alone: on the API's port if only this machine can reach it, else on a listener
# of their own.
ADMIN_PATHS = ("/admin/", "/console", "/metrics")
SHARED_PATHS = ("/static/",)


class AppPart:
    """The app behind a listener that serves only the operators' paths, or only all others."""

    def __init__(self, app: ListenedApp, *, is_admin: bool) -> None:
        self._app = app
        self.busy = app.busy
        self._is_admin = is_admin

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if not path.startswith(SHARED_PATHS) and path.startswith(ADMIN_PATHS) is not self._is_admin:
            scope = {**scope, HIDDEN: True}
        await self._app(scope, receive, send)


class Api(Starlette):
    """Routes behind one door.

    The door answers every exception, so Starlette's middleware for errors is left out.
    """

    def __init__(self, routes: Sequence[Route], context: WebContext, room: BodyRoom, running_keys: RunningKeys) -> None:
        super().__init__(routes=routes)
        # A redirect would send a caller's key to wherever the Host header says.
        self.router.redirect_slashes = False
        self.room = room
        self.running_keys = running_keys
        self._door = RequestDoor(
            self.router,
            clock=context.clock,
            entropy=context.entropy,
            room=room,
            shapes=dict(_longest_first(pair for door in DOORS for pair in door.error_shapes().items())),
            names=tuple(_longest_first([*(pair for door in DOORS for pair in door.metric_names), *ADMIN_NAMES])),
        )
        self.busy = self._door.busy

    def build_middleware_stack(self) -> ASGIApp:
        return self._door


def _longest_first(pairs: Iterable[tuple[str, T]]) -> list[tuple[str, T]]:
    """Sort pairs by their path, longest first, because the first match counts."""
    return sorted(pairs, key=lambda pair: len(pair[0]), reverse=True)


def build_app(context: WebContext) -> Api:
    reception = Reception(context.store, context.blobs, context.clock, context.entropy, context.worker_id)
    limits = context.settings.limits
    creation, watch = JobCreation(context, reception), JobWatch(context)
    uploads, streams = upload_slots(limits.uploads_max), stream_slots(limits.event_streams_max)
    wait = JobWait(watch, streams)
    parts = DoorParts(context, reception, creation, watch, wait, uploads, streams)
    gateway = GatewayRoutes(context, BackgroundRoutes(context, reception, wait))
    entries = [
        # Routes are tried in order, and users wait for these.
        *gateway.routes(),
        *(entry for door in DOORS for entry in door.routes(parts)),
        *KeyRoutes(context).routes(),
        *AdminBatchRoutes(context).routes(),
        *AdminItemRoutes(context).routes(),
        *OperationRoutes(context).routes(),
        *OverviewRoutes(context).routes(),
        *AutoscaleRoutes(context).routes(),
        *DeliveryRoutes(context).routes(),
        *AuditRoutes(context).routes(),
        *SchedulerRoutes(context).routes(),
        *DeploymentRoutes(context).routes(),
        *UsageRoutes(context).routes(),
        *BudgetRoutes(context).routes(),
    ]
    settings = context.settings
    room = BodyRoom(
        settings.server.bodies_bytes_max, max(settings.gateway.body_bytes_max, settings.limits.body_bytes_max)
    )
    authenticator = Authenticator(context)
    pages = [*DocumentPages(entries).routes(), *ConsolePages(context, authenticator, gateway).routes(), static_route()]
    guarded = guarded_routes(authenticator, LimitRooms(context), entries)
    return Api(
        [*guarded, *pages, *Health(context, serves_api=True).routes(), scrape.local_route(Gauges(context))],
        context,
        room,
        reception.running_keys,
    )
