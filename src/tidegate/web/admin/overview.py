"""The view of what runs, waits and is stuck over all tenants.

It has the overview, workers, flows, organizations and the free capacity of models.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tidegate.core.budgets.budget import Limit, Period
from tidegate.core.deployments import Serves
from tidegate.core.nouns import Caller
from tidegate.core.schedule.reasons import Reason
from tidegate.core.states import WorkerState
from tidegate.core.usage.prices import units_text
from tidegate.store.fleet.workers import report_from
from tidegate.store.operators.operated import OverviewRows
from tidegate.upstream.routing.deployment_status import DeploymentStatus
from tidegate.web.admin.audit import READ, WRITE, text
from tidegate.web.context import WebContext
from tidegate.web.http.answers import json_answer, page_of
from tidegate.web.http.routes import Guarded
from tidegate.web.jobs.reported_health import reported_status, reported_troubles
from tidegate.web.requests import requests

LIST_COUNT = 20
LIST_COUNT_MAX = 100
WORKERS_MAX = 1_000
LOST = "lost"
FLOWS_MAX = 1_000


class OpenBatches(msgspec.Struct, frozen=True):
    """Open batches of one status, and their requests."""

    status: str
    batches: int
    paused: int
    requests: int
    completed: int
    failed: int


class EndedBatches(msgspec.Struct, frozen=True):
    """Batches that ended with one status in the last hour, and their requests.

    Above 10,000 batches the counts are not complete.
    """

    status: str
    batches: int
    requests: int
    failed: int


class ModelBacklog(msgspec.Struct, frozen=True):
    """The work that waits for a model, and its speed.

    `closed` is why this process sends it nothing now; empty while it may.
    """

    model: str
    batches: int
    requests: int
    work_units: int
    oldest_seconds: int
    due_in_seconds: int
    requests_per_second: float
    tokens_per_second: float
    closed: str


class StuckBatch(msgspec.Struct, frozen=True):
    """A batch that needs a look: a step failed and is tried again, or its time is nearly over."""

    id: str
    org: str
    status: str
    failures: int
    expires_in_seconds: int


class DeploymentHealth(msgspec.Struct, frozen=True):
    """The health of a deployment in this process, or as reported by a worker that found it
    unhealthy. `in_flight` counts background calls. It `serves` interactive calls, batches or both.

    `tide` is what running processes reported about its room beside interactive calls, and
    `tide_calls` is how many background calls they allow there (0: not known). Calls `everywhere`
    are those of all processes.
    """

    name: str
    models: list[str]
    state: str
    in_flight: int
    interactive_in_flight: int
    in_flight_max: int
    rests_for_ms: int
    answered: int
    failures: dict[str, int]
    last_failure: str
    tide: list[str]
    limits: list[str]
    tide_calls: int
    calls_everywhere: int
    interactive_everywhere: int
    unhealthy_seconds: int | None = None
    serves: str = Serves.BOTH


class Overview(msgspec.Struct, frozen=True):
    object: str
    batches: list[OpenBatches]
    ended_last_hour: list[EndedBatches]
    models: list[ModelBacklog]
    deployments: list[DeploymentHealth]
    workers_alive: int
    attention: list[StuckBatch]


class WorkerShown(msgspec.Struct, frozen=True):
    """One incarnation of a process: `alive`, `lost` (its heartbeat stopped) or `gone`.

    Times are unix seconds. `trouble` is what keeps it from running items; empty without trouble.
    """

    id: str
    object: str
    host: str
    version: str
    state: str
    started_at: int
    last_beat_at: int
    runs_items: bool
    trouble: str


class FlowShown(msgspec.Struct, frozen=True):
    """The queue of one share owner for one model.

    `served` is its weighted service; the flow with the least goes next.
    """

    object: str
    model: str
    share_owner: str
    org: str | None
    state: str
    weight: float
    served: int
    served_tokens: int
    wakes_in_ms: int | None


class FlowsRefreshed(msgspec.Struct, frozen=True):
    refreshed: int


class OrgShown(msgspec.Struct, frozen=True):
    id: str
    object: str
    name: str
    created_at: int
    keys: int
    open_batches: int


class ModelCapacity(msgspec.Struct, frozen=True):
    """What this process could send to a model now.

    `closed` is why nothing may be sent; empty while something may.
    """

    object: str
    model: str
    free_slots: int
    closed: str


class Overviews:
    """The maker of the overview, for the admin API and the console alike."""

    def __init__(self, context: WebContext) -> None:
        self._store = context.store
        self._router = context.router

    async def look(self) -> Overview:
        rows = await self._store.overview()
        loads = await self._store.loads()
        tides: dict[str, list[str]] = {}
        for name, why in await self._store.tides():
            tides.setdefault(name, []).append(why)
        troubles = reported_troubles(await self._store.worker_reports())
        statuses = [reported_status(one, troubles.get(one.name)) for one in self._router.status()]
        return Overview(
            "overview",
            [
                OpenBatches(
                    row["state"], *(int(row[name]) for name in ("jobs", "paused", "items", "answered", "failed"))
                )
                for row in rows.jobs
            ],
            [EndedBatches(row["state"], int(row["jobs"]), int(row["items"]), int(row["failed"])) for row in rows.ended],
            self._backlogs(rows, statuses),
            [_health(one, tides.get(one.name, []), loads.get(one.name)) for one in statuses],
            await self._store.workers_alive(),
            [
                StuckBatch(row["id"], row["org"], row["state"], row["step_failures"], row["left_ms"] // 1000)
                for row in rows.stuck
            ],
        )

    def _backlogs(self, rows: OverviewRows, statuses: Sequence[DeploymentStatus]) -> list[ModelBacklog]:
        healthy = {model for one in statuses if one.open_for_ms is None for model in one.models}
        unhealthy = {model for one in statuses for model in one.models} - healthy
        waiting = {row["model"]: row for row in rows.models}
        found = []
        for model in sorted({*waiting, *rows.rates}):
            row = waiting.get(model, {})
            items, tokens = rows.rates.get(model, (0, 0))
            found.append(
                ModelBacklog(
                    model=model,
                    batches=int(row.get("jobs") or 0),
                    requests=int(row.get("items") or 0),
                    work_units=int(row.get("units") or 0),
                    oldest_seconds=int(row.get("oldest_ms") or 0) // 1000,
                    due_in_seconds=int(row.get("due_in_ms") or 0) // 1000,
                    requests_per_second=round(items, 2),
                    tokens_per_second=round(tokens, 2),
                    closed=Reason.UNHEALTHY if model in unhealthy else self._router.closed(model),
                )
            )
        return found


class OverviewRoutes:
    def __init__(self, context: WebContext) -> None:
        self._store = context.store
        self._router = context.router
        self._overviews = Overviews(context)

    def routes(self) -> list[Guarded]:
        return [
            Guarded("GET", "/admin/v1/overview", READ, self.overview),
            Guarded("GET", "/admin/v1/workers", READ, self.workers),
            Guarded("GET", "/admin/v1/flows", READ, self.flows),
            Guarded("POST", "/admin/v1/flows/refresh", WRITE, self.refresh_flows),
            Guarded("GET", "/admin/v1/orgs", READ, self.orgs),
            Guarded("GET", "/admin/v1/model_capacity", READ, self.model_capacity),
        ]

    async def overview(self, request: Request, caller: Caller) -> Response:
        requests.refuse_unknown(request.query_params, ())
        return json_answer(await self._overviews.look())

    async def workers(self, request: Request, caller: Caller) -> Response:
        requests.refuse_unknown(request.query_params, ())
        found = [worker_shown(row) for row in await self._store.list_workers(WORKERS_MAX)]
        return json_answer(page_of(found, [one.id for one in found], has_more=False))

    async def flows(self, request: Request, caller: Caller) -> Response:
        query = request.query_params
        requests.refuse_unknown(query, ("limit", "model"))
        count = requests.limit(query, LIST_COUNT, FLOWS_MAX)
        rows = await self._store.list_flows(text(query, "model"), count + 1)
        return json_answer(page_of([flow_shown(row) for row in rows[:count]], [], has_more=len(rows) > count))

    async def refresh_flows(self, request: Request, caller: Caller) -> Response:
        """Look at resting flows now. Nothing else changes, so the audit notes nothing."""
        return json_answer(FlowsRefreshed(await self._store.refresh_flows()))

    async def orgs(self, request: Request, caller: Caller) -> Response:
        query = request.query_params
        requests.refuse_unknown(query, ("after", "limit"))
        count = requests.limit(query, LIST_COUNT, LIST_COUNT_MAX)
        rows = await self._store.list_orgs(after=requests.after(query, "tenant"), count_max=count + 1)
        if rows is None:
            raise requests.unknown_cursor()
        found = [
            OrgShown(row["id"], "org", row["name"], row["created_at"] // 1000, row["key_count"], row["open_count"])
            for row in rows[:count]
        ]
        return json_answer(page_of(found, [one.id for one in found], has_more=len(rows) > count))

    async def model_capacity(self, request: Request, caller: Caller) -> Response:
        requests.refuse_unknown(request.query_params, ())
        found = [
            ModelCapacity("model_capacity", name, self._router.free_slots(name), self._router.closed(name))
            for name in sorted(self._router.names())
        ]
        return json_answer(page_of(found, [], has_more=False))


def _limit_text(limit: Limit) -> str:
    """Write a limit as an operator would say it."""
    counted = ((limit.requests, "requests"), (limit.tokens, "tokens"))
    parts = [f"{count:,} {word}" for count, word in counted if count is not None]
    if limit.nano is not None:
        parts.append(units_text(limit.nano))
    span = "in all" if limit.period is Period.LIFETIME else f"a {limit.period}"
    return f"{' and '.join(parts)} {span}"


def worker_shown(row: dict[str, Any]) -> WorkerShown:
    # Only a worker declares another one gone; until then a process without a heartbeat is shown as
    # lost.
    is_lost = row["state"] == WorkerState.ALIVE and row["alive_until"] <= row["now"]
    return WorkerShown(
        row["id"],
        "worker",
        row["host"],
        row["version"],
        LOST if is_lost else row["state"],
        row["started_at"] // 1000,
        row["beat_at"] // 1000,
        bool(row["runs_items"]),
        report_from(row["report"]).trouble,
    )


def flow_shown(row: dict[str, Any]) -> FlowShown:
    return FlowShown(
        "flow",
        row["model"],
        row["share_owner"],
        row["org"],
        row["state"],
        row["weight_milli"] / 1000,
        row["served"],
        row["served_tokens"],
        row["wakes_in_ms"],
    )


def _health(status: DeploymentStatus, tide: list[str], load: tuple[int, int, int] | None) -> DeploymentHealth:
    """Return a deployment's health. Without a reported load it shows this process's own load."""
    return DeploymentHealth(
        status.name,
        list(status.models),
        status.state,
        status.in_flight,
        status.interactive_in_flight,
        status.max_in_flight,
        status.rests_for_ms,
        status.answered,
        status.failures,
        status.last_failure,
        tide,
        [_limit_text(limit) for limit in status.limits],
        *(load or (0, status.in_flight, status.interactive_in_flight)),
        None if status.open_for_ms is None else status.open_for_ms // 1000,
        status.serves,
    )
