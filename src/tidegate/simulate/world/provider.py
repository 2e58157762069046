"""The model server that all processes call, and the router of one process in front of it.

The provider is the witness: it writes down each call with its sender, its moment and what became of it. Its moods come from the weather. It
answers with a body of its own for every call, so that each line of an output file can be traced to the one call that made it.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from tidegate.core.budgets import Budget
from tidegate.core.errors import Ambiguous, BrokenAnswer, Refused, Throttled, Unavailable, UpstreamError
from tidegate.core.nouns import Answer, Call, Usage
from tidegate.core.schedule import Reason
from tidegate.simulate.world.loop import VirtualLoop
from tidegate.simulate.world.process import Over, Process, outside
from tidegate.simulate.world.trace import Trace
from tidegate.simulate.world.weather import Weather

MODELS = ("alpha", "beta")
SLOTS = 6
HANG_S = 6.0
RETRY_AFTER_S_MAX = 25.0


@dataclass(slots=True)
class Witnessed:
    """One call as the model server saw it. `mood` says how it was met; `heard` whether its sender got the whole answer."""

    serial: int
    process: Process
    incarnation: str
    job_id: str
    number: int
    key: str
    tag: str
    sent_s: float
    mood: str = ""
    heard_s: float | None = None
    aborted: bool = False
    wait_s: float = 0.0

    @property
    def final(self) -> bool:
        """Whether this call, once heard, settles its item."""
        return self.mood in ("ok", "refuse")


class _Message(msgspec.Struct):
    content: str


class _Body(msgspec.Struct):
    messages: list[_Message]


_body = msgspec.json.Decoder(_Body)


class Provider:
    def __init__(self, loop: VirtualLoop, weather: Weather, trace: Trace, check: Callable[[Witnessed], None]) -> None:
        self._loop = loop
        self._weather = weather
        self._trace = trace
        self._check = check
        self.calls: list[Witnessed] = []
        self.poison: set[str] = set()

    async def meet(self, process: Process, call: Call) -> Answer:
        """One call, from the moment its bytes go out."""
        tag = _body.decode(call.body).messages[-1].content
        incarnation = process.me.id if process.me else ""
        seen = Witnessed(
            len(self.calls),
            process,
            incarnation,
            call.job_id,
            call.number,
            call.idempotency_key,
            tag,
            self._loop.time(),
        )
        self.calls.append(seen)
        self._trace.note(process.name, "call", seen.serial, tag)
        self._check(seen)
        ended: asyncio.Future[Answer | UpstreamError] = self._loop.create_future()
        outside(self._loop, self._duration_s(seen), lambda: self._end(seen, ended))
        try:
            result = await ended
        except asyncio.CancelledError:
            seen.aborted = True
            self._trace.note(process.name, "aborted", seen.serial)
            raise
        seen.heard_s = self._loop.time()
        if isinstance(result, UpstreamError):
            raise result
        return result

    def _duration_s(self, seen: Witnessed) -> float:
        dice = self._weather.dice
        seen.mood = self._mood(seen)
        if seen.mood == "hang":
            return HANG_S
        if seen.mood == "away":
            return dice.uniform(0.001, 0.05)
        if self._weather.strikes("slow"):
            return dice.uniform(1.0, 12.0)
        return dice.uniform(0.02, self._weather.plan.call_s_max)

    def _mood(self, seen: Witnessed) -> str:
        if seen.tag in self.poison:
            return "poison"
        moods = ("error", "throttle", "reset", "hang", "broken", "away", "refuse")
        return next((mood for mood in moods if self._weather.strikes(mood)), "ok")

    def _end(self, seen: Witnessed, ended: "asyncio.Future[Answer | UpstreamError]") -> None:
        if seen.mood == "poison" and not ended.done():
            seen.process.kill()
        if ended.done() or seen.process.dead:
            return
        self._trace.note(seen.process.name, "answer", seen.serial, seen.mood)
        ended.set_result(self._verdict(seen))

    def _verdict(self, seen: Witnessed) -> Answer | UpstreamError:
        dice = self._weather.dice
        match seen.mood:
            case "error":
                return Ambiguous("the server failed", status=500)
            case "throttle":
                seen.wait_s = dice.choice((0.0, dice.uniform(0.2, 2.0), dice.uniform(2.0, RETRY_AFTER_S_MAX)))
                wait_ms = int(seen.wait_s * 1000) or None
                return Throttled("too many requests", status=429, retry_after_ms=wait_ms)
            case "reset" | "hang":
                return Ambiguous("the connection broke")
            case "broken":
                return BrokenAnswer("the answer is not an answer", status=200)
            case "away":
                return Unavailable("connection refused")
            case "refuse":
                return Refused("no", status=400, body=b'{"error":{"message":"no"}}')
        body = (
            b'{"id":"call-%d","choices":[{"index":0,"message":{"role":"assistant","content":"%b"}}],'
            b'"usage":{"prompt_tokens":%d,"completion_tokens":1}}'
        ) % (seen.serial, seen.tag.encode(), seen.serial + 1)
        return Answer(200, body, Usage(seen.serial + 1, 0, 1), "only")


class ProcessRouter:
    """The Upstream port of one process: slots, and rests after a 429."""

    def __init__(self, process: Process, provider: Provider) -> None:
        self._process = process
        self._provider = provider
        self._in_flight: dict[str, int] = {}
        self._rests_until_ms: dict[str, float] = {}

    async def send(self, call: Call) -> Answer:
        if self._process.over:
            raise Over
        model = call.model
        self._in_flight[model] = self._in_flight.get(model, 0) + 1
        try:
            return await self._provider.meet(self._process, call)
        except Throttled as error:
            until_ms = self._process.monotonic_ms() + (error.retry_after_ms or 0)
            self._rests_until_ms[model] = max(until_ms, self._rests_until_ms.get(model, 0.0))
            raise
        finally:
            self._in_flight[model] -= 1

    def free_slots(self, model: str) -> int:
        if self.rests_until_ms(model):
            return 0
        return max(0, SLOTS - self._in_flight.get(model, 0))

    def rests_until_ms(self, model: str) -> float:
        until_ms = self._rests_until_ms.get(model, 0.0)
        return until_ms if until_ms > self._process.monotonic_ms() else 0.0

    def closed(self, model: str) -> str:
        return Reason.RESTING if self.rests_until_ms(model) else ""

    def spent_until_ms(self, budgets: tuple[Budget, ...]) -> float:
        return 0.0

    def knows(self, model: str) -> bool:
        return model in MODELS
