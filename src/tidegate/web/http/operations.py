"""The purpose of a route, as the OpenAPI document shows it."""

from collections.abc import Mapping
from typing import Any

import msgspec

# The parameters that page through a list.
PAGE = ("after", "limit")


class Operation(msgspec.Struct, frozen=True):
    """The summary, bodies and parameters of a route.

    `takes` and `gives` are the structs of the body and the answer; None for raw bytes. A form has
    parts, one of them a file.
    """

    summary: str
    takes: Any = None
    gives: Any = None
    query: tuple[str, ...] = ()
    takes_form: bool = False


# By method and path.
OperationTable = Mapping[tuple[str, str], Operation]
