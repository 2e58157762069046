"""The models that callers may name, as OpenAI lists them: those that the operator named, and those that deployments say they serve.

Deployments are asked through the control client, side by side, not often and never waited for long: one that is silent adds nothing now,
and its word counts when it comes. What a key may not use is not shown to it.
"""

import asyncio
from urllib.parse import unquote

from starlette.requests import Request
from starlette.responses import Response

from tidegate.core.errors import ApiProblem
from tidegate.core.lines import MODEL_BYTES_MAX
from tidegate.core.nouns import Caller
from tidegate.core.policy_rules import allows
from tidegate.upstream.probe import Probe
from tidegate.web import wire
from tidegate.web.context import WebContext
from tidegate.web.routes import Guarded

WAIT_S = 2.0
MODELS_MAX = 1_000
SCOPE = "batches:read or inference"


class Models:
    def __init__(self, context: WebContext) -> None:
        settings = context.settings
        self._router = context.router
        self._model_of = context.model_of()
        self._clock = context.clock
        self._believed_ms = settings.gateway.models_cache_s * 1000
        self._created_s = context.clock.now_ms() // 1000
        self._found: dict[str, tuple[str, ...]] = {}
        self._asked_at_ms: float | None = None
        self._asking: asyncio.Task[None] | None = None

    def routes(self) -> list[Guarded]:
        return [
            Guarded("GET", "/v1/models", SCOPE, self.list),
            Guarded("GET", "/v1/models/{model:path}", SCOPE, self.one),
        ]

    async def list(self, request: Request, caller: Caller) -> Response:
        return wire.json_answer(wire.Models("list", [self._model(name) for name in await self._names(caller)]))

    async def one(self, request: Request, caller: Caller) -> Response:
        name = unquote(request.path_params["model"])
        if name not in await self._names(caller):
            raise ApiProblem(
                404, "model_not_found", "The model does not exist here: GET /v1/models lists those that do."
            )
        return wire.json_answer(self._model(name))

    def _model(self, name: str) -> wire.Model:
        return wire.Model(name, "model", self._created_s, "tidegate")

    async def _names(self, caller: Caller) -> tuple[str, ...]:
        await self._ask_if_due()
        names = {*self._router.names()}.union(*self._found.values())
        return tuple(sorted(name for name in names if allows(caller.models, caller.resources, name, self._model_of)))

    async def _ask_if_due(self) -> None:
        now_ms = self._clock.monotonic_ms()
        if self._asking is None and (self._asked_at_ms is None or now_ms - self._asked_at_ms >= self._believed_ms):
            self._asked_at_ms = now_ms
            self._asking = asyncio.create_task(self._ask())
        if self._asking is not None:
            await asyncio.wait({self._asking}, timeout=WAIT_S)

    async def _ask(self) -> None:
        try:
            # A deployment that was given names serves those; one that was given none is asked for its own.
            nameless = [one.name for one in self._router.status() if not one.models]
            self._found = {name: names for name, names in self._found.items() if name in nameless}
            for probe in await asyncio.gather(*(self._router.probe(name) for name in nameless)):
                self._hear(probe)
        finally:
            self._asking = None

    def _hear(self, probe: Probe) -> None:
        if probe.reachable and not probe.message:
            names = (name for name in probe.models if 0 < len(name.encode("utf-8", "replace")) <= MODEL_BYTES_MAX)
            self._found[probe.deployment] = tuple(name for name in names if name.isprintable())[:MODELS_MAX]
