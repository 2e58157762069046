"""Divide one whole number among several by weight, so that the parts add up to it exactly: largest
remainder.

Each gets floor(total · weight / weights). The rest goes, one by one, to the largest fractional
parts, ties to the first. This module does not know what is divided: tokens and money both are.
"""

from collections.abc import Sequence


def apportion(total: int, weights: Sequence[int]) -> list[int]:
    """Return the parts of `total`, one for each weight, in order.

    Weights that are all 0 share evenly.
    """
    if total < 0 or any(weight < 0 for weight in weights):
        raise ValueError("only a number of at least 0 is divided, by weights of at least 0")
    if not weights:
        if total:
            raise ValueError("there are no shares to divide among")
        return []
    shares = weights if any(weights) else [1] * len(weights)
    whole = sum(shares)
    parts = [total * share // whole for share in shares]
    left = total - sum(parts)
    if left:
        # A remainder is a fraction of the same whole, so remainders compare as integers; sorting is
        # stable, so ties go to the first.
        order = sorted(range(len(shares)), key=lambda index: -(total * shares[index] % whole))
        for index in order[:left]:
            parts[index] += 1
    return parts
