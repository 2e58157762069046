"""A world in virtual time for learned capacity: the real router, and model servers behind it that say nothing about themselves.

Items are sent as a worker sends them: while the router has a free slot, and again after the wait that the retry decision gives them. A
server is either a modelled engine (steps of a continuous batch) or one that takes a fixed time; both can refuse calls.
"""

import asyncio
import random
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import msgspec
from yarl import URL

from tests.simulation.world.loop import VirtualLoop
from tests.support.ports import LoopClock, SeededDice
from tidegate.core import retry
from tidegate.core.deployments import Deployment
from tidegate.core.errors import UpstreamError
from tidegate.core.nouns import Call
from tidegate.simulate.engine.model import EngineLimits, ModelledEngine, ModelledEvent, ModelledRequest
from tidegate.upstream.calls.router import Router
from tidegate.upstream.http.transport import HttpReply, SendPermit, UpstreamRequest
from tidegate.upstream.routing.slots import Capacity

CHAT, EMBEDDINGS = "/v1/chat/completions", "/v1/embeddings"
CONNECTIONS_MAX = 1_000
DAY_MS = 86_400_000.0
MEASURED_SHARE = 0.97


class Item(NamedTuple):
    """One item of a batch: what it asks of which model, in tokens; an embedding answers none."""

    model: str
    prompt_tokens: int
    answer_tokens: int

    @property
    def endpoint(self) -> str:
        return CHAT if self.answer_tokens else EMBEDDINGS


class _Body(msgspec.Struct):
    max_tokens: int


_body = msgspec.json.Decoder(_Body)


class Server(Protocol):
    async def answer(self, body: bytes) -> HttpReply: ...


def answered(prompt_tokens: int, answer_tokens: int) -> HttpReply:
    if not answer_tokens:
        return HttpReply(
            200, {}, b'{"data":[{"embedding":[0.5],"index":0}],"usage":{"prompt_tokens":%d}}' % prompt_tokens
        )
    usage = b'{"prompt_tokens":%d,"completion_tokens":%d}' % (prompt_tokens, answer_tokens)
    return HttpReply(200, {}, b'{"choices":[{"message":{"content":"x"}}],"usage":%b}' % usage)


class EngineServer:
    """A modelled engine: what calls take follows from how many run beside them."""

    def __init__(self, limits: EngineLimits | None = None) -> None:
        self._engine = ModelledEngine(limits or EngineLimits())
        self._ended: dict[Hashable, asyncio.Future[None]] = {}
        self._calls = 0
        self._is_stepping = False

    async def answer(self, body: bytes) -> HttpReply:
        asked = _body.decode(body).max_tokens
        self._calls += 1
        ended = self._ended[self._calls] = asyncio.get_running_loop().create_future()
        # Each prompt differs from the first byte on, so that the prefix cache plays no part.
        prompt = self._calls.to_bytes(8, "big") + body
        self._engine.submit(ModelledRequest(prompt, asked, tag=self._calls))
        self._step()
        await ended
        return answered(len(body) // 4, asked)

    def _step(self) -> None:
        step = None if self._is_stepping else self._engine.step()
        if step is not None:
            self._is_stepping = True
            asyncio.get_running_loop().call_later(step.duration_ms / 1000, self._stepped, step.events)

    def _stepped(self, events: list[ModelledEvent]) -> None:
        self._is_stepping = False
        for event in events:
            if event.finished:
                self._ended.pop(event.sequence.tag).set_result(None)
        self._step()


class SteadyServer:
    """A server that takes the same time for every call of an endpoint, has so many slots, and lets others wait for one."""

    def __init__(self, chat_s: float = 0.15, embedding_s: float = 0.005, slots: int = CONNECTIONS_MAX) -> None:
        self._chat_s, self._embedding_s = chat_s, embedding_s
        self._slots = asyncio.Semaphore(slots)

    async def answer(self, body: bytes) -> HttpReply:
        asked = _body.decode(body).max_tokens
        async with self._slots:
            await asyncio.sleep(self._chat_s if asked else self._embedding_s)
        return answered(len(body) // 4, asked)


class RefusingServer:
    """A server in front of another: it refuses this share of calls at once, by chance."""

    def __init__(
        self, server: Server, share: float, status: int = 429, retry_after_s: float | None = 1.0, seed: int = 1
    ) -> None:
        self._server = server
        self._share = share
        self._status = status
        self._headers = {} if retry_after_s is None else {"Retry-After": f"{retry_after_s:g}"}
        self._dice = random.Random(seed)

    async def answer(self, body: bytes) -> HttpReply:
        if self._dice.random() < self._share:
            return HttpReply(self._status, self._headers, b"{}")
        return await self._server.answer(body)


@dataclass(slots=True)
class Witness:
    """Every call that reached a server: when, where and under which key, how many were out then, and with which status it ended."""

    sent: list[tuple[float, str, str, int]] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    in_flight: int = 0


class _Line:
    def __init__(self, name: str, server: Server, witness: Witness) -> None:
        self._name, self._server, self._witness = name, server, witness

    async def post(self, request: UpstreamRequest, total_s: float, permit: SendPermit | None = None) -> HttpReply:
        assert request.body is not None
        if permit is not None:
            permit.begin_send()
        witness = self._witness
        witness.in_flight += 1
        witness.sent.append((asyncio.get_running_loop().time(), self._name, request.idempotency_key, witness.in_flight))
        try:
            reply = await self._server.answer(request.body)
        finally:
            witness.in_flight -= 1
        witness.statuses[reply.status] += 1
        return reply

    async def get(self, url: URL, total_s: float) -> HttpReply:
        return HttpReply(200, {}, b'{"data":[]}')


class _Transport:
    def __init__(self, servers: dict[str, Server], witness: Witness) -> None:
        self._servers, self._witness = servers, witness

    def client_for(self, deployment: Deployment) -> _Line:
        return _Line(deployment.name, self._servers[deployment.name], self._witness)

    pool_timeout_s = 10.0

    def free_slots(self) -> int:
        return CONNECTIONS_MAX

    def recorded(self, items: Iterable[tuple[str, int]]) -> None:
        """Nothing is kept."""

    async def close(self) -> None:
        """Nothing is held."""


@dataclass(slots=True)
class Report:
    """When the items were answered, what reached the servers, and how many items failed."""

    witness: Witness
    answered_s: list[float] = field(default_factory=list)
    failed: int = 0

    @property
    def seconds(self) -> float:
        """How long the whole batch took."""
        return self.answered_s[-1]

    @property
    def rate(self) -> float:
        """Items a second, without the last few: those wait for their Retry-After when nothing else is left to do."""
        count = int(len(self.answered_s) * MEASURED_SHARE)
        return count / self.answered_s[count - 1]


Place = tuple[Deployment, Callable[[], Server]]


def run(places: Sequence[Place], items: Sequence[Item], *, seed: int = 1, capacity: Capacity | None = None) -> Report:
    """Have all items answered by these deployments, in virtual time."""
    return in_virtual_time(_run(places, items, seed, capacity))


def in_virtual_time(work: Coroutine[Any, Any, Report]) -> Report:
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()


async def _run(places: Sequence[Place], items: Sequence[Item], seed: int, capacity: Capacity | None) -> Report:
    loop, dice, witness = asyncio.get_running_loop(), SeededDice(seed), Witness()
    transport = _Transport({place.name: make() for place, make in places}, witness)
    clock = LoopClock(loop, 1_000_000.0)
    router = Router(transport, transport, clock, dice, capacity=capacity)
    router.serve([place for place, _ in places])
    report = Report(witness)
    # Items of the models in turn, as the hand gives them out.
    waiting: dict[str, deque[tuple[int, Item, int]]] = {}
    for number, item in enumerate(items):
        waiting.setdefault(item.model, deque()).append((number, item, 0))
    left, news = len(items), asyncio.Event()
    policy = retry.RetryPolicy()
    router.on_room(news.set)

    async def send(number: int, item: Item, attempts: int) -> None:
        nonlocal left
        body = b'{"max_tokens":%d,"pad":"' % item.answer_tokens
        body += b"x" * (4 * item.prompt_tokens - len(body) - 2) + b'"}'
        now_ms = clock.monotonic_ms()
        call = Call("batch_1", number, item.endpoint, item.model, body, f"{number}", now_ms + DAY_MS, attempts)
        try:
            await router.send(call)
            left -= 1
            report.answered_s.append(loop.time())
        except UpstreamError as error:
            now_ms = clock.monotonic_ms()
            verdict = retry.decide(error, attempts, int(now_ms), int(now_ms + DAY_MS), policy, dice.uniform(0, 1))
            if isinstance(verdict, retry.RetryAt):
                again = (number, item, attempts + int(verdict.counts))
                loop.call_later((verdict.at_ms - now_ms) / 1000, put_back, again)
            else:
                left -= 1
                report.failed += 1
        news.set()

    def put_back(again: tuple[int, Item, int]) -> None:
        waiting[again[1].model].appendleft(again)
        news.set()

    tasks: set[asyncio.Task[None]] = set()
    while left:
        news.clear()
        while ready := [queue for model, queue in waiting.items() if queue and router.free_slots(model) > 0]:
            for queue in ready:
                task = asyncio.create_task(send(*queue.popleft()))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
                await asyncio.sleep(0)
        try:
            async with asyncio.timeout(0.2):
                await news.wait()
        except TimeoutError:
            pass
    await router.close()
    return report
