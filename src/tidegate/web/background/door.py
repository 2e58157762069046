"""The front door of background responses.

They are created at the door of interactive calls, and read here.
"""

from typing import TYPE_CHECKING

from tidegate.web.jobs.front_door import DoorParts, FrontDoor

if TYPE_CHECKING:
    from tidegate.web.http.routes import Guarded


class BackgroundDoor(FrontDoor):
    about = "background responses"
    metric_names = (("/v1/responses", "responses"),)
    scopes = ("inference",)
    environment_scopes = ("inference",)

    def routes(self, parts: DoorParts) -> "list[Guarded]":
        from tidegate.web.background.routes import BackgroundRoutes

        return BackgroundRoutes(parts.context, parts.reception, parts.wait).routes()
