"""Prices of tokens, in whole billionths of the operator's currency: no float ever touches money.

A price is per million tokens. Prompt tokens that came from a cache have a price of their own, and
batch work has a factor. The cost of an item is rounded once, and its parts (input, cached, output)
and every sum over items, jobs, keys and days add up to it exactly. This module does not know the
currency, and the store keeps what was spent.
"""

from collections.abc import Iterable
from decimal import Decimal, InvalidOperation
from enum import StrEnum
from fractions import Fraction
from typing import NamedTuple

import msgspec

from tidegate.core.apportion import apportion
from tidegate.core.errors import SettingsError
from tidegate.core.nouns import Usage

NANO = 10**9
MILLION = 10**6
FACTOR_ONE = 10**6
# A million units for a million tokens: above any price, and far from where sums leave a database's
# integer.
PRICE_UNITS_MAX = 10**6
DIGITS_MAX = 50


class Surcharge(StrEnum):
    """The charges that providers make beside the usual price of tokens."""

    SERVICE_TIER = "service_tier"
    SERVER_TOOLS = "server_tools"
    MODALITIES = "modalities"


class Price(msgspec.Struct, frozen=True):
    """The price of a deployment's tokens, in nano-units per million.

    `batch_factor_ppm` is the share that batch work pays.

    Without a price of their own, cached tokens cost what others do. `covers` are surcharges that
    the deployment does not make, or that the price includes.
    """

    input_nano: int = 0
    cached_nano: int | None = None
    output_nano: int = 0
    batch_factor_ppm: int = FACTOR_ONE
    covers: frozenset[Surcharge] = frozenset()

    @classmethod
    def of(
        cls,
        input: str | int | float | Decimal = 0,
        cached: str | int | float | Decimal | None = None,
        output: str | int | float | Decimal = 0,
        batch_factor: str | int | float | Decimal = 1,
    ) -> "Price":
        """Return the price that an operator writes: units per million tokens, and a factor from 0
        to 1 (0.5: half for batch work).
        """
        factor = _scaled("price.batch_factor", batch_factor, FACTOR_ONE)
        if factor > FACTOR_ONE:
            raise SettingsError(f"price.batch_factor is {batch_factor}: use a number from 0 to 1")
        return cls(
            _scaled("price.input", input, NANO),
            None if cached is None else _scaled("price.cached", cached, NANO),
            _scaled("price.output", output, NANO),
            factor,
        )


def _scaled(name: str, value: str | int | float | Decimal, scale: int) -> int:
    # A float prints as the shortest text that means it, so 0.05 from a configuration file is 0.05
    # here.
    try:
        exact = Decimal(str(value))
        in_range = not isinstance(value, bool) and 0 <= exact <= PRICE_UNITS_MAX
    except InvalidOperation:
        raise SettingsError(f"{name} is {value!r}: write a number such as 0.05") from None
    if not in_range:
        raise SettingsError(f"{name} is {value}: use a number from 0 to {PRICE_UNITS_MAX}")
    # Fractions do not round silently as decimals of many digits do. But 1e-999999999 would make a
    # fraction of a billion digits.
    fine = exact.adjusted() < -DIGITS_MAX or len(exact.as_tuple().digits) > DIGITS_MAX
    scaled = Fraction(0 if fine else exact) * scale
    if (fine and exact) or scaled.denominator != 1:
        raise SettingsError(f"{name} is {value}: it is finer than one part in {scale}; round it")
    return scaled.numerator


def nano_of(units: str | int | float | Decimal) -> int:
    """Return an amount of money as an operator writes it, in nano-units."""
    return _scaled("cost", units, NANO)


class Cost(msgspec.Struct, frozen=True, gc=False):
    """Money in nano-units, split by what it paid for."""

    input_nano: int = 0
    cached_nano: int = 0
    output_nano: int = 0

    @property
    def total_nano(self) -> int:
        return self.input_nano + self.cached_nano + self.output_nano


def _exact_parts(usage: Usage, price: Price, batch: bool) -> tuple[int, int, int]:
    """Return input, cached and output in a unit so small that nothing is rounded; `_SCALE` of them
    are one nano-unit.
    """
    factor = price.batch_factor_ppm if batch else FACTOR_ONE
    cached_nano = price.input_nano if price.cached_nano is None else price.cached_nano
    fresh = usage.input_tokens - usage.cached_tokens
    return (
        fresh * price.input_nano * factor,
        usage.cached_tokens * cached_nano * factor,
        usage.output_tokens * price.output_nano * factor,
    )


_SCALE = MILLION * FACTOR_ONE


def _rounded(parts: tuple[int, int, int]) -> Cost:
    exact = sum(parts)
    return Cost(*apportion((exact + _SCALE // 2) // _SCALE, parts))


def cost(usage: Usage, price: Price, *, batch: bool) -> Cost:
    """Return what one call cost: the total is rounded to the nearest nano-unit, and the parts add
    up to it.
    """
    return _rounded(_exact_parts(usage, price, batch))


def bound(prompt_tokens: int, output_tokens: int, price: Price, *, batch: bool) -> int:
    """Return the most nano-units that a call of this size can cost, rounded up.

    A hard budget sets them aside before the call.
    """
    factor = price.batch_factor_ppm if batch else FACTOR_ONE
    dearest = max(price.input_nano, price.cached_nano or 0)
    return -(-(prompt_tokens * dearest + output_tokens * price.output_nano) * factor // _SCALE)


class CostRange(NamedTuple):
    """The likely cost of a call, and the most that it can cost, in nano-units."""

    likely: int = 0
    most: int = 0


def units_text(nano: int) -> str:
    """Return nano-units as an exact decimal number of whole units: 1500000 is 0.0015."""
    whole, rest = divmod(abs(nano), NANO)
    text = f"{whole}.{rest:09d}".rstrip("0").rstrip(".") if rest else str(whole)
    return f"-{text}" if nano < 0 else text


class Spend(msgspec.Struct, frozen=True, gc=False):
    """The usage and the cost of some calls together."""

    calls: int = 0
    usage: Usage = Usage()
    cost: Cost = Cost()

    @staticmethod
    def total(parts: "Iterable[Spend]") -> "Spend":
        calls = 0
        usages: list[Usage] = []
        input_nano = cached_nano = output_nano = 0
        for part in parts:
            calls += part.calls
            usages.append(part.usage)
            input_nano += part.cost.input_nano
            cached_nano += part.cost.cached_nano
            output_nano += part.cost.output_nano
        return Spend(calls, Usage.total(usages), Cost(input_nano, cached_nano, output_nano))
