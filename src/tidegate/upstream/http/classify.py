"""The border of HTTP: each failed status or foreign exception becomes exactly one UpstreamError.

No module above this one sees an aiohttp exception or reads a status. One question decides between
the classes: may the upstream have done (and billed) the work? Messages never hold request headers,
and a foreign exception is never chained to ours, because its representation would show them.
"""

import asyncio
import os
import re
import ssl
from collections.abc import Mapping

import aiohttp
from aiohttp.http_exceptions import ContentEncodingError, HttpProcessingError

from tidegate.core.answers import answer
from tidegate.core.answers.redaction import without_account
from tidegate.core.errors import (
    Ambiguous,
    AnswerTooLong,
    AnswerUnusable,
    BrokenAnswer,
    KeyRejected,
    Refused,
    Throttled,
    Unavailable,
    UpstreamError,
)
from tidegate.core.retry_after import retry_after_ms

FAILURE_BODY_BYTES_MAX = 64 * 1024
PAGE_BYTES_MAX = 512
CERTIFICATE_WORDS = (
    "the server does not accept our side of the TLS handshake: does it demand a client certificate? "
    "check the deployment's tls.cert_file and tls.key_file"
)
# nginx completes the handshake without a certificate, and refuses the request with its own page.
_WANTS_CERTIFICATE = re.compile(
    rb"<title>4[0-9]{2} (?:No required SSL certificate was sent|The SSL certificate error)</title>"
)
# OpenAI's word for an account that has no money left, which other providers use too.
_OUT_OF_QUOTA = b'"insufficient_quota"'


class CallCut(Exception):
    """We ended a call: after a time-out, at the deadline, or because a body came too slowly.

    The text says which.
    """


class HandshakeRejected(Exception):
    """The server ended a TLS connection before it accepted our handshake, so it read no request."""


class AnswerTooLarge(Exception):
    """The body passed `response_bytes_max`, counted after decompression."""

    def __init__(self, status: int, bytes_max: int) -> None:
        super().__init__(status, bytes_max)
        self.status = status
        self.bytes_max = bytes_max


def no_answer(wrong: answer.NotAnAnswer, status: int, body: bytes) -> BrokenAnswer:
    """Return the error of a call with a status of success but a body that is no answer."""
    kind = AnswerUnusable if isinstance(wrong, answer.Unreadable) else BrokenAnswer
    return kind(str(wrong), status=status, body=_bounded(body))


def refusal(status: int, headers: Mapping[str, str], body: bytes, now_ms: int) -> UpstreamError:
    """Return the error of one class for a status without success.

    `now_ms` is wall time, for dates in headers.
    """
    raw = _bounded(body)
    after_ms = retry_after_ms(headers, now_ms)
    if status == 429:
        why = "too many requests"
        if _OUT_OF_QUOTA in raw[:PAGE_BYTES_MAX]:
            why = "the quota of its account is used up, check the account's plan and billing"
        return Throttled(f"the upstream answered 429: {why}", status=status, body=raw, retry_after_ms=after_ms)
    if status in (401, 403):
        # The body may quote our key, so it is not kept; the operator sees the status, the caller
        # sees neither.
        return KeyRejected(
            f"the upstream answered {status} to our own key: check the deployment's api_key", status=status
        )
    if status in (408, 425) or 500 <= status <= 599:
        message = f"the upstream answered {status}"
        if status in (503, 529):
            return Ambiguous(message, status=status, body=raw, retry_after_ms=after_ms, code="upstream_overloaded")
        return Ambiguous(message, status=status, body=raw, retry_after_ms=after_ms)
    if 300 <= status <= 399:
        # Only the operator may see the target, which the body names too: the probe and `tidegate
        # run` show it.
        return Refused(
            f"the upstream redirects ({status}), and redirects are not followed: set the deployment's url to the final address",
            status=status,
        )
    if _WANTS_CERTIFICATE.search(raw[:PAGE_BYTES_MAX]):
        return Unavailable(f"the call never started: {CERTIFICATE_WORDS}", code="upstream_tls_rejected")
    if 400 <= status <= 499:
        return Refused(f"the upstream refused the request with status {status}", status=status, body=raw)
    return BrokenAnswer(f"the upstream ended with status {status}, which is no answer", status=status, body=raw)


def redirect_target(headers: Mapping[str, str]) -> str:
    """Return the target of a redirect without parts that may be secret.

    The text is empty if the headers name no target.
    """
    return headers.get("Location", "").split("?")[0][:200]


def failure(wrong: BaseException, *, sent: bool) -> UpstreamError:
    """Return the error of one class for a call that ended without a whole answer.

    `sent` tells whether any byte of the request can have reached the upstream. Before that, the
    call cannot have been billed.
    """
    if isinstance(wrong, AnswerTooLarge):
        return AnswerTooLong(
            f"the upstream's answer is larger than {wrong.bytes_max} bytes: raise response_bytes_max if it is meant to be",
            status=wrong.status,
        )
    what = _in_words(wrong)
    if isinstance(wrong, HandshakeRejected):
        return Unavailable(f"the call never started: {what}", code="upstream_tls_rejected")
    if isinstance(wrong, NEVER_CONNECTED) or not sent:
        return Unavailable(f"the call never started: {what}")
    return Ambiguous(f"the call broke after it was sent: {what}")


# Raised only while a connection is made, whatever else happened before.
NEVER_CONNECTED = (
    aiohttp.ClientConnectorError,
    aiohttp.ConnectionTimeoutError,
    aiohttp.ServerFingerprintMismatch,
    aiohttp.InvalidURL,
    ssl.SSLCertVerificationError,
    HandshakeRejected,
)


def _in_words(wrong: BaseException) -> str:
    """Return a sentence of classes, hosts and system text, without headers, keys or bodies."""
    match wrong:
        case CallCut():
            return str(wrong)
        case HandshakeRejected():
            return CERTIFICATE_WORDS
        case aiohttp.ClientConnectorDNSError():
            return f"the name {wrong.host!r} cannot be resolved: check the deployment's url and DNS"
        case aiohttp.ClientConnectorCertificateError() | aiohttp.ClientConnectorSSLError():
            why = _tls_reason(
                wrong.certificate_error
                if isinstance(wrong, aiohttp.ClientConnectorCertificateError)
                else wrong.os_error
            )
            return (
                f"TLS with {wrong.host}:{wrong.port} failed{why}: check the deployment's tls settings and certificate"
            )
        case aiohttp.ClientConnectorError():
            # The text of asyncio's own error names the address again, as Python writes it.
            number = wrong.os_error.errno
            reason = os.strerror(number) if number else wrong.os_error.strerror or type(wrong.os_error).__name__
            return f"no connection to {wrong.host}:{wrong.port} ({reason}): is the server running?"
        case aiohttp.ConnectionTimeoutError():
            return "connecting took too long"
        case aiohttp.ServerDisconnectedError():
            return "the upstream closed the connection without an answer"
        case aiohttp.ClientPayloadError():
            return "the upstream's answer ended early or was garbled"
        case ContentEncodingError():
            return "the upstream's answer is compressed in a way that cannot be read, and none was asked for"
        case HttpProcessingError():
            return "the upstream's answer is not valid HTTP"
        case OSError() if wrong.strerror:
            return wrong.strerror
        case asyncio.TimeoutError():
            return "it took too long"
    return type(wrong).__name__


def _tls_reason(error: BaseException) -> str:
    """Return the TLS library's reason in brackets.

    Its text is about certificates and versions, never about a request.
    """
    reason = getattr(error, "verify_message", None) or getattr(error, "reason", None)
    return f" ({reason})" if isinstance(reason, str) else ""


def _bounded(body: bytes) -> bytes:
    """Return a failure's body as one line, without the ids of the account that pays."""
    return answer.one_line(without_account(body[: FAILURE_BODY_BYTES_MAX + 1]), FAILURE_BODY_BYTES_MAX)
