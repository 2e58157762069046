"""The front door of interactive calls.

The app makes its routes, because the console's playground calls through them too.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tidegate.web.jobs.front_door import FrontDoor

if TYPE_CHECKING:
    from tidegate.web.http.problems import ErrorShape


class GatewayDoor(FrontDoor):
    about = "interactive calls"
    metric_names = (("/v1/", "interactive"),)
    scopes = ("inference",)
    environment_scopes = ("inference",)

    def error_shapes(self) -> "Mapping[str, ErrorShape]":
        from tidegate.web.http.problems import ANTHROPIC_PATHS, in_anthropic_shape

        return {ANTHROPIC_PATHS: in_anthropic_shape}
