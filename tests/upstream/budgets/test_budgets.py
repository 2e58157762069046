"""Shared budgets on the way to a deployment: who binds which call, what is sent when they are spent, what is settled afterwards.

Real sockets; the clock is moved by hand, and patience is nought so that nothing waits for it inside.
"""

import asyncio
from collections.abc import Iterable

import pytest

from tests.upstream.limits import MemoryLimits, minute
from tests.upstream.raw_server import CHAT, Peer, RawServer, Request, answers_with, eventually
from tests.upstream.world import CHAT_ENDPOINT, RouterWorld, deployment
from tidegate.core.budgets.budget import Budget, Limit, LimitBound, Period
from tidegate.core.deployments import Deployment, Estimate, HttpLimits, Resource
from tidegate.core.errors import Ambiguous, Refused, Throttled, Unavailable, Withheld
from tidegate.core.nouns import Call
from tidegate.upstream.calls.router import Router
from tidegate.upstream.calls.traffic import Traffic
from tidegate.upstream.calls.translation import Shaped
from tidegate.upstream.http.connections import Connection
from tidegate.upstream.http.transport import RequestTemplate, UpstreamRequest
from tidegate.upstream.routing.deployment_state import DeploymentPolicy
from tidegate.upstream.routing.slots import Capacity

pytestmark = pytest.mark.anyio

AT_ONCE = DeploymentPolicy(patience_ms=0)
ANSWER = b'{"choices":[{}],"usage":{"prompt_tokens":30,"completion_tokens":12}}'


def budget(bound: LimitBound, name: str, *limits: Limit) -> Budget:
    return Budget(bound, name, limits)


async def send_all(router: Router, calls: Iterable[Call]) -> tuple[int, list[Withheld]]:
    """How many were answered, and how the others were withheld."""
    ends = await asyncio.gather(*(router.send(call) for call in calls), return_exceptions=True)
    withheld = [end for end in ends if isinstance(end, Withheld)]
    wrong = [end for end in ends if isinstance(end, BaseException) and not isinstance(end, Withheld)]
    assert wrong == []
    return len(ends) - len(withheld), withheld


async def test_nine_then_thirty_under_ten_a_minute_are_ten(world: RouterWorld, limits: MemoryLimits) -> None:
    """VM-X sent 23 of them in that minute."""
    async with RawServer() as server:
        place = deployment(server.url, limits=(minute(10),))
        async with world.router(place, policy=AT_ONCE, capacity=Capacity(limits)) as router:
            assert await send_all(router, [world.call() for _ in range(9)]) == (9, [])
            world.clock.advance(20_000)
            sent, withheld = await send_all(router, [world.call() for _ in range(30)])
            assert (sent, len(withheld)) == (1, 29)
            assert {(error.code, error.billed) for error in withheld} == {("budget_spent", False)}
            until = router.rests_until_ms("m")
            assert until == pytest.approx(world.clock.monotonic + 40_500, abs=1)
            assert router.free_slots("m") == 0
            assert router.status()[0].state == "closed"
            assert router.status()[0].failures == {}
            world.clock.advance(until - world.clock.monotonic)
            assert router.rests_until_ms("m") == 0
            assert (await send_all(router, [world.call() for _ in range(30)]))[0] == 9
    assert len(server.posts) == 19


async def test_a_spent_budget_is_not_asked_again_before_the_moment_it_named(
    world: RouterWorld, limits: MemoryLimits
) -> None:
    async with RawServer() as server:
        place = deployment(server.url, limits=(minute(1),))
        async with world.router(place, policy=AT_ONCE, capacity=Capacity(limits)) as router:
            await send_all(router, [world.call() for _ in range(2)])
            asked = len(limits.questions)
            for second in range(1, 51):
                world.clock.advance(1_000)
                _, withheld = await send_all(router, [world.call()])
                assert withheld[0].retry_after_ms == pytest.approx(60_500 - 1_000 * second, abs=1)
            assert len(limits.questions) == asked
            world.clock.advance(10_501)
            await router.send(world.call())
            assert len(limits.questions) == asked + 1
    assert len(server.posts) == 2


async def test_one_question_for_all_calls_that_wait(world: RouterWorld, limits: MemoryLimits) -> None:
    async with RawServer() as server:
        place = deployment(server.url, limits=(minute(1_000),))
        async with world.router(place, capacity=Capacity(limits)) as router:
            await send_all(router, [world.call() for _ in range(60)])
    assert len(limits.questions) == 1
    assert [(len(asks), asks[0].requests) for asks in limits.questions] == [(1, 60)]


async def test_a_jobs_budget_is_enforced_without_any_other(world: RouterWorld, limits: MemoryLimits) -> None:
    """VM-X sent 40 in four seconds under a batch's 10 a minute, because no connection had a limit."""
    own = budget(LimitBound.JOB, "batch_1", minute(10))
    async with RawServer() as server:
        async with world.router(deployment(server.url), policy=AT_ONCE, capacity=Capacity(limits)) as router:
            sent, withheld = await send_all(router, [world.call(budgets=(own,)) for _ in range(40)])
            assert (sent, len(withheld)) == (10, 30)
            # Only this job is spent: its model goes on for others, and the engine can know before it leases.
            assert router.rests_until_ms("m") == 0
            assert router.free_slots("m") == 64
            assert router.spent_until_ms((own,)) > world.clock.monotonic
            assert await send_all(router, [world.call() for _ in range(20)]) == (20, [])
    assert len(server.posts) == 30


async def test_a_job_can_only_tighten(world: RouterWorld, limits: MemoryLimits) -> None:
    async with RawServer() as server:
        place = deployment(server.url, limits=(minute(5),))
        async with world.router(place, policy=AT_ONCE, capacity=Capacity(limits)) as router:
            wide = budget(LimitBound.JOB, "batch_1", minute(100))
            assert (await send_all(router, [world.call(budgets=(wide,)) for _ in range(20)]))[0] == 5


async def test_every_level_binds_and_what_is_switched_off_does_not(world: RouterWorld, limits: MemoryLimits) -> None:
    levels = (
        budget(LimitBound.TENANT, "t", minute(50)),
        budget(LimitBound.USER, "u", minute(3)),
        budget(LimitBound.KEY, "k", minute(1, enabled=False)),
        budget(LimitBound.JOB, "j", minute(40)),
    )
    async with RawServer() as server:
        place = deployment(server.url, limits=(minute(2, enabled=False),))
        async with world.router(place, policy=AT_ONCE, capacity=Capacity(limits)) as router:
            sent, withheld = await send_all(router, [world.call(budgets=levels) for _ in range(20)])
            assert sent == 3
            assert {error.spent for error in withheld} == {"user:u"}
    assert {asked.name for asks in limits.questions for ask in asks for asked in ask.budgets} == {"t", "u", "j"}


async def test_ten_resources_and_one_more_share_what_they_leave_open(world: RouterWorld, limits: MemoryLimits) -> None:
    """A deployment's limit is one for all resources that have none of their own; VM-X kept one per resource."""
    resources = [Resource(f"r{number}", "m") for number in range(10)]
    resources.append(Resource("own", "m", (minute(4),)))
    async with RawServer() as server:
        place = deployment(server.url, models=("m",), limits=(minute(20), Limit(Period.HOUR, 30)))
        async with world.router(place, policy=AT_ONCE, resources=resources, capacity=Capacity(limits)) as router:
            calls = [world.call(f"r{number}") for number in range(10) for _ in range(5)]
            assert (await send_all(router, calls))[0] == 20
            # Its own minute is untouched by theirs, but the hour that it does not name is shared.
            assert (router.rests_until_ms("r3") > 0, router.rests_until_ms("own")) == (True, 0)
            assert (await send_all(router, [world.call("own") for _ in range(9)]))[0] == 4
            world.clock.advance(61_000)
            assert (await send_all(router, [world.call("own") for _ in range(9)]))[0] == 4
            assert (await send_all(router, [world.call("r1") for _ in range(9)]))[0] == 2
    assert {b'"m"' in request.body for request in server.posts} == {True}


async def test_a_resources_calls_carry_the_upstreams_name_and_every_other_byte(
    world: RouterWorld, limits: MemoryLimits
) -> None:
    body = b'{"model": "chat", "seed":12345678901234567890123, "messages" : [{"role":"user","content":"\\u00e9  x"}]}'
    async with RawServer() as server:
        place = deployment(server.url, models=("m",))
        async with world.router(place, resources=[Resource("chat", "m")]) as router:
            assert router.knows("chat")
            await router.send(world.call("chat", body=body))
            await router.send(world.call("m", body=body))
    renamed, plain = (request.body for request in server.posts)
    assert plain == body
    assert renamed.startswith(b'{"model":"m",')
    for kept in (b"12345678901234567890123", b'[{"role":"user","content":"\\u00e9  x"}]'):
        assert kept in renamed


async def test_failover_goes_on_under_the_other_deployments_budget(world: RouterWorld, limits: MemoryLimits) -> None:
    async with RawServer() as first, RawServer() as second:
        places = (
            deployment(first.url, "first", limits=(minute(4),)),
            deployment(second.url, "second", limits=(minute(7),)),
        )
        async with world.router(*places, policy=AT_ONCE, capacity=Capacity(limits)) as router:
            sent, withheld = await send_all(router, [world.call() for _ in range(30)])
            assert (sent, len(withheld)) == (11, 19)
            assert router.rests_until_ms("m") > world.clock.monotonic
    assert (len(first.posts), len(second.posts)) == (4, 7)


async def test_a_429_is_a_request_sent_and_no_tokens_and_no_attempt(world: RouterWorld, limits: MemoryLimits) -> None:
    async with RawServer(answers_with(429, Retry_After="1")) as server:
        place = deployment(server.url, limits=(minute(10, 10_000),))
        async with world.router(place, policy=AT_ONCE, capacity=Capacity(limits)) as router:
            for _ in range(3):
                with pytest.raises(Throttled) as caught:
                    await router.send(world.call(attempt_count=1))
                assert not isinstance(caught.value, Withheld)
                world.clock.advance(1_000)
            await eventually(lambda: len(limits.settlements) == 3, "the refusals to be settled")
            assert limits.used("one") == (3, 0)


async def test_real_usage_takes_the_place_of_what_was_reserved(world: RouterWorld, limits: MemoryLimits) -> None:
    async with RawServer(answers_with(200, ANSWER)) as server:
        place = deployment(server.url, limits=(minute(None, 10_000),))
        async with world.router(place, policy=AT_ONCE, capacity=Capacity(limits)) as router:
            await send_all(router, [world.call(tokens=1_000) for _ in range(5)])
            await eventually(lambda: limits.settlements, "the answers to be settled")
            await eventually(lambda: limits.used("one")[1] == 5 * 42, "every answer to be settled")
            # An answer that took more than was reserved is a debt.
            await router.send(world.call(tokens=2))
            await eventually(lambda: limits.used("one")[1] == 6 * 42, "the debt to be settled")


async def test_what_may_have_been_done_keeps_its_reserve(world: RouterWorld, limits: MemoryLimits) -> None:
    async with RawServer(answers_with(500)) as server:
        place = deployment(server.url, limits=(minute(10, 10_000),))
        async with world.router(place, policy=AT_ONCE, capacity=Capacity(limits)) as router:
            with pytest.raises(Ambiguous):
                await router.send(world.call(tokens=700))
        assert limits.used("one") == (1, 700)
        assert limits.settlements == []


async def test_a_call_that_was_not_sent_gives_its_permit_back(world: RouterWorld, limits: MemoryLimits) -> None:
    place = deployment("http://127.0.0.1:9/v1", limits=(minute(10, 10_000),))
    async with world.router(place, policy=AT_ONCE, capacity=Capacity(limits)) as router:
        with pytest.raises(Unavailable):
            await router.send(world.call(tokens=700))
        await eventually(lambda: limits.settlements, "the permit to be given back")
    assert limits.used("one") == (0, 0)
    assert limits.settlements[0].unsent_requests == 1


async def test_a_retry_takes_a_new_grant(world: RouterWorld, limits: MemoryLimits) -> None:
    async with RawServer(answers_with(500)) as server:
        place = deployment(server.url, limits=(minute(2),))
        async with world.router(place, policy=AT_ONCE, capacity=Capacity(limits)) as router:
            for attempt in range(2):
                with pytest.raises(Ambiguous):
                    await router.send(world.call(key="same", attempt_count=attempt))
            with pytest.raises(Withheld):
                await router.send(world.call(key="same", attempt_count=2))
    assert len(server.posts) == 2


async def test_a_permit_that_ran_out_while_a_connection_was_waited_for_is_taken_again(
    world: RouterWorld, limits: MemoryLimits
) -> None:
    gate = asyncio.Event()

    async def script(request: Request, peer: Peer) -> None:
        await gate.wait()
        await peer.answer()

    http = HttpLimits(connections_max=1, kept_alive_max=1)
    async with RawServer(script) as server:
        place = deployment(server.url, limits=(minute(10),))
        async with world.router(place, limits=http, capacity=Capacity(limits)) as router:
            first = asyncio.create_task(router.send(world.call(key="first")))
            await eventually(lambda: server.posts, "the first call to arrive")
            second = asyncio.create_task(router.send(world.call(key="second")))
            await eventually(lambda: len(limits.questions) == 2, "the second call to have a permit")
            await asyncio.sleep(0)
            world.clock.advance(250)
            gate.set()
            await asyncio.gather(first, second)
            await eventually(lambda: limits.settlements, "the outdated permit to be settled as unsent")
            assert len(limits.questions) == 3
            assert limits.used("one") == (2, 0)
    assert [request.headers["Idempotency-Key"] for request in server.posts] == ["first", "second"]


async def test_nothing_is_sent_after_its_permit_expired_however_late_that_is_seen(
    world: RouterWorld, limits: MemoryLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process stands still when all that is left to do is to write: its permit is over when it goes on."""
    async with RawServer() as server:
        place = deployment(server.url, limits=(minute(10),))
        async with world.router(place, capacity=Capacity(limits)) as router:
            await router.send(world.call(key="first"))
            expect, pieces = Connection.expect_answer, RequestTemplate.chunks
            stalls = [expect.__name__, pieces.__name__]

            def stall(name: str) -> None:
                if name in stalls:
                    stalls.remove(name)
                    world.clock.advance(300)

            def expect_late(wire: Connection, http: HttpLimits) -> None:
                stall(expect.__name__)
                expect(wire, http)

            def pieces_late(way: RequestTemplate, request: UpstreamRequest) -> tuple[bytes, ...]:
                stall(pieces.__name__)
                return pieces(way, request)

            monkeypatch.setattr(Connection, expect.__name__, expect_late)
            monkeypatch.setattr(RequestTemplate, pieces.__name__, pieces_late)
            await router.send(world.call(key="second"))
            await eventually(lambda: limits.settlements, "the outdated permit to be settled as unsent")
            assert stalls == []
            assert limits.used("one") == (2, 0)
            assert router.status()[0].failures == {}
    assert [request.headers["Idempotency-Key"] for request in server.posts] == ["first", "second"]
    assert server.connection_count == 1, "the connection is kept for the next leave"


async def test_limits_that_cannot_be_reached_send_nothing_and_are_asked_seldom(
    world: RouterWorld, limits: MemoryLimits
) -> None:
    limits.away = True
    async with RawServer() as server:
        bound = deployment(server.url, "bound", models=("m",), limits=(minute(10),))
        free = deployment(server.url, "free", models=("free",))
        async with world.router(bound, free, capacity=Capacity(limits)) as router:
            for _ in range(5):
                _, withheld = await send_all(router, [world.call() for _ in range(20)])
                assert {error.code for error in withheld} == {"limits_unavailable"}
                assert all(0 < (error.retry_after_ms or 0) <= 1_000 for error in withheld)
            assert len(limits.questions) == 1
            assert router.rests_until_ms("m") == pytest.approx(world.clock.monotonic + 1_000, abs=1)
            assert router.status()[0].state == "closed"
            assert (await router.send(world.call("free"))).deployment == "free"
            limits.away = False
            world.clock.advance(1_001)
            assert await send_all(router, [world.call() for _ in range(3)]) == (3, [])
    assert len(server.posts) == 4


async def test_without_anyone_who_keeps_budgets_nothing_bound_is_sent(world: RouterWorld) -> None:
    async with RawServer() as server, world.router(deployment(server.url, limits=(minute(10),))) as router:
        _, withheld = await send_all(router, [world.call()])
        assert withheld[0].code == "limits_unavailable"
    assert server.posts == []


async def test_a_cancelled_call_that_waits_for_a_permit_leaves_nothing_behind(
    world: RouterWorld, limits: MemoryLimits
) -> None:
    async with RawServer() as server:
        place = deployment(server.url, limits=(minute(10),))
        async with world.router(place, capacity=Capacity(limits)) as router:
            calls = [asyncio.create_task(router.send(world.call())) for _ in range(5)]
            await asyncio.sleep(0)
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            assert router.free_slots("m") == 64
            await eventually(lambda: limits.used("one") == (0, 0), "every leave to go back")
    assert server.posts == []


async def test_a_call_that_leaves_while_it_waits_for_its_budget_keeps_no_slot(
    world: RouterWorld, limits: MemoryLimits
) -> None:
    async with RawServer() as server:
        place = deployment(server.url, limits=(minute(1),))
        async with world.router(place, capacity=Capacity(limits)) as router:
            await router.send(world.call())
            world.clock.advance(59_000)
            waiting = asyncio.create_task(router.send(world.call()))
            await eventually(lambda: router._states[place.name].expecting == 1, "a slot to be kept for the call")
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            world.clock.advance(2_000)
            assert router.free_slots("m") == 64
    assert len(server.posts) == 1


async def test_a_budget_that_frees_in_a_moment_is_waited_for_and_holds_only_so_many_places(world: RouterWorld) -> None:
    """Time is the loop's own here: the call waits inside."""
    limits = MemoryLimits(world.clock)
    spent = budget(LimitBound.TENANT, "t", minute(1))
    async with RawServer() as server:
        async with world.router(deployment(server.url), capacity=Capacity(limits)) as router:
            await router.send(world.call(budgets=(spent,)))
            world.clock.advance(60_400)
            waiting = [asyncio.create_task(router.send(world.call(budgets=(spent,)))) for _ in range(20)]
            await eventually(lambda: sum(task.done() for task in waiting) == 4, "four to be put off")
            assert router.free_slots("m") == 64
            world.clock.advance(101)
            await eventually(lambda: len(server.posts) == 2, "the first to be sent")
            for task in waiting:
                task.cancel()
            ends = await asyncio.gather(*waiting, return_exceptions=True)
            assert sum(isinstance(end, Withheld) for end in ends) >= 4


async def test_bound_estimates_never_let_real_tokens_pass_the_limit(world: RouterWorld, limits: MemoryLimits) -> None:
    async def greedy(request: Request, peer: Peer) -> None:
        body = b'{"choices":[{}],"usage":{"prompt_tokens":%d,"completion_tokens":50}}' % len(request.body)
        await peer.answer(200, body)

    body = b'{"model":"m","max_tokens":50}'
    async with RawServer(greedy) as server:
        place = deployment(server.url, limits=(minute(None, 500),), estimate=Estimate.BOUND)
        async with world.router(place, policy=AT_ONCE, capacity=Capacity(limits)) as router:
            sent, _ = await send_all(router, [world.call(body=body) for _ in range(30)])
            assert sent == 500 // (len(body) + 50)
            world.clock.advance(61_000)
            with pytest.raises(Refused) as refused:
                await router.send(world.call(body=b'{"model":"m","max_tokens":501}'))
            assert (refused.value.code, refused.value.status) == ("request_exceeds_limit", 400)
            assert "max_tokens" in refused.value.message
            # One without a bound takes the whole limit, so it waits until nothing else is in the window, and is never stuck.
            assert (await send_all(router, [world.call(body=b'{"model":"m"}') for _ in range(2)]))[0] == 1
    assert len(server.posts) == sent + 1


async def test_what_a_model_used_to_answer_is_what_the_next_call_is_likely_to(
    world: RouterWorld, limits: MemoryLimits
) -> None:
    async with RawServer(answers_with(200, ANSWER)) as server:
        place = deployment(server.url, limits=(minute(None, 1_000_000),))
        async with world.router(place, policy=AT_ONCE, capacity=Capacity(limits)) as router:
            await router.send(world.call())
            await router.send(world.call())
            await router.send(world.call(body=b'{"model":"m","max_completion_tokens":5}'))
            await router.send(world.call(tokens=77))
    asked = [asks[0].tokens for asks in limits.questions]
    assert asked == [4 + 256, 4 + 12, 10 + 5, 77]


async def test_a_cap_on_tokens_in_flight_lets_one_through_and_holds_the_others(world: RouterWorld) -> None:
    highest = flying = 0

    async def script(request: Request, peer: Peer) -> None:
        nonlocal highest, flying
        flying += 1
        highest = max(highest, flying)
        await asyncio.sleep(0.002)
        flying -= 1
        await peer.answer(200, CHAT)

    async with RawServer(script) as server:
        async with world.router(deployment(server.url, tokens_in_flight_max=1_000)) as router:
            await asyncio.gather(*(router.send(world.call(tokens=300)) for _ in range(20)))
            assert highest == 3
            highest = 0
            await asyncio.gather(*(router.send(world.call(tokens=5_000)) for _ in range(5)))
            assert highest == 1
            assert router._states["one"].tokens_in_flight == 0


async def test_what_a_user_asks_for_takes_nothing_of_the_tokens_that_items_may_have_in_flight(
    world: RouterWorld, limits: MemoryLimits
) -> None:
    traffic = Traffic(lambda engine: Shaped(CHAT_ENDPOINT, b"{}"), is_stream=False)
    let_go = asyncio.Event()

    async def script(request: Request, peer: Peer) -> None:
        await let_go.wait()
        await peer.answer(200, CHAT)

    async with RawServer(script) as server:
        place = deployment(server.url, limits=(minute(tokens=10_000),), tokens_in_flight_max=1_000)
        async with world.router(place, capacity=Capacity(limits)) as router:
            opening = asyncio.create_task(router.open(world.call(tokens=900), traffic))
            await eventually(lambda: bool(server.posts), "the user's call")
            assert router._states["one"].tokens_in_flight == 0
            let_go.set()
            await opening


async def test_calls_without_budgets_do_not_ask_the_limits(world: RouterWorld, limits: MemoryLimits) -> None:
    place: Deployment
    async with RawServer() as server:
        place = deployment(server.url)
        async with world.router(place, capacity=Capacity(limits)) as router:
            await send_all(router, [world.call() for _ in range(10)])
    assert limits.questions == []
    assert limits.settlements == []
