"""Runs the modelled engine in real time: each step takes as long as the model says, then its events are delivered.

Steps are laid end to end on the loop's clock, so the timers' own coarseness does not add up. What an event means to a client
is the listener's business.
"""

import asyncio
from collections.abc import Callable

from tidegate.simulate.engine.model import ModelledEngine, ModelledEvent, ModelledRequest, Sequence

Listener = Callable[[ModelledEvent], None]

LAG_MAX_S = 0.1


class SimulatedPace:
    """The clock of one engine."""

    def __init__(self, engine: ModelledEngine) -> None:
        self.engine = engine
        self._listeners: dict[Sequence, Listener] = {}
        self._wake = asyncio.Event()

    def submit(self, request: ModelledRequest, listener: Listener) -> Sequence:
        """Queue a request; its events go to `listener` as they happen."""
        sequence = self.engine.submit(request)
        self._listeners[sequence] = listener
        self._wake.set()
        return sequence

    def abort(self, sequence: Sequence) -> None:
        """Forget a request whose client is gone."""
        self.engine.abort(sequence)
        self._listeners.pop(sequence, None)

    async def run(self) -> None:
        """Step until cancelled."""
        loop = asyncio.get_running_loop()
        until = loop.time()
        while True:
            step = self.engine.step()
            if step is None:
                self._wake.clear()
                await self._wake.wait()
                until = loop.time()
                continue
            # A machine that cannot keep up makes the engine slow, it does not make it rush afterwards.
            until = max(until, loop.time() - LAG_MAX_S) + step.duration_ms / 1000
            await asyncio.sleep(max(0.0, until - loop.time()))
            for event in step.events:
                listener = self._listeners.get(event.sequence)
                if listener is None:
                    continue
                if event.finished:
                    del self._listeners[event.sequence]
                listener(event)
