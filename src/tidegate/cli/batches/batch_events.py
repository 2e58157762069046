"""Reads the events of a batch from a server, over as many connections as it takes:
after a break it connects again."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING

import msgspec

from tidegate.cli.terminal.server_client import AskedServer
from tidegate.core.errors import ApiProblem, SettingsError, StoreUnavailable

if TYPE_CHECKING:
    import aiohttp

AGAIN_S = 1.0
# A server sends something every 15 s, if only a sign of life.
SILENCE_S = 45.0
_REFUSED = (400, 401, 403, 404)
_NOTHING_MORE = 204


class BatchEvent(msgspec.Struct, frozen=True):
    """One event of a batch. An empty `kind` means that the server does not answer; it is asked
    again until it does."""

    kind: str
    data: bytes = b"{}"


AWAY = BatchEvent("")


class BatchEvents:
    """A reader of one batch's events, from a server on this machine or elsewhere."""

    def __init__(self, server: AskedServer, batch: str, tenant: str | None) -> None:
        self._server = server
        self._batch = batch
        self._tenant = tenant
        self._last_id = ""

    async def read(self) -> AsyncGenerator[BatchEvent, None]:
        """Yield every event up to the batch's end, each once and in order."""
        import aiohttp

        while True:
            try:
                async with self._opened() as response, aclosing(self._events(response)) as events:
                    async for event in events:
                        yield event
                    if response.status == _NOTHING_MORE:
                        return
            except (aiohttp.ClientError, StoreUnavailable, TimeoutError, OSError):
                yield AWAY
            await asyncio.sleep(AGAIN_S)

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator["aiohttp.ClientResponse"]:
        import aiohttp

        headers = {"Last-Event-ID": self._last_id} if self._last_id else {}
        path = f"/v1/batches/{self._batch}/events"
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=SILENCE_S)
        async with self._server.streamed(path, headers, timeout, self._tenant) as response:
            if response.status in _REFUSED:
                raise self._server.refusal(response.status, await response.read(), path)
            if response.status not in (200, _NOTHING_MORE):
                raise aiohttp.ClientError(f"the server answered with status {response.status}")
            yield response

    async def _events(self, response: "aiohttp.ClientResponse") -> AsyncGenerator[BatchEvent, None]:
        kind, data, event_id = "", b"", ""
        async for raw in response.content:
            name, _, value = raw.rstrip(b"\n").partition(b": ")
            if name == b"event":
                kind = value.decode()
            elif name == b"data":
                data = value
            elif name == b"id":
                event_id = value.decode()
            elif not raw.strip() and kind:
                self._last_id = event_id if kind == "reset" else event_id or self._last_id
                yield BatchEvent(kind, data)
                kind, data, event_id = "", b"", ""


class _LookedAt(msgspec.Struct):
    """The fields of a batch whose change counts as an event; estimates differ at every look."""

    status: str
    request_counts: dict[str, int]


class LookedAtBatch:
    """A reader that polls one batch as an operator, who sees all organizations' batches
    but gets no events of them."""

    def __init__(self, server: AskedServer, path: str) -> None:
        self._server = server
        self._path = path

    async def read(self) -> AsyncGenerator[BatchEvent, None]:
        """Yield an event for every change that is seen, without end."""
        last = _LookedAt("", {})
        while True:
            try:
                data = bytes(await self._server.get(self._path, msgspec.Raw))
                now = msgspec.json.decode(data, type=_LookedAt)
                if now != last:
                    yield BatchEvent("batch.progress" if now.status == last.status else f"batch.{now.status}", data)
                last = now
            except ApiProblem as problem:
                if problem.status in _REFUSED:
                    raise
                yield AWAY
            except SettingsError:
                yield AWAY
            await asyncio.sleep(AGAIN_S)
