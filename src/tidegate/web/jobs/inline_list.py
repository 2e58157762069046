"""The parser that cuts the body of a create into its requests as it arrives.

The body is `{"requests": [{…}, …], …}`.

At most one element of the list and one piece of the body are held at a time, beside the few other
fields that a door allows. The door decides what an element means.
"""

import re
from collections.abc import Iterator, Sequence
from enum import Enum

import msgspec

from tidegate.core.errors import ApiProblem

OTHER_BYTES_MAX = 65_536
_SPACES = re.compile(rb"[ \t\r\n]*+")
_BRACKET_OR_QUOTE = re.compile(rb'["{}\[\]]')
# Everything up to and including the next bracket outside of strings; no match if these bytes have
# none.
_TO_BRACKET = re.compile(rb'[^"{}\[\]]*+(?:"[^"\\]*+(?:\\.[^"\\]*+)*+"[^"{}\[\]]*+)*+[{}\[\]]', re.DOTALL)
_STRING = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
_SCALAR = re.compile(rb"[^,{}\[\] \t\r\n\"]*+")
_QUOTE, _OPENING = ord('"'), b"{["
_NOT_SCALAR = b'"{['
_SHOWN_CHARS_MAX = 64


class _Place(Enum):
    """The part of the body that comes next."""

    START = 0
    FIRST_NAME = 1
    NAME = 2
    COLON = 3
    VALUE = 4
    LIST = 5
    FIRST_ELEMENT = 6
    ELEMENT = 7
    AFTER_ELEMENT = 8
    AFTER_VALUE = 9
    END = 10


_FOLLOWING = {
    (_Place.START, b"{"): _Place.FIRST_NAME,
    (_Place.FIRST_NAME, b"}"): _Place.END,
    (_Place.COLON, b":"): _Place.VALUE,
    (_Place.LIST, b"["): _Place.FIRST_ELEMENT,
    (_Place.FIRST_ELEMENT, b"]"): _Place.AFTER_VALUE,
    (_Place.AFTER_ELEMENT, b","): _Place.ELEMENT,
    (_Place.AFTER_ELEMENT, b"]"): _Place.AFTER_VALUE,
    (_Place.AFTER_VALUE, b","): _Place.NAME,
    (_Place.AFTER_VALUE, b"}"): _Place.END,
}


class InlineList:
    """The parser of one body.

    It yields whole elements as the bytes that were sent. `name` is the name of the list, and
    `others` are the other fields that the body may have. `count` is the number of elements before
    the one at hand.
    """

    def __init__(self, name: str, element_bytes_max: int, others: Sequence[str] = ()) -> None:
        self.name = name
        self.count = 0
        self.fields: dict[str, msgspec.Raw] = {}
        self._element_bytes_max = element_bytes_max
        self._others = tuple(others)
        self._place = _Place.START
        self._field = ""
        self._has_list = False
        # `_start` is where the unread bytes begin. Inside a value (`_is_inside`), `_at`, `_depth`
        # and `_in_string` are where the search for its end stopped.
        self._buffer = bytearray()
        self._start = 0
        self._is_inside = False
        self._at = 0
        self._depth = 0
        self._in_string = False

    @property
    def param(self) -> str:
        """Return the name of the next element, for a refusal."""
        return f"{self.name}.{self.count}"

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Parse the next bytes of the body; yield the elements that they complete."""
        # A client may send pieces of one byte: the bytes that are held are not copied for each.
        del self._buffer[: self._start]
        self._buffer += data
        self._at -= self._start
        self._start = 0
        while True:
            if self._is_inside:
                text = self._take_value()
                if text is None:
                    return
                if text:
                    yield text
                    self.count += 1
            elif not self._go_on():
                return

    def finish(self) -> None:
        """Raise unless the body was whole and its list had an element."""
        if not self._has_list and self._place in (_Place.START, _Place.END, _Place.LIST):
            raise self._missing()
        if self._place is not _Place.END:
            raise invalid("The body ends before its JSON is complete.")
        if not self.count:
            raise bad(self.name, f"`{self.name}` is empty: send at least one request.")

    def _go_on(self) -> bool:
        """Take the next character that is no space; return False if more bytes are needed."""
        spaces = _SPACES.match(self._buffer, self._start)
        self._start = spaces.end() if spaces else self._start
        if self._start == len(self._buffer):
            return False
        self._take_letter(bytes(self._buffer[self._start : self._start + 1]))
        return True

    def _take_letter(self, letter: bytes) -> None:
        """Take the one character that may come here, or begin the value that starts with it."""
        place = self._place
        is_before_element = place in (_Place.FIRST_ELEMENT, _Place.ELEMENT)
        if (
            (is_before_element and letter == b"{")
            or (place in (_Place.FIRST_NAME, _Place.NAME) and letter == b'"')
            or (place is _Place.VALUE and letter not in b",:]}")
        ):
            self._is_inside, self._at, self._depth, self._in_string = True, self._start, 0, False
            return
        self._start += 1
        following = _FOLLOWING.get((place, letter))
        if following is not None:
            is_list = following is _Place.VALUE and self._field == self.name
            self._place = _Place.LIST if is_list else following
            self._has_list = self._has_list or following is _Place.FIRST_ELEMENT
        elif place in (_Place.START, _Place.LIST):
            raise self._missing()
        elif is_before_element:
            raise bad(self.param, f"`{self.param}` must be an object.")
        else:
            raise invalid("The body is not valid JSON.")

    def _take_value(self) -> bytes | None:
        """Take an element, a field's name or a field's value, once it is whole.

        Return an element, empty bytes for another value, or None if more bytes are needed.
        """
        end = self._scan()
        is_element = self._place in (_Place.FIRST_ELEMENT, _Place.ELEMENT)
        size = (end or len(self._buffer)) - self._start
        if is_element and size > self._element_bytes_max:
            most = self._element_bytes_max
            message = f"`{self.param}` is larger than {most:,} bytes: split it, or ask the operator for a higher limit."
            raise ApiProblem(413, "body_too_large", message, param=self.param)
        if not is_element and size > OTHER_BYTES_MAX:
            where = self._field or self.name
            raise bad(where, f"The fields beside `{self.name}` may have {OTHER_BYTES_MAX:,} bytes each.")
        if not end:
            return None
        text = bytes(self._buffer[self._start : end])
        self._start, self._is_inside = end, False
        if is_element:
            self._place = _Place.AFTER_ELEMENT
            return text
        if self._place is _Place.VALUE:
            self.fields[self._field] = msgspec.Raw(text)
            self._place = _Place.AFTER_VALUE
        else:
            self._take_name(text)
        return b""

    def _take_name(self, text: bytes) -> None:
        try:
            name = msgspec.json.decode(text, type=str)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise invalid("The body is not valid JSON.") from None
        if name in self.fields or (name == self.name and self._has_list):
            raise bad(name, f"`{name}` is named twice: name it once.")
        if name != self.name and name not in self._others:
            self._refuse_other(name)
        self._field, self._place = name, _Place.COLON

    def _refuse_other(self, name: str) -> None:
        if not self._others:
            raise bad(self.name, f"`{self.name}` is the only field that the body may have.")
        shown = "".join(letter if letter.isprintable() else "?" for letter in name[:_SHOWN_CHARS_MAX])
        known = ", ".join((self.name, *self._others))
        message = f"Unknown parameter `{shown}`. Known are: {known}."
        raise ApiProblem(400, "unknown_parameter", message, param=shown)

    def _scan(self) -> int:
        """Return the end of a value, searched from where the last search stopped; 0 if it has not
        arrived.

        Brackets are only counted: the decoder checks whether they match.
        """
        data, at, depth, in_string = self._buffer, self._at, self._depth, self._in_string
        if data[self._start] not in _NOT_SCALAR:
            scalar = _SCALAR.match(data, at)
            self._at = scalar.end() if scalar else at
            return self._at if self._at < len(data) else 0
        if not in_string and (depth or data[at] != _QUOTE):
            while (whole := _TO_BRACKET.match(data, at)) is not None:
                at = whole.end()
                depth += 1 if data[at - 1] in _OPENING else -1
                if not depth:
                    return at
        while True:
            if in_string:
                text = _STRING.match(data, at)
                at = text.end() if text else at
                # The match stops at the closing quote, at the end of the bytes, or at an escape of
                # which only half has arrived.
                if data[at : at + 1] != b'"':
                    break
                at, in_string = at + 1, False
                if not depth:
                    return at
            found = _BRACKET_OR_QUOTE.search(data, at)
            if found is None:
                at = len(data)
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

    def _missing(self) -> ApiProblem:
        return bad(self.name, f'The body must be a JSON object with a list of requests: {{"{self.name}": [...]}}.')


def bad(param: str | None, message: str) -> ApiProblem:
    return ApiProblem(400, "invalid_parameter", message, param=param)


def invalid(message: str) -> ApiProblem:
    return ApiProblem(400, "invalid_json", message)
