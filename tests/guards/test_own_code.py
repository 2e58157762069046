"""Own code that blocks, hangs or is let go of: what it holds up, how much of it is waited for, and what is left of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from tidegate.guards import own_code
from tidegate.guards.own_code import Overran, OwnCode

pytestmark = pytest.mark.anyio

LONG_S = 20.0


async def until(is_so: Callable[[], bool]) -> None:
    """Wait for another thread."""
    async with asyncio.timeout(LONG_S):
        while not is_so():  # noqa: ASYNC110 - it happens in another thread
            await asyncio.sleep(0.001)


class Blocking:
    """A coroutine of an operator's that holds its own event loop when a test wants it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(own_code, "LEFT_BEHIND_MAX", 2)
        self.begun: list[threading.Thread] = []
        self.held: list[threading.Event] = []

        async def run(work: Callable[[], Awaitable[Any]]) -> Any:
            self.begun.append(threading.current_thread())
            return await work()

        self.code = OwnCode("blocking", run, LONG_S)

    async def block(self, more: int = 1) -> None:
        """Block the code's loop; calls that come meanwhile overrun."""
        held, begun = threading.Event(), len(self.begun)
        self.held.append(held)

        async def wait() -> None:
            held.wait()

        first = asyncio.create_task(self.code.call(wait))
        await until(lambda: len(self.begun) > begun)
        first.cancel()
        self.code._timeout_s = 0.001
        answers = await asyncio.gather(*(self.ask() for _ in range(more)), return_exceptions=True)
        self.code._timeout_s = LONG_S
        assert [type(one) for one in answers] == [Overran] * more
        assert len(self.begun) == begun + 1, "what waits behind it has not begun"

    async def ask(self) -> Any:
        async def answer() -> int:
            return 7

        return await self.code.call(answer)

    async def free(self) -> None:
        for held in self.held:
            held.set()
        await until(lambda: not self.code._left_behind)


async def test_a_loop_that_is_blocked_is_left_behind_and_so_many_at_the_most(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Blocking(monkeypatch)
    for _ in range(2):
        await own.block(more=3)
        assert await own.ask() == 7, "several calls behind one blocked loop are one loop left behind"
        await own.block()
        begun = len(own.begun)
        with pytest.raises(Overran):
            await own.ask()
        assert len(own.begun) == begun, "it is not called again until one comes back"
        await own.free()
        assert await own.ask() == 7
    own.code.close()


async def test_a_call_that_only_waits_leaves_its_loop_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Blocking(monkeypatch)
    assert await own.ask() == 7
    own.code._timeout_s = 0.1
    with pytest.raises(Overran):
        await own.code.call(asyncio.Event().wait)
    own.code._timeout_s = LONG_S
    assert await own.ask() == 7
    assert len(set(own.begun)) == 1, "one thread for all of them"
    own.code.close()


@pytest.mark.parametrize("is_coroutine", [False, True])
async def test_code_that_was_let_go_of_has_no_thread_and_may_still_be_asked(is_coroutine: bool) -> None:
    ran: list[threading.Thread] = []

    def plain() -> int:
        ran.append(threading.current_thread())
        return 7

    async def coroutine() -> int:
        return plain()

    function: Callable[[], int | Coroutine[Any, Any, int]] = coroutine if is_coroutine else plain
    code = OwnCode("closed", function, LONG_S)
    for _ in range(2):
        assert await code.call() == 7
        assert await code.call() == 7
        code.close()
        code.close()
        ran[-1].join(LONG_S)
        assert not ran[-1].is_alive()
    assert ran[0] is ran[1]
    assert all(thread.daemon for thread in ran), "the end of the process does not wait for own code"
