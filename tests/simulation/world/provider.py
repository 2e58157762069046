"""The model servers that all processes call, and the lines of one process to them.

The provider is the witness: it writes down each call with its sender, its deployment, its moment and what became of it. Its moods come
from the weather. It answers with a body of its own for every call, so that each line of an output file can be traced to its call.
The real router stands before it, with its deployments, budgets and breakers: only the transport is simulated.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from zlib import crc32

import msgspec
from yarl import URL

from tests.simulation.world.loop import VirtualLoop
from tests.simulation.world.process import Over, Process, outside
from tests.simulation.world.trace import Trace
from tests.simulation.world.weather import Weather
from tidegate.core.deployments import Deployment
from tidegate.core.errors import Ambiguous, Unavailable, UpstreamError
from tidegate.core.ids import split_item_id
from tidegate.core.nouns import Usage
from tidegate.core.usage.estimate import prompt_tokens
from tidegate.upstream.http.send_permit import SendPermit
from tidegate.upstream.http.transport import HttpReply

HANG_S = 6.0
CONNECTIONS_MAX = 1_000


@dataclass(slots=True)
class Witnessed:
    """One call as the model server saw it. `mood` says how it was met; `heard` whether its sender got the whole answer.

    `reserved` is what its sender had a permit for, in tokens."""

    serial: int
    process: Process
    incarnation: str
    deployment: str
    job_id: str
    number: int
    key: str
    tag: str
    sent_s: float
    usage: Usage
    reserved: int = 0
    mood: str = ""
    heard_s: float | None = None
    ended: bool = False
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
    max_tokens: int


_body = msgspec.json.Decoder(_Body)


def usage_of(content: str, max_tokens: int, factor: int) -> Usage:
    """What a request takes: the same however often it is asked."""
    return Usage(prompt_tokens(len(content)) * factor, 0, 1 + crc32(content.encode()) % max_tokens)


def tag_of(content: str) -> str:
    """What names an item; the rest of its prompt is padding."""
    return content.partition(" ")[0]


class Provider:
    def __init__(self, loop: VirtualLoop, weather: Weather, trace: Trace, check: Callable[[Witnessed], None]) -> None:
        self._loop = loop
        self._weather = weather
        self._trace = trace
        self._check = check
        self.calls: list[Witnessed] = []
        self.poison: set[str] = set()
        self.job_ids: dict[str, str] = {}

    async def meet(
        self, process: Process, deployment: str, key: str, body: bytes, total_s: float, reserved: int
    ) -> HttpReply:
        """One call, from the moment its bytes go out."""
        said = _body.decode(body)
        content = said.messages[-1].content
        item = split_item_id(key.rpartition("-")[0])
        assert item is not None, "every key begins with its item"
        tag = tag_of(content)
        seen = Witnessed(
            len(self.calls),
            process,
            process.me.id if process.me else "",
            deployment,
            self.job_ids[tag.partition("-")[0]],
            item[1],
            key,
            tag,
            self._loop.time(),
            usage_of(content, said.max_tokens, self._weather.plan.estate.usage_factor),
            reserved,
        )
        self.calls.append(seen)
        self._trace.note(process.name, "call", seen.serial, seen.tag, deployment)
        self._check(seen)
        ended: asyncio.Future[HttpReply | UpstreamError] = self._loop.create_future()
        duration_s = self._duration_s(seen)
        if duration_s > total_s:
            # The sender cuts it when its time is over, and hears nothing more of it.
            duration_s, seen.mood = total_s, "cut"
        outside(self._loop, duration_s, lambda: self._end(seen, ended))
        try:
            result = await ended
        except asyncio.CancelledError:
            seen.aborted = True
            self._trace.note(process.name, "aborted", seen.serial)
            raise
        finally:
            seen.ended = True
        seen.heard_s = self._loop.time()
        if isinstance(result, UpstreamError):
            raise result
        return result

    def knock(self) -> HttpReply:
        """The answer to `GET /models`."""
        if self._weather.strikes("away"):
            raise Unavailable("connection refused")
        return HttpReply(500 if self._weather.strikes("error") else 200, {}, b'{"data":[]}')

    def _duration_s(self, seen: Witnessed) -> float:
        dice = self._weather.dice
        seen.mood = self._mood(seen)
        if seen.mood == "hang":
            return HANG_S
        if seen.mood == "poison" and self._weather.plan.poison_s_max:
            return dice.uniform(0.02, self._weather.plan.poison_s_max)
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

    def _end(self, seen: Witnessed, ended: "asyncio.Future[HttpReply | UpstreamError]") -> None:
        if seen.mood == "poison" and not ended.done():
            seen.process.kill()
        if ended.done() or seen.process.dead:
            return
        self._trace.note(seen.process.name, "answer", seen.serial, seen.mood)
        ended.set_result(self._verdict(seen))

    def _verdict(self, seen: Witnessed) -> HttpReply | UpstreamError:
        dice = self._weather.dice
        match seen.mood:
            case "error":
                return HttpReply(500, {}, b'{"error":{"message":"the server failed"}}')
            case "throttle":
                longest_s = self._weather.plan.retry_after_s_max
                seen.wait_s = dice.choice(
                    (0.0, dice.uniform(0.2, min(2.0, longest_s)), dice.uniform(0.08 * longest_s, longest_s))
                )
                wait_ms = int(seen.wait_s * 1000)
                return HttpReply(429, {"retry-after-ms": str(wait_ms)} if wait_ms else {}, b"")
            case "reset" | "hang" | "cut":
                return Ambiguous("the connection broke")
            case "broken":
                return HttpReply(200, {}, b"the answer is not an answer")
            case "away":
                return Unavailable("connection refused")
            case "refuse":
                return HttpReply(400, {}, b'{"error":{"message":"no"}}')
        body = (
            b'{"id":"call-%d","choices":[{"index":0,"message":{"role":"assistant","content":"%b"}}],'
            b'"usage":{"prompt_tokens":%d,"completion_tokens":%d}}'
        ) % (seen.serial, seen.tag.encode(), seen.usage.input_tokens, seen.usage.output_tokens)
        return HttpReply(200, {}, body)


class ProcessTransport:
    """The Transport of one process: a line to each deployment."""

    def __init__(self, process: Process, provider: Provider) -> None:
        self._process = process
        self._provider = provider

    def line(self, deployment: Deployment) -> "ProcessLine":
        return ProcessLine(self._process, self._provider, deployment.name)

    def free_slots(self) -> int:
        return CONNECTIONS_MAX

    def recorded(self, items: Iterable[tuple[str, int]]) -> None:
        """Nothing is kept."""

    async def close(self) -> None:
        """Nothing is held."""


class ProcessLine:
    def __init__(self, process: Process, provider: Provider, deployment: str) -> None:
        self._process = process
        self._provider = provider
        self._deployment = deployment

    async def post(
        self,
        url: URL,
        idempotency_key: str,
        body: bytes,
        total_s: float,
        headers: bytes = b"",
        permit: SendPermit | None = None,
        attempt: int = 0,
    ) -> HttpReply:
        process = self._process
        if process.over:
            raise Over
        weather = process.weather
        if weather.strikes("connect_slow"):
            await asyncio.sleep(weather.dice.uniform(0.05, 1.2))
        if permit is not None:
            permit.begin()
        reserved = permit.tokens if permit is not None else 0
        return await self._provider.meet(process, self._deployment, idempotency_key, body, total_s, reserved)

    async def get(self, url: URL, total_s: float) -> HttpReply:
        weather = self._process.weather
        slow_s = weather.dice.uniform(0.05, 1.2) if weather.strikes("connect_slow") else 0.0
        return await self._process.ask(self._provider.knock, slow_s)
