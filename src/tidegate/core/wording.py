"""Write counts as people read them, in every sentence of the program.

The caller names what is counted.
"""


def in_words(count: int, noun: str, plural: str = "") -> str:
    """Return a count with its noun: `1 item`, `2,000 items`."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"
