"""The parser of byte ranges (RFC 9110, section 14). It knows only the size of the file."""

import re

_ONE = re.compile(r"bytes=(?P<first>[0-9]{0,18})-(?P<last>[0-9]{0,18})", re.ASCII | re.IGNORECASE)


class Unsatisfiable(Exception):
    """The range begins after the end."""


def choose(header: str | None, size_bytes: int) -> tuple[int, int] | None:
    """Return the start and the exclusive end of the bytes asked for; None for all of them.

    A header that is malformed or names several ranges is ignored, as the standard allows: then the
    whole is sent, once.
    """
    matched = _ONE.fullmatch(header.replace(" ", "")) if header else None
    if matched is None or not (matched["first"] or matched["last"]):
        return None
    if not matched["first"]:
        count = min(int(matched["last"]), size_bytes)
        if count == 0:
            raise Unsatisfiable
        return size_bytes - count, size_bytes
    first = int(matched["first"])
    last = int(matched["last"]) if matched["last"] else size_bytes - 1
    if matched["last"] and last < first:
        return None
    if first >= size_bytes:
        raise Unsatisfiable
    return first, min(last + 1, size_bytes)
