"""Budgets in money and parallel places on the way to a deployment: what is set aside, what it is settled with, and who is turned away how.

Real sockets and the core's own ledgers; the clock is moved by hand, and patience is nought so that nothing waits for it inside.
"""

from __future__ import annotations

import asyncio
import functools
import json
import math
from collections.abc import Mapping, Sequence

import msgspec
import pytest

from tests.support.ports import HandClock
from tests.upstream.budgets.test_budgets import AT_ONCE
from tests.upstream.raw_server import Peer, RawServer, Request, Script, answers_with, eventually
from tests.upstream.world import CHAT_ENDPOINT, RouterWorld, deployment
from tidegate.core.audio_file import AudioFile
from tidegate.core.budgets.budget import Budget, BudgetRequest, Grant, Limit, LimitBound, Period, Settlement, budgets_of
from tidegate.core.budgets.deal import deal, settle
from tidegate.core.budgets.ledger import Ledger
from tidegate.core.budgets.money import MoneyLedger
from tidegate.core.deployments import Deployment, EngineKind
from tidegate.core.errors import Ambiguous, Overspent, Refused, SurchargeUnpriced, Throttled, Unbounded, Withheld
from tidegate.core.nouns import Answer, Call
from tidegate.core.usage.prices import NANO, Price, Surcharge
from tidegate.upstream.budgets.token_estimator import LETTER_TOKENS, OTHER_TOKENS
from tidegate.upstream.calls.router import Router
from tidegate.upstream.calls.traffic import Traffic
from tidegate.upstream.calls.translation import Shaped
from tidegate.upstream.routing.key_slots import WAITING_CALLS_MAX, KeySlots
from tidegate.upstream.routing.slots import Capacity, ModelSlots, RoomSignal, SlotDemand, SlotSharing
from tidegate.wait_line import WaitLine

pytestmark = pytest.mark.anyio

# A token costs a thousandth, so that a body of n bytes is worth n thousandths at most.
PRICE = Price.of(1_000, None, 1_000)
CHEAP = Price.of(1, None, 1)
TOKEN = NANO // 1_000
USED = b'{"choices":[{}],"usage":{"prompt_tokens":5,"completion_tokens":5}}'
DAY_MS = 86_400_000
USER = Traffic(lambda engine: Shaped(CHAT_ENDPOINT, b"{}"), is_stream=False)


class LedgerLimits:
    """The Limits port over ledgers in memory and the test's clock."""

    def __init__(self, clock: HandClock) -> None:
        self._clock = clock
        self.ledgers: dict[str, Ledger] = {}
        self.questions = 0

    def _of(self, budgets: Sequence[Budget]) -> dict[str, Ledger]:
        for one in budgets:
            self.ledgers.setdefault(one.id, MoneyLedger() if one.in_money else Ledger())
        return self.ledgers

    async def debit(self, asks: Sequence[BudgetRequest]) -> list[Grant]:
        self.questions += 1
        return deal(asks, self._of([one for ask in asks for one in ask.budgets]), self._clock.now_ms())

    async def settle_grants(self, settlements: Sequence[Settlement]) -> None:
        settle(settlements, self._of([one for each in settlements for one in each.budgets]), self._clock.now_ms())

    async def share_slots(
        self, worker_id: str, wanted: Mapping[str, int], in_use: Mapping[str, int], caps: Mapping[str, int]
    ) -> dict[str, int]:
        return {name: min(caps[name], wanted[name], 1) for name in caps}

    def left(self, budget: Budget) -> int:
        """In tokens, if all that is in flight were free."""
        ledger = self._of([budget])[budget.id]
        assert isinstance(ledger, MoneyLedger)
        return ledger.left(budget.limits[0], self._clock.now_ms()) // TOKEN


@pytest.fixture
def limits(world: RouterWorld) -> LedgerLimits:
    return LedgerLimits(world.clock)


def money(tokens: int, period: Period = Period.LIFETIME) -> tuple[Budget, ...]:
    return budgets_of(LimitBound.KEY, "k", [Limit(period, nano=tokens * TOKEN)])


def likely(tokens: int) -> int:
    """Of a call of `sized`, what it will likely cost where nothing is known: its body has 14 letters."""
    return 10 + math.ceil(14 * LETTER_TOKENS + (tokens - 10 - 14) * OTHER_TOKENS)


def sized(world: RouterWorld, budgets: tuple[Budget, ...], tokens: int, left_ms: float = 60_000) -> Call:
    """A call that can cost so many tokens at most."""
    body = b'{"model":"m","max_tokens":10}'
    return world.call(body=body + b"\n" * (tokens - 10 - len(body)), budgets=budgets, left_ms=left_ms)


async def test_what_is_set_aside_is_replaced_by_what_it_cost(world: RouterWorld, limits: LedgerLimits) -> None:
    budgets = money(100)
    async with RawServer(answers_with(200, USED)) as server:
        async with world.router(
            deployment(server.url, price=PRICE), policy=AT_ONCE, capacity=Capacity(limits)
        ) as router:
            for spent in (10, 20):
                await router.send(sized(world, budgets, 60))
                await eventually(
                    functools.partial(lambda left: limits.left(budgets[0]) == left, 100 - spent), "it to be settled"
                )
            with pytest.raises(Overspent) as broke:
                await router.send(sized(world, budgets, 104))
            assert (broke.value.code, broke.value.status, broke.value.billed) == ("budget_exceeded", 0, False)
            assert f"0.0{likely(104)}" in broke.value.message
            assert 80 < likely(104) < 100
            assert "0.08 left" in broke.value.message
            assert "shorten the input" in broke.value.message, "an embedding has no max_tokens to lower"
            with pytest.raises(Overspent):
                await router.send(sized(world, budgets, 140))
            await router.send(sized(world, budgets, 80))
            assert router.status()[0].failures == {}
    assert len(server.posts) == 3


async def test_large_calls_that_do_not_fit_keep_no_small_one_back(world: RouterWorld, limits: LedgerLimits) -> None:
    """All are asked for together, as if each cost the same: the answer to each is true of that call alone."""
    budgets = money(200)
    async with RawServer(answers_with(200, USED)) as server:
        async with world.router(
            deployment(server.url, price=PRICE), policy=AT_ONCE, capacity=Capacity(limits)
        ) as router:
            await router.send(sized(world, budgets, 150))
            await eventually(lambda: limits.left(budgets[0]) == 190, "it to be settled")
            ends = await asyncio.gather(
                *(in_the_end(router, sized(world, budgets, size)) for size in [250, 50, 260, 50, 270, 50]),
                return_exceptions=True,
            )
            assert [type(end) for end in ends] == [Overspent, Answer] * 3


async def in_the_end(router: Router, call: Call) -> Answer:
    """Asked again for as long as calls in flight have the rest set aside."""
    while True:
        try:
            return await router.send(call)
        except Withheld as waits:
            if waits.code != "budget_reserved":
                raise
            await asyncio.sleep(0.01)


async def test_who_finds_the_rest_in_flight_waits_and_is_not_refused(world: RouterWorld, limits: LedgerLimits) -> None:
    budgets = money(100)
    may_answer = asyncio.Event()

    async def slowly(request: Request, peer: Peer) -> None:
        await may_answer.wait()
        await peer.answer(200, USED)

    async with RawServer(slowly) as server:
        async with world.router(
            deployment(server.url, price=PRICE), policy=AT_ONCE, capacity=Capacity(limits)
        ) as router:
            first = asyncio.create_task(router.send(sized(world, budgets, 80)))
            await eventually(lambda: len(server.posts) == 1, "the call to arrive")
            with pytest.raises(Withheld) as waits:
                await router.send(sized(world, budgets, 50))
            assert (waits.value.code, waits.value.spent) == ("budget_reserved", "money:key:k")
            may_answer.set()
            await first
            await eventually(lambda: limits.left(budgets[0]) == 90, "it to be settled")
            await router.send(sized(world, budgets, 50))


@pytest.mark.parametrize(
    ("status", "error", "left"), [(429, Throttled, 100), (400, Refused, 100), (500, Ambiguous, 40)]
)
async def test_what_may_have_been_done_is_paid_and_what_was_turned_away_is_not(
    world: RouterWorld, limits: LedgerLimits, status: int, error: type[Exception], left: int
) -> None:
    budgets = money(100)
    async with RawServer(answers_with(status, b"{}")) as server:
        async with world.router(
            deployment(server.url, price=PRICE), policy=AT_ONCE, capacity=Capacity(limits)
        ) as router:
            with pytest.raises(error):
                await router.send(sized(world, budgets, 60))
            await eventually(lambda: limits.left(budgets[0]) == left, "it to be settled")


@pytest.mark.parametrize(
    "answer",
    [
        b'{"choices":[{}]}',
        b'{"choices":[{"message":{"content":"Hello."}}],"usage":{"prompt_tokens":3}}',
        b'{"choices":[{"message":{"content":"Hello."}}],"usage":{"prompt_tokens":3,"completion_tokens":null}}',
        b'{"choices":[{"message":{"content":"Hello."}}],"usage":{"completion_tokens":2}}',
    ],
)
async def test_an_item_that_does_not_report_all_that_it_used_costs_an_estimate_by_text(
    world: RouterWorld, limits: LedgerLimits, answer: bytes
) -> None:
    """A prompt of 50 bytes and an answer of 6 or of none, or what was reported of either."""
    budgets = money(100)
    async with RawServer(answers_with(200, answer)) as server:
        async with world.router(
            deployment(server.url, price=PRICE), policy=AT_ONCE, capacity=Capacity(limits)
        ) as router:
            reported = (await router.send(sized(world, budgets, 60))).usage
            used = (reported.input_tokens or 13) + (2 if b"Hello." in answer else 0)
            await eventually(lambda: limits.left(budgets[0]) == 100 - used, "it to be settled")


async def test_what_nothing_bounds_is_not_sent_unless_the_deployment_does(
    world: RouterWorld, limits: LedgerLimits
) -> None:
    budgets = money(100)
    async with RawServer(answers_with(200, USED)) as server:
        place = deployment(server.url, price=PRICE)
        async with world.router(place, policy=AT_ONCE, capacity=Capacity(limits)) as router:
            with pytest.raises(Refused) as refused:
                await router.send(world.call(budgets=budgets))
            assert (refused.value.code, refused.value.status) == ("max_tokens_required", 400)
            assert router.status()[0].failures == {}
        bounded = deployment(server.url, price=PRICE, output_tokens_max=20)
        async with world.router(bounded, policy=AT_ONCE, capacity=Capacity(limits)) as router:
            assert (await router.send(world.call(budgets=budgets))).status == 200
            with pytest.raises(Overspent):
                await router.send(world.call(body=b'{"model":"m","n":5}', budgets=budgets))
    assert len(server.posts) == 1


async def test_what_is_too_dear_here_goes_where_it_is_cheaper(world: RouterWorld, limits: LedgerLimits) -> None:
    budgets = money(50)
    async with RawServer(answers_with(200, USED)) as dear, RawServer(answers_with(200, USED)) as cheap:
        places = (
            deployment(dear.url, "dear", price=PRICE, weight=100.0),
            deployment(cheap.url, "cheap", price=CHEAP),
        )
        async with world.router(*places, policy=AT_ONCE, capacity=Capacity(limits)) as router:
            assert (await router.send(sized(world, budgets, 90))).deployment == "cheap"
    assert len(dear.posts) == 0


async def test_a_budget_that_renews_in_time_is_waited_for_unless_a_user_waits(
    world: RouterWorld, limits: LedgerLimits
) -> None:
    budgets = money(60, Period.DAY)
    all_used = b'{"choices":[{}],"usage":{"prompt_tokens":50,"completion_tokens":10}}'
    async with RawServer(answers_with(200, all_used)) as server:
        async with world.router(
            deployment(server.url, price=PRICE), policy=AT_ONCE, capacity=Capacity(limits)
        ) as router:
            await router.send(sized(world, budgets, 60))
            await eventually(lambda: limits.left(budgets[0]) == 0, "it to be settled")
            with pytest.raises(Overspent) as broke:
                await router.send(sized(world, budgets, 60, left_ms=1_000))
            assert "is spent" in broke.value.message
            with pytest.raises(Withheld) as waits:
                await router.send(sized(world, budgets, 60, left_ms=2 * DAY_MS))
            assert waits.value.code == "budget_spent"
            with pytest.raises(Overspent):
                await router.open(sized(world, budgets, 60, left_ms=2 * DAY_MS), USER)
            world.clock.advance(DAY_MS)
            await router.send(sized(world, budgets, 60))


async def test_places_are_taken_per_call_in_order_and_given_back(world: RouterWorld) -> None:
    parallel = KeySlots(SlotDemand(None, ModelSlots({}, 0, is_alone=True)), world.clock)
    key, both = (("key:k", 2),), (("tenant:t", 9), ("key:k", 2))
    await parallel.take_slots(key)
    await parallel.take_slots(both)
    order: list[int] = []

    async def one(number: int) -> None:
        await parallel.take_slots(key)
        order.append(number)

    tasks = []
    for number in range(WAITING_CALLS_MAX):
        tasks.append(asyncio.create_task(one(number)))
        await asyncio.sleep(0)
    with pytest.raises(Withheld) as full:
        await parallel.take_slots(key)
    assert full.value.code == "max_parallel_requests_exceeded"
    tasks[0].cancel()
    await asyncio.gather(tasks[0], return_exceptions=True)
    parallel.release_slots(key)
    await eventually(lambda: order == [1], "the next to go")
    parallel.release_slots(both)
    await eventually(lambda: order == [1, 2], "the next to go")
    for _ in tasks[3:]:
        parallel.release_slots(key)
        await asyncio.sleep(0)
    await asyncio.gather(*tasks[1:])
    assert order == list(range(1, WAITING_CALLS_MAX))


async def test_names_that_callers_make_up_are_forgotten_when_their_calls_are_refused_or_leave(
    world: RouterWorld,
) -> None:
    parallel = KeySlots(SlotDemand(None, ModelSlots({}, 0, is_alone=True)), world.clock)
    key = ("key:k", 1)
    first = await parallel.take_slots((("user:first", 3), key))
    waiting = [
        asyncio.create_task(parallel.take_slots(((f"user:{number}", 3), key))) for number in range(WAITING_CALLS_MAX)
    ]
    await asyncio.sleep(0)
    for number in range(WAITING_CALLS_MAX, 100):
        with pytest.raises(Withheld):
            await parallel.take_slots(((f"user:{number}", 3), key))
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert [one.name for one in parallel.slots()] == ["parallel:user:first", "parallel:key:k"]
    first.release_key_slots()
    assert not parallel.slots()


async def test_a_cap_that_is_lowered_holds_at_once_and_one_that_is_raised_too(world: RouterWorld) -> None:
    parallel = KeySlots(SlotDemand(None, ModelSlots({}, 0, is_alone=True)), world.clock)
    for _ in range(2):
        await parallel.take_slots((("key:k", 2),))
    parallel.release_slots((("key:k", 2),))
    waits = asyncio.create_task(parallel.take_slots((("key:k", 1),)))
    await asyncio.sleep(0)
    assert not waits.done()
    await parallel.take_slots((("key:k", 3),))
    parallel.release_slots((("key:k", 3),))
    parallel.release_slots((("key:k", 3),))
    await waits


async def test_a_part_of_a_shared_cap_is_asked_for_and_nothing_goes_beyond_it(
    world: RouterWorld, limits: LedgerLimits
) -> None:
    demand = SlotDemand(lambda: "me", ModelSlots({}, 0, is_alone=False))
    parallel = KeySlots(demand, world.clock)
    sharing = SlotSharing(limits, demand, (parallel,), RoomSignal(WaitLine()), None)
    try:
        await parallel.take_slots((("key:k", 5),))
        second = asyncio.create_task(parallel.take_slots((("key:k", 5),)))
        await asyncio.sleep(0)
        assert not second.done(), "this process's part is one"
        parallel.release_slots((("key:k", 5),))
        await second
    finally:
        await sharing.close()


def wordy(world: RouterWorld, budgets: tuple[Budget, ...], letters: int, text: bytes = b"abcd") -> Call:
    """A call whose prompt takes a token a byte at most, and one for four bytes in truth."""
    body = b'{"max_tokens":1,"messages":"%s"}' % (text * (letters // len(text)))
    return world.call(body=body, budgets=budgets)


def counting(bytes_per_token: int) -> Script:
    async def script(request: Request, peer: Peer) -> None:
        usage = {"prompt_tokens": len(request.body) // bytes_per_token, "completion_tokens": 1}
        await peer.answer(200, json.dumps({"choices": [{}], "usage": usage}).encode())

    return script


@pytest.mark.parametrize("text", [b"abcd", b"0123456789", "\u6f6e\u6c50".encode()], ids=["words", "digits", "chinese"])
async def test_a_budget_below_the_worst_of_one_call_is_used_up_one_call_after_another(
    world: RouterWorld, limits: LedgerLimits, text: bytes
) -> None:
    """Each may cost 4,000 and costs 1,000: a budget of 3,500 pays for three, and none is passed."""
    budgets = money(3_500)
    async with RawServer(counting(4)) as server:
        async with world.router(
            deployment(server.url, price=PRICE), policy=AT_ONCE, capacity=Capacity(limits)
        ) as router:
            calls = [wordy(world, budgets, 3_960, text) for _ in range(6)]
            ends = await asyncio.gather(*(in_the_end(router, call) for call in calls), return_exceptions=True)
    assert sorted(type(end).__name__ for end in ends) == ["Answer"] * 3 + ["Overspent"] * 3
    assert server.open_count_highest >= 1
    assert 0 < limits.left(budgets[0]) < 1_000


async def test_calls_that_go_on_their_likely_cost_never_run_beside_others(
    world: RouterWorld, limits: LedgerLimits
) -> None:
    budgets = money(3_500)
    at_once = highest = 0

    async def slowly(request: Request, peer: Peer) -> None:
        nonlocal at_once, highest
        at_once += 1
        highest = max(highest, at_once)
        await asyncio.sleep(0.02)
        at_once -= 1
        await counting(4)(request, peer)

    async with RawServer(slowly) as server:
        async with world.router(
            deployment(server.url, price=PRICE), policy=AT_ONCE, capacity=Capacity(limits)
        ) as router:
            await asyncio.gather(
                *(in_the_end(router, wordy(world, budgets, 3_960)) for _ in range(5)), return_exceptions=True
            )
    assert highest == 1


async def test_a_server_that_counts_densely_is_believed_from_then_on(world: RouterWorld, limits: LedgerLimits) -> None:
    """Half a token a byte was counted once: what may take as much again is not sent with less."""
    async with RawServer(counting(2)) as server:
        async with world.router(
            deployment(server.url, price=PRICE), policy=AT_ONCE, capacity=Capacity(limits)
        ) as router:
            await router.send(wordy(world, money(9_000), 4_000))
            poor = budgets_of(LimitBound.KEY, "poor", [Limit(Period.LIFETIME, nano=2_300 * TOKEN)])
            with pytest.raises(Overspent):
                await router.send(wordy(world, poor, 4_000))
    assert len(server.posts) == 1


TOOL_USE = (
    b'{"type":"message","id":"m","model":"m","role":"assistant","stop_reason":"tool_use",'
    b'"content":[{"type":"tool_use","id":"t","name":"f","input":{"of":["a","b"],"n":3}}]}'
)
SILENT_ANSWERS = {
    "chat": ({}, b'{"model":"m","max_tokens":9}', b'{"choices":[{"message":{"content":"some words"}}]}'),
    "chat from messages": (
        {"engine": EngineKind.ANTHROPIC},
        b'{"model":"m","max_tokens":9,"messages":[{"role":"user","content":"hi"}]}',
        TOOL_USE,
    ),
    "audio": ({}, b'{"model":"m","max_completion_tokens":9}', b'{"text":"some words"}'),
}


@pytest.mark.parametrize("kind", SILENT_ANSWERS)
async def test_an_item_whose_answer_reports_no_usage_is_priced_by_what_its_budget_paid(
    world: RouterWorld, limits: LedgerLimits, kind: str
) -> None:
    more, body, answer = SILENT_ANSWERS[kind]
    budgets = money(10**6)
    file = AudioFile("a.wav", "audio/wav", bytes(90_000)) if kind == "audio" else None
    endpoint = "/v1/audio/transcriptions" if kind == "audio" else CHAT_ENDPOINT
    async with RawServer(answers_with(200, answer)) as server:
        place = deployment(server.url, price=PRICE, **more)
        async with world.router(place, policy=AT_ONCE, capacity=Capacity(limits)) as router:
            found = await router.send(world.call(endpoint=endpoint, body=body, budgets=budgets, audio=file))
    assert found.priced is not None
    assert found.priced.input_tokens + found.priced.output_tokens == 10**6 - limits.left(budgets[0])
    assert found.priced.input_tokens > (90 if kind == "audio" else 1)


DEARER = (b'"service_tier":"priority"', b'"web_search_options":{}', b'"modalities":["text","audio"]')


@pytest.mark.parametrize("more", DEARER)
@pytest.mark.parametrize("traffic", [None, USER], ids=["item", "user"])
async def test_what_costs_more_than_its_tokens_is_not_sent_under_a_hard_budget(
    world: RouterWorld, limits: LedgerLimits, more: bytes, traffic: Traffic | None
) -> None:
    body = b'{"model":"m","max_tokens":10,%s}' % more
    covering = msgspec.structs.replace(PRICE, covers=frozenset(Surcharge))
    async with RawServer(answers_with(200, USED)) as strict, RawServer(answers_with(200, USED)) as other:

        async def send(*places: Deployment, budgets: tuple[Budget, ...]) -> str:
            async with world.router(*places, policy=AT_ONCE, capacity=Capacity(limits)) as router:
                call = world.call(body=body, budgets=budgets)
                if traffic is None:
                    return (await router.send(call)).deployment
                shaped = traffic._replace(shape=lambda engine: Shaped(CHAT_ENDPOINT, body))
                answer = await router.open(call, shaped)
                assert isinstance(answer, Answer)
                return answer.deployment

        first = deployment(strict.url, name="strict", price=PRICE)
        with pytest.raises(SurchargeUnpriced) as refused:
            await send(first, budgets=money(10**6))
        assert (refused.value.code, refused.value.status) == ("surcharge_unpriced", 400)
        assert "price.covers" in refused.value.message
        assert len(strict.posts) == 0
        # Elsewhere it may be priced.
        second = deployment(other.url, name="other", price=covering)
        assert await send(first, second, budgets=money(10**6)) == "other"
        # Where nothing counts money, what it costs is the operator's own affair.
        assert await send(first, budgets=()) == "strict"
        free = deployment(strict.url, name="free", price=None)
        assert await send(free, budgets=money(10**6)) == "free"


@pytest.mark.parametrize("more", [b'"n":"128"', b'"n":128.0', b'"best_of":1.28e2', b'"max_completion_tokens":"100000"'])
async def test_no_way_to_write_a_number_passes_a_hard_budget(
    world: RouterWorld, limits: LedgerLimits, more: bytes
) -> None:
    budgets = money(1_000)
    async with RawServer(answers_with(200, USED)) as server:
        async with world.router(
            deployment(server.url, price=PRICE), policy=AT_ONCE, capacity=Capacity(limits)
        ) as router:
            with pytest.raises(Overspent):
                await router.send(world.call(body=b'{"model":"m","max_tokens":10,%s}' % more, budgets=budgets))
            with pytest.raises(Unbounded):
                await router.send(world.call(body=b'{"model":"m","max_tokens":-1}', budgets=budgets))
    assert len(server.posts) == 0
