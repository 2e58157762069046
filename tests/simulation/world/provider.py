"""The model servers that all processes call, and the lines of one process to them.

The provider is the witness: it writes down each call (`witness`). Its moods come from the weather. It answers with a body of its own for
every call, so that each line of an output file can be traced to its call. The real router stands before it, with its deployments, budgets
and breakers: only the transport is simulated.
"""

import asyncio
import random
from collections.abc import Callable, Iterable
from zlib import crc32

import msgspec
from yarl import URL

from tests.simulation.world import answers
from tests.simulation.world.estate import MESSAGES
from tests.simulation.world.loop import VirtualLoop
from tests.simulation.world.process import Over, Process, outside
from tests.simulation.world.trace import Trace
from tests.simulation.world.weather import Weather
from tests.simulation.world.witness import INVALID, NOTHING, User, Witnessed
from tidegate.core.deployments import Deployment, EngineKind
from tidegate.core.errors import Ambiguous, Unavailable, UpstreamError
from tidegate.core.grouping.chat import BATCH_ENDPOINT
from tidegate.core.ids import split_item_id
from tidegate.core.nouns import Usage
from tidegate.core.usage.estimate import prompt_tokens
from tidegate.upstream.http.connections import InFlightCall
from tidegate.upstream.http.transport import HttpReply, SendPermit, Stream, UpstreamRequest

HANG_S = 6.0
CONNECTIONS_MAX = 1_000
POOL_TIMEOUT_S = 10.0
ANSWER_BYTES_MAX = 1 << 20
_INVALID_SHARE = 0.35
_MOODS = ("error", "throttle", "reset", "hang", "broken", "away", "refuse")

# What a call ends with: an answer, or none.
End = HttpReply | UpstreamError


class _Block(msgspec.Struct):
    text: str


class _Message(msgspec.Struct):
    content: str | list[_Block]


class _Body(msgspec.Struct):
    messages: list[_Message | list[_Message]] = []
    input: str | list[str] = ""
    max_tokens: int = 0
    max_completion_tokens: int = 0
    stream: bool = False

    @property
    def contents(self) -> list[str]:
        if not self.messages:
            return [self.input] if isinstance(self.input, str) else self.input
        conversations = [one for one in self.messages if isinstance(one, list)]
        single = [one for one in self.messages if isinstance(one, _Message)]
        # The messages behind the first one are about an answer that did not fit.
        contents = [one[0].content for one in conversations or [single]]
        return [content if isinstance(content, str) else content[0].text for content in contents]


_body = msgspec.json.Decoder(_Body)


def usage_of(content: str, max_tokens: int, factor: int) -> Usage:
    """What a request takes: the same however often it is asked. An embedding has no output."""
    output = 1 + crc32(content.encode()) % max_tokens if max_tokens else 0
    return Usage(prompt_tokens(len(content)) * factor, 0, output)


def tag_of(content: str) -> str:
    """What names an item; the rest of its prompt is padding."""
    return content.partition(" ")[0]


class Provider:
    """`number_of` says which item of a job a tag names."""

    def __init__(
        self,
        loop: VirtualLoop,
        weather: Weather,
        trace: Trace,
        check: Callable[[list[Witnessed]], None],
        number_of: Callable[[str, str], int],
    ) -> None:
        self._loop = loop
        self._weather = weather
        self._trace = trace
        self._check = check
        self._number_of = number_of
        self._count = 0
        self._engines = {one.name: one.engine for one in weather.plan.estate.deployments}
        self.calls: list[Witnessed] = []
        self.user_calls: list[Witnessed] = []
        self.poison: set[str] = set()
        self.job_ids: dict[str, list[str]] = {}
        self.users: dict[str, User] = {}
        # Jobs whose answers are held to a schema.
        self.held_to_schema: set[str] = set()
        self._schema_dice = random.Random(f"schemas/{weather.plan.seed}")

    # ---- items

    async def meet(
        self, process: Process, deployment: str, request: UpstreamRequest, total_s: float, reserved: int
    ) -> HttpReply:
        """One call, from the moment its bytes go out."""
        path, body = request.url.path, _body.decode(request.body or b"")
        seen = self._witness(process, deployment, request.idempotency_key, body, reserved)
        lead = seen[0]
        self.calls += seen
        self._trace.note(process.name, "call", lead.serial, " ".join(one.tag for one in seen), deployment)
        self._check(seen)
        ended: asyncio.Future[End] = self._loop.create_future()
        mood, duration_s = self._fate(seen, total_s)
        _mark(seen, mood=mood)
        outside(self._loop, duration_s, lambda: self._end(seen, path, ended))
        try:
            result = await ended
        except asyncio.CancelledError:
            _mark(seen, aborted=True)
            self._trace.note(process.name, "aborted", lead.serial)
            raise
        finally:
            _mark(seen, ended=True, ended_s=self._loop.time())
        _mark(seen, received_s=self._loop.time())
        if isinstance(result, UpstreamError):
            raise result
        return result

    def _witness(self, process: Process, deployment: str, key: str, body: _Body, reserved: int) -> list[Witnessed]:
        max_tokens = body.max_tokens or body.max_completion_tokens
        factor = self._weather.plan.estate.usage_factor
        contents = body.contents
        usages = [usage_of(content, max_tokens, factor) for content in contents]
        whole = Usage(sum(one.input_tokens for one in usages), 0, sum(one.output_tokens for one in usages))
        serial, self._count = self._count, self._count + 1
        seen: list[Witnessed] = []
        for content, usage in zip(contents, usages, strict=True):
            tag = tag_of(content)
            user = self.users.get(tag)
            job_id = "" if user else self._job_of(tag, key)
            one = Witnessed(
                serial,
                process,
                process.me.id if process.me else "",
                deployment,
                job_id,
                -1 if user else self._number(job_id, tag, key, len(contents)),
                key,
                tag,
                self._loop.time(),
                usage,
                0 if seen else reserved,
                leads=not seen,
                item_count=len(contents),
                whole_usage=NOTHING if seen else whole,
                user=user,
                wants_json=job_id in self.held_to_schema,
            )
            seen.append(one)
        return seen

    def _job_of(self, tag: str, key: str) -> str:
        """The job whose line a tag names; where some of them run again, the one that the key names."""
        first, *again = self.job_ids[tag.partition("-")[0]]
        item = _item_of(key)
        part = item[0] if item else key.removeprefix("batch_grp_").partition("_")[0]
        return next((one for one in again if one.startswith(f"batch_{part}")), first)

    def _number(self, job_id: str, tag: str, key: str, item_count: int) -> int:
        if item_count > 1:
            return self._number_of(job_id, tag)
        item = _item_of(key)
        assert item is not None, "every key begins with its item"
        return item[1]

    def _fate(self, seen: list[Witnessed], total_s: float) -> tuple[str, float]:
        """How a call is met, and how long that takes."""
        mood = self._mood(seen)
        duration_s = self._duration_s(mood)
        # The sender cuts it when its time is over, and gets nothing more of it.
        return ("cut", total_s) if duration_s > total_s else (mood, duration_s)

    def _duration_s(self, mood: str) -> float:
        dice = self._weather.dice
        if mood == "hang":
            return HANG_S
        if mood == "poison" and self._weather.plan.poison_s_max:
            return dice.uniform(0.02, self._weather.plan.poison_s_max)
        if mood == "away":
            return dice.uniform(0.001, 0.05)
        if self._weather.strikes("slow"):
            return dice.uniform(1.0, 12.0)
        return dice.uniform(0.02, self._weather.plan.call_s_max)

    def _mood(self, seen: list[Witnessed]) -> str:
        if any(one.tag in self.poison for one in seen):
            return "poison"
        mood = next((mood for mood in _MOODS if self._weather.strikes(mood)), "ok")
        if mood == "ok" and seen[0].wants_json and self._schema_dice.random() < _INVALID_SHARE:
            return INVALID
        return mood

    def _end(self, seen: list[Witnessed], path: str, ended: "asyncio.Future[End]") -> None:
        lead = seen[0]
        if lead.mood == "poison" and not ended.done():
            lead.process.kill()
        if ended.done() or lead.process.dead:
            return
        self._trace.note(lead.process.name, "answer", lead.serial, lead.mood)
        ended.set_result(self._verdict(seen, path))

    def _verdict(self, seen: list[Witnessed], path: str) -> End:
        dice, mood = self._weather.dice, seen[0].mood
        match mood:
            case "error":
                return HttpReply(500, {}, b'{"error":{"message":"the server failed"}}')
            case "throttle":
                longest_s = self._weather.plan.retry_after_s_max
                wait_s = dice.choice(
                    (0.0, dice.uniform(0.2, min(2.0, longest_s)), dice.uniform(0.08 * longest_s, longest_s))
                )
                _mark(seen, wait_s=wait_s)
                wait_ms = int(wait_s * 1000)
                return HttpReply(429, {"retry-after-ms": str(wait_ms)} if wait_ms else {}, b"")
            case "reset" | "hang" | "cut":
                return Ambiguous("the connection broke")
            case "broken":
                few = seen[:-1] if len(seen) > 1 and dice.random() < 0.5 else []
                if path == BATCH_ENDPOINT:
                    # Each result stands for itself: only the item that is left out has none.
                    _mark(few, mood="ok")
                return HttpReply(200, {}, answers.whole(path, few) if few else b"the answer is not an answer")
            case "away":
                return Unavailable("connection refused")
            case "refuse":
                return HttpReply(400, {}, b'{"error":{"message":"no"}}')
        speaks_messages = self._engines[seen[0].deployment] is EngineKind.ANTHROPIC
        if speaks_messages is not (path == MESSAGES):
            return HttpReply(404, {}, b'{"error":{"message":"there is no such path here"}}')
        return HttpReply(200, {}, answers.whole(path, seen, dice))

    # ---- users

    async def open(
        self, process: Process, deployment: str, request: UpstreamRequest, total_s: float, reserved: int
    ) -> Stream:
        """One call of a user, or of an item that goes like one: its answer from its head on."""
        path, body = request.url.path, _body.decode(request.body or b"")
        seen = self._witness(process, deployment, request.idempotency_key, body, reserved)
        one = seen[0]
        one.is_streamed, one.is_turned = body.stream, one.user is None
        (self.calls if one.is_turned else self.user_calls).append(one)
        self._trace.note(
            process.name, "turned call" if one.is_turned else "user's call", one.serial, one.tag, deployment
        )
        self._check(seen)
        task = asyncio.current_task()
        assert task is not None
        one.mood, duration_s = self._fate(seen, total_s)
        one.ended_s = one.sent_s + duration_s
        outside(self._loop, duration_s, lambda: _mark(seen, ended=True))
        first_s = self._weather.dice.uniform(0.2, 0.9) * duration_s if one.mood == "ok" and body.stream else duration_s
        try:
            await asyncio.sleep(first_s)
        except asyncio.CancelledError:
            one.aborted = one.is_turned
            _leave(one, self._loop.time())
            raise
        end = self._verdict(seen, path)
        if isinstance(end, UpstreamError):
            one.received_s, one.ended = self._loop.time(), True
            raise end
        flight = InFlightCall(task, task.cancelling(), self._loop.time() + total_s, total_s)
        pieces = answers.pieces(one, end.body, is_stream=body.stream)
        payload = _Payload(self._loop, one, pieces, duration_s - first_s)

        def close(whole: bool) -> None:
            if not whole:
                _leave(one, self._loop.time())

        headers = {"Content-Type": "text/event-stream" if len(pieces) > 1 else "application/json", **end.headers}
        return Stream(end.status, headers, payload, flight, close, ANSWER_BYTES_MAX)

    # ---- questions that cost nothing

    def probe(self) -> HttpReply:
        """The answer to `GET /models`."""
        if self._weather.strikes("away"):
            raise Unavailable("connection refused")
        return HttpReply(500 if self._weather.strikes("error") else 200, {}, b'{"data":[]}')

    def metrics(self, deployment: str) -> HttpReply:
        """The engine's own figures."""
        if self._weather.strikes("away"):
            raise Unavailable("connection refused")
        out = [one for one in self.calls + self.user_calls if one.leads and not one.ended]
        running = sum(one.deployment == deployment for one in out)
        page = f"vllm:num_requests_running {running}\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0.2\n"
        return HttpReply(200, {}, page.encode())


def _item_of(key: str) -> tuple[str, int] | None:
    """The item that an idempotency key begins with: a digest follows, and the number of the try where answers must fit."""
    return split_item_id(key.partition("-")[0])


class _Payload:
    """The pieces of an answer: the first is here, the last comes with its end."""

    def __init__(self, loop: VirtualLoop, call: Witnessed, pieces: list[bytes], rest_s: float) -> None:
        self._loop = loop
        self._call = call
        self._pieces = pieces
        self._rest_s = rest_s

    async def readany(self) -> bytes:
        if self._call.first_s is not None and len(self._pieces) == 1:
            await asyncio.sleep(self._rest_s)
        if not self._pieces:
            self._call.received_s, self._call.ended = self._loop.time(), True
            return b""
        if self._call.first_s is None:
            self._call.first_s = self._loop.time()
        return self._pieces.pop(0)


def _leave(call: Witnessed, at_s: float) -> None:
    if not call.ended:
        call.ended, call.left, call.ended_s = True, True, at_s
    call.left = call.left or call.received_s is None


def _mark(seen: list[Witnessed], **fields: object) -> None:
    """All that share a call share its fate."""
    for one in seen:
        for name, value in fields.items():
            setattr(one, name, value)


class ProcessTransport:
    """The Transport of one process: a line to each deployment."""

    def __init__(self, process: Process, provider: Provider) -> None:
        self._process = process
        self._provider = provider

    def client_for(self, deployment: Deployment) -> "ProcessLine":
        return ProcessLine(self._process, self._provider, deployment.name)

    pool_timeout_s = POOL_TIMEOUT_S

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

    async def post(self, request: UpstreamRequest, total_s: float, permit: SendPermit | None = None) -> HttpReply:
        reserved = await self._begin(permit)
        return await self._provider.meet(self._process, self._deployment, request, total_s, reserved)

    async def open(
        self, request: UpstreamRequest, total_s: float, permit: SendPermit | None = None, *, interactive: bool = True
    ) -> Stream:
        reserved = await self._begin(permit)
        return await self._provider.open(self._process, self._deployment, request, total_s, reserved)

    async def _begin(self, permit: SendPermit | None) -> int:
        """Connect; says how many tokens the call may take."""
        if self._process.over:
            raise Over
        weather = self._process.weather
        if weather.strikes("connect_slow"):
            await asyncio.sleep(weather.dice.uniform(0.05, 1.2))
        if permit is None:
            return 0
        permit.begin_send()
        return permit.tokens

    async def get(self, url: URL, total_s: float) -> HttpReply:
        weather, provider = self._process.weather, self._provider
        slow_s = weather.dice.uniform(0.05, 1.2) if weather.strikes("connect_slow") else 0.0
        if url.path.endswith("/metrics"):
            return await self._process.ask(lambda: provider.metrics(self._deployment), slow_s)
        return await self._process.ask(provider.probe, slow_s)
