"""The path of a value in a tree of settings: keys of mappings and places in lists."""

KeyPath = tuple[str | int, ...]
