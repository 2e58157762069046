"""What a route is for, as the OpenAPI document shows it."""

from collections.abc import Mapping
from typing import Any

import msgspec

# What a list takes to be read in pages.
PAGE = ("after", "limit")


class Operation(msgspec.Struct, frozen=True):
    """`takes` and `gives` are the structs of the body and the answer; None where bytes pass through as they are. A form has parts, one of
    them a file."""

    summary: str
    takes: Any = None
    gives: Any = None
    query: tuple[str, ...] = ()
    takes_form: bool = False


# By method and path.
Operations = Mapping[tuple[str, str], Operation]
