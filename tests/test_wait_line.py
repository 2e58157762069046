"""The line under connections, deployments and keys: a caller that leaves it, at any time, takes no turn along, and the order holds."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from tidegate.wait_line import WaitLine

# What may happen between two turns of the loop: one comes, one that waits is cancelled, a place comes free, or the loop goes round.
STEPS = st.lists(
    st.one_of(
        st.just(("come", 0)),
        st.tuples(st.just("cancel"), st.integers(0, 20)),
        st.just(("free", 0)),
        st.just(("run", 0)),
    ),
    max_size=60,
)


class Places:
    """A few places and one line, as their users write it: a place is handed over with the turn."""

    def __init__(self, count: int) -> None:
        self.free = count
        self.line = WaitLine()
        self.order: list[int] = []
        self.holding: set[int] = set()

    async def take(self, number: int) -> None:
        if self.free and not self.line:
            self.free -= 1
        else:
            turn = self.line.join()
            try:
                await turn
            except BaseException:
                if self.line.give_up(turn):
                    self.give_back()
                raise
            self.order.append(number)
        self.holding.add(number)

    def give_back(self) -> None:
        self.free += 1
        while self.free and self.line.call_first():
            self.free -= 1


@given(STEPS, st.integers(1, 3))
def test_no_place_is_lost_and_the_order_holds(steps: list[tuple[str, int]], count: int) -> None:
    async def play() -> None:
        places = Places(count)
        tasks: list[asyncio.Task[None]] = []
        cancelled: set[int] = set()
        for step, which in steps:
            match step:
                case "come":
                    tasks.append(asyncio.create_task(places.take(len(tasks))))
                case "cancel" if which < len(tasks) and not tasks[which].done():
                    tasks[which].cancel()
                    cancelled.add(which)
                case "free" if places.holding:
                    places.holding.pop()
                    places.give_back()
                case "run":
                    await asyncio.sleep(0)
        for _ in range(len(tasks) + 3):
            await asyncio.sleep(0)
        served = [number for number in places.order if number not in cancelled]
        assert served == sorted(served), "of those who waited, the first to come is the first to be served"
        waiting = [number for number, task in enumerate(tasks) if not task.done()]
        assert len(places.line) == len(waiting), "who has left stands in no line"
        assert not (places.free and waiting), "none waits beside a free place"
        assert places.free + len(places.holding) == count, "no place is lost or made"
        for number in waiting:
            tasks[number].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert len(places.line) == 0

    asyncio.run(play())


def test_a_call_to_all_reaches_each_of_those_who_wait_now() -> None:
    async def play() -> None:
        line, order = WaitLine(), []

        async def wait(number: int) -> None:
            await line.join()
            order.append(number)

        tasks = [asyncio.create_task(wait(number)) for number in range(3)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        line.call_all()
        assert not line
        assert not line.call_first()
        last = line.join()
        assert line.call_first()
        assert last.done()
        assert not line.call_first(), "one turn for one that waits"
        await asyncio.gather(*tasks, return_exceptions=True)
        assert order == [0, 2]

    asyncio.run(play())
