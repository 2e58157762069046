"""Answers that are read without aiohttp's parser: the usual ones are, and no bytes are read in another way than it reads them."""

import asyncio
from collections.abc import Mapping

import pytest
from aiohttp.client_proto import ResponseHandler
from hypothesis import given
from hypothesis import strategies as st

from tidegate.core.deployments import HttpLimits
from tidegate.upstream.http.connections import read_plain_answer

LIMITS = HttpLimits()
VLLM = (
    b"HTTP/1.1 200 OK\r\ndate: Tue, 17 Nov 2026 18:00:00 GMT\r\nserver: uvicorn\r\ncontent-length: 2\r\n"
    b"content-type: application/json\r\nx-request-id: 1f\r\n\r\n{}"
)
NGINX = (
    b"HTTP/1.1 429 Too Many Requests\r\nServer: nginx\r\nContent-Length: 4\r\nConnection: keep-alive\r\n"
    b"Retry-After: 3\r\nSet-Cookie: a=1\r\nSet-Cookie: b=2\r\nX-Empty:\r\n\r\nslow"
)


def _parsed(data: bytes) -> tuple[int, Mapping[str, str], bytes] | None:
    """What aiohttp reads of these bytes; None unless they are one answer after which the connection can be used again."""

    async def read() -> tuple[int, Mapping[str, str], bytes] | None:
        handler = ResponseHandler(asyncio.get_running_loop())
        handler.set_response_params(
            read_until_eof=True,
            max_line_size=LIMITS.header_bytes_max,
            max_field_size=LIMITS.header_bytes_max,
            max_headers=LIMITS.header_count_max,
        )
        handler.data_received(data)
        if handler.exception() is not None or len(handler) != 1:
            return None
        message, payload = await handler.read()
        if not payload.is_eof() or handler.should_close:
            return None
        return message.code, message.headers, payload.read_nowait()

    return asyncio.run(read())


def _agrees(data: bytes) -> bool:
    """Whether these bytes are read as aiohttp reads them; False when they are left to it."""
    answer = read_plain_answer(data, LIMITS)
    if answer is None:
        return False
    head, body = answer
    parsed = _parsed(data)
    assert parsed is not None
    code, headers, data = parsed
    assert (head.code, body.read_nowait()) == (code, data)
    assert [(name.lower(), value) for name, value in head.headers.items()] == [
        (name.lower(), value) for name, value in headers.items()
    ]
    return True


@pytest.mark.parametrize("data", [VLLM, NGINX, VLLM[:-2].replace(b"length: 2", b"length: 0")])
def test_usual_answers_are_read(data: bytes) -> None:
    assert _agrees(data)


@pytest.mark.parametrize(
    "data",
    [
        VLLM[:-1],
        VLLM + b"x",
        VLLM + VLLM,
        VLLM.replace(b"200 OK", b"204 No Content"),
        VLLM.replace(b"200 OK", b"103 Early Hints"),
        VLLM.replace(b"HTTP/1.1", b"HTTP/1.0"),
        VLLM.replace(b"x-request-id: 1f", b"Connection: close"),
        VLLM.replace(b"x-request-id: 1f", b"CONTENT-ENCODING: gzip"),
        VLLM.replace(b"x-request-id: 1f", b"transfer-encoding: chunked"),
        VLLM.replace(b"x-request-id: 1f", b"content-length: 2"),
        VLLM.replace(b"x-request-id: 1f", b"content-length: 3"),
        VLLM.replace(b"content-length: 2", b"content-length: +2"),
        VLLM.replace(b"x-request-id: 1f", b"x-request-id: \xff"),
        VLLM.replace(b"x-request-id: 1f", b"x-request-id: 1\r\n folded"),
        VLLM.replace(b"x-request-id: 1f", b"x-request-id : 1"),
        VLLM.replace(b"x-request-id: 1f", b"x-request-id: 1 "),
        VLLM.replace(b"\r\n", b"\n"),
        VLLM.replace(b"1f", b"f" * LIMITS.header_bytes_max),
        VLLM.replace(b"x-request-id: 1f", b"\r\n".join(b"x-%d: 1" % n for n in range(LIMITS.header_count_max))),
    ],
)
def test_every_other_answer_is_left_to_the_parser(data: bytes) -> None:
    assert read_plain_answer(data, LIMITS) is None


_names = st.sampled_from(
    [
        b"X-A",
        b"x_b",
        b"Connection",
        b"Keep-Alive",
        b"Content-Length",
        b"content-type",
        b"Upgrade",
        b"Trailer",
        b"X A",
        b"",
    ]
)
_values = st.sampled_from(
    [b"", b" ", b" 1", b" 2 ", b"keep-alive", b" keep-alive, close", b"\t3", b" a: b", b" \x7f", b" h2c"]
)
_lines = st.lists(st.builds(lambda name, value: name + b":" + value, _names, _values), max_size=5)
_ends = st.sampled_from([b"\r\n", b"\n", b"\r"])


@given(
    st.sampled_from([b"HTTP/1.1 200 OK", b"HTTP/1.1 404 ", b"HTTP/1.1 304 Same", b"HTTP/1.1 500", b"HTTP/1.0 200 OK"]),
    _lines,
    st.binary(max_size=4),
    st.integers(-1, 1),
    st.lists(_ends, min_size=1, max_size=2),
)
def test_whatever_is_read_is_read_as_the_parser_reads_it(
    status: bytes, lines: list[bytes], body: bytes, more: int, ends: list[bytes]
) -> None:
    head = [status, b"Content-Length: %d" % (len(body) + more), *lines]
    data = b"".join(line + ends[number % len(ends)] for number, line in enumerate(head)) + ends[0] + body
    _agrees(data)
