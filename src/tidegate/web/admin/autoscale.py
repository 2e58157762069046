"""How many model replicas and workers are needed now, for autoscalers that poll it."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tidegate.core.nouns import Caller
from tidegate.core.schedule.autoscale import ReplicaLoad, ReplicasNeeded, model_replicas, worker_replicas
from tidegate.web.admin.audit import READ
from tidegate.web.context import WebContext
from tidegate.web.http import requests
from tidegate.web.http.answers import json_answer
from tidegate.web.http.routes import Guarded


class ReplicasShown(msgspec.Struct, frozen=True):
    """How many are needed, and why; never 0 while anything waits."""

    replicas_needed: int
    why: str


class Autoscale(msgspec.Struct, frozen=True):
    object: str
    models: dict[str, ReplicasShown]
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
        found = (await self._look()).models
        return json_answer(found.get(str(request.path_params["model"]), ReplicasShown(0, "Nothing waits.")))

    async def _look(self) -> Autoscale:
        waiting = await self._store.due_work()
        status = self._router.status()
        names = sorted({*waiting.due, *(model for one in status for model in one.models)})
        paces = await self._store.paces(names)
        needed: dict[str, ReplicasNeeded] = {}
        slots: dict[str, int] = {}
        for name in names:
            # A deployment without models serves any.
            serving = [one for one in status if name in one.models] or [one for one in status if not one.models]
            slots[name] = max((one.max_in_flight for one in serving), default=1)
            calls = sum(self._router.interactive(one.name)[0] for one in serving)
            load = ReplicaLoad(waiting.due.get(name, ()), paces[name].rate, len(serving), calls, slots[name])
            needed[name] = model_replicas(load)
        workers = worker_replicas(
            [(one.count, slots[name]) for name, one in needed.items() if name in waiting.due],
            self._slots_per_worker,
            has_inputs=waiting.has_inputs,
        )
        return Autoscale("autoscale", {name: _shown(one) for name, one in needed.items()}, _shown(workers))


def _shown(needed: ReplicasNeeded) -> ReplicasShown:
    return ReplicasShown(needed.count, needed.why)
