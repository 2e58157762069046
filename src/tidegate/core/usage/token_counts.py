"""Read the counts of tokens that a model server reports, one by one: an odd one is ignored, and
spoils no other.
"""

from typing import Any

# Above any real count, and so low that a job of wrong ones at the dearest price does not soon cost
# more than a database's integer holds: a worker that recorded such a sum would fail, and so would
# each one after it.
TOKENS_MAX = 1 << 28


def token_count(holder: Any, name: str) -> int | None:
    """Return the count of this name; None where there is no credible one."""
    return as_count(holder.get(name)) if isinstance(holder, dict) else None


def as_count(value: Any) -> int | None:
    """Return a value as a count, also `10.0`; None where it is none."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if type(value) is int and 0 <= value <= TOKENS_MAX else None
