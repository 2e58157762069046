"""Which bytes of a file a client asks for: one range as the standard reads it; what is malformed is as if nothing were asked."""

from __future__ import annotations

import pytest

from tidegate.web.http.ranges import Unsatisfiable, choose


@pytest.mark.parametrize(
    ("header", "found"),
    [
        ("bytes=0-0", (0, 1)),
        ("bytes = 2 - 4", (2, 5)),
        ("bytes=5-5", (5, 6)),
        ("bytes=5-", (5, 10)),
        ("bytes=9-", (9, 10)),
        ("bytes=2-99", (2, 10)),
        ("bytes=-3", (7, 10)),
        ("bytes=-10", (0, 10)),
        ("bytes=-99", (0, 10)),
        *((header, None) for header in (None, "", "bytes=-", "bytes=5-4", "bytes=0-1,3-4", "lines=0-1", "bytes=a-b")),
    ],
)
def test_one_range_of_ten_bytes(header: str | None, found: tuple[int, int] | None) -> None:
    assert choose(header, 10) == found


@pytest.mark.parametrize(
    ("header", "size_bytes"),
    [("bytes=10-", 10), ("bytes=10-12", 10), ("bytes=-0", 10), ("bytes=0-", 0), ("bytes=-1", 0)],
)
def test_a_range_without_a_byte_is_refused(header: str, size_bytes: int) -> None:
    with pytest.raises(Unsatisfiable):
        choose(header, size_bytes)
