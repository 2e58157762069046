"""The border's map is whole: every exception of the client is exactly one class."""

import asyncio
import inspect
import json
import ssl
from collections.abc import Iterator
from unittest.mock import Mock

import aiohttp
import pytest
from aiohttp import http_exceptions
from aiohttp.client_reqrep import ConnectionKey
from aiohttp.http_exceptions import ContentEncodingError
from hypothesis import given
from hypothesis import strategies as st

from tidegate.core.answers.answer import NotAnAnswer
from tidegate.core.errors import Ambiguous, AnswerTooLong, Unavailable
from tidegate.core.retry_after import retry_after_ms
from tidegate.upstream.http import classify

NOW_MS = 1_700_000_000_000


def every_exception() -> Iterator[BaseException]:
    key = ConnectionKey("h", 1, True, True, None, None, None)
    special: dict[str, BaseException] = {
        "ClientConnectorError": aiohttp.ClientConnectorError(key, OSError(111, "Connection refused")),
        "ClientConnectorDNSError": aiohttp.ClientConnectorDNSError(key, OSError(-2, "Name unknown")),
        "ClientProxyConnectionError": aiohttp.ClientProxyConnectionError(key, OSError(111, "Connection refused")),
        "ClientConnectorSSLError": aiohttp.ClientConnectorSSLError(key, OSError(1, "TLS")),
        "UnixClientConnectorError": aiohttp.client_exceptions.UnixClientConnectorError(
            "/x", key, OSError(2, "missing")
        ),
        "ClientConnectorCertificateError": aiohttp.ClientConnectorCertificateError(key, ssl.CertificateError("bad")),
        "ServerFingerprintMismatch": aiohttp.ServerFingerprintMismatch(b"a", b"b", "h", 1),
    }
    responses = (aiohttp.ClientResponseError,)
    for module in (aiohttp.client_exceptions, http_exceptions):
        for name, kind in inspect.getmembers(module, inspect.isclass):
            if not issubclass(kind, Exception):
                continue
            if name in special:
                yield special[name]
            elif issubclass(kind, aiohttp.ClientConnectorError):
                yield kind(key, OSError(1, "x"))
            elif issubclass(kind, responses):
                yield kind(Mock(real_url="http://h"), ())
            elif issubclass(kind, http_exceptions.HttpProcessingError):
                yield kind.__new__(kind)
            elif issubclass(kind, aiohttp.InvalidURL):
                yield kind("http://h")
            else:
                yield kind()
    yield from (OSError(104, "Connection reset by peer"), TimeoutError(), asyncio.IncompleteReadError(b"", 5))
    yield from (ConnectionResetError(), BrokenPipeError(), ssl.SSLError(1, "x"), ValueError(), AssertionError())
    yield classify.CallCut("its deadline passed")


@pytest.mark.parametrize("wrong", list(every_exception()), ids=lambda wrong: type(wrong).__name__)
def test_every_exception_is_one_class_by_whether_it_was_sent(wrong: BaseException) -> None:
    before, after = classify.failure(wrong, sent=False), classify.failure(wrong, sent=True)
    assert type(before) is Unavailable
    never = isinstance(wrong, classify.NEVER_CONNECTED)
    assert type(after) is (Unavailable if never else Ambiguous)
    assert before.message
    assert not before.billed


@pytest.mark.parametrize("name", ["ClientConnectorError", "ClientConnectorDNSError", "ClientConnectorSSLError"])
def test_refused_unresolved_and_tls_are_never_possibly_billed(name: str) -> None:
    wrong = next(one for one in every_exception() if type(one).__name__ == name)
    error = classify.failure(wrong, sent=True)
    assert type(error) is Unavailable
    assert ":" in error.message


def test_too_large_is_a_broken_answer() -> None:
    error = classify.failure(classify.AnswerTooLarge(200, 1000), sent=True)
    assert type(error) is AnswerTooLong
    assert "response_bytes_max" in error.message


@pytest.mark.parametrize(
    ("headers", "wait_ms"),
    [
        ({}, None),
        ({"Retry-After": "7"}, 7_000),
        ({"Retry-After": "0"}, 0),
        ({"Retry-After": "0.5"}, 500),
        ({"Retry-After": "1000000000"}, 10**12),
        ({"Retry-After": "-5"}, None),
        ({"Retry-After": "nan"}, None),
        ({"Retry-After": "inf"}, None),
        ({"Retry-After": "1e400"}, None),
        ({"Retry-After": "soon"}, None),
        ({"Retry-After": ""}, None),
        ({"Retry-After": "9" * 5000}, None),
        ({"retry-after-ms": "250", "Retry-After": "9"}, 250),
        ({"retry-after-ms": "-1", "Retry-After": "9"}, 9_000),
        ({"Retry-After": "Tue, 14 Nov 2023 22:13:30 GMT"}, 10_000),
        ({"Retry-After": "Tue, 14 Nov 2023 22:13:10 GMT"}, None),
        ({"Retry-After": "Tue, 14 Nov 2023 22:13:30 GMT", "Date": "Tue, 14 Nov 2023 22:13:25 GMT"}, 5_000),
        ({"Retry-After": "Tue, 99 Nov 2023 22:13:30 GMT"}, None),
        ({"Retry-After": "Tue, 14 Nov 99999999999 22:13:30 GMT"}, None),
        ({"Retry-After": "Fri, 31 Dec 9999 23:59:59 GMT", "Date": "garbage"}, 253_402_300_799_000 - NOW_MS),
    ],
)
def test_retry_after_in_all_its_forms(headers: dict[str, str], wait_ms: int | None) -> None:
    assert retry_after_ms(headers, NOW_MS) == wait_ms
    error = classify.refusal(429, headers, b"", NOW_MS)
    assert error.retry_after_ms == wait_ms
    assert classify.refusal(503, headers, b"", NOW_MS).retry_after_ms == wait_ms


@given(st.text(max_size=100))
def test_no_retry_after_can_raise_or_be_negative(text: str) -> None:
    wait = retry_after_ms({"Retry-After": text, "Date": text}, NOW_MS)
    assert wait is None or wait >= 0


@pytest.mark.parametrize("field", ["code", "type"])
def test_an_account_without_money_is_not_taken_for_too_many_requests(field: str) -> None:
    out = classify.refusal(
        429, {}, json.dumps({"error": {"message": "no", field: "insufficient_quota"}}).encode(), NOW_MS
    )
    assert "the quota of its account is used up" in str(out)
    many = classify.refusal(429, {}, b'{"error":{"message":"slow down","code":"rate_limit_exceeded"}}', NOW_MS)
    assert str(many) == "the upstream answered 429: too many requests"


def test_a_refusal_keeps_the_upstreams_own_body_on_one_line_and_bounded() -> None:
    error = classify.refusal(400, {}, b'{"error":\n {"message":"bad"}}\n', NOW_MS)
    assert error.body == b'{"error":  {"message":"bad"}}'
    assert classify.refusal(404, {}, b"<html>", NOW_MS).body == b'"<html>"'
    assert len(classify.refusal(400, {}, b"x" * 10_000_000, NOW_MS).body) <= classify.FAILURE_BODY_BYTES_MAX + 2


def test_a_failure_does_not_name_the_account_that_pays() -> None:
    named = b'{"error":{"message":"Limit reached in organization org-AbC123dEf456"}}'
    wrongs = [classify.refusal(status, {}, named, NOW_MS) for status in (400, 429, 500, 503)]
    for wrong in (*wrongs, classify.no_answer(NotAnAnswer("it is none"), 200, named)):
        assert b"Limit reached in organization" in wrong.body
        assert b"AbC123" not in wrong.body


def test_a_rejected_key_keeps_no_body_because_it_may_quote_the_key() -> None:
    assert classify.refusal(401, {}, b'{"error":"Incorrect API key provided: sk-canary"}', NOW_MS).body == b""


def test_a_redirect_does_not_tell_callers_where_it_leads() -> None:
    page = b'<a href="http://10.0.0.7/login">moved</a>'
    error = classify.refusal(302, {"Location": "http://10.0.0.7/login?token=canary"}, page, NOW_MS)
    assert "redirects (302)" in error.message
    assert b"10.0.0.7" not in error.message.encode() + error.body


def test_an_encoding_that_was_not_asked_for_is_named() -> None:
    error = classify.failure(ContentEncodingError("Can not decode content-encoding: brotli (br)"), sent=True)
    assert "compressed in a way that cannot be read" in error.message


def test_what_the_tls_library_found_wrong_is_named() -> None:
    key = ConnectionKey("gpu.example", 443, True, True, None, None, None)
    untrusted = ssl.SSLCertVerificationError("certificate verify failed")
    untrusted.verify_message = "self-signed certificate"
    plain = ssl.SSLError(1, "[SSL: WRONG_VERSION_NUMBER] wrong version number")
    plain.reason = "WRONG_VERSION_NUMBER"
    for wrong, why in (
        (aiohttp.ClientConnectorCertificateError(key, untrusted), "self-signed certificate"),
        (aiohttp.ClientConnectorSSLError(key, plain), "WRONG_VERSION_NUMBER"),
    ):
        assert f"TLS with gpu.example:443 failed ({why}): check" in classify.failure(wrong, sent=False).message
