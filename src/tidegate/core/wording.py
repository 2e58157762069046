"""Counts as people read them, in every sentence of the program. What is counted is the caller's business."""


def in_words(count: int, noun: str, plural: str = "") -> str:
    """`1 item`, `2,000 items`."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"
