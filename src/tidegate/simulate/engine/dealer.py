"""The choice of a call's behaviour: by its text, by the present rates, and by earlier failures."""

import msgspec

from tidegate.simulate.engine.board import Board
from tidegate.simulate.engine.faults import Behaviour, Chance, behaviour_from, rates_from
from tidegate.simulate.engine.messages import HttpRequest


class Dealer:
    """The dealer of one process.

    It uses the rates of the options until others are set on the board.
    """

    def __init__(self, rates: dict[str, float], seed: int, board: Board) -> None:
        self._seed = seed
        self._board = board
        self._chance = Chance(rates_from(rates), seed)
        self._version = 0

    def behaviour(self, marked: str | None, request: HttpRequest) -> Behaviour | None:
        """Return the behaviour for this call; one that its text asks for goes before chance."""
        behaviour = self._draw() if marked is None else behaviour_from(marked)
        if behaviour is None or behaviour.fault is None or behaviour.fault.times is None:
            return behaviour
        # A second call for an answer that fits has another key, so the body stands for both.
        named = None if behaviour.fault.kind == "unfit" else request.headers.get(b"idempotency-key")
        key = named or request.body
        if self._board.attempt(key) < behaviour.fault.times:
            return behaviour
        # The fault has happened often enough; a delay beside it stays.
        return msgspec.structs.replace(behaviour, fault=None) if behaviour.delays else None

    def _draw(self) -> Behaviour | None:
        version = self._board.faults_version()
        if version != self._version:
            self._version = version
            self._chance = Chance(rates_from(self._board.faults()), self._seed)
        return self._chance.draw()
