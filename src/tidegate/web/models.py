"""The models that callers may name, as OpenAI lists them. One upstream for every model has no list of its own here."""

from starlette.requests import Request
from starlette.responses import Response

from tidegate.core.nouns import Caller
from tidegate.web import wire
from tidegate.web.context import WebContext
from tidegate.web.routes import Guarded


class Models:
    def __init__(self, context: WebContext) -> None:
        self._names = sorted(context.settings.models)
        self._created_s = context.clock.now_ms() // 1000

    def routes(self) -> list[Guarded]:
        return [Guarded("GET", "/v1/models", "batches:read", self.list)]

    async def list(self, request: Request, caller: Caller) -> Response:
        shown = [name for name in self._names if not caller.models or name in caller.models]
        return wire.json_answer(
            wire.Models("list", [wire.Model(name, "model", self._created_s, "tidegate") for name in shown])
        )
