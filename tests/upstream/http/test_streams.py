"""An answer that is read as it comes: however it ends, its connection is given up once, and nothing is read behind its end."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import aiohttp
import pytest

from tidegate.core.deployments import HttpLimits
from tidegate.core.errors import Ambiguous, BrokenAnswer
from tidegate.upstream.http.connections import InFlightCall, TimeoutSweep
from tidegate.upstream.http.transport import Stream

pytestmark = pytest.mark.anyio

NO_HEADERS: Mapping[str, str] = {}


class Pieces:
    """The body of an answer: these pieces, and then an error, its end, or nothing more."""

    def __init__(self, *pieces: bytes, wrong: Exception | None = None, hangs: bool = False) -> None:
        self._pieces = list(pieces)
        self._wrong = wrong
        self._hangs = hangs

    async def readany(self) -> bytes:
        if self._pieces:
            return self._pieces.pop(0)
        if self._hangs:
            await asyncio.Event().wait()
        if self._wrong is not None:
            raise self._wrong
        return b""


class Reading:
    """A stream over such a body, and how it ended."""

    def __init__(self, body: Pieces, bytes_max: int = 1_000) -> None:
        self.ends: list[bool] = []
        self.flight: InFlightCall = TimeoutSweep(asyncio.get_running_loop(), HttpLimits()).watch_call(600, 600)
        self.stream = Stream(200, NO_HEADERS, body, self.flight, self.ends.append, bytes_max)


async def test_an_answer_that_came_whole_leaves_its_connection_usable() -> None:
    reading = Reading(Pieces(b"one", b"two"))
    assert [await reading.stream.read() for _ in range(4)] == [b"one", b"two", b"", b""]
    reading.stream.close()
    assert reading.ends == [True]


async def test_an_answer_that_breaks_off_gives_its_connection_up_at_once() -> None:
    reading = Reading(Pieces(b"one", wrong=aiohttp.ClientPayloadError("cut")))
    assert await reading.stream.read() == b"one"
    with pytest.raises(Ambiguous):
        await reading.stream.read()
    assert reading.ends == [False]
    assert await reading.stream.read() == b""
    assert reading.ends == [False]


@pytest.mark.parametrize(("is_late", "is_cancelled"), [(False, True), (True, False), (True, True)])
async def test_a_reader_that_is_stopped_gives_the_connection_up_at_once(is_late: bool, is_cancelled: bool) -> None:
    """By another task, whose request goes on, or because the answer took too long, which is a failed call; or by both."""
    began = asyncio.Event()

    async def read() -> None:
        reading = found[0] = Reading(Pieces(hangs=True))
        began.set()
        await reading.stream.read()

    found: dict[int, Reading] = {}
    task = asyncio.create_task(read())
    await began.wait()
    if is_late:
        found[0].flight.cut("its deadline passed")
    if is_cancelled:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    else:
        with pytest.raises(Ambiguous, match="deadline"):
            await task
    assert found[0].ends == [False]


async def test_no_more_of_an_answer_is_kept_than_the_bound() -> None:
    exact = Reading(Pieces(b"x" * 600, b"x" * 400))
    assert await exact.stream.read_whole() == b"x" * 1_000
    assert exact.ends == [True]
    longer = Reading(Pieces(b"x" * 600, b"x" * 401, hangs=True))
    with pytest.raises(BrokenAnswer):
        await longer.stream.read_whole()
    assert longer.ends == [False]


async def test_blank_lines_before_an_answer_are_signs_of_life_and_no_slow_answer() -> None:
    """Some servers send them while a request waits for its turn."""
    loop, limits = asyncio.get_running_loop(), HttpLimits()
    flight = TimeoutSweep(loop, limits).watch_call(3_600, 600)
    began_s = loop.time()
    flight.answered(200)

    def overdue(after_s: float, chunk: bytes) -> str | None:
        flight.received(chunk)
        return flight.overdue(began_s + after_s, limits)

    assert {overdue(10.0 * looks, b"\n") for looks in range(100)} == {None}
    assert overdue(1_000, b"{") is None
    assert "bytes per second" in (overdue(1_000 + limits.body_rate_grace_s + 1, b"}") or "")
