"""The requests of a create as lines of an input file.

The body is `{"requests": [{"custom_id": …, "params": {…}}, …]}`.

A fault in the list or in a request's frame refuses the whole body. A fault inside `params` is found
by ingest and fails only that request.
"""

import re
from collections.abc import Iterator
from hashlib import blake2b

import msgspec

from tidegate.core.wording import in_words
from tidegate.web.jobs.inline_list import InlineList, bad, invalid

CUSTOM_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}", re.ASCII)
# The most bytes that a line adds to its request.
FRAME_BYTES = 128
_ONE_LINE = bytes.maketrans(b"\r\n", b"  ")


class InlineRequest(msgspec.Struct, forbid_unknown_fields=True):
    custom_id: str
    params: msgspec.Raw


_decode = msgspec.json.Decoder(InlineRequest).decode


class InlineRequests:
    """The parser of the body of a create, which yields the lines of its whole requests."""

    def __init__(self, endpoint: str, count_max: int, request_bytes_max: int) -> None:
        self._url = endpoint.encode()
        self._count_max = count_max
        self._list = InlineList("requests", request_bytes_max)
        self._seen: set[bytes] = set()

    @property
    def count(self) -> int:
        return self._list.count

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Parse the next bytes of the body; yield the lines that they complete."""
        return map(self._line, self._list.feed(data))

    def finish(self) -> None:
        """Raise unless the body was whole and had at least one request."""
        self._list.finish()

    def _line(self, text: bytes) -> bytes:
        """Return the input line of one request.

        Its parameters are the caller's bytes on one line.
        """
        if self.count >= self._count_max:
            raise bad(
                "requests",
                f"`requests` has more than {in_words(self._count_max, 'request')}: make several batches of them.",
            )
        param = self._list.param
        try:
            request = _decode(text)
        except msgspec.ValidationError as error:
            raise bad(param, f"`{param}`: {_lowered(str(error))}.") from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise invalid(f"`{param}` is not valid JSON.") from None
        custom_id = request.custom_id
        if not CUSTOM_ID.fullmatch(custom_id):
            message = f"`{param}.custom_id` must have 1 to 64 letters, digits, hyphens and underscores."
            raise bad(f"{param}.custom_id", message)
        params = bytes(request.params)
        if not params.startswith(b"{"):
            raise bad(f"{param}.params", f"`{param}.params` must be an object: what you would send to /v1/messages.")
        known = blake2b(custom_id.encode(), digest_size=16).digest()
        if known in self._seen:
            raise bad(f"{param}.custom_id", f"`{param}.custom_id` was used before: {custom_id}. Give each its own.")
        self._seen.add(known)
        return b'{"custom_id":"%b","method":"POST","url":"%b","body":%b}\n' % (
            custom_id.encode(),
            self._url,
            params.translate(_ONE_LINE),
        )


def _lowered(text: str) -> str:
    return text[:1].lower() + text[1:200]
