"""The health of this process: whether it runs, and whether it is ready for work. No key is needed.

Only this machine gets the full reasons. A missing first key is shown to everyone."""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tidegate.core.errors import TidegateError
from tidegate.core.ports import Clock
from tidegate.web.context import WebContext
from tidegate.web.http.loopback import NO_KEY_YET, is_loopback, require_key
from tidegate.web.http.pepper import require_pepper

# So that a probe waits less than a second even if a part hangs.
CHECK_S = 0.8
BELIEVED_MS = 1_000


class Health:
    def __init__(self, context: WebContext, *, serves_api: bool) -> None:
        self._context = context
        self._checks = {
            "store": HealthCheck("the store", context.store.require_schema, context.clock),
            "blobs": HealthCheck("the blob store", context.blobs.check, context.clock),
        }
        if serves_api:
            self._checks["keys"] = HealthCheck("the store", lambda: _require_keys(context), context.clock)

    def routes(self) -> list[Route]:
        return [Route("/healthz", self.alive), Route("/readyz", self.ready)]

    async def alive(self, request: Request) -> Response:
        return _answer({"status": "ok"}, 200)

    async def ready(self, request: Request) -> Response:
        found = await asyncio.gather(*(check.reason() for check in self._checks.values()))
        reasons = {**dict(zip(self._checks, found, strict=True)), **self._context.readiness()}
        is_local = request.client is not None and is_loopback(request.client.host)
        # A missing first key is no secret, and the operator of a new installation often looks from
        # another machine.
        checks = {
            name: "ok" if reason is None else (reason if is_local or reason == NO_KEY_YET else "not ready")
            for name, reason in reasons.items()
        }
        fit = all(reason is None for reason in reasons.values())
        return _answer({"status": "ready" if fit else "not_ready", "checks": checks}, 200 if fit else 503)


class HealthCheck:
    """The check of one part of the process, one at a time and at most once a second.

    A check writes to the disk, and anyone may ask for it.

    A part that hangs is not waited for: the answer reports it, and the check stays open for the
    next request.
    """

    def __init__(self, what: str, ask: Callable[[], Awaitable[None]], clock: Clock) -> None:
        self._what = what
        self._ask = ask
        self._clock = clock
        self._asking: asyncio.Task[str | None] | None = None
        self._believed_until_ms = 0.0

    async def reason(self) -> str | None:
        """Return why this part is not ready; None if it is."""
        if self._asking is None or (self._asking.done() and self._clock.monotonic_ms() >= self._believed_until_ms):
            self._asking = asyncio.create_task(self._answer())
        await asyncio.wait([self._asking], timeout=CHECK_S)
        if not self._asking.done():
            return f"{self._what} did not answer within {CHECK_S:g} s"
        return self._asking.result()

    async def _answer(self) -> str | None:
        try:
            await self._ask()
        except TidegateError as error:
            return str(error)
        finally:
            self._believed_until_ms = self._clock.monotonic_ms() + BELIEVED_MS
        return None


async def _require_keys(context: WebContext) -> None:
    """Raise an error if no key can be right here: a key is needed and there is none, or the keys
    have another pepper.
    """
    if not is_loopback(context.settings.server.host):
        await require_key(context.store)
    await require_pepper(context.store, context.pepper)


def _answer(body: dict[str, object], status: int) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")
