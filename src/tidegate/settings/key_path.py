"""Where a value stands in a tree of settings: the keys and places in lists that lead to it."""

KeyPath = tuple[str | int, ...]
