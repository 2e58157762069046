"""The URLs and addresses that a tenant may have us call.

A URL must match a strict grammar, so that no two parsers can read it differently. Its host is
resolved only when something is sent; every address that comes back must be public. The lists are
our own, because those of Python differ between its versions.
"""

import re
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

import msgspec

URL_CHARS_MAX = 2_048
HTTPS_PORTS = frozenset({443, 8443})
HTTP_PORTS = frozenset({80})
PORT_MAX = 65_535
# Words for the result of a request. One word covers a host that does not resolve and one with an
# address that is not public: two would reveal names that only we can resolve.
TARGET_REFUSED = "target_refused"
TOO_LARGE = "too_large"
_GONE = 410

_URL = re.compile(
    r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?:\[(?P<six>[0-9A-Fa-f:.]{2,45})\]|(?P<name>[A-Za-z0-9._-]{1,253}))"
    r"(?::(?P<port>[0-9]{1,5}))?(?:/(?:[A-Za-z0-9._~!$&'()*+,;=:@/-]|%[0-9A-Fa-f]{2})*)?"
    r"(?:\?(?:[A-Za-z0-9._~!$&'()*+,;=:@/?-]|%[0-9A-Fa-f]{2})*)?",
    re.ASCII,
)
_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?", re.ASCII)
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*", re.ASCII)

_FOUR_CLOSED = tuple(
    map(
        IPv4Network,
        (
            "0.0.0.0/8",
            "10.0.0.0/8",
            "100.64.0.0/10",
            "127.0.0.0/8",
            "169.254.0.0/16",
            "172.16.0.0/12",
            "192.0.0.0/24",
            "192.0.2.0/24",
            "192.88.99.0/24",
            "192.168.0.0/16",
            "198.18.0.0/15",
            "198.51.100.0/24",
            "203.0.113.0/24",
            "224.0.0.0/3",
            # Azure's service for a machine's identity.
            "168.63.129.16/32",
        ),
    )
)
_SIX_OPEN = IPv6Network("2000::/3")
# Protocol assignments with Teredo, documentation, and 6to4, which hides an IPv4 address.
_SIX_CLOSED = tuple(map(IPv6Network, ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")))
_TRANSLATED = IPv6Network("64:ff9b::/96")
_ISATAP = (0x00005EFE, 0x02005EFE)
# Networks whose addresses end with an IPv4 address, 6to4, which has one after its prefix, and
# Teredo, which ends with an inverted one.
_ENDING_IN_FOUR = tuple(map(IPv6Network, ("::/96", "::ffff:0:0:0/96", "64:ff9b:1::/48")))
_SIX_TO_FOUR = IPv6Network("2002::/16")
_TEREDO = IPv6Network("2001::/32")
# Closed even to a host that the operator allows: servers there give out a machine's identity, or
# are no single machine.
_NEVER_FOUR = tuple(
    map(IPv4Network, ("0.0.0.0/8", "169.254.0.0/16", "224.0.0.0/3", "168.63.129.16/32", "100.100.100.200/32"))
)
_NEVER_SIX = tuple(map(IPv6Network, ("::/128", "fe80::/10", "fec0::/10", "ff00::/8", "fd00:ec2::/32")))


class TargetRefused(ValueError):
    """A URL that is never called; the text says why, for its owner."""


class TargetRules(msgspec.Struct, frozen=True):
    """The targets that the operator allows beyond public https: hosts at any address and port, and
    plain http.
    """

    allow_hosts: frozenset[str] = frozenset()
    allow_http: bool = False


class Target(msgspec.Struct, frozen=True):
    """A URL that may be called. `is_allowed` means that the operator named its host."""

    url: str
    scheme: str
    host: str
    port: int
    is_allowed: bool

    def allows(self, address: str) -> bool:
        """Return whether this address, to which the host's name was resolved, may be dialled."""
        return is_reachable(address) if self.is_allowed else is_public(address)


class CallbackReply(msgspec.Struct, frozen=True):
    """The result of one request to a receiver: its status, or 0 and a word for why there is
    none."""

    status: int = 0
    failure: str = ""
    retry_after_ms: int = 0

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300

    @property
    def is_gone(self) -> bool:
        return self.status == _GONE

    @property
    def word(self) -> str:
        """Return the failure as its owner may see it, never the receiver's own text."""
        return self.failure or f"http_{self.status // 100}xx"


class FetchedFile(msgspec.Struct, frozen=True):
    """The result of reading a file: its bytes and its type, or a status, or 0 and a word for why
    there is none.
    """

    status: int = 0
    failure: str = ""
    media_type: str = ""
    data: bytes = b""


def read_target(url: str, rules: TargetRules) -> Target:
    """Return the URL as a target; TargetRefused says what is wrong with it. Nothing is resolved."""
    if len(url) > URL_CHARS_MAX:
        raise TargetRefused(f"it has more than {URL_CHARS_MAX:,} characters")
    found = _URL.fullmatch(url)
    if found is None:
        raise TargetRefused(
            "it must look like https://host/path, in ASCII, without a user, a password, a fragment or spaces"
        )
    scheme = found["scheme"].lower()
    if scheme != "https" and not (scheme == "http" and rules.allow_http):
        raise TargetRefused("it must begin with https://")
    host = _host(found["six"], found["name"])
    port = int(found["port"] or (443 if scheme == "https" else 80))
    if not 0 < port <= PORT_MAX:
        raise TargetRefused(f"its port must be a number from 1 to {PORT_MAX}")
    target = Target(url, scheme, host, port, host in rules.allow_hosts)
    if target.is_allowed:
        return target
    if port not in (HTTPS_PORTS if scheme == "https" else HTTP_PORTS):
        raise TargetRefused("its port must be 443 or 8443" + (", or 80 with http" if rules.allow_http else ""))
    if _is_address(host):
        if not is_public(host):
            raise TargetRefused("its host is not a public address")
    elif "." not in host:
        raise TargetRefused("its host must be a full name, such as hooks.example.com")
    return target


def is_public(address: str) -> bool:
    """Return whether this address is on the open internet and in no special network."""
    parsed = _parsed(address)
    if isinstance(parsed, IPv4Address):
        return not any(parsed in network for network in (*_FOUR_CLOSED, *_NEVER_FOUR))
    if parsed is None or parsed not in _SIX_OPEN or (int(parsed) >> 32) & 0xFFFFFFFF in _ISATAP:
        return False
    return not any(parsed in network for network in _SIX_CLOSED)


def is_reachable(address: str) -> bool:
    """Return whether this address may be dialled for a host that the operator allows."""
    parsed = _parsed(address)
    if isinstance(parsed, IPv4Address):
        return not any(parsed in network for network in _NEVER_FOUR)
    if parsed is None or any(parsed in network for network in _NEVER_SIX):
        return False
    hidden = _hidden_four(parsed)
    return hidden is None or not any(hidden in network for network in _NEVER_FOUR)


def _parsed(address: str) -> IPv4Address | IPv6Address | None:
    """Return the address that packets would reach: for IPv4 written or translated as IPv6, the IPv4
    address.
    """
    try:
        parsed = ip_address(address)
    except ValueError:
        return None
    if isinstance(parsed, IPv4Address):
        return parsed
    if parsed.scope_id is not None:
        return None
    if parsed.ipv4_mapped is not None:
        return parsed.ipv4_mapped
    return IPv4Address(int(parsed) & 0xFFFFFFFF) if parsed in _TRANSLATED else parsed


def _hidden_four(address: IPv6Address) -> IPv4Address | None:
    """Return the IPv4 address that a tunnel or a translator would make of this address; None where
    there is none.
    """
    bits = int(address)
    if address in _SIX_TO_FOUR:
        return IPv4Address(bits >> 80 & 0xFFFFFFFF)
    if address in _TEREDO:
        return IPv4Address(bits & 0xFFFFFFFF ^ 0xFFFFFFFF)
    is_isatap = bits >> 32 & 0xFFFFFFFF in _ISATAP
    if is_isatap or (not address.is_loopback and any(address in network for network in _ENDING_IN_FOUR)):
        return IPv4Address(bits & 0xFFFFFFFF)
    return None


def _host(six: str | None, name: str | None) -> str:
    if six is not None:
        try:
            return str(IPv6Address(six))
        except ValueError:
            raise TargetRefused("its host is not an IPv6 address") from None
    host = (name or "").lower()
    labels = host.split(".")
    if _NUMBER.fullmatch(labels[-1]):
        # Resolvers disagree about 0x7f.1, 2130706433 and 127.1.
        try:
            return str(IPv4Address(host))
        except ValueError:
            raise TargetRefused("an address must be written as four decimal numbers") from None
    if not all(_LABEL.fullmatch(label) for label in labels):
        raise TargetRefused("its host is not a name")
    return host


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
