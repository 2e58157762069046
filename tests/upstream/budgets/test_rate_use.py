"""How much of a limit four processes use, and that no window of any alignment holds more: minutes of it, in virtual time.

Real routers over the store's own ledger; only the sockets are left out, and each question to the store takes some milliseconds.
"""

import asyncio
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any

import pytest
from yarl import URL

from tests.simulation.world.loop import VirtualLoop
from tests.support.ports import LoopClock, SeededDice
from tests.upstream.raw_server import CHAT
from tidegate.core.budgets.budget import BudgetRequest, Grant, Limit, Period, Settlement
from tidegate.core.deployments import Deployment
from tidegate.core.errors import LimitsUnavailable, Withheld
from tidegate.core.nouns import Call
from tidegate.store.database.sqlite import SqliteDriver
from tidegate.store.limits import StoreLimits
from tidegate.store.store import Store
from tidegate.upstream.calls.router import Router
from tidegate.upstream.http.transport import HttpReply, SendPermit, UpstreamRequest
from tidegate.upstream.routing.slots import Capacity

MINUTE_MS = 60_000
POLL_S = 1.0
REQUESTS, TOKENS = Limit(Period.MINUTE, 600), Limit(Period.MINUTE, None, 60_000)


class Upstream:
    """Answers every call after so long, and writes down when each was sent."""

    def __init__(self, clock: LoopClock, call_s: float, tokens: int) -> None:
        self._clock = clock
        self._call_s = call_s
        self.tokens = tokens
        self.sent_ms: list[float] = []

    def client_for(self, deployment: Deployment) -> "Upstream":
        return self

    pool_timeout_s = 10.0

    def free_slots(self) -> int:
        return 1_000

    def recorded(self, items: Iterable[tuple[str, int]]) -> None:
        """Nothing is kept."""

    async def close(self) -> None:
        """Nothing is open."""

    async def get(self, url: URL, total_s: float) -> HttpReply:
        return HttpReply(200, {}, b"{}")

    async def post(self, request: UpstreamRequest, total_s: float, permit: SendPermit | None = None) -> HttpReply:
        await asyncio.sleep(0.002)
        if permit is not None:
            permit.begin_send()
        self.sent_ms.append(self._clock.monotonic_ms())
        await asyncio.sleep(self._call_s)
        usage = b'"usage":{"prompt_tokens":%d,"completion_tokens":1}' % (self.tokens - 1)
        return HttpReply(200, {}, CHAT[:-1] + b"," + usage + b"}")


class FarLimits:
    """The store's answer, a few milliseconds away; `away_until_s` makes it unreachable."""

    def __init__(self, inner: StoreLimits, loop: VirtualLoop, dice: SeededDice) -> None:
        self._inner = inner
        self._loop = loop
        self._dice = dice
        self.away: Sequence[tuple[float, float]] = ()
        self.question_count = 0

    async def _travel(self) -> None:
        await asyncio.sleep(self._dice.uniform(0.001, 0.008))
        if any(begin <= self._loop.time() < end for begin, end in self.away):
            raise LimitsUnavailable("the store is away")

    async def debit(self, asks: Sequence[BudgetRequest]) -> list[Grant]:
        self.question_count += 1
        await self._travel()
        grants = await self._inner.debit(asks)
        await self._travel()
        return grants

    async def settle_grants(self, settlements: Sequence[Settlement]) -> None:
        await self._travel()
        await self._inner.settle_grants(settlements)

    async def share_slots(
        self, worker_id: str, wanted: Mapping[str, int], in_use: Mapping[str, int], caps: Mapping[str, int]
    ) -> dict[str, int]:
        await self._travel()
        return await self._inner.share_slots(worker_id, wanted, in_use, caps)


class Scene:
    def __init__(self, call_s: float, limit: Limit, slots: int, runners: int) -> None:
        self.loop = VirtualLoop()
        self.clock = LoopClock(self.loop)
        self.dice = SeededDice(7)
        self.upstream = Upstream(self.clock, call_s, 100)
        self.estimate = 100
        self.place = Deployment("one", "http://upstream/v1", max_in_flight=slots, limits=(limit,))
        self.limits: FarLimits
        self._runner_count = runners
        self.sent_by: list[int] = []

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_until_complete(work)
        finally:
            asyncio.set_event_loop(None)
            self.loop.dismantle([])

    async def work(self, minutes: float, away: Sequence[tuple[float, float]] = (), worker_count: int = 4) -> None:
        store = Store(SqliteDriver(None, self.clock.now_ms))
        await store.migrate()
        self.limits = FarLimits(StoreLimits(store, "here"), self.loop, self.dice)
        self.limits.away = away
        self.sent_by = [0] * worker_count
        workers = []
        for number in range(worker_count):
            name = f"worker_{number}"
            await store.enlist_worker(name, "here", "1", 3_600_000)
            capacity = Capacity(self.limits, lambda name=name: name)  # type: ignore[misc]
            router = Router(self.upstream, self.upstream, self.clock, self.dice, capacity=capacity)
            router.serve([self.place])
            workers += [asyncio.create_task(self._runner(router, number)) for _ in range(self._runner_count)]
        await asyncio.sleep(minutes * 60)
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        await store.close()

    async def _runner(self, router: Router, number: int) -> None:
        """As a worker does: take nothing up while the model rests or has no slot, and retry a call when its error says."""
        while True:
            rest_ms = router.rests_until_ms("m") - self.clock.monotonic_ms()
            if rest_ms > 0 or not router.free_slots("m"):
                await asyncio.sleep(POLL_S * self.dice.uniform(0.1, 1.0))
                continue
            now_ms = self.clock.monotonic_ms()
            try:
                await router.send(
                    Call(
                        "batch_1", 1, "/v1/chat/completions", "m", b"{}", "k", now_ms + 3_600_000, tokens=self.estimate
                    )
                )
            except Withheld as error:
                await asyncio.sleep((error.retry_after_ms or 0) / 1000 + self.dice.uniform(0.0, 2.0))
            else:
                self.sent_by[number] += 1


def fullest(sent_ms: list[float]) -> int:
    """The most in any minute, of any alignment."""
    most = first = 0
    for last, at in enumerate(sent_ms):
        while sent_ms[first] <= at - MINUTE_MS:
            first += 1
        most = max(most, last - first + 1)
    return most


@pytest.mark.parametrize(
    ("call_s", "runners", "limit"),
    [
        (0.1, 10, REQUESTS),
        (20.0, 60, TOKENS),
        pytest.param(0.1, 10, TOKENS, marks=pytest.mark.soak),
        pytest.param(20.0, 60, REQUESTS, marks=pytest.mark.soak),
    ],
)
def test_a_limit_is_used_to_98_percent_and_exceeded_never(call_s: float, runners: int, limit: Limit) -> None:
    scene = Scene(call_s, limit, 256, runners)
    scene.run(scene.work(4))
    sent = scene.upstream.sent_ms
    assert fullest(sent) <= 600
    # Three whole minutes, after the first few seconds in which the processes find their parts.
    used = sum(5_000 <= at < 5_000 + 3 * MINUTE_MS for at in sent)
    assert used >= 0.98 * 3 * 600
    # No process polls: there are four, with a few questions each for each sixteenth of what a minute frees.
    assert scene.limits.question_count < 4 * 60 * 4 * 6
    assert min(scene.sent_by) > 0.5 * len(sent) / 4


def test_what_was_reserved_in_vain_is_used_by_others_soon() -> None:
    """Ten times too much is reserved for each call: what comes back is asked for again before the moment that was named."""
    scene = Scene(0.1, Limit(Period.MINUTE, None, 60_000), 256, 10)
    scene.estimate = 1_000
    scene.run(scene.work(4))
    sent = scene.upstream.sent_ms
    assert fullest(sent) <= 600
    # Without that it is little more than half; the rest is the tenth call that does not fit until nine have come back.
    assert sum(10_000 <= at < 10_000 + 3 * MINUTE_MS for at in sent) >= 0.75 * 3 * 600


def test_a_store_that_goes_away_costs_use_and_never_exactness() -> None:
    scene = Scene(0.1, Limit(Period.MINUTE, 120), 64, 5)
    scene.run(scene.work(5, away=[(70.0, 95.0), (150.0, 150.4), (200.0, 201.0)]))
    sent = scene.upstream.sent_ms
    assert fullest(sent) <= 120
    # While the limits cannot be asked, only calls that had a permit already go out.
    assert not [at for at in sent if 70_300 <= at < 95_000]
    assert [at for at in sent if at >= 240_000]


def test_an_exhausted_budget_costs_nothing_while_it_rests() -> None:
    scene = Scene(0.1, Limit(Period.HOUR, 50), 64, 5)
    scene.run(scene.work(15))
    assert len(scene.upstream.sent_ms) == 50
    assert scene.limits.question_count < 60
