"""The report of how many model replicas and workers are needed now, for autoscalers."""

from collections import defaultdict
from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from tidegate.core.deployments import Serves
from tidegate.core.nouns import Caller
from tidegate.core.schedule.autoscale import (
    NO_POOL,
    DueWork,
    PoolLoad,
    ReplicasNeeded,
    background_pool,
    model_replicas,
    whole_scale,
    worker_replicas,
)
from tidegate.upstream.routing.deployment_status import DeploymentStatus
from tidegate.web.admin.audit import READ
from tidegate.web.context import WebContext
from tidegate.web.http.answers import json_answer
from tidegate.web.http.routes import Guarded
from tidegate.web.jobs.reported_health import reported_status, reported_troubles
from tidegate.web.requests import requests


class ReplicasShown(msgspec.Struct, frozen=True):
    """The number of replicas that are needed, with the reason; never 0 while anything waits."""

    replicas_needed: int
    why: str


class PoolReplicas(ReplicasShown, frozen=True):
    """Replicas of a model, where each deployment counts as one.

    `scale_by` is the factor for the number of its servers. It also holds where one deployment's
    address stands for several servers.
    """

    scale_by: float


class ModelReplicas(PoolReplicas, frozen=True):
    """Replicas of a model over all its deployments.

    If some of them serve only interactive calls or only batches, `pools` has the replicas of each
    kind: `interactive`, `batch` and `both`.
    """

    pools: dict[str, PoolReplicas] | UnsetType = UNSET


class Autoscale(msgspec.Struct, frozen=True):
    object: str
    models: dict[str, ModelReplicas]
    workers: ReplicasShown


class AutoscaleRoutes:
    def __init__(self, context: WebContext) -> None:
        self._store = context.store
        self._router = context.router
        self._slots_per_worker = context.settings.worker.in_flight_max

    def routes(self) -> list[Guarded]:
        return [
            Guarded("GET", "/admin/v1/autoscale", READ, self.all),
            Guarded("GET", "/admin/v1/autoscale/workers", READ, self.workers),
            Guarded("GET", "/admin/v1/autoscale/models/{model:path}", READ, self.model),
        ]

    async def all(self, request: Request, caller: Caller) -> Response:
        requests.refuse_unknown(request.query_params, ())
        return json_answer(await self._look())

    async def workers(self, request: Request, caller: Caller) -> Response:
        requests.refuse_unknown(request.query_params, ())
        return json_answer((await self._look()).workers)

    async def model(self, request: Request, caller: Caller) -> Response:
        requests.refuse_unknown(request.query_params, ())
        name = self._router.model_of(str(request.path_params["model"]))
        found = (await self._look()).models
        return json_answer(found.get(name, ModelReplicas(0, "Nothing waits.", 0.0)))

    async def _look(self) -> Autoscale:
        waiting = await self._store.due_work()
        loads = await self._store.loads()
        troubles = reported_troubles(await self._store.worker_reports())
        status = [reported_status(one, troubles.get(one.name)) for one in self._router.status()]
        calls = {one.name: max(one.interactive_in_flight, loads.get(one.name, (0, 0, 0))[2]) for one in status}
        due: dict[str, list[DueWork]] = {model: [] for one in status for model in one.models}
        paces = await self._store.paces(sorted({*due, *waiting.due}))
        rates: dict[str, float] = defaultdict(float)
        for name, pace in paces.items():
            # A resource's work is done by the replicas of its model.
            model = self._router.model_of(name)
            due.setdefault(model, []).extend(waiting.due.get(name, ()))
            rates[model] += pace.rate or 0
        models: dict[str, ModelReplicas] = {}
        busy: list[tuple[int, int]] = []
        for model in sorted(due):
            pools = _pools(model, status, calls)
            needed = model_replicas(due[model], rates[model], pools)
            models[model] = _model_shown(needed, whole_scale(needed, pools))
            background = background_pool(pools)
            if due[model] and background in needed:
                busy.append((needed[background].count, pools.get(background, NO_POOL).slots))
        workers = worker_replicas(busy, self._slots_per_worker, has_steps=waiting.has_steps)
        return Autoscale("autoscale", models, ReplicasShown(workers.count, workers.why))


def _pools(model: str, status: Sequence[DeploymentStatus], calls: dict[str, int]) -> dict[Serves, PoolLoad]:
    """Return the deployments of a model by what they serve, with the interactive calls of each
    pool. A deployment without models serves any model; a drained one serves none.
    """
    serving = [one for one in status if model in one.models] or [one for one in status if not one.models]
    found: dict[Serves, PoolLoad] = {}
    for serves in Serves:
        members = [one for one in serving if one.serves is serves and not one.is_drained]
        if members:
            found[serves] = PoolLoad(
                len(members),
                sum(1 for one in members if one.open_for_ms is not None),
                sum(calls[one.name] for one in members),
                max(one.capacity for one in members),
            )
    return found


def _model_shown(needed: dict[Serves, ReplicasNeeded], scale: float) -> ModelReplicas:
    if len(needed) == 1:
        [one] = needed.values()
        return ModelReplicas(one.count, one.why, scale)
    why = " ".join(f"{serves}: {one.why}" for serves, one in needed.items())
    pools = {str(serves): PoolReplicas(one.count, one.why, one.scale) for serves, one in needed.items()}
    return ModelReplicas(sum(one.count for one in needed.values()), why, scale, pools)
