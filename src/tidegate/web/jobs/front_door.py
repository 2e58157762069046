"""The description of a front door: its routes, scopes, shapes and names, so that no other room has
to know them. `web/doors.py` lists all doors.

Commands and workers read that list too, and serve no routes. So a door imports what its routes need
only when it is asked for them.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from tidegate.core.ports import Blobs
    from tidegate.core.webhooks import EventBodies
    from tidegate.stages.accept import Reception
    from tidegate.store.store import Store
    from tidegate.web.context import WebContext
    from tidegate.web.http.operations import OperationTable
    from tidegate.web.http.problems import ErrorShape
    from tidegate.web.http.routes import Guarded
    from tidegate.web.http.tenant_slots import TenantSlots
    from tidegate.web.jobs.creation import JobCreation
    from tidegate.web.jobs.job_wait import JobWait
    from tidegate.web.jobs.job_watch import JobWatch


class DoorParts(msgspec.Struct, frozen=True):
    """The parts that doors make their routes of.

    `uploads` and `streams` bound what one tenant has open at all doors together.
    """

    context: "WebContext"
    reception: "Reception"
    creation: "JobCreation"
    watch: "JobWatch"
    wait: "JobWait"
    uploads: "TenantSlots"
    streams: "TenantSlots"


class FrontDoor:
    """A front door.

    `about` describes it in the OpenAPI document. `metric_names` are the names of its calls in
    metrics, by the beginning of their paths. `scopes` are the scopes that its routes need; a key
    that is bound to environments gets only `environment_scopes`.
    """

    about: str
    metric_names: tuple[tuple[str, str], ...]
    scopes: tuple[str, ...]
    environment_scopes: tuple[str, ...] = ()

    def routes(self, parts: DoorParts) -> "list[Guarded]":
        """Return the door's routes, unless the app makes them itself."""
        return []

    def operations(self) -> "OperationTable":
        """Return the descriptions of its routes. A route without one is described by its path."""
        return {}

    def error_shapes(self) -> "Mapping[str, ErrorShape]":
        """Return the shapes of its refusals by the beginning of their paths; OpenAI's shape holds
        elsewhere.
        """
        return {}

    def event_bodies(self, store: "Store", blobs: "Blobs", bytes_max: int) -> "Mapping[str, EventBodies]":
        """Return what writes the webhook events of jobs made at this door, by the name that these
        jobs carry; empty for OpenAI's form.
        """
        return {}
