"""Reads and writes a key's limits as text: `minute:requests=10,tokens=500`."""

from typing import TYPE_CHECKING

from tidegate.core.budgets.budget import Limit
from tidegate.core.errors import ApiProblem, SettingsError
from tidegate.core.usage.prices import units_text

if TYPE_CHECKING:
    from tidegate.web.requests.limit_requests import KeyLimitFields


def limit_text(limit: Limit) -> str:
    """Return a limit as text, in the form that `read_limits` reads."""
    sides: list[tuple[str, object]] = [
        ("requests", limit.requests),
        ("tokens", limit.tokens),
        ("cost", units_text(limit.nano) if limit.nano else None),
        ("batches", limit.jobs),
        ("bytes", limit.bytes),
    ]
    return f"{limit.period}:{','.join(f'{name}={amount}' for name, amount in sides if amount)}"


def read_limits(texts: list[str]) -> "list[KeyLimitFields]":
    """Read limits such as `minute:requests=10,tokens=500`, `month:cost=20.50` and
    `day:batches=100,bytes=1000000`."""
    from tidegate.web.requests.limit_requests import job_limits

    found = []
    for text in texts:
        try:
            found.append(_limit(text))
            job_limits(found[-1:])
        except ApiProblem as problem:
            raise SettingsError(f"--limit {text!r}: {problem.message.replace('`limits[0].', '`')}") from None
    return found


def _limit(text: str) -> "KeyLimitFields":
    from tidegate.web.requests.limit_requests import COUNT_MAX, KeyLimitFields

    period, _, sides = text.partition(":")
    given = [side.partition("=")[::2] for side in sides.split(",")]
    amounts = dict(given)
    if not all(amounts.values()) or not set(amounts) <= {"requests", "tokens", "cost", "batches", "bytes"}:
        raise SettingsError(
            f"--limit {text!r} cannot be read: write it like minute:requests=10,tokens=500 or month:cost=20.50."
        )
    if len(amounts) < len(given):
        raise SettingsError(f"--limit {text!r} says the same twice: which of them is meant?")
    cost = amounts.pop("cost", None)
    counts = {name: int(count) if count.isascii() and count.isdecimal() else 0 for name, count in amounts.items()}
    for name, count in counts.items():
        if not 0 < count <= COUNT_MAX:
            raise SettingsError(f"--limit {text!r}: `{name}` must be a whole number from 1 to {COUNT_MAX:,}.")
    return KeyLimitFields(
        period,
        counts.get("requests"),
        counts.get("tokens"),
        cost=cost,
        batches=counts.get("batches"),
        bytes=counts.get("bytes"),
    )
