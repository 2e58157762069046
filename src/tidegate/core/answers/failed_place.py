"""The end of the message of a line that cannot be run: the place of the line, ` (line 7)`.

A run over several files or over a table names the place as its author finds it: ` (line 7 of
b.jsonl)`, ` (row 7)`. Only this module knows the form.
"""

import re

_PLACED = re.compile(r"(.*) \(((?:line|row) [0-9]+(?: of .+)?)\)", re.DOTALL)


def with_place(message: str, place: str) -> str:
    """Return a message that ends with the place of its line."""
    return f"{message} ({place})"


def split_place(message: str) -> tuple[str, str]:
    """Return a message without its place, and the place; the place is empty where there is none."""
    found = _PLACED.fullmatch(message)
    return (found[1], found[2]) if found else (message, "")
