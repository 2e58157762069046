"""Every exception that the HTTP client library defines, found by walking it, has its place here: whether a call that met it may have been
billed. A new version of the library with a new one fails this test until someone has decided."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import ssl
from unittest.mock import Mock

import aiohttp
import pytest
from aiohttp.client_reqrep import ConnectionKey

from tidegate.core.errors import Ambiguous, Unavailable
from tidegate.upstream.http import classify

# Raised while a connection is made, or before: nothing was sent, whatever else is believed.
NEVER_BILLED = {
    "client_exceptions.ClientConnectorCertificateError",
    "client_exceptions.ClientConnectorDNSError",
    "client_exceptions.ClientConnectorError",
    "client_exceptions.ClientConnectorSSLError",
    "client_exceptions.ClientProxyConnectionError",
    "client_exceptions.ClientSSLError",
    "client_exceptions.ConnectionTimeoutError",
    "client_exceptions.InvalidURL",
    "client_exceptions.InvalidUrlClientError",
    "client_exceptions.InvalidUrlRedirectClientError",
    "client_exceptions.ServerFingerprintMismatch",
    "client_exceptions.UnixClientConnectorError",
}
# May come at any time: billed or not by whether a byte of the request had left.
BILLED_ONCE_SENT = {
    "client_exceptions.ClientConnectionError",
    "client_exceptions.ClientConnectionResetError",
    "client_exceptions.ClientError",
    "client_exceptions.ClientHttpProxyError",
    "client_exceptions.ClientOSError",
    "client_exceptions.ClientPayloadError",
    "client_exceptions.ClientResponseError",
    "client_exceptions.ContentTypeError",
    "client_exceptions.NonHttpUrlClientError",
    "client_exceptions.NonHttpUrlRedirectClientError",
    "client_exceptions.RedirectClientError",
    "client_exceptions.ServerConnectionError",
    "client_exceptions.ServerDisconnectedError",
    "client_exceptions.ServerTimeoutError",
    "client_exceptions.SocketTimeoutError",
    "client_exceptions.TooManyRedirects",
    "client_exceptions.UploadAbortedError",
    "compression_utils.TooManyMembersError",
    "http_exceptions.BadHttpMessage",
    "http_exceptions.BadHttpMethod",
    "http_exceptions.BadStatusLine",
    "http_exceptions.ContentEncodingError",
    "http_exceptions.ContentLengthError",
    "http_exceptions.DecompressSizeError",
    "http_exceptions.HttpBadRequest",
    "http_exceptions.HttpProcessingError",
    "http_exceptions.InvalidHeader",
    "http_exceptions.InvalidURLError",
    "http_exceptions.LineTooLong",
    "http_exceptions.PayloadEncodingError",
    "http_exceptions.TransferEncodingError",
    "streams.EofStream",
    # Of web sockets, forms and payload objects, which we do not use: should one come all the same, it is the careful class.
    "_websocket.models.WSHandshakeError",
    "_websocket.models.WebSocketError",
    "client_exceptions.WSMessageTypeError",
    "client_exceptions.WSServerHandshakeError",
    "multipart.BadContentDispositionHeader",
    "multipart.BadContentDispositionParam",
    "payload.LookupError",
}
# The library's own server.
SERVERS = ("aiohttp.web", "aiohttp.worker", "aiohttp.pytest_plugin", "aiohttp.test_utils")
KEY = ConnectionKey("h", 1, True, True, None, None, None)


def every_class() -> dict[str, type[BaseException]]:
    found: dict[str, type[BaseException]] = {}
    for info in pkgutil.walk_packages(aiohttp.__path__, "aiohttp."):
        if info.name.startswith(SERVERS):
            continue
        for _, kind in inspect.getmembers(importlib.import_module(info.name), inspect.isclass):
            is_its_own = kind.__module__.startswith("aiohttp.") and not kind.__module__.startswith(SERVERS)
            if issubclass(kind, BaseException) and is_its_own:
                found[f"{kind.__module__}.{kind.__qualname__}".removeprefix("aiohttp.")] = kind
    return found


def one_of(kind: type[BaseException]) -> BaseException:
    if issubclass(kind, aiohttp.client_exceptions.UnixClientConnectorError):
        return kind("/x", KEY, OSError(2, "missing"))
    if issubclass(kind, aiohttp.ClientConnectorCertificateError):
        return kind(KEY, ssl.CertificateError("bad"))
    if issubclass(kind, aiohttp.ClientConnectorError):
        return kind(KEY, OSError(1, "x"))
    if issubclass(kind, aiohttp.ServerFingerprintMismatch):
        return kind(b"a", b"b", "h", 1)
    if issubclass(kind, aiohttp.ClientResponseError):
        return kind(Mock(real_url="http://h"), ())
    return kind.__new__(kind)


def test_no_exception_of_the_library_is_without_a_place() -> None:
    assert set(every_class()) == NEVER_BILLED | BILLED_ONCE_SENT
    assert not NEVER_BILLED & BILLED_ONCE_SENT


@pytest.mark.parametrize(("name", "kind"), sorted(every_class().items()))
def test_each_is_sorted_by_whether_it_may_have_been_billed(name: str, kind: type[BaseException]) -> None:
    before = classify.failure(one_of(kind), sent=False)
    after = classify.failure(one_of(kind), sent=True)
    assert type(before) is Unavailable
    assert not before.billed
    assert type(after) is (Unavailable if name in NEVER_BILLED else Ambiguous)
    assert after.billed is (name not in NEVER_BILLED)
    assert before.message
    assert after.message
    assert after.__cause__ is None, "what the library raised knows our key's header"
