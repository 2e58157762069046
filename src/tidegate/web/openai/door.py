"""The front door of OpenAI's Files, Uploads and Batches."""

from typing import TYPE_CHECKING

from tidegate.web.jobs.front_door import DoorParts, FrontDoor

if TYPE_CHECKING:
    from tidegate.web.http.operations import OperationTable
    from tidegate.web.http.routes import Guarded


class OpenAIDoor(FrontDoor):
    about = "OpenAI's Files, Uploads and Batches"
    metric_names = (("/v1/files", "files"), ("/v1/uploads", "uploads"), ("/v1/batches", "batches"))
    scopes = ("files:read", "files:write", "batches:read", "batches:write", "batches:cancel")

    def routes(self, parts: DoorParts) -> "list[Guarded]":
        from tidegate.web.openai.batches import BatchRoutes
        from tidegate.web.openai.events.routes import EventRoutes
        from tidegate.web.openai.files import FileRoutes
        from tidegate.web.openai.items import ItemRoutes
        from tidegate.web.openai.models import ModelRoutes
        from tidegate.web.openai.uploads import UploadRoutes

        context = parts.context
        return [
            *FileRoutes(context, parts.reception, parts.uploads).routes(),
            *UploadRoutes(context, parts.reception, parts.uploads).routes(),
            *BatchRoutes(context, parts.reception, parts.creation, parts.wait).routes(),
            *ItemRoutes(context).routes(),
            *EventRoutes(context, parts.watch, parts.streams).routes(),
            *ModelRoutes(context).routes(),
        ]

    def operations(self) -> "OperationTable":
        from tidegate.web.openai.operations import OPERATIONS

        return OPERATIONS
