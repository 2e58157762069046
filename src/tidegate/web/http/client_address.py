"""The address that a request comes from, also behind proxies that the operator named.

`X-Forwarded-For` can be written by anyone. It counts only when the peer is one of
`server.trusted_proxies`, and is read from the right: the first address that is not a trusted proxy
is the caller, whatever a caller wrote further left.
"""

import ipaddress
from collections.abc import Sequence
from functools import lru_cache

from starlette.datastructures import Headers

from tidegate.core.keys import addresses_from
from tidegate.web.http.door import is_plain_host

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

HOPS_MAX = 32
# A client that has one address of a /64 usually has all of them.
IPV6_OWNER_BITS = 64


def networks_of(texts: Sequence[str]) -> tuple[Network, ...]:
    """Read addresses and ranges such as 10.0.0.0/8; ValueError names the first that is neither."""
    return tuple(ipaddress.ip_network(text, strict=False) for text in texts)


def client_address(peer: str, headers: Headers, trusted: Sequence[Network]) -> str:
    """Return the caller's address: the peer's, or the one that trusted proxies report."""
    if not _is_within(peer, trusted):
        return peer
    hops = [hop.strip() for line in headers.getlist("x-forwarded-for") for hop in line.split(",")]
    address = peer
    for hop in reversed(hops[-HOPS_MAX:]):
        if _parsed(hop) is None:
            return address
        address = hop
        if not _is_within(hop, trusted):
            return address
    return address


def public_base(peer: str, headers: Headers, scheme: str, trusted: Sequence[Network]) -> str:
    """Return the scheme and host that the caller used, as a trusted proxy or else the request
    reports them.
    """
    host = headers.get("host", "")
    if trusted and _is_within(peer, trusted):
        forwarded_scheme, forwarded_host = headers.get("x-forwarded-proto", ""), headers.get("x-forwarded-host", "")
        scheme = forwarded_scheme if forwarded_scheme in ("http", "https") else scheme
        host = forwarded_host if forwarded_host and is_plain_host(forwarded_host.encode("latin-1", "replace")) else host
    return f"{scheme}://{host}"


@lru_cache(maxsize=4096)
def owner_of(address: str) -> str:
    """Return the name under which failures of an address are counted: the address, or its network
    for IPv6.
    """
    parsed = _parsed(address)
    if isinstance(parsed, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((parsed, IPV6_OWNER_BITS), strict=False))
    return str(parsed) if parsed is not None else address


def is_allowed(address: str, text: str) -> bool:
    """Return whether a key may be used from this address.

    `text` is the stored list of allowed addresses.
    """
    return not text or _is_within(address, _networks_in(text))


@lru_cache(maxsize=4096)
def _networks_in(text: str) -> tuple[Network, ...]:
    return networks_of(addresses_from(text))


def _parsed(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(text.strip("[]"))
    except ValueError:
        return None
    mapped = getattr(address, "ipv4_mapped", None)
    return mapped or address


def _is_within(text: str, networks: Sequence[Network]) -> bool:
    address = _parsed(text)
    return address is not None and any(address in network for network in networks)
