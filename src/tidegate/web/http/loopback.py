"""The addresses and names of this machine, and the callers that may be served without a key."""

import ipaddress
from functools import lru_cache
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from tidegate.core.errors import ApiProblem, SettingsError
from tidegate.store.store import Store

# The entry of a request's scope that marks a request through the socket in the data directory: it
# comes from this machine.
BY_SOCKET = "tidegate.by_socket"
# Headers of proxies: a request with one of them may come from elsewhere, though its connection
# comes from here.
FORWARDED = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip", "via")
NO_KEY_YET = (
    "There is no API key yet, so every call is refused with 401. Set auth.bootstrap_key to a text from `tidegate keys generate` and "
    "restart, or run `tidegate keys create --org NAME` beside the server."
)


@lru_cache(maxsize=1024)
def is_loopback(host: str) -> bool:
    """Return whether this address or name always means this machine."""
    name = host.strip("[]").rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


async def require_key(store: Store) -> None:
    """Raise an error that says how to make a first key, while the store has none."""
    if not await store.any_key():
        raise SettingsError(NO_KEY_YET)


def is_local_program(client: str, headers: Headers) -> bool:
    """Return whether a program on this machine sent this, and not a web page in this machine's
    browser.

    A page from elsewhere is recognized by its Origin or Sec-Fetch-Site, and a foreign name that
    points here by the Host.
    """
    origin = headers.get("origin")
    return (
        is_loopback(client)
        and is_loopback(_host_of(f"//{headers.get('host', 'localhost')}"))
        and (origin is None or is_loopback(_host_of(origin)))
        and headers.get("sec-fetch-site", "none") in ("none", "same-origin")
    )


def is_sent_without_a_network(client: str, headers: Headers) -> bool:
    """Return whether a browser's data crosses no network, except inside something that the user
    trusts.

    Either the browser runs on this machine, or it called its own machine, as through a tunnel or a
    published port of a container.
    """
    if is_loopback(client):
        return True
    return is_loopback(_host_of(f"//{headers.get('host', '')}")) and not any(name in headers for name in FORWARDED)


def refuse_remote(client: str, headers: Headers) -> None:
    """Refuse requests that no local program sent: without keys a local address is the only
    credential, and a web page in this machine's browser must not borrow it.
    """
    if not is_local_program(client, headers) or any(name in headers for name in FORWARDED):
        raise ApiProblem(
            403,
            "local_only",
            "Without API keys this server answers only programs on its own machine that call it as localhost or 127.0.0.1. "
            "Make a key with `tidegate keys create --org NAME` to call it from elsewhere.",
        )


def _host_of(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""
