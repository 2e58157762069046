"""A line of calls that wait for a turn: first come, first served, and safe to leave at any moment.

A turn is given with `call_first` or `call_all` and taken by awaiting it. A call that stops waiting
when its turn has already come must pass the turn on, or it is lost: `give_up` returns whether that
is so. What a turn stands for (a connection, a slot, a second look) is up to the caller.
"""

import asyncio

# A place in a line; done when its turn has come.
WaitTurn = asyncio.Future[None]


class WaitLine:
    """A line of waiting calls. `turns` are their turns, in order: for reading."""

    __slots__ = ("turns",)

    def __init__(self) -> None:
        self.turns: dict[WaitTurn, None] = {}

    def __len__(self) -> int:
        return len(self.turns)

    def join(self) -> WaitTurn:
        """Join the end of the line.

        Await the turn, and leave with `give_up` when the wait ends otherwise.
        """
        turn: WaitTurn = asyncio.get_running_loop().create_future()
        self.turns[turn] = None
        return turn

    def give_up(self, turn: WaitTurn) -> bool:
        """Stop waiting. Return True when the turn has come already and must be passed on."""
        self.turns.pop(turn, None)
        return turn.done() and not turn.cancelled()

    def call_first(self) -> bool:
        """Give a turn to the call that has waited longest. Return False when none waits."""
        while self.turns:
            turn = next(iter(self.turns))
            del self.turns[turn]
            # A cancelled turn is passed over: its task leaves the line later.
            if not turn.done():
                turn.set_result(None)
                return True
        return False

    def call_all(self) -> None:
        """Give a turn to every call that waits now, in order."""
        turns, self.turns = self.turns, {}
        for turn in turns:
            if not turn.done():
                turn.set_result(None)
