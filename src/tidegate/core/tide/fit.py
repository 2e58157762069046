"""Fit a line to what was measured, with a prior that stands for the first few measurements.

    value = first coefficient * first input + second * second + third * third

Least squares with slow forgetting. The prior keeps it solvable and safe while there are few
measurements, and bounds what hostile or absurd ones can do to it: no coefficient leaves a fixed
range around what was expected. This module knows no units.
"""

from collections.abc import Callable, Sequence

COEFFICIENT_RANGE = 20.0
# Larger than anything real in milliseconds, sequences or tokens, and small enough that its square
# still adds up exactly.
MEASURED_MAX = 1e6

Three = tuple[float, float, float]


class LineFit:
    """The line, in its `coefficients`.

    `expected` returns what to expect, given the coefficients found so far.
    """

    def __init__(
        self,
        expected: Callable[[Three], Three],
        start: Three,
        typical: Three,
        prior_samples: float,
        memory_samples: float,
    ) -> None:
        self.coefficients = start
        self._expected = expected
        self._weights = [prior_samples * size * size for size in typical]
        self._keep = 1 - 1 / memory_samples
        self._squares = [[0.0] * 3 for _ in range(3)]
        self._products = [0.0] * 3

    def learn(self, inputs: Three, value: float) -> None:
        """Take in one measurement; ignore one with a number out of range."""
        if not all(0.0 <= one < MEASURED_MAX for one in (*inputs, value)):
            return
        for at, one in enumerate(inputs):
            row = self._squares[at]
            self._squares[at] = [square * self._keep + one * other for square, other in zip(row, inputs, strict=True)]
            self._products[at] = self._products[at] * self._keep + one * value
        expected = self._expected(self.coefficients)
        squares = [
            [square + (weight if at == place else 0.0) for place, square in enumerate(row)]
            for at, (row, weight) in enumerate(zip(self._squares, self._weights, strict=True))
        ]
        products = [
            seen + weight * one for seen, weight, one in zip(self._products, self._weights, expected, strict=True)
        ]
        low, high = 1 / COEFFICIENT_RANGE, COEFFICIENT_RANGE
        first, second, third = (
            min(max(found, one * low), one * high)
            for found, one in zip(_solved(squares, products), expected, strict=True)
        )
        self.coefficients = (first, second, third)


def _solved(squares: Sequence[Sequence[float]], products: Sequence[float]) -> list[float]:
    """Solve three equations by Gauss; the prior's weight on the diagonal keeps every pivot above
    zero.
    """
    rows = [[*row, product] for row, product in zip(squares, products, strict=True)]
    for at in range(3):
        for below in range(at + 1, 3):
            factor = rows[below][at] / rows[at][at]
            rows[below] = [mine - factor * other for mine, other in zip(rows[below], rows[at], strict=True)]
    found = [0.0, 0.0, 0.0]
    for at in (2, 1, 0):
        rest = sum(rows[at][place] * found[place] for place in range(at + 1, 3))
        found[at] = (rows[at][3] - rest) / rows[at][at]
    return found
