"""The scheduler's modes and counts, which an operator reads and switches.

A switch is in the store, so every process follows. Counts are those of this process.
"""

from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tidegate import metrics
from tidegate.core.nouns import Caller
from tidegate.core.schedule.policy import ModeOverride
from tidegate.settings import Settings, schedule_policy, switched
from tidegate.settings.policy import NO_SHADOW
from tidegate.settings.scheduling import ModeName, ShadowMode
from tidegate.store.fleet.mode_overrides import MODE
from tidegate.web.admin.audit import READ, WRITE, AuditTrail, trail_of
from tidegate.web.context import WebContext
from tidegate.web.http.answers import json_answer
from tidegate.web.http.routes import Guarded
from tidegate.web.requests import requests

CONFIGURED = "configured"
_PATH = "/admin/v1/scheduler"


class SchedulerRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The modes to switch.

    A mode that is left out stays; `configured` returns to that of the settings.
    """

    mode: ModeName | Literal["configured"] | None = None
    shadow_mode: ShadowMode | Literal["configured"] | None = None


class SchedulerStatus(msgspec.Struct, frozen=True):
    """The modes in force, whether each was switched at run time, and this process's counts, if it
    has a worker.
    """

    mode: str
    shadow_mode: str
    mode_switched: bool
    shadow_mode_switched: bool
    shadow_decisions: int = 0
    shadow_differences: int = 0
    picks: dict[str, int] = {}
    skips: dict[str, int] = {}


def status_of(settings: Settings, override: ModeOverride) -> SchedulerStatus:
    """Return the modes in force with this switch."""
    policy = switched(schedule_policy(settings), override)
    return SchedulerStatus(
        mode=policy.mode.value,
        shadow_mode=policy.shadow_mode.value if policy.shadow_mode else NO_SHADOW,
        mode_switched=bool(override.mode),
        shadow_mode_switched=bool(override.shadow_mode),
    )


async def override_mode(trail: AuditTrail, wanted: SchedulerRequest) -> ModeOverride:
    """Switch the modes. Asking twice changes nothing."""
    store = trail.noting("scheduler.mode", "scheduler", MODE)
    mode, shadow_mode = ("" if one == CONFIGURED else one for one in (wanted.mode, wanted.shadow_mode))
    return await store.override_mode(mode, shadow_mode)


class SchedulerRoutes:
    def __init__(self, context: WebContext) -> None:
        self._context = context
        self._store = context.store
        self._settings = context.settings

    def routes(self) -> list[Guarded]:
        return [
            Guarded("GET", _PATH, READ, self.show),
            Guarded("POST", _PATH, WRITE, self.set),
        ]

    async def show(self, request: Request, caller: Caller) -> Response:
        return json_answer(self._counted(await self._store.mode_override()))

    async def set(self, request: Request, caller: Caller) -> Response:
        wanted = await requests.json_body(request, SchedulerRequest, self._settings.limits.body_bytes_max)
        return json_answer(self._counted(await override_mode(trail_of(self._context, request, caller), wanted)))

    def _counted(self, override: ModeOverride) -> SchedulerStatus:
        return msgspec.structs.replace(
            status_of(self._settings, override),
            shadow_decisions=sum(metrics.counted(metrics.scheduler_shadow_decisions).values()),
            shadow_differences=sum(metrics.counted(metrics.scheduler_shadow_differences).values()),
            picks=metrics.counted(metrics.scheduler_picks),
            skips=metrics.counted(metrics.scheduler_skips),
        )
