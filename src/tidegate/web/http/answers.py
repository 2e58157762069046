"""JSON answers and pages of lists, for every door."""

from collections.abc import Sequence
from typing import Generic, TypeVar

import msgspec
from starlette.responses import Response

T = TypeVar("T")


class Page(msgspec.Struct, Generic[T]):
    object: str
    data: list[T]
    first_id: str | None
    last_id: str | None
    has_more: bool


def json_answer(body: msgspec.Struct, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")


def page_of(found: Sequence[T], ids: Sequence[str], *, has_more: bool) -> Page[T]:
    return Page("list", list(found), ids[0] if ids else None, ids[-1] if ids else None, has_more)
