"""Whole lines of a file come out of pieces of any size."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.core.answers.whole_lines import whole_lines

pytestmark = pytest.mark.anyio


async def lines_of(pieces: list[bytes]) -> list[bytes]:
    async def arriving() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    return [line async for line in whole_lines(arriving())]


@given(lines=st.lists(st.binary(max_size=6).filter(lambda line: b"\n" not in line)), size=st.integers(1, 9))
async def test_lines_are_the_same_in_pieces_of_any_size(lines: list[bytes], size: int) -> None:
    file = b"".join(line + b"\n" for line in lines)
    assert await lines_of([file[at : at + size] for at in range(0, len(file), size)]) == lines


async def test_a_last_line_without_an_end_is_a_line() -> None:
    assert await lines_of([b"a\nb", b"", b"c"]) == [b"a", b"bc"]


async def test_nothing_has_no_line() -> None:
    assert await lines_of([]) == await lines_of([b""]) == []
