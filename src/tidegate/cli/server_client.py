"""How commands read and write beside a running server: the embedded store has one writer, so to write they ask it.

With PostgreSQL every process may write, so a command writes itself.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import quote

import msgspec

from tidegate.core.errors import ApiProblem, SettingsError, StoreUnavailable
from tidegate.settings import Settings, local_path

if TYPE_CHECKING:
    import aiohttp

    from tidegate.control import Control
    from tidegate.service import Parts

T = TypeVar("T")

ANSWER_BYTES_MAX = 1 << 20
TIMEOUT_S = 30.0


class _ServerError(msgspec.Struct):
    message: str = ""
    code: str | None = None


class _ServerProblem(msgspec.Struct):
    error: _ServerError


@dataclass(frozen=True, slots=True)
class ServerClient:
    """A server that runs beside this command, whom it asks through the socket in the data directory."""

    control: "Control"
    data_dir: Path

    async def post(self, path: str, answer: type[T], body: object = None, tenant: str | None = None) -> T:
        """Ask it to do something; its refusals come out as they would from the store."""
        return await self._ask("POST", path, answer, msgspec.json.encode(body or {}), tenant)

    async def delete(self, path: str, answer: type[T], tenant: str | None = None) -> T:
        """Ask it to remove something."""
        return await self._ask("DELETE", path, answer, None, tenant)

    async def get(self, path: str, answer: type[T]) -> T:
        """Ask it how things are."""
        return await self._ask("GET", path, answer, None, None)

    @asynccontextmanager
    async def streamed(
        self, path: str, headers: dict[str, str], timeout: "aiohttp.ClientTimeout", tenant: str | None
    ) -> AsyncIterator["aiohttp.ClientResponse"]:
        """Ask it for something that comes bit by bit."""
        import aiohttp

        from tidegate.control import socket_address

        with socket_address(self.data_dir) as address:
            connector = aiohttp.UnixConnector(address)
            async with (
                aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=False) as session,
                session.get(f"http://localhost{path}", headers=headers | self._headers(tenant)) as response,
            ):
                yield response

    def _headers(self, tenant: str | None) -> dict[str, str]:
        from tidegate.web.http.auth import CONTROL_HEADER, TENANT_HEADER

        headers = {CONTROL_HEADER: self.control.token}
        if tenant is not None:
            headers[TENANT_HEADER] = quote(tenant, safe="")
        return headers

    async def _ask(self, method: str, path: str, answer: type[T], body: bytes | None, tenant: str | None) -> T:
        import aiohttp

        from tidegate.control import socket_address

        headers = {"Content-Type": "application/json"} | self._headers(tenant)
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        try:
            with socket_address(self.data_dir) as address:
                connector = aiohttp.UnixConnector(address)
                async with (
                    aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=False) as session,
                    session.request(method, f"http://localhost{path}", data=body, headers=headers) as response,
                ):
                    answer_bytes = await response.content.read(ANSWER_BYTES_MAX)
                    if response.status < 300:
                        return msgspec.json.decode(answer_bytes, type=answer)
                    raise refusal_of(response.status, answer_bytes)
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.MsgspecError) as error:
            raise StoreUnavailable(
                f"the server at {self.control.url} holds the store but does not answer ({error or type(error).__name__}). "
                "Wait a moment, or stop it and run the command again."
            ) from error


@asynccontextmanager
async def reading(settings: Settings) -> AsyncIterator["Parts"]:
    """The store and the blobs for a command that only looks."""
    from tidegate import service

    if not settings.store.is_postgresql and not local_path(settings.store.location).exists():
        raise SettingsError(f"Nothing is kept in {settings.data_dir} yet; --data names another directory.")
    async with service.opened(settings, read_only=True) as parts:
        yield parts


def server(settings: Settings) -> ServerClient | None:
    """The server that must be asked; None when this command may write itself."""
    return None if settings.store.is_postgresql else running_server(settings)


def running_server(settings: Settings) -> ServerClient | None:
    """The server that runs on this machine over this data directory; None when there is none."""
    from tidegate.control import running_control

    control = running_control(settings.data_dir)
    return ServerClient(control, settings.data_dir) if control is not None else None


def refusal_of(status: int, answer_bytes: bytes) -> ApiProblem:
    """A server's refusal in the words that the store would have used."""
    try:
        error = msgspec.json.decode(answer_bytes, type=_ServerProblem).error
    except msgspec.MsgspecError:
        error = _ServerError(f"the server answered with status {status}")
    return ApiProblem(status, error.code or "refused", error.message)
