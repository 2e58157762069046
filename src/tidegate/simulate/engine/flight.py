"""One call inside the modelled engine: its sequences, their times, and the listeners for tokens."""

from collections.abc import Callable
from functools import partial
from time import monotonic

from tidegate.simulate.engine import meters
from tidegate.simulate.engine.answers import SimulatedAnswer
from tidegate.simulate.engine.kv_cache import TOKEN_BYTES
from tidegate.simulate.engine.model import ModelledEvent, ModelledRequest, RequestTooLong, Sequence
from tidegate.simulate.engine.pace import SimulatedPace


class SimulatedFlight:
    """A call from its submission to its last token."""

    def __init__(self, pace: SimulatedPace, answer: SimulatedAnswer, counters: "memoryview[int]") -> None:
        self._pace = pace
        self._answer = answer
        self._counters = counters
        self._started = monotonic()
        self._seen = [self._started] * len(answer.choices)
        self._left = len(answer.choices)
        self._sequences: list[Sequence] = []
        self.on_token: Callable[[int, bytes], None] | None = None
        self.on_done: Callable[[], None] | None = None

    def start(self) -> None:
        """Submit all choices, or none if one of them raises RequestTooLong."""
        try:
            for index, choice in enumerate(self._answer.choices):
                request = ModelledRequest(choice.prompt, choice.output_tokens, choice.text, self._answer.ask.priority)
                self._sequences.append(self._pace.submit(request, partial(self._receive, index)))
        except RequestTooLong:
            self.abort()
            raise

    def abort(self) -> None:
        """Abort all sequences, because the client is gone."""
        for sequence in self._sequences:
            self._pace.abort(sequence)

    def _receive(self, index: int, event: ModelledEvent) -> None:
        now = monotonic()
        choice = self._answer.choices[index]
        histogram = meters.BETWEEN_TOKENS_AT if event.ordinal > 1 else meters.FIRST_TOKEN_AT
        meters.observe(self._counters, histogram, now - self._seen[index])
        self._seen[index] = now
        choice.note_cache(event.sequence.cached_tokens)
        if self.on_token is not None and event.ordinal:
            self.on_token(index, choice.text[(event.ordinal - 1) * TOKEN_BYTES : event.ordinal * TOKEN_BYTES])
        if event.finished:
            self._left -= 1
            if not self._left:
                meters.observe(self._counters, meters.WHOLE_CALL_AT, now - self._started)
                if self.on_done is not None:
                    self.on_done()
