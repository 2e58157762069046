"""Bytes that are cut into lines as the judge reads them: whole ones, the rest, gaps, and lines too long to hold."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tidegate.judge import jsonl
from tidegate.judge.jsonl import JsonlLine, lines_of

pytestmark = pytest.mark.anyio


async def cut(*pieces: tuple[int, bytes]) -> list[JsonlLine]:
    async def chunks() -> AsyncIterator[tuple[int, bytes]]:
        for piece in pieces:
            yield piece

    return [line async for line in lines_of(chunks())]


async def test_lines_end_at_newlines_wherever_pieces_do() -> None:
    lines = [JsonlLine(0, b"ab", True), JsonlLine(3, b"", True), JsonlLine(4, b"cd\r", True), JsonlLine(8, b"e", False)]
    assert await cut((0, b"ab\n\ncd\r\ne")) == lines
    assert await cut((0, b"a"), (1, b"b"), (2, b"\n\nc"), (5, b"d\r\n"), (8, b"e")) == lines
    assert await cut() == []


async def test_a_gap_ends_a_line() -> None:
    lines = [JsonlLine(0, b"ab", False), JsonlLine(9, b"cd", True)]
    assert await cut((0, b"ab"), (9, b"cd\n")) == lines


async def test_a_line_that_never_ends_is_not_held_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "LINE_BYTES_MAX", 4)
    lines = [JsonlLine(0, b"abcde", False), JsonlLine(5, b"fg", True)]
    assert await cut((0, b"abc"), (3, b"de"), (5, b"f"), (6, b"g\n")) == lines
