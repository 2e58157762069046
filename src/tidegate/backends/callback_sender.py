"""The client for addresses that tenants name: it sends callbacks and reads files.

- Each request uses HTTP/1.1 and a fresh connection.
- The host is resolved here and every address is checked. A socket is made only for a checked
  address, so a name that changes its addresses cannot lead elsewhere.
- Redirects are not followed, proxies not used, cookies not kept and compressed answers not
  unpacked.
- Of a callback's answer only the status and Retry-After count.
"""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import aiohttp
import yarl
from aiohttp.abc import AbstractResolver, ResolveResult

from tidegate.core.callback_targets import (
    TARGET_REFUSED,
    TOO_LARGE,
    CallbackReply,
    FetchedFile,
    Target,
    TargetRefused,
    TargetRules,
    read_target,
)
from tidegate.core.retry_after import retry_after_ms

CONNECT_S = 5.0
TOTAL_S = 15.0
FETCH_S = 60.0
DRAIN_S = 1.0
ANSWER_BYTES_MAX = 64 << 10
OK = 200
# A receiver that hangs delays only its owner's calls to that host: one owner cannot use up a host's
# slots.
PER_OWNER_MAX = 5
PER_HOST_MAX = 20
# A tenant's name server may be slow. Look-ups get their own threads, so that other work does not
# wait.
RESOLVE_THREADS = 64

CONNECTION_FAILED = "connection_failed"
TLS_FAILED = "tls_failed"
TIMED_OUT = "timed_out"
BAD_ANSWER = "bad_answer"

T = TypeVar("T")
Address = tuple[Any, ...]
Resolve = Callable[[str, int], Sequence[Address]]


def resolve(host: str, port: int) -> Sequence[Address]:
    """Ask the system for every address of a host."""
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)


class CallbackSender:
    def __init__(
        self, rules: TargetRules, user_agent: str, resolve: Resolve = resolve, tls: ssl.SSLContext | bool = True
    ) -> None:
        """Create a sender.

        `tls` says which certificates are trusted; True means those of the system.

        aiohttp has read the system's certificates already.
        """
        self._rules = rules
        self._user_agent = user_agent
        self._resolve = resolve
        self._threads = ThreadPoolExecutor(RESOLVE_THREADS, thread_name_prefix="callback-resolve")
        self._tls = tls
        self._slots: dict[tuple[str, str | None], _CallSlots] = {}

    async def post(self, url: str, body: bytes, headers: Mapping[str, str], *, owner: str) -> CallbackReply:
        """Send a callback once. Any failure is a reply with a word for it."""

        async def send(target: Target) -> CallbackReply:
            sent = {"Content-Type": "application/json", "User-Agent": self._user_agent, **headers}
            async with self._request(target, TOTAL_S, data=body, headers=sent) as response:
                reply = CallbackReply(response.status, retry_after_ms=retry_after_ms(response.headers, None) or 0)
                await _drain(response)
                return reply

        reply = await self._within(url, owner, TOTAL_S, send)
        return CallbackReply(failure=reply) if isinstance(reply, str) else reply

    async def fetch(self, url: str, size_bytes_max: int, *, owner: str) -> FetchedFile:
        """Read a file once. Any failure is a reply with a word for it."""

        async def read(target: Target) -> FetchedFile:
            asked = {"User-Agent": self._user_agent}
            async with self._request(target, FETCH_S, headers=asked) as response:
                if response.status != OK:
                    return FetchedFile(response.status)
                if response.headers.get("Content-Encoding", "identity").lower() != "identity":
                    return FetchedFile(failure=BAD_ANSWER)
                data = bytearray()
                async for part in response.content.iter_any():
                    data += part
                    if len(data) > size_bytes_max:
                        return FetchedFile(failure=TOO_LARGE)
                return FetchedFile(OK, "", response.headers.get("Content-Type", ""), bytes(data))

        found = await self._within(url, owner, FETCH_S, read)
        return FetchedFile(failure=found) if isinstance(found, str) else found

    async def _within(self, url: str, owner: str, total_s: float, act: Callable[[Target], Awaitable[T]]) -> T | str:
        """Act on a target within the slots of its owner and host, and a time limit.

        Return a word if that failed.
        """
        try:
            target = read_target(url, self._rules)
        except TargetRefused:
            return TARGET_REFUSED
        # The owner's slot comes first: calls that wait for it hold no slot of the host.
        async with self._slot((target.host, owner), PER_OWNER_MAX), self._slot((target.host, None), PER_HOST_MAX):
            try:
                async with asyncio.timeout(total_s):
                    return await act(target)
            except TimeoutError:
                return TIMED_OUT
            except _Closed:
                return TARGET_REFUSED
            except (aiohttp.ClientSSLError, ssl.SSLError):
                return TLS_FAILED
            except (aiohttp.ClientConnectionError, OSError):
                return CONNECTION_FAILED
            except (aiohttp.ClientError, ValueError):
                return BAD_ANSWER

    async def close(self) -> None:
        """Stop resolving names. The caller awaits the requests that are under way."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    @contextlib.asynccontextmanager
    async def _request(
        self, target: Target, total_s: float, headers: Mapping[str, str], data: bytes | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send one request to a checked address: a POST with a body, a GET without."""
        addresses = await self._addresses(target)
        connector = aiohttp.TCPConnector(
            resolver=_Pinned(target.host, addresses),
            use_dns_cache=False,
            force_close=True,
            ssl=self._tls,
            socket_factory=lambda address: _checked_socket(target, address),
        )
        async with (
            aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,
                auto_decompress=False,
                timeout=aiohttp.ClientTimeout(total=total_s, sock_connect=CONNECT_S),
                skip_auto_headers=("Accept", "Accept-Encoding"),
            ) as session,
            session.request(
                "GET" if data is None else "POST",
                yarl.URL(target.url, encoded=True),
                data=data,
                headers=headers,
                allow_redirects=False,
            ) as response,
        ):
            yield response

    async def _addresses(self, target: Target) -> list[ResolveResult]:
        """Return the host's addresses.

        Raise _Closed if there are none, or one of them is not allowed.
        """
        loop = asyncio.get_running_loop()
        try:
            found = await loop.run_in_executor(self._threads, self._resolve, target.host, target.port)
        except (OSError, UnicodeError) as error:
            if isinstance(error, socket.gaierror) and error.errno == socket.EAI_AGAIN:
                # No name server answered, so the name may be good: it is worth another try.
                raise
            raise _Closed from None
        addresses = {(one[0], str(one[4][0])) for one in found}
        if not addresses or not all(target.allows(address) for _, address in addresses):
            raise _Closed
        return [
            ResolveResult(
                hostname=target.host,
                host=address,
                port=target.port,
                family=int(family),
                proto=socket.IPPROTO_TCP,
                flags=socket.AI_NUMERICHOST,
            )
            for family, address in sorted(addresses)
        ]

    @contextlib.asynccontextmanager
    async def _slot(self, name: tuple[str, str | None], count_max: int) -> AsyncIterator[None]:
        """Hold one of the slots of a host, in total or for one owner."""
        slots = self._slots.setdefault(name, _CallSlots(count_max))
        slots.user_count += 1
        try:
            async with slots.free:
                yield
        finally:
            slots.user_count -= 1
            if not slots.user_count:
                del self._slots[name]


class _CallSlots:
    def __init__(self, count_max: int) -> None:
        self.free = asyncio.Semaphore(count_max)
        self.user_count = 0


class _Closed(Exception):
    """Raised if the host may not be called."""


class _Pinned(AbstractResolver):
    """A resolver that knows one host and its checked addresses."""

    def __init__(self, host: str, addresses: list[ResolveResult]) -> None:
        self._host = host
        self._addresses = addresses

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        if host.lower() != self._host:
            raise _Closed
        return self._addresses

    async def close(self) -> None:
        """Do nothing: there is nothing to close."""


def _checked_socket(target: Target, address: Address) -> socket.socket:
    """Make the socket for this address, after a last check before anything is sent."""
    family, kind, proto, _, where = address
    if not target.allows(str(where[0])):
        raise _Closed
    return socket.socket(family, kind, proto)


async def _drain(response: aiohttp.ClientResponse) -> None:
    """Read a short answer to its end, so that the receiver is not cut off.

    The status is known already.
    """
    with contextlib.suppress(TimeoutError, aiohttp.ClientError, OSError, ValueError):
        async with asyncio.timeout(DRAIN_S):
            left = ANSWER_BYTES_MAX
            while left > 0 and (part := await response.content.read(left)):
                left -= len(part)
