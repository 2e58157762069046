"""Read an answer that came in one piece and is as plain as most are: a status, headers, and a body as long as they say.

Everything else is left to aiohttp's parser, which reads the same from what is read here: pieces, bodies of no stated length, encodings,
connections that end, and whatever looks odd. It costs several times as much, most of it for streams that a whole answer does not need.
"""

import re

import msgspec
from multidict import CIMultiDict, istr

from tidegate.core.deployments import HttpLimits

_HEAD = re.compile(
    rb"HTTP/1\.1 ([2-5][0-9][0-9]) [ -~]*+\r\n"
    rb"((?:[0-9A-Za-z!#$%&'*+.^_`|~-]++:[ -~]*+(?<! )\r\n)++)\r\n"
)
_HEADER = re.compile(r"([^:]++): *+([^\r]*+)\r\n")
_LENGTH = istr("Content-Length")
_CONNECTION = istr("Connection")
_KEPT = "keep-alive"
# Headers that change how a body or a connection is read.
_OTHER_WAYS = tuple(
    map(istr, ("Transfer-Encoding", "Content-Encoding", "Upgrade", "Proxy-Connection", "Sec-WebSocket-Key1"))
)
_WITHOUT_BODY = (204, 304)


class WholeHead(msgspec.Struct, frozen=True):
    code: int
    headers: CIMultiDict[str]


class WholeBody:
    """The body of an answer that is here already."""

    __slots__ = ("_data",)

    def __init__(self, data: bytes) -> None:
        self._data = data

    def read_nowait(self) -> bytes:
        data, self._data = self._data, b""
        return data

    async def readany(self) -> bytes:
        return self.read_nowait()


def read_plain_answer(data: bytes, limits: HttpLimits) -> tuple[WholeHead, WholeBody] | None:
    """Return the answer that these bytes are, from the first to the last; None when the parser has to look."""
    head = _HEAD.match(data)
    if head is None:
        return None
    begin = head.end()
    status, lines = head.groups()
    headers = CIMultiDict(_HEADER.findall(lines.decode("ascii")))
    if headers.getall(_LENGTH, None) != [str(len(data) - begin)]:
        return None
    if begin > limits.header_bytes_max or len(headers) > limits.header_count_max:
        return None
    for name in _OTHER_WAYS:
        if name in headers:
            return None
    if headers.get(_CONNECTION, _KEPT) != _KEPT:
        return None
    code = int(status)
    return None if code in _WITHOUT_BODY else (WholeHead(code, headers), WholeBody(data[begin:]))
