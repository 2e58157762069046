"""The front door of Anthropic's Message Batches."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tidegate.web.jobs.front_door import DoorParts, FrontDoor
from tidegate.web.message_batches.paths import ONE, PATH

if TYPE_CHECKING:
    from tidegate.web.http.operations import OperationTable
    from tidegate.web.http.problems import ErrorShape
    from tidegate.web.http.routes import Guarded


class MessageBatchDoor(FrontDoor):
    about = "Anthropic's Message Batches"
    metric_names = ((PATH, "messages"),)
    scopes = ("batches:read", "batches:write", "batches:cancel", "files:read")

    def routes(self, parts: DoorParts) -> "list[Guarded]":
        from tidegate.web.message_batches.routes import MessageBatchRoutes

        return MessageBatchRoutes(parts.context, parts.reception, parts.creation, parts.uploads).routes()

    def operations(self) -> "OperationTable":
        from tidegate.web.http.operations import Operation
        from tidegate.web.message_batches import schemas

        pages = ("after_id", "before_id", "limit", "beta")
        return {
            ("GET", PATH): Operation("List message batches", gives=schemas.MessageBatchPage, query=pages),
            ("POST", PATH): Operation("Create a message batch", gives=schemas.MessageBatch),
            ("GET", ONE): Operation("Show a message batch", gives=schemas.MessageBatch),
            ("DELETE", ONE): Operation("Delete an ended message batch", gives=schemas.MessageBatchDeleted),
            ("POST", f"{ONE}/cancel"): Operation("Cancel a message batch", gives=schemas.MessageBatch),
            ("GET", f"{ONE}/results"): Operation("Read the results of a message batch"),
        }

    def error_shapes(self) -> "Mapping[str, ErrorShape]":
        from tidegate.web.http.problems import in_anthropic_shape

        return {PATH: in_anthropic_shape}
