"""A line of those who wait for a turn: first come, first served, and safe to leave at any moment.

A turn is given with `call_first` or `call_all` and taken by awaiting the place. One that leaves when its turn has come already must pass it
on, or the turn is lost: `give_up` says so. What a turn is worth (a connection, a slot, a second look) is the caller's business.
"""

import asyncio

# A place in a line: done when its turn has come.
Turn = asyncio.Future[None]


class WaitLine:
    """`turns` are those who wait, in order: for reading."""

    __slots__ = ("turns",)

    def __init__(self) -> None:
        self.turns: dict[Turn, None] = {}

    def __len__(self) -> int:
        return len(self.turns)

    def join(self) -> Turn:
        """Stand at the end of the line; to be awaited, and left with `give_up` when the wait does not end well."""
        turn: Turn = asyncio.get_running_loop().create_future()
        self.turns[turn] = None
        return turn

    def give_up(self, turn: Turn) -> bool:
        """Stop waiting. True when the turn has come already: it must be passed on."""
        self.turns.pop(turn, None)
        return turn.done() and not turn.cancelled()

    def call_first(self) -> bool:
        """Give the turn to the one that has waited longest. False when none waits."""
        while self.turns:
            turn = next(iter(self.turns))
            del self.turns[turn]
            # A cancelled one runs later, and leaves then.
            if not turn.done():
                turn.set_result(None)
                return True
        return False

    def call_all(self) -> None:
        """Give a turn to each of those who wait now, in order."""
        turns, self.turns = self.turns, {}
        for turn in turns:
            if not turn.done():
                turn.set_result(None)
