"""The modelled engine in real time: a step takes the model's time, then its events are delivered.

Steps follow one another on the loop's clock without gaps, so that errors of the timers do not add
up. The listeners decide what an event means to a client.
"""

import asyncio
from collections.abc import Callable

from tidegate.simulate.engine.model import ModelledEngine, ModelledEvent, ModelledRequest, Sequence

PaceListener = Callable[[ModelledEvent], None]

LAG_MAX_S = 0.1


class SimulatedPace:
    """The clock of one engine."""

    def __init__(self, engine: ModelledEngine) -> None:
        self.engine = engine
        self._listeners: dict[Sequence, PaceListener] = {}
        self._wake = asyncio.Event()

    def submit(self, request: ModelledRequest, listener: PaceListener) -> Sequence:
        """Queue a request; its events go to `listener` as they happen."""
        sequence = self.engine.submit(request)
        self._listeners[sequence] = listener
        self._wake.set()
        return sequence

    def abort(self, sequence: Sequence) -> None:
        """Drop a request whose client is gone."""
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
            # On a machine that cannot keep up, the engine is slow, but it does not rush afterwards.
            until = max(until, loop.time() - LAG_MAX_S) + step.duration_ms / 1000
            await asyncio.sleep(max(0.0, until - loop.time()))
            for event in step.events:
                listener = self._listeners.get(event.sequence)
                if listener is None:
                    continue
                if event.finished:
                    del self._listeners[event.sequence]
                listener(event)
