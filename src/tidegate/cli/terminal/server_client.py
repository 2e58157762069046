"""The client by which commands read and write through a server.

- A server on this machine has the embedded store to itself, so commands ask it to write.
- With PostgreSQL every process may write, so a command writes itself.
- A server elsewhere is asked for everything, with a key.
"""

import os
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

import msgspec

from tidegate.cli.terminal import terminal
from tidegate.core.errors import ApiProblem, SettingsError, StoreUnavailable, TidegateError
from tidegate.settings import Settings, local_path

if TYPE_CHECKING:
    import aiohttp

    from tidegate.control import Control
    from tidegate.core.deployments import Secret
    from tidegate.storage import Parts

T = TypeVar("T")

ANSWER_BYTES_MAX = 1 << 20
TIMEOUT_S = 30.0
STARTS_WITHIN_S = 10.0
LOOK_EVERY_S = 0.05
PAGE_COUNT_MAX = 100
LISTED_MAX = 10_000
UNKNOWN_URL = "unknown_url"
LACKS_SCOPE = "insufficient_scope"
WRONG_KEY = "invalid_api_key"
# The code for refusals without one: they come from another program, because ours have codes.
NO_CODE = "refused"
NOT_FOR_OPERATORS = (
    "This address does not answer operators: they have one of their own, on the port that admin.port names."
)
# The status for a range that begins behind the last byte.
_NOTHING_THERE = 416


class _ServerError(msgspec.Struct):
    message: str = ""
    code: str | None = None


class _ServerProblem(msgspec.Struct):
    error: _ServerError


class AskedServer(ABC):
    """A server that commands ask over HTTP; its refusals become the same errors as
    those of the store."""

    @abstractmethod
    def session(
        self, tenant: str | None, timeout: "aiohttp.ClientTimeout"
    ) -> AbstractAsyncContextManager["aiohttp.ClientSession"]:
        """Open a session for requests, on behalf of a tenant if the server allows that."""

    @abstractmethod
    def unanswered(self, error: Exception) -> TidegateError:
        """Return the error of a server that does not answer."""

    def refusal(self, status: int, answer_bytes: bytes, path: str) -> ApiProblem:
        """Return the server's refusal as an error; say where operators are answered if this is the
        wrong address for them."""
        try:
            error = msgspec.json.decode(answer_bytes, type=_ServerProblem).error
        except msgspec.MsgspecError:
            error = _ServerError(f"the server answered with status {status}")
        if error.code == UNKNOWN_URL and path.startswith("/admin/"):
            error.message = NOT_FOR_OPERATORS
        return ApiProblem(status, error.code or NO_CODE, error.message)

    async def get(self, path: str, answer: type[T], tenant: str | None = None) -> T:
        """Get the answer of a path."""
        return await self._ask("GET", path, answer, None, tenant)

    async def pages(self, path: str, tenant: str | None = None, count_max: int = LISTED_MAX) -> list[dict[str, Any]]:
        """Return what the server lists under a path, read page by page, at most
        `count_max` entries."""
        found: list[dict[str, Any]] = []
        cursor = ""
        while len(found) < count_max:
            joined = "&" if "?" in path else "?"
            page = await self.get(f"{path}{joined}limit={PAGE_COUNT_MAX}{cursor}", dict[str, Any], tenant)
            found += page["data"]
            if not page["has_more"]:
                break
            cursor = f"&after={quote(str(page['last_id']), safe='')}"
        return found[:count_max]

    async def post(self, path: str, answer: type[T], body: object = None, tenant: str | None = None) -> T:
        """Ask the server to do something."""
        return await self._ask("POST", path, answer, msgspec.json.encode(body or {}), tenant)

    async def delete(self, path: str, answer: type[T], tenant: str | None = None) -> T:
        """Ask the server to remove something."""
        return await self._ask("DELETE", path, answer, None, tenant)

    async def upload(self, file: Path, answer: type[T], tenant: str | None = None) -> T:
        """Upload a file as the input of a batch."""
        import aiohttp

        # Quoted, a name with a space or an umlaut would arrive as %20 or %C3%BC.
        form = aiohttp.FormData(quote_fields=False)
        form.add_field("purpose", "batch")
        # Opened by descriptor: aiohttp would also read the name of the stream, which
        # may be no UTF-8.
        with os.fdopen(os.open(file, os.O_RDONLY | os.O_CLOEXEC), "rb") as stream:
            form.add_field(
                "file", stream, filename=terminal.clean(terminal.as_text(file.name)), content_type="application/jsonl"
            )
            return await self._ask("POST", "/v1/files", answer, form, tenant)

    @asynccontextmanager
    async def streamed(
        self, path: str, headers: dict[str, str], timeout: "aiohttp.ClientTimeout", tenant: str | None
    ) -> AsyncIterator["aiohttp.ClientResponse"]:
        """Open the response of a path that comes bit by bit."""
        async with self.session(tenant, timeout) as session, session.get(path, headers=headers) as response:
            yield response

    async def content(self, path: str, start: int = 0, tenant: str | None = None) -> AsyncIterator[bytes]:
        """Yield the bytes of a path from `start` on; nothing if there are none yet."""
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=None, sock_connect=TIMEOUT_S, sock_read=TIMEOUT_S)
        try:
            headers = {"Range": f"bytes={start}-"} if start else {}
            async with self.streamed(path, headers, timeout, tenant) as response:
                if response.status == _NOTHING_THERE:
                    return
                if response.status >= 300:
                    raise self.refusal(response.status, await response.content.read(ANSWER_BYTES_MAX), path)
                async for chunk in response.content.iter_any():
                    yield chunk
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self.unanswered(error) from error

    async def _ask(
        self, method: str, path: str, answer: type[T], body: "bytes | aiohttp.FormData | None", tenant: str | None
    ) -> T:
        import aiohttp

        headers = {"Content-Type": "application/json"} if isinstance(body, bytes) else {}
        # An upload has no time limit.
        timeout = aiohttp.ClientTimeout(total=None if isinstance(body, aiohttp.FormData) else TIMEOUT_S)
        try:
            async with (
                self.session(tenant, timeout) as session,
                session.request(method, path, data=body, headers=headers) as response,
            ):
                answer_bytes = await response.content.read(ANSWER_BYTES_MAX)
                while chunk := await response.content.read(ANSWER_BYTES_MAX - len(answer_bytes)):
                    answer_bytes += chunk
                if response.status < 300:
                    return msgspec.json.decode(answer_bytes, type=answer)
                raise self.refusal(response.status, answer_bytes, path)
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.MsgspecError) as error:
            raise self.unanswered(error) from error


class ServerClient(AskedServer):
    """A server on this machine, asked through the socket in the data directory."""

    def __init__(self, control: "Control", data_dir: Path) -> None:
        self.control = control
        self.data_dir = data_dir

    @asynccontextmanager
    async def session(
        self, tenant: str | None, timeout: "aiohttp.ClientTimeout"
    ) -> AsyncIterator["aiohttp.ClientSession"]:
        import aiohttp

        from tidegate.control import socket_address
        from tidegate.web.http.auth import CONTROL_HEADER, TENANT_HEADER

        headers = {CONTROL_HEADER: self.control.token}
        if tenant is not None:
            headers[TENANT_HEADER] = quote(tenant, safe="")
        with socket_address(self.data_dir) as address:
            async with aiohttp.ClientSession(
                "http://localhost",
                connector=aiohttp.UnixConnector(address),
                timeout=timeout,
                headers=headers,
                trust_env=False,
            ) as session:
                yield session

    def unanswered(self, error: Exception) -> TidegateError:
        return StoreUnavailable(
            f"the server at {self.control.url} holds the store but does not answer ({error or type(error).__name__}). "
            "Wait a moment, or stop it and run the command again."
        )


class RemoteServer(AskedServer):
    """A server elsewhere, with the key that identifies the caller."""

    def __init__(self, address: str, key: "Secret | None") -> None:
        self.address = address
        self.key = key

    @asynccontextmanager
    async def session(
        self, tenant: str | None, timeout: "aiohttp.ClientTimeout"
    ) -> AsyncIterator["aiohttp.ClientSession"]:
        import aiohttp

        if tenant is not None:
            raise SettingsError("--org names an organization on this machine; at another server the key says which.")
        headers = {"Authorization": f"Bearer {self.key.reveal()}"} if self.key is not None else {}
        async with aiohttp.ClientSession(self.address, timeout=timeout, headers=headers) as session:
            yield session

    def unanswered(self, error: Exception) -> TidegateError:
        return SettingsError(
            f"{self.address} does not answer ({_reason(error)}). Check --server and that it is running."
        )

    def refusal(self, status: int, answer_bytes: bytes, path: str) -> ApiProblem:
        found = AskedServer.refusal(self, status, answer_bytes, path)
        if found.code == NO_CODE:
            text = f"{self.address} does not answer as a Tidegate server (status {status}). Check --server."
            return ApiProblem(status, found.code, text)
        if found.code != WRONG_KEY:
            return found
        refused = f"{self.address} refuses this API key" if self.key is not None else f"{self.address} needs an API key"
        return ApiProblem(
            status,
            found.code,
            f"{refused}. Put a valid one into an environment variable and name it with --api-key env:NAME. Its operator makes keys with "
            "`tidegate keys create --org NAME`.",
        )


def _reason(error: Exception) -> str:
    """Return the system's reason why a server does not answer, without the addresses
    and options of the attempt."""
    if isinstance(error, TimeoutError):
        return f"nothing came within {TIMEOUT_S:g} s"
    if not isinstance(error, OSError):
        return str(error) or type(error).__name__
    # Errors of name resolution have numbers of their own, which are negative.
    code = error.errno or 0
    return os.strerror(code) if code > 0 else error.strerror or str(error)


def remote(settings: Settings) -> RemoteServer | None:
    """Return the server elsewhere that commands should ask; None if they are for this machine."""
    if not settings.remote.url:
        return None
    return RemoteServer(settings.remote.url.rstrip("/").removesuffix("/v1"), settings.remote.key)


def any_server(settings: Settings) -> AskedServer:
    """Return the server elsewhere, or the one that runs over the data directory. Raise
    SettingsError if there is none."""
    found = remote(settings) or _started_server(settings)
    if found is None:
        raise SettingsError(
            f"No server runs over {settings.data_dir}. Start one with `tidegate serve`, name its data directory with "
            "--data, or one elsewhere with --server URL."
        )
    return found


@asynccontextmanager
async def reading(settings: Settings) -> AsyncIterator["Parts"]:
    """Open the store and the blobs for a command that only reads."""
    from tidegate import storage

    if not settings.store.is_postgresql and not local_path(settings.store.location).exists():
        raise SettingsError(f"Nothing is kept in {settings.data_dir} yet; --data names another directory.")
    async with storage.opened(settings, read_only=True) as parts:
        yield parts


# The results of this process's looks for a server on this machine.
looks: "list[ServerClient | None]" = []


def asked(settings: Settings) -> AskedServer | None:
    """Return the server that must be asked, elsewhere or here; None if this command may
    write itself."""
    if (elsewhere := remote(settings)) is not None:
        return elsewhere
    if settings.store.is_postgresql:
        return None
    looks.append(_started_server(settings))
    return looks[-1]


def _started_server(settings: Settings) -> "ServerClient | None":
    """Return the server that runs on this machine over this data directory, or None.

    A server that is starting takes the store before it answers, so wait for it."""
    from tidegate import storage

    if (found := running_server(settings)) is not None or not storage.is_taken(settings):
        return found
    terminal.say(f"Waiting up to {STARTS_WITHIN_S:g} s for the server that is starting over {settings.data_dir}.")
    give_up_s = time.monotonic() + STARTS_WITHIN_S
    while (found := running_server(settings)) is None and storage.is_taken(settings) and time.monotonic() < give_up_s:
        time.sleep(LOOK_EVERY_S)
    return found


def running_server(settings: Settings) -> ServerClient | None:
    """Return the server that answers on this machine over this data directory, or None."""
    from tidegate.control import running_control

    control = running_control(settings.data_dir)
    return ServerClient(control, settings.data_dir) if control is not None else None


async def tenant(parts: "Parts", org: str | None) -> str:
    """Return the id of the organization of this name; an empty id if the default one
    does not exist yet."""
    if org is None:
        return parts.tenant_id
    tenant_id = await parts.store.tenant_by_name(org)
    if tenant_id is None:
        raise SettingsError(f"There is no organization {org!r}; `tidegate keys list` shows those that have keys.")
    return tenant_id
