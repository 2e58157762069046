"""How a bug is planted: another text for a part of one statement, another value in the place of one name, for as long as it lasts."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest import mock

from tidegate.store.queries import statements

Planting = Callable[[ExitStack], None]


def sql(name: str, old: str, new: str) -> Planting:
    """Another text for a part of one statement."""

    def plant(stack: ExitStack) -> None:
        known = statements()
        right = known[name]
        if old not in right.sql:
            raise ValueError(f"{name} does not say {old!r} any more: this planted bug must be planted anew")
        known[name] = replace(right, sql=right.sql.replace(old, new))
        stack.callback(known.__setitem__, name, right)

    return plant


def patch(target: Any, name: str, new: Any) -> Planting:
    return lambda stack: stack.enter_context(mock.patch.object(target, name, new)) and None


def both(*plantings: Planting) -> Planting:
    def plant(stack: ExitStack) -> None:
        for planting in plantings:
            planting(stack)

    return plant
