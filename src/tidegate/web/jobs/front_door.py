"""What a front door says of itself, so that no other room has to know it. The list of doors is `web/doors.py`.

Commands and workers read that list too, and serve no routes: a door imports what its routes need when it is asked for them.
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
    from tidegate.web.http.operations import Operations
    from tidegate.web.http.problems import ErrorShape
    from tidegate.web.http.routes import Guarded
    from tidegate.web.http.tenant_slots import TenantSlots
    from tidegate.web.jobs.creation import JobCreation
    from tidegate.web.jobs.job_wait import JobWait
    from tidegate.web.jobs.job_watch import JobWatch


class DoorParts(msgspec.Struct, frozen=True):
    """What doors make their routes of. `uploads` and `streams` bound what one tenant has open at all doors together."""

    context: "WebContext"
    reception: "Reception"
    creation: "JobCreation"
    watch: "JobWatch"
    wait: "JobWait"
    uploads: "TenantSlots"
    streams: "TenantSlots"


class FrontDoor:
    """`about` names it in the OpenAPI document. `metric_names` are what calls are counted under, by where their paths begin. `scopes` are
    what its routes ask of a key; a key that is bound to environments has only those of `environment_scopes`."""

    about: str
    metric_names: tuple[tuple[str, str], ...]
    scopes: tuple[str, ...]
    environment_scopes: tuple[str, ...] = ()

    def routes(self, parts: DoorParts) -> "list[Guarded]":
        """Return its routes, where the app does not make them itself."""
        return []

    def operations(self) -> "Operations":
        """Return what its routes are for. A route that is not among them is described by its path."""
        return {}

    def error_shapes(self) -> "Mapping[str, ErrorShape]":
        """Return how it writes refusals, by where its paths begin; OpenAI's shape holds elsewhere."""
        return {}

    def event_bodies(self, store: "Store", blobs: "Blobs", bytes_max: int) -> "Mapping[str, EventBodies]":
        """Return what words the events of jobs that were made here, by the name that these jobs carry; empty for OpenAI's words."""
        return {}
