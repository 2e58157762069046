"""Escape the characters in JSON text that many clients take for the end of a line: U+2028, U+2029
and U+0085.

JSON allows them unescaped inside strings, but a client that splits text at every Unicode line
break, such as Python's `str.splitlines`, would cut a result line or an event in two. The other
characters that it splits at are control characters, which JSON never allows raw.
"""

_ESCAPES = ((b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"), (b"\xc2\x85", b"\\u0085"))
_BEGINNINGS = (b"\xe2\x80", b"\xe2", b"\xc2")


def escape_line_breaks(text: bytes) -> bytes:
    """Return the same JSON with these characters as escapes.

    They stand only inside strings, so its meaning stays the same.
    """
    if text.isascii():
        return text
    for character, escape in _ESCAPES:
        if character in text:
            text = text.replace(character, escape)
    return text


class StreamEscaper:
    """Escape line breaks in text that comes in pieces, which may be cut anywhere."""

    __slots__ = ("_beginning",)

    def __init__(self) -> None:
        self._beginning = b""

    def feed(self, chunk: bytes) -> bytes:
        """Return what can be passed on now: everything but the beginning of a character that may
        have to be escaped.
        """
        if self._beginning:
            chunk = self._beginning + chunk
            self._beginning = b""
        for beginning in _BEGINNINGS:
            if chunk.endswith(beginning):
                self._beginning = beginning
                chunk = chunk.removesuffix(beginning)
                break
        return escape_line_breaks(chunk)

    def end_stream(self) -> bytes:
        """Return the bytes that are still held, as they came."""
        beginning, self._beginning = self._beginning, b""
        return beginning
