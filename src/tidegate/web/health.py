"""How this process is: up at all, and fit to be sent work. Nobody needs a key to ask; only this machine is told reasons in full."""

import asyncio

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tidegate.core.errors import TidegateError
from tidegate.web.context import WebContext
from tidegate.web.loopback import is_loopback

CHECK_S = 5.0
BELIEVED_MS = 1_000


class Health:
    def __init__(self, context: WebContext) -> None:
        self._context = context
        self._checked: dict[str, str | None] = {}
        self._checked_at_ms: float | None = None
        self._turn = asyncio.Lock()

    def routes(self) -> list[Route]:
        return [Route("/healthz", self.alive), Route("/readyz", self.ready)]

    async def alive(self, request: Request) -> Response:
        return _answer({"status": "ok"}, 200)

    async def ready(self, request: Request) -> Response:
        reasons = {**await self._storage(), **self._context.readiness()}
        told = request.client is not None and is_loopback(request.client.host)
        checks = {
            name: "ok" if reason is None else (reason if told else "not ready") for name, reason in reasons.items()
        }
        fit = all(reason is None for reason in reasons.values())
        return _answer({"status": "ready" if fit else "not_ready", "checks": checks}, 200 if fit else 503)

    async def _storage(self) -> dict[str, str | None]:
        """Asking costs a write to the disk, and anyone may ask: so the last answer is good for a second."""
        async with self._turn:
            now_ms = self._context.clock.monotonic_ms()
            if self._checked_at_ms is None or now_ms - self._checked_at_ms >= BELIEVED_MS:
                store, blobs = await asyncio.gather(self._store_reason(), self._blobs_reason())
                self._checked = {"store": store, "blobs": blobs}
                self._checked_at_ms = self._context.clock.monotonic_ms()
            return self._checked

    async def _store_reason(self) -> str | None:
        try:
            async with asyncio.timeout(CHECK_S):
                await self._context.store.require_current()
        except TidegateError as error:
            return str(error)
        except TimeoutError:
            return f"the store did not answer within {CHECK_S:g} s"
        return None

    async def _blobs_reason(self) -> str | None:
        try:
            async with asyncio.timeout(CHECK_S):
                await self._context.blobs.check()
        except TidegateError as error:
            return str(error)
        except TimeoutError:
            return f"the blob store did not answer within {CHECK_S:g} s"
        return None


def _answer(body: dict[str, object], status: int) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")
