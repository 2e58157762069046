"""The front door of webhook endpoints and their deliveries."""

from typing import TYPE_CHECKING

from tidegate.web.jobs.front_door import DoorParts, FrontDoor

if TYPE_CHECKING:
    from tidegate.web.http.operations import OperationTable
    from tidegate.web.http.routes import Guarded


class WebhookDoor(FrontDoor):
    about = "webhooks"
    metric_names = (("/v1/webhook", "webhooks"),)
    scopes = ("batches:read", "batches:write")

    def routes(self, parts: DoorParts) -> "list[Guarded]":
        from tidegate.web.webhooks.webhooks import WebhookRoutes

        return WebhookRoutes(parts.context, parts.reception).routes()

    def operations(self) -> "OperationTable":
        from tidegate.web.webhooks.operations import OPERATIONS

        return OPERATIONS
