"""What one call is settled with when nothing says what it took, over the core's own ledgers; nothing is sent."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.support.ports import HandClock
from tests.upstream.budgets.test_money import PRICE, TOKEN, LedgerLimits, money
from tests.upstream.world import RouterWorld, deployment
from tidegate.core.budgets.budget import Budget, Limit, LimitBound, Period, Settlement
from tidegate.core.deployments import Deployment, Estimate
from tidegate.core.nouns import Usage
from tidegate.core.usage.prices import CostRange, cost
from tidegate.upstream.budgets.budget_client import BudgetClient
from tidegate.upstream.budgets.call_receipt import CallEnd, CallReceipt
from tidegate.upstream.budgets.token_estimator import TokenEstimator
from tidegate.upstream.http.transport import SendPermit

pytestmark = pytest.mark.anyio

BODY = b'{"model":"m","max_tokens":10}' + b" " * 171
TENANT = (Budget(LimitBound.TENANT, "acme", (Limit(Period.MINUTE, None, 1_000),)),)


class NotingLimits(LedgerLimits):
    """Ledgers that write down what they were settled with."""

    def __init__(self, clock: HandClock) -> None:
        super().__init__(clock)
        self.settled: list[Settlement] = []

    async def settle_grants(self, settlements: Sequence[Settlement]) -> None:
        self.settled += settlements
        await super().settle_grants(settlements)


class Till:
    """One budget, and calls that are paid from it."""

    def __init__(self, budgets: tuple[Budget, ...], place: Deployment, body: bytes = BODY) -> None:
        self.world = RouterWorld()
        self._body = body
        self.limits = NotingLimits(self.world.clock)
        self.client = BudgetClient(self.limits, self.world.clock)
        self.budgets = budgets
        self.place = place
        self.used: list[Usage] = []
        self.estimator = TokenEstimator()

    async def permit(self, tokens: int = 0, cost: CostRange = CostRange()) -> SendPermit:  # noqa: B008 - a constant
        permit = await self.client.reserve_permit(self.client.terms(self.budgets), tokens, is_bound=False, cost=cost)
        permit.begin_send()
        return permit

    def receipt(self, permit: SendPermit, *, is_batch: bool = False) -> CallReceipt:
        call = self.world.call(body=self._body, budgets=self.budgets)
        return CallReceipt(
            self.client,
            self.estimator,
            call,
            permit,
            self.place,
            is_batch=is_batch,
            on_usage=lambda place, usage: self.used.append(usage),
        )

    async def settled(self) -> Settlement:
        await self.client.close()
        [settlement] = self.limits.settled
        return settlement


@pytest.mark.parametrize(("estimate", "is_kept"), [(Estimate.BOUND, True), (Estimate.LIKELY, False)])
async def test_an_answer_that_reports_nothing_takes_its_whole_bound_where_the_limit_must_hold(
    estimate: Estimate, is_kept: bool
) -> None:
    till = Till(TENANT, deployment("http://one/v1", estimate=estimate))
    till.receipt(await till.permit(900)).settle_answer(None, 40)
    await till.client.close()
    given_back = sum(one.reserved_tokens - one.used_tokens for one in till.limits.settled)
    assert given_back == 0 if is_kept else given_back > 800


async def test_a_call_that_ran_alone_is_charged_no_more_than_was_left_for_it() -> None:
    """Its worst is above the whole budget: it goes with all that there is, and no way of its end takes more."""
    most = cost(Usage(len(BODY), 0, 10), PRICE, batch=False).total_nano
    for is_batch in (True, False):
        till = Till(money(180), deployment("http://one/v1", price=PRICE))
        permit = await till.permit(cost=CostRange(120 * TOKEN, most if not is_batch else 500 * TOKEN))
        assert (permit.nano, till.limits.questions) == (180 * TOKEN, 1), "it is not asked for what can never be granted"
        receipt = till.receipt(permit, is_batch=is_batch)
        receipt.settle_failed(CallEnd.PERHAPS_DONE)
        settlement = await till.settled()
        assert 0 < settlement.used_nano <= permit.nano < most
        assert all(cost(one, PRICE, batch=False).total_nano <= permit.nano for one in till.used)
        assert len(till.used) == (not is_batch)


async def test_a_call_that_was_taken_back_is_charged_no_more_than_was_left_for_it() -> None:
    till = Till(money(20), deployment("http://one/v1", price=PRICE))
    permit = await till.permit(cost=CostRange(10 * TOKEN, 500 * TOKEN))
    till.receipt(permit, is_batch=True).settle_taken_back()
    settlement = await till.settled()
    assert (settlement.reserved_nano, settlement.used_nano) == (20 * TOKEN, 20 * TOKEN)


async def test_a_caller_that_leaves_before_anything_came_pays_what_may_have_been_done() -> None:
    """An answer that is no stream may be written to its end, so it costs what a call with an unknown end costs; a stream stopped early."""
    settled = []
    for end in ("unknown", "left", "left a stream"):
        till = Till(money(1_000), deployment("http://one/v1", price=PRICE))
        receipt = till.receipt(await till.permit(cost=CostRange(300 * TOKEN, 600 * TOKEN)))
        if end == "unknown":
            receipt.settle_failed(CallEnd.PERHAPS_DONE)
        else:
            receipt.settle_left(is_stream=end == "left a stream")
        # What comes later changes nothing.
        receipt.settle_answer(Usage(900, 0, 900))
        settlement = await till.settled()
        assert len(till.used) == 1
        settled.append(settlement.used_nano)
    assert settled[0] == settled[1] > settled[2] > 0


async def test_the_prompt_of_a_stream_that_was_left_is_booked_also_where_nothing_is_limited() -> None:
    till = Till((), deployment("http://one/v1"))
    till.receipt(SendPermit(till.world.clock, (), "", 0, 1e12)).settle_left(is_stream=True)
    assert till.used == [Usage(50, 0, 0)]


async def test_the_letters_of_an_image_are_not_paid_as_text_where_an_answer_reports_nothing() -> None:
    photo = b'{"type":"image_url","image_url":{"url":"data:image/png;base64,%b"}}' % (b"A" * 400_000)
    body = b'{"model":"m","max_tokens":10,"messages":[{"role":"user","content":[%b]}]}' % photo
    for is_left in (True, False):
        till = Till(money(90_000), deployment("http://one/v1", price=PRICE), body)
        receipt = till.receipt(await till.permit(cost=CostRange(2_000 * TOKEN, 51_000 * TOKEN)))
        if is_left:
            receipt.settle_left(is_stream=True)
        else:
            receipt.settle_answer(None, 40)
        settlement = await till.settled()
        assert 1_000 < till.used[0].input_tokens < 3_000
        assert 0 < settlement.used_nano < settlement.reserved_nano


@pytest.mark.parametrize("is_batch", [False, True])
async def test_a_call_without_a_budget_in_money_costs_tokens_alone(is_batch: bool) -> None:
    till = Till(TENANT, deployment("http://one/v1", price=PRICE))
    till.receipt(await till.permit(100), is_batch=is_batch).settle_answer(Usage(20, 0, 10))
    settlement = await till.settled()
    assert (settlement.reserved_tokens, settlement.used_tokens) == (100, 30)
    assert (settlement.reserved_nano, settlement.used_nano) == (0, 0)
    assert till.used == [Usage(20, 0, 10)]


async def test_a_whole_answer_is_counted_by_its_text_only_where_it_does_not_say_what_was_written() -> None:
    answer = b'{"choices":[{"index":0,"message":{"role":"assistant","content":"%b"}}]}' % (b"word " * 80)
    counted = []
    for reported in (Usage(20, 0, 10), Usage(20, 0, 0)):
        till = Till(TENANT, deployment("http://one/v1"))
        till.receipt(await till.permit(100)).settle_whole(reported, answer)
        await till.client.close()
        counted += till.used
    assert counted[0] == Usage(20, 0, 10)
    assert counted[1].output_tokens > 20


@pytest.mark.parametrize(
    ("is_batch", "reported", "uncounted_bytes", "is_believed"),
    [
        (True, Usage(20, 0, 10), 0, True),
        (True, Usage(0, 0, 10), 0, False),
        (False, Usage(20, 0, 0), 0, True),
        (False, Usage(0, 0, 10), 0, False),
        (False, Usage(20, 0, 0), 400, False),
    ],
)
async def test_what_an_answer_reports_is_believed_where_it_can_be_all(
    is_batch: bool, reported: Usage, uncounted_bytes: int, is_believed: bool
) -> None:
    till = Till(TENANT, deployment("http://one/v1"))
    till.receipt(await till.permit(100), is_batch=is_batch).settle_answer(reported, uncounted_bytes)
    settlement = await till.settled()
    assert (till.used == [reported]) is is_believed
    tokens = reported.input_tokens + reported.output_tokens
    assert settlement.used_tokens == tokens if is_believed else settlement.used_tokens > tokens


SAYS_HELLO = b'{"choices":[{"index":0,"message":{"role":"assistant","content":"Hello."}}]}'


@pytest.mark.parametrize(
    ("reported", "used"),
    [
        (Usage(), Usage(50, 0, 2)),
        (Usage(20, 0, 0), Usage(20, 0, 2)),
        (Usage(0, 0, 10), Usage(50, 0, 10)),
    ],
)
@pytest.mark.parametrize("is_batch", [False, True])
async def test_what_an_answer_does_not_report_is_counted_by_its_text(
    reported: Usage, used: Usage, is_batch: bool
) -> None:
    """A prompt of 200 bytes and an answer of 6. Books and budgets get the same figures."""
    till = Till(TENANT, deployment("http://one/v1"))
    found = till.receipt(await till.permit(100), is_batch=is_batch).settle_whole(reported, SAYS_HELLO)
    assert (found, till.used) == (used, [used])
    assert (await till.settled()).used_tokens == used.input_tokens + used.output_tokens


async def test_an_item_whose_answer_is_empty_wrote_no_tokens() -> None:
    till = Till(TENANT, deployment("http://one/v1"))
    answer = b'{"choices":[{"index":0,"message":{"role":"assistant","content":""}}]}'
    till.receipt(await till.permit(100), is_batch=True).settle_whole(Usage(20, 0, 0), answer)
    assert (await till.settled()).used_tokens == 20


@pytest.mark.parametrize(
    ("budgets", "tokens_max", "learned"),
    [((), 0, False), ((), 5_000, True), (TENANT, 0, True)],
    ids=["no limit", "tokens in flight", "a budget"],
)
async def test_only_calls_under_a_limit_teach_how_much_an_answer_takes(
    budgets: tuple[Budget, ...], tokens_max: int, learned: bool
) -> None:
    till = Till(budgets, deployment("http://one/v1", tokens_in_flight_max=tokens_max))
    permit = await till.permit(100) if budgets else SendPermit(till.world.clock, (), "", 0, 1e12)
    call = till.world.call(body=BODY.replace(b'"max_tokens":10', b'"n":1'))
    before = till.estimator.tokens(call, Estimate.LIKELY)
    till.receipt(permit).settle_answer(Usage(5, 0, 3))
    assert (till.estimator.tokens(call, Estimate.LIKELY) < before) is learned
    assert till.used == [Usage(5, 0, 3)]
    await till.client.close()
