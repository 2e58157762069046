"""The body of a create, cut into requests as it arrives: `{"requests": [{"custom_id": …, "params": {…}}, …]}`.

At most one request and one piece of the body are held at a time. Each request becomes a line of an input file. What is wrong with the list,
or with a request's frame, refuses the whole body; what is wrong inside `params` is found by ingest and fails that request alone.
"""

import re
from enum import Enum
from hashlib import blake2b

import msgspec

from tidegate.core.errors import ApiProblem

CUSTOM_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}", re.ASCII)
# What a line adds to the bytes of its request, at most.
FRAME_BYTES = 128
_HEAD_BYTES_MAX = 1_024
_HEAD = re.compile(rb'[ \t\r\n]*+\{[ \t\r\n]*+"requests"[ \t\r\n]*+:[ \t\r\n]*+\[')
_SPACES = re.compile(rb"[ \t\r\n]*+")
_BRACKET_OR_QUOTE = re.compile(rb'["{}\[\]]')
_STRING = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
_ONE_LINE = bytes.maketrans(b"\r\n", b"  ")


class InlineRequest(msgspec.Struct, forbid_unknown_fields=True):
    custom_id: str
    params: msgspec.Raw


_decode = msgspec.json.Decoder(InlineRequest).decode


class _Place(Enum):
    """What comes next in the body."""

    HEAD = 0
    FIRST_REQUEST = 1
    REQUEST = 2
    REST_OF_REQUEST = 3
    COMMA = 4
    TAIL = 5
    END = 6


class InlineRequests:
    """Feed it the body; it returns the lines of the requests that are whole."""

    def __init__(self, endpoint: str, count_max: int, request_bytes_max: int) -> None:
        self._url = endpoint.encode()
        self._count_max = count_max
        self._request_bytes_max = request_bytes_max
        self._place = _Place.HEAD
        # `_start` is where what was not taken yet begins; `_at`, `_depth` and `_in_string` are how far a request was looked through.
        self._held = b""
        self._start = 0
        self._at = 0
        self._depth = 0
        self._in_string = False
        self._seen: set[bytes] = set()
        self.count = 0

    def feed(self, data: bytes) -> list[bytes]:
        """Take the next bytes of the body; returns the lines that they complete."""
        self._held = self._held[self._start :] + data
        self._at -= self._start
        self._start = 0
        lines: list[bytes] = []
        while self._step(lines):
            continue
        return lines

    def finish(self) -> None:
        """Raise unless the body was whole and had at least one request."""
        if self._place is _Place.HEAD:
            raise _no_requests()
        if self._place is not _Place.END:
            raise _invalid("The body ends before its JSON is complete.")
        if not self.count:
            raise _bad("requests", "`requests` is empty: send at least one request.")

    def _step(self, lines: list[bytes]) -> bool:
        """Go on by one part; False when more bytes are needed."""
        if self._place is _Place.HEAD:
            return self._take_head()
        if self._place is _Place.REST_OF_REQUEST:
            return self._take_request(lines)
        spaces = _SPACES.match(self._held, self._start)
        self._start = spaces.end() if spaces else self._start
        if self._start == len(self._held):
            return False
        self._take_letter(self._held[self._start : self._start + 1])
        return True

    def _take_head(self) -> bool:
        found = _HEAD.match(self._held)
        if found is None:
            if len(self._held) > _HEAD_BYTES_MAX:
                raise _no_requests()
            return False
        self._start, self._place = found.end(), _Place.FIRST_REQUEST
        return True

    def _take_letter(self, letter: bytes) -> None:
        """Take the one character that may stand here, outside of any request."""
        is_before_request = self._place in (_Place.FIRST_REQUEST, _Place.REQUEST)
        if is_before_request and letter == b"{":
            self._place, self._at, self._depth = _Place.REST_OF_REQUEST, self._start, 0
            return
        self._start += 1
        if self._place is _Place.COMMA and letter == b",":
            self._place = _Place.REQUEST
        elif self._place in (_Place.FIRST_REQUEST, _Place.COMMA) and letter == b"]":
            self._place = _Place.TAIL
        elif self._place is _Place.TAIL and letter == b"}":
            self._place = _Place.END
        elif self._place is _Place.TAIL and letter == b",":
            raise _bad("requests", "`requests` is the only field that the body may have.")
        elif is_before_request:
            raise _bad(self._param, f"`{self._param}` must be an object with `custom_id` and `params`.")
        else:
            raise _invalid("The body is not valid JSON.")

    def _take_request(self, lines: list[bytes]) -> bool:
        end = self._scan()
        if (end or len(self._held)) - self._start > self._request_bytes_max:
            most = self._request_bytes_max
            message = (
                f"`{self._param}` is larger than {most:,} bytes: split it, or ask the operator for a higher limit."
            )
            raise ApiProblem(413, "body_too_large", message, param=self._param)
        if not end:
            return False
        lines.append(self._line(self._held[self._start : end]))
        self._start, self._place = end, _Place.COMMA
        return True

    def _scan(self) -> int:
        """Look for the end of a request, from where the last look stopped; 0 when it is not there yet.

        Brackets are only counted: whether they match is the decoder's to say."""
        held, at, depth, in_string = self._held, self._at, self._depth, self._in_string
        while True:
            if in_string:
                text = _STRING.match(held, at)
                at = text.end() if text else at
                # What it stops at is the closing quote, or an escape that lies only half in these bytes.
                if held[at : at + 1] != b'"':
                    break
                at, in_string = at + 1, False
            found = _BRACKET_OR_QUOTE.search(held, at)
            if found is None:
                at = len(held)
                break
            at = found.end()
            if found[0] == b'"':
                in_string = True
            else:
                depth += 1 if found[0] in b"{[" else -1
                if not depth:
                    return at
        self._at, self._depth, self._in_string = at, depth, in_string
        return 0

    def _line(self, text: bytes) -> bytes:
        """The input line of one request; its parameters are the caller's own bytes, on one line."""
        self._in_string = False
        if self.count >= self._count_max:
            raise _bad(
                "requests", f"`requests` has more than {self._count_max:,} requests: make several batches of them."
            )
        param = self._param
        try:
            request = _decode(text)
        except msgspec.ValidationError as error:
            raise _bad(param, f"`{param}`: {_lowered(str(error))}.") from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise _invalid(f"`{param}` is not valid JSON.") from None
        custom_id = request.custom_id
        if not CUSTOM_ID.fullmatch(custom_id):
            message = f"`{param}.custom_id` must have 1 to 64 letters, digits, hyphens and underscores."
            raise _bad(f"{param}.custom_id", message)
        params = bytes(request.params)
        if not params.startswith(b"{"):
            raise _bad(f"{param}.params", f"`{param}.params` must be an object: what you would send to /v1/messages.")
        known = blake2b(custom_id.encode(), digest_size=16).digest()
        if known in self._seen:
            raise _bad(f"{param}.custom_id", f"`{param}.custom_id` was used before: {custom_id}. Give each its own.")
        self._seen.add(known)
        self.count += 1
        return b'{"custom_id":"%b","method":"POST","url":"%b","body":%b}\n' % (
            custom_id.encode(),
            self._url,
            params.translate(_ONE_LINE),
        )

    @property
    def _param(self) -> str:
        """The request at hand, as Anthropic names it."""
        return f"requests.{self.count}"


def _no_requests() -> ApiProblem:
    return _bad("requests", 'The body must be a JSON object with one field: {"requests": [...]}.')


def _lowered(text: str) -> str:
    return text[:1].lower() + text[1:200]


def _bad(param: str | None, message: str) -> ApiProblem:
    return ApiProblem(400, "invalid_parameter", message, param=param)


def _invalid(message: str) -> ApiProblem:
    return ApiProblem(400, "invalid_json", message)
