"""Choice, slots, rests, failover, breaker and budget over real sockets, with a clock moved by hand."""

import asyncio
from collections import Counter
from typing import Any

import msgspec
import pytest

from tests.upstream.raw_server import CHAT, Peer, RawServer, Request, Script, eventually
from tests.upstream.world import RouterWorld, deployment, secret
from tidegate.core.deployments import HttpLimits
from tidegate.core.errors import (
    Ambiguous,
    BrokenAnswer,
    KeyRejected,
    PoolExhausted,
    Refused,
    SettingsError,
    Throttled,
    Unavailable,
    UpstreamError,
)
from tidegate.core.ports import Upstream
from tidegate.upstream.calls.admission import Feedback
from tidegate.upstream.calls.router import Router
from tidegate.upstream.routing.deployment_state import KEY_REST_MS_MAX

pytestmark = pytest.mark.anyio

FAST = HttpLimits(pool_timeout_s=0.05)


def always(status: int, body: bytes = b'{"error":{"message":"no"}}', **headers: str) -> Script:
    async def script(request: Request, peer: Peer) -> None:
        if request.line.startswith("GET") and status >= 500:
            await peer.answer(200, b'{"data":[]}')
        else:
            await peer.answer(status, body, **headers)

    return script


class Gate:
    """A script whose answers wait until the test opens the gate."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()

    async def __call__(self, request: Request, peer: Peer) -> None:
        await self.opened.wait()
        await peer.answer()


async def failure(router: Router, world: RouterWorld, **named: object) -> UpstreamError:
    with pytest.raises(UpstreamError) as caught:
        await router.send(world.call(**named))  # type: ignore[arg-type]
    return caught.value


async def test_a_call_becomes_an_answer(world: RouterWorld) -> None:
    body = b'{"choices":[{}],"usage":{"prompt_tokens":3,"completion_tokens":1}}'
    async with RawServer(always(200, body)) as server, world.router(deployment(server.url)) as router:
        upstream: Upstream = router
        answer = await upstream.send(world.call(key="batch_1:9:abc"))
    assert (answer.status, answer.body, answer.deployment) == (200, body, "one")
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (3, 1)
    assert server.posts[0].path == "/v1/chat/completions"
    assert server.posts[0].headers["Idempotency-Key"] == "batch_1:9:abc"


async def test_models_go_to_their_own_deployments_and_any_other_to_the_unnamed(world: RouterWorld) -> None:
    async with RawServer() as named, RawServer() as unnamed:
        places = (deployment(named.url, "named", models=("m",)), deployment(unnamed.url, "unnamed"))
        async with world.router(*places) as router:
            assert (await router.send(world.call("m"))).deployment == "named"
            assert (await router.send(world.call("other"))).deployment == "unnamed"
            assert router.knows("other")
        async with world.router(places[0]) as router:
            assert not router.knows("other")
            assert router.free_slots("other") == 0
            assert router.rests_until_ms("other") == 0
            assert "add one under models" in (await failure(router, world, model="other")).message


async def test_two_deployments_of_one_name_are_refused(world: RouterWorld) -> None:
    with pytest.raises(SettingsError, match="two deployments"):
        async with world.router(deployment("http://h/v1"), deployment("http://i/v1")):
            pass


async def test_slots_are_never_exceeded_and_waiting_calls_get_them(world: RouterWorld) -> None:
    highest = flying = 0

    async def script(request: Request, peer: Peer) -> None:
        nonlocal highest, flying
        flying += 1
        highest = max(highest, flying)
        await asyncio.sleep(0.002)
        flying -= 1
        await peer.answer()

    async with RawServer(script) as server, world.router(deployment(server.url, max_in_flight=3)) as router:
        assert router.free_slots("m") == 3
        answers = await asyncio.gather(*(router.send(world.call()) for _ in range(40)))
        assert router.free_slots("m") == 3
    assert len(answers) == 40
    assert highest == 3


async def test_slots_that_stay_taken_are_pool_exhaustion_and_open_no_circuit(world: RouterWorld) -> None:
    gate = Gate()
    async with RawServer(gate) as server, world.router(deployment(server.url, max_in_flight=2), limits=FAST) as router:
        flying = [asyncio.create_task(router.send(world.call())) for _ in range(2)]
        await eventually(lambda: len(server.posts) == 2, "two calls to arrive")
        assert router.free_slots("m") == 0
        for _ in range(20):
            assert type(await failure(router, world)) is PoolExhausted
        assert router.status()[0].state == "closed"
        gate.opened.set()
        await asyncio.gather(*flying)


async def test_the_connection_ceiling_bounds_the_free_slots_and_opens_no_circuit(world: RouterWorld) -> None:
    gate = Gate()
    limits = HttpLimits(connections_max=2, kept_alive_max=2, pool_timeout_s=0.05)
    async with RawServer(gate) as server, world.router(deployment(server.url), limits=limits) as router:
        assert router.free_slots("m") == 2
        flying = [asyncio.create_task(router.send(world.call())) for _ in range(2)]
        await eventually(lambda: len(server.posts) == 2, "two calls to arrive")
        assert router.free_slots("m") == 0
        for _ in range(10):
            error = await failure(router, world)
            assert (type(error), error.code) == (PoolExhausted, "upstream_pool_timeout")
        assert router.status()[0].state == "closed"
        gate.opened.set()
        await asyncio.gather(*flying)
    assert server.open_count_highest == 2


async def test_calls_go_where_load_over_weight_is_least(world: RouterWorld) -> None:
    gate = Gate()
    async with RawServer(gate) as heavy, RawServer(gate) as light:
        places = (deployment(heavy.url, "heavy", weight=2.0), deployment(light.url, "light", weight=1.0))
        async with world.router(*places) as router:
            flying = [asyncio.create_task(router.send(world.call())) for _ in range(30)]
            await eventually(lambda: len(heavy.posts) + len(light.posts) == 30, "all calls to arrive")
            assert (len(heavy.posts), len(light.posts)) == (20, 10)
            gate.opened.set()
            await asyncio.gather(*flying)


async def test_retry_after_is_obeyed_and_a_shorter_one_never_shortens_it(world: RouterWorld) -> None:
    gate = asyncio.Event()

    async def script(request: Request, peer: Peer) -> None:
        await gate.wait()
        await peer.answer(429, Retry_After=request.headers["Idempotency-Key"])

    async with RawServer(script) as server, world.router(deployment(server.url)) as router:
        calls = [asyncio.create_task(router.send(world.call(key=seconds))) for seconds in ("30", "5", "0")]
        await eventually(lambda: len(server.posts) == 3, "three calls to arrive")
        gate.set()
        for error in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(error, Throttled)
        now = world.clock.monotonic
        assert router.rests_until_ms("m") == now + 30_000
        assert router.free_slots("m") == 0
        world.clock.advance(29_999)
        error = await failure(router, world)
        assert (type(error), error.retry_after_ms) == (Throttled, 1)
        assert len(server.posts) == 3
        server.script = always(200, CHAT)
        world.clock.advance(1)
        assert router.rests_until_ms("m") == 0
        await router.send(world.call())


async def test_an_absurd_retry_after_is_capped(world: RouterWorld) -> None:
    async with (
        RawServer(always(429, Retry_After="1000000000")) as server,
        world.router(deployment(server.url)) as router,
    ):
        await failure(router, world)
        assert router.rests_until_ms("m") == world.clock.monotonic + 86_400_000


async def test_throttling_without_a_stated_wait_backs_off_further_each_time(world: RouterWorld) -> None:
    waits = []
    async with RawServer(always(429)) as server, world.router(deployment(server.url)) as router:
        for _ in range(9):
            error = await failure(router, world)
            assert error.retry_after_ms is not None
            waits.append(error.retry_after_ms)
            world.clock.advance(error.retry_after_ms)
        assert waits == sorted(waits)
        assert waits[0] <= 1_000
        assert waits[-1] <= 60_000
        assert router.status()[0].state == "closed"


async def test_retry_after_of_a_503_rests_the_deployment_too(world: RouterWorld) -> None:
    async with RawServer(always(503, Retry_After="12")) as server, world.router(deployment(server.url)) as router:
        error = await failure(router, world)
        assert (type(error), error.retry_after_ms) == (Ambiguous, 12_000)
        assert router.status()[0].state == "resting"


@pytest.mark.parametrize("status", [429, 401, 403])
async def test_what_was_not_billed_goes_on_to_another_deployment(world: RouterWorld, status: int) -> None:
    async with RawServer(always(status)) as bad, RawServer() as good:
        places = (deployment(bad.url, "bad", weight=100.0), deployment(good.url, "good"))
        async with world.router(*places) as router:
            assert (await router.send(world.call())).deployment == "good"
    assert (len(bad.posts), len(good.posts)) == (1, 1)
    assert bad.posts[0].headers["Idempotency-Key"] == good.posts[0].headers["Idempotency-Key"]


async def test_a_refused_connection_goes_on_to_another_deployment(world: RouterWorld) -> None:
    async with RawServer() as gone:
        pass
    async with RawServer() as good:
        places = (deployment(gone.url, "gone", weight=100.0), deployment(good.url, "good"))
        async with world.router(*places) as router:
            for _ in range(20):
                assert (await router.send(world.call())).deployment == "good"
            assert router.free_slots("m") == 64


@pytest.mark.parametrize(("status", "kind"), [(500, Ambiguous), (200, BrokenAnswer), (400, Refused)])
async def test_what_may_have_been_billed_or_refused_stays_where_it_was(
    world: RouterWorld, status: int, kind: type[UpstreamError]
) -> None:
    async with RawServer(always(status)) as bad, RawServer() as good:
        places = (deployment(bad.url, "bad", weight=100.0), deployment(good.url, "good"))
        async with world.router(*places) as router:
            assert type(await failure(router, world)) is kind
    assert (len(bad.posts), len(good.posts)) == (1, 0)


async def _open_the_breaker(router: Router, world: RouterWorld) -> None:
    for _ in range(5):
        assert type(await failure(router, world)) is Ambiguous
    assert router.status()[0].state == "open"


async def test_a_burst_of_503_opens_the_circuit_and_probes_close_it(world: RouterWorld) -> None:
    async with RawServer(always(503)) as server, world.router(deployment(server.url)) as router:
        await _open_the_breaker(router, world)
        assert router.free_slots("m") == 0
        for _ in range(10):
            assert type(await failure(router, world)) is Unavailable
        assert len(server.posts) == 5
        for round_number in range(1, 10):
            world.clock.advance(5_000)
            assert router.rests_until_ms("m") == 0
            assert router.free_slots("m") == 1
            assert type(await failure(router, world)) is Ambiguous
            assert type(await failure(router, world)) is Unavailable
            assert len(server.posts) == 5 + round_number
        server.script = always(200, CHAT)
        world.clock.advance(5_000)
        await router.send(world.call())
        assert router.status()[0].state == "closed"
        assert router.free_slots("m") == 64


async def test_a_server_that_does_not_even_answer_the_probe_gets_no_item(world: RouterWorld) -> None:
    async def down(request: Request, peer: Peer) -> None:
        await peer.answer(502, b"bad gateway")

    async with RawServer(down) as server, world.router(deployment(server.url)) as router:
        await _open_the_breaker(router, world)
        for _ in range(11):
            world.clock.advance(5_000)
            assert type(await failure(router, world)) is Unavailable
        assert len(server.posts) == 5
        # Should only its GET be broken, an item goes without a probe once in a while.
        world.clock.advance(5_000)
        assert type(await failure(router, world)) is Ambiguous
        assert len(server.posts) == 6


async def test_an_open_circuit_beside_a_healthy_deployment_is_closed_by_a_probe(world: RouterWorld) -> None:
    async with RawServer(always(500)) as bad, RawServer() as good:
        bad_place = deployment(bad.url, "bad", weight=100.0)
        async with world.router(bad_place, deployment(good.url, "good")) as router:
            await _open_the_breaker(router, world)
            for _ in range(10):
                assert (await router.send(world.call())).deployment == "good"
            bad.script = always(200, CHAT)
            world.clock.advance(5_000)
            assert (await router.send(world.call())).deployment == "bad"
            assert router.status()[0].state == "closed"


@pytest.mark.parametrize("status", [400, 429])
async def test_a_refusal_or_a_throttle_shows_a_probe_that_the_server_is_back(world: RouterWorld, status: int) -> None:
    async with RawServer(always(500)) as server, world.router(deployment(server.url)) as router:
        await _open_the_breaker(router, world)
        server.script = always(status)
        world.clock.advance(5_000)
        await failure(router, world)
        assert router.status()[0].state in ("closed", "resting")


async def test_refusals_never_open_a_circuit(world: RouterWorld) -> None:
    async with RawServer(always(422)) as server, world.router(deployment(server.url)) as router:
        for _ in range(50):
            assert type(await failure(router, world)) is Refused
        assert router.status()[0].state == "closed"


async def test_a_rejected_key_pauses_the_deployment_instead_of_failing_every_item(world: RouterWorld) -> None:
    async with RawServer(always(401)) as server, world.router(deployment(server.url, api_key=secret())) as router:
        error = await failure(router, world)
        assert (type(error), error.retry_after_ms) == (KeyRejected, KEY_REST_MS_MAX)
        assert router.status()[0].state == "paused"
        for _ in range(100):
            await failure(router, world)
        assert len(server.posts) == 1
        server.script = always(200, CHAT)
        world.clock.advance(60_000)
        await router.send(world.call())
        assert router.status()[0].state == "closed"


async def test_while_a_probe_is_out_no_call_is_put_off_until_the_next_one(world: RouterWorld) -> None:
    asked, answer = asyncio.Event(), asyncio.Event()

    async def late(request: Request, peer: Peer) -> None:
        if request.line.startswith("POST"):
            asked.set()
            await answer.wait()
        await peer.answer(200, CHAT)

    async with RawServer(always(401)) as server, world.router(deployment(server.url, api_key=secret())) as router:
        await failure(router, world)
        server.script = late
        world.clock.advance(60_000)
        probe = asyncio.create_task(router.send(world.call()))
        await asked.wait()
        assert router.free_slots("m") == 0
        assert 0 < router.rests_until_ms("m") - world.clock.monotonic <= 1_000
        answer.set()
        await probe
        assert router.rests_until_ms("m") == 0


async def test_a_request_that_is_forbidden_while_others_pass_is_to_blame_itself(world: RouterWorld) -> None:
    async def script(request: Request, peer: Peer) -> None:
        await peer.answer(*((403, b"{}") if request.headers["Idempotency-Key"] == "poison" else (200, CHAT)))

    async with RawServer(script) as server, world.router(deployment(server.url)) as router:
        assert type(await failure(router, world, key="poison")) is KeyRejected
        assert router.free_slots("m") == 64
        await router.send(world.call())
        error = await failure(router, world, key="poison")
        assert (type(error), error.status) == (Refused, 403)
    assert len(server.posts) == 3


async def test_three_forbidden_in_a_row_are_our_key(world: RouterWorld) -> None:
    async with RawServer(always(403)) as server, world.router(deployment(server.url)) as router:
        for _ in range(3):
            assert type(await failure(router, world)) is KeyRejected
        assert router.status()[0].state == "paused"


async def test_retries_are_held_to_their_budget_and_put_off_rather_than_failed(world: RouterWorld) -> None:
    async with RawServer() as server, world.router(deployment(server.url)) as router:
        for _ in range(20):
            await router.send(world.call())
        ends = await asyncio.gather(
            *(router.send(world.call(attempt_count=1)) for _ in range(30)), return_exceptions=True
        )
        put_off = [end for end in ends if isinstance(end, Throttled)]
        assert len(ends) - len(put_off) == 3 + 2
        assert {error.code for error in put_off} == {"retry_budget_spent"}
        assert all(error.retry_after_ms for error in put_off)
        assert router.free_slots("m") == 64
        world.clock.advance(62_000)
        await router.send(world.call(attempt_count=1))
    assert len(server.posts) == 26


async def test_a_throttled_retry_spends_no_budget(world: RouterWorld) -> None:
    async with RawServer(always(429, Retry_After="1")) as server, world.router(deployment(server.url)) as router:
        for _ in range(10):
            error = await failure(router, world, attempt_count=1)
            assert error.code == "upstream_throttled"
            world.clock.advance(1_000)
    assert len(server.posts) == 10


async def test_our_own_deadline_ends_the_call_and_opens_no_circuit(world: RouterWorld) -> None:
    async def hang(request: Request, peer: Peer) -> None:
        world.clock.advance(60)
        await peer.until_gone()

    async with RawServer(hang) as server, world.router(deployment(server.url)) as router:
        ended = 0
        while ended < 8:
            error = await failure(router, world, left_ms=50)
            if type(error) is Unavailable:
                # A busy machine let the deadline pass before the call was out.
                assert "never started" in error.message
                continue
            assert type(error) is Ambiguous
            ended += 1
        assert router.status()[0].state == "closed"
        await eventually(lambda: server.open_count == 0, "the calls to be dropped")
        assert type(await failure(router, world, left_ms=0)) is Unavailable
    assert len(server.posts) == 8


async def test_a_deployments_own_time_limits_win(world: RouterWorld) -> None:
    async def hang(request: Request, peer: Peer) -> None:
        await peer.until_gone()

    async with RawServer(hang) as server:
        # Long enough to connect and send on a busy machine.
        limits: list[dict[str, Any]] = [{"total_timeout_s": 0.5}, {"read_timeout_s": 0.5}]
        for limit in limits:
            async with world.router(deployment(server.url, **limit)) as router:
                assert type(await failure(router, world)) is Ambiguous


async def test_a_cancelled_send_reaches_the_upstream_and_frees_its_slot(world: RouterWorld) -> None:
    gate = Gate()

    async def script(request: Request, peer: Peer) -> None:
        await peer.until_gone()

    async with RawServer(script) as server, world.router(deployment(server.url, max_in_flight=1)) as router:
        call = asyncio.create_task(router.send(world.call()))
        await eventually(lambda: server.posts, "the call to arrive")
        waiting, leaving = (asyncio.create_task(router.send(world.call())) for _ in range(2))
        await eventually(lambda: len(router._room.line) == 2, "both to stand in line")
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        assert len(router._room.line) == 1
        call.cancel()
        assert isinstance((await asyncio.gather(call, return_exceptions=True))[0], asyncio.CancelledError)
        await asyncio.wait_for(server.posts[0].gone.wait(), 5)
        server.script = gate
        gate.opened.set()
        await eventually(lambda: len(server.posts) == 2, "the waiting call to take the slot")
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert router.free_slots("m") == 1
        assert router.status()[0].state == "closed"


async def test_a_defect_in_the_midst_of_a_call_gives_its_slot_back(
    world: RouterWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Feedback, "read_reply", broken)
    async with RawServer() as server, world.router(deployment(server.url, max_in_flight=1)) as router:
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                await router.send(world.call())
            assert router.free_slots("m") == 1


async def test_waiting_for_one_model_does_not_swallow_another_models_turn(world: RouterWorld) -> None:
    gates = {"a": Gate(), "b": Gate()}
    async with RawServer(gates["a"]) as first, RawServer(gates["b"]) as second:
        places = (
            deployment(first.url, "a", models=("a",), max_in_flight=1),
            deployment(second.url, "b", models=("b",), max_in_flight=1),
        )
        async with world.router(*places) as router:
            calls = [asyncio.create_task(router.send(world.call(model))) for model in "aabb"]
            await eventually(lambda: first.posts and second.posts, "one call of each model to arrive")
            gates["b"].opened.set()
            await asyncio.gather(*calls[2:])
            gates["a"].opened.set()
            await asyncio.gather(*calls[:2])


async def test_an_upstream_that_quotes_our_key_is_not_passed_on(world: RouterWorld) -> None:
    body = b'{"error":{"message":"bad request by sk-canary-77aa"}}'
    async with RawServer(always(400, body)) as server, world.router(deployment(server.url, api_key=secret())) as router:
        error = await failure(router, world)
        assert error.body == b'{"error":{"message":"bad request by ***"}}'
        assert "canary" not in repr(router.status())


async def test_status_counts_what_happened(world: RouterWorld) -> None:
    statuses = iter([200, 200, 400, 500, 429])

    async def script(request: Request, peer: Peer) -> None:
        status = next(statuses)
        await peer.answer(status, CHAT if status == 200 else b"{}")

    async with RawServer(script) as server, world.router(deployment(server.url, models=("m",))) as router:
        await asyncio.gather(*(router.send(world.call()) for _ in range(5)), return_exceptions=True)
        status = router.status()[0]
    assert status.answered == 2
    assert Counter(status.failures) == {"upstream_refused": 1, "upstream_ambiguous": 1, "upstream_throttled": 1}
    assert status.in_flight == 0
    assert status.last_failure


async def test_a_probe_needs_none_of_the_connections_for_calls(world: RouterWorld) -> None:
    async def script(request: Request, peer: Peer) -> None:
        if request.line.startswith("POST"):
            await peer.until_gone()
        await peer.answer()

    limits = HttpLimits(connections_max=1, kept_alive_max=1, pool_timeout_s=0.01)
    async with RawServer(script) as server, world.router(deployment(server.url), limits=limits) as router:
        call = asyncio.create_task(router.send(world.call()))
        await eventually(lambda: server.requests, "the call to arrive")
        assert (await router.probe("one")).reachable
        call.cancel()


async def test_doctors_probe_says_what_is_there_and_what_to_do(world: RouterWorld) -> None:
    async with RawServer() as server, world.router(deployment(server.url)) as router:
        probe = await router.probe("one")
        assert (probe.reachable, probe.status, probe.models, probe.message) == (True, 200, ("m",), "")
        server.script = always(401)
        assert "api_key" in (await router.probe("one")).message
        server.script = always(404)
        assert "url" in (await router.probe("one")).message
        server.script = always(200, b"<html>")
        assert "OpenAI-compatible" in (await router.probe("one")).message
    async with world.router(deployment(server.url)) as router:
        probe = await router.probe("one")
        assert not probe.reachable
        assert "is the server running?" in probe.message


async def test_a_call_whose_lease_may_be_over_is_not_sent_and_counts_as_no_failure(world: RouterWorld) -> None:
    async with RawServer(always(200, CHAT)) as server, world.router(deployment(server.url)) as router:
        call = msgspec.structs.replace(world.call(), begin_by_ms=world.clock.monotonic_ms())
        with pytest.raises(Unavailable) as refused:
            await router.send(call)
        assert refused.value.code == "lease_over"
        assert not refused.value.billed
        assert router.status()[0].failures == {}
        assert server.requests == []
