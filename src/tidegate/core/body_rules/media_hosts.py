"""The hosts from which a model's servers may fetch a file that a request names.

Nothing is fetched or looked up here: the name in the URL is compared with what the operator wrote.
A URL is read by one strict pattern, so that no other parser finds another host in it.
"""

import re
from collections.abc import Collection

ANY_HOST = "*"
URL_CHARS_MAX = 8_192

# A host, a host with a port, `*.` before a host for all names below it, or `*` for every host.
_HOSTS = re.compile(r"\*|(?:\*\.)?[a-z0-9](?:[a-z0-9.-]*[a-z0-9])?(?::[1-9][0-9]{0,4})?", re.IGNORECASE)
# The beginning of a URL or of a place on the server's disk. URL parsers drop control characters
# before it, and tabs and line breaks inside it.
_BROKEN_UP = r"[\t\r\n]*+"
PLACE = (
    rf"[\0-\x20\s]*+(?:[A-Za-z][A-Za-z0-9+.\t\r\n-]*+:{_BROKEN_UP}/{_BROKEN_UP}/"
    rf"|[fF]{_BROKEN_UP}[iI]{_BROKEN_UP}[lL]{_BROKEN_UP}[eE]{_BROKEN_UP}:)"
)
_PLACE = re.compile(PLACE)
_LOCAL = re.compile(r"\s*data:", re.IGNORECASE)
_URL = re.compile(r"(https?)://([a-z0-9.-]+)(?::([0-9]{1,5}))?(?:[/?][!-~]*)?", re.IGNORECASE)
_PORTS = {"http": "80", "https": "443"}


def is_host_pattern(text: str) -> bool:
    """Return whether an operator may write this for hosts."""
    return _HOSTS.fullmatch(text) is not None


def is_local(url: str) -> bool:
    """Return whether the URL holds its file itself."""
    return _LOCAL.match(url) is not None


def names_a_place(text: str) -> bool:
    """Return whether a text that should be a file's content is a URL instead."""
    return _PLACE.match(text) is not None


def host_of(url: str) -> str | None:
    """Return the host, with its port where that is not the scheme's own; None for what is no plain
    http(s) URL.
    """
    found = _URL.fullmatch(url) if len(url) <= URL_CHARS_MAX else None
    if found is None or "\\" in url or "#" in url:
        return None
    host = found[2].lower().rstrip(".")
    port = (found[3] or "").lstrip("0")
    return host if not host or port in ("", _PORTS[found[1].lower()]) else f"{host}:{port}"


def is_allowed(url: str, hosts: Collection[str]) -> bool:
    """Return whether a server may fetch this URL. `hosts` are in lower case."""
    if ANY_HOST in hosts:
        return url[:7].lower() == "http://" or url[:8].lower() == "https://"
    host = host_of(url)
    if not host:
        return False
    name, _, port = host.partition(":")
    after = f":{port}" if port else ""
    labels = name.split(".")
    above = (f"*.{'.'.join(labels[at:])}{after}" for at in range(1, len(labels)))
    return host in hosts or any(one in hosts for one in above)
