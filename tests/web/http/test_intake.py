"""A body that is read whole takes room in memory as soon as its length is known, and gives it back."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Sequence

import pytest
from starlette.types import Message

from tests.support.ports import HandClock
from tidegate.core.errors import ApiProblem
from tidegate.web.http import intake
from tidegate.web.http.intake import BodyRoom, Intake

pytestmark = pytest.mark.anyio

OVER = ApiProblem(413, "too_large", "Send less.")


class Sender:
    """Sends a body in these pieces, and notes how much room is taken as each is asked for."""

    def __init__(self, pieces: Sequence[bytes], declared: int | None, *, waits: bool = False) -> None:
        self.room = BodyRoom(1_000, 1_000)
        self.taken = list[int]()
        self._pieces = list(pieces)
        headers = {b"transfer-encoding": b"chunked"} if declared is None else {b"content-length": b"%d" % declared}
        headers |= {b"expect": b"100-continue"} if waits else {}
        self.intake = Intake(self._receive, headers, HandClock(), self.room)

    async def _receive(self) -> Message:
        self.taken.append(self.room.taken_bytes)
        return {"type": "http.request", "body": self._pieces.pop(0), "more_body": bool(self._pieces)}


@pytest.mark.parametrize(("declared", "taken"), [(6, [6, 6]), (None, [0, 4])])
async def test_room_is_taken_by_what_a_body_says_of_itself_or_as_it_comes(
    declared: int | None, taken: list[int]
) -> None:
    sender = Sender([b"abcd", b"ef"], declared)
    assert await sender.intake.whole(6, OVER) == b"abcdef"
    assert (sender.taken, sender.room.taken_bytes) == (taken, 6)
    for _ in range(2):
        sender.intake.release()
        assert sender.room.taken_bytes == 0


async def test_a_body_in_tiny_chunks_takes_little_more_memory_than_its_bytes() -> None:
    left = 20_000
    whole = b"ab" * left

    async def receive() -> Message:
        nonlocal left
        left -= 1
        # The loop drops timers that are over only when it comes to run.
        await asyncio.sleep(0)
        return {"type": "http.request", "body": bytes(bytearray(b"ab")), "more_body": left > 0}

    room = BodyRoom(len(whole), len(whole))
    reader = Intake(receive, {b"transfer-encoding": b"chunked"}, HandClock(), room)
    tracemalloc.start()
    body = await reader.whole(len(whole), OVER)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert body == whole
    assert most < 8 * len(whole)


async def test_a_body_that_says_it_is_too_large_takes_no_room_and_is_not_read() -> None:
    sender = Sender([b"abcdefg"], 7)
    with pytest.raises(ApiProblem) as problem:
        await sender.intake.whole(6, OVER)
    assert problem.value is OVER
    assert (sender.taken, sender.room.taken_bytes) == ([], 0)


@pytest.mark.parametrize(("waits", "received"), [(False, 6), (True, 0)])
async def test_the_rest_of_a_body_is_received_up_to_a_bound_and_not_from_a_client_that_waits_for_a_word(
    monkeypatch: pytest.MonkeyPatch, waits: bool, received: int
) -> None:
    monkeypatch.setattr(intake, "DRAIN_BYTES_MAX", 5)
    sender = Sender([b"abc"] * 9, 27, waits=waits)
    await sender.intake.drain()
    assert sender.intake.received_bytes == received
    await sender.intake.drain()
    assert sender.intake.received_bytes == received, "once"
