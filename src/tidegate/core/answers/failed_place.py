"""How the message of a line that cannot be run ends: with where the line stands, ` (line 7)`.

A run over several files or over a table says it as its author finds it: ` (line 7 of b.jsonl)`, ` (row 7)`. Only this module knows
the form.
"""

import re

_PLACED = re.compile(r"(.*) \(((?:line|row) [0-9]+(?: of .+)?)\)", re.DOTALL)


def with_place(message: str, place: str) -> str:
    """Return a message that ends with where its line stands."""
    return f"{message} ({place})"


def split_place(message: str) -> tuple[str, str]:
    """Return a message without its place, and the place; empty where it names none."""
    found = _PLACED.fullmatch(message)
    return (found[1], found[2]) if found else (message, "")
