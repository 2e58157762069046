"""The front door of the completion-batch API."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tidegate.web.completion_batch.paths import DOOR, ONE, PATH, PREFIX, SCOPE
from tidegate.web.jobs.front_door import DoorParts, FrontDoor

if TYPE_CHECKING:
    from tidegate.core.ports import Blobs
    from tidegate.core.webhooks import EventBodies
    from tidegate.store.store import Store
    from tidegate.web.http.operations import OperationTable
    from tidegate.web.http.problems import ErrorShape
    from tidegate.web.http.routes import Guarded


class CompletionBatchDoor(FrontDoor):
    about = "the completion-batch API"
    metric_names = ((PREFIX, "completion_batch"),)
    scopes = (SCOPE,)
    environment_scopes = (SCOPE,)

    def routes(self, parts: DoorParts) -> "list[Guarded]":
        from tidegate.web.completion_batch.routes import CompletionBatchRoutes

        return CompletionBatchRoutes(parts).routes()

    def operations(self) -> "OperationTable":
        from tidegate.web.completion_batch.shapes import BatchEntity, ItemEntity
        from tidegate.web.http.operations import Operation

        shown = ("includesItems", "includesUsers")
        return {
            ("POST", PATH): Operation("Create a completion batch", gives=BatchEntity),
            ("GET", ONE): Operation("Show a completion batch", gives=BatchEntity, query=shown),
            ("POST", f"{ONE}/cancel"): Operation("Cancel a completion batch"),
            ("GET", f"{ONE}/events"): Operation("Follow a completion batch by its events"),
            ("GET", f"{ONE}/{{item_id}}"): Operation("Show an item", gives=ItemEntity),
        }

    def error_shapes(self) -> "Mapping[str, ErrorShape]":
        from tidegate.web.completion_batch.shapes import error_body

        return {PREFIX: error_body}

    def event_bodies(self, store: "Store", blobs: "Blobs", bytes_max: int) -> "Mapping[str, EventBodies]":
        from tidegate.web.completion_batch.callbacks import CallbackBodies

        return {DOOR: CallbackBodies(store, blobs, bytes_max)}
