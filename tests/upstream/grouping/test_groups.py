"""Several items of one job as one call, over real sockets: who goes together, how answers come apart, and what a failure does to whom."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from tests.upstream.raw_server import Peer, RawServer, Request, Script, eventually
from tests.upstream.world import RouterWorld, deployment, together
from tidegate.core.budgets.budget import Budget, Limit, LimitBound, Period
from tidegate.core.deployments import HttpLimits
from tidegate.core.errors import Ambiguous, HandedBack, Refused, Throttled
from tidegate.core.ids import group_id
from tidegate.core.nouns import Answer, Call
from tidegate.core.retry import RetryAt, RetryPolicy, decide

pytestmark = pytest.mark.anyio

EMBEDDINGS = "/v1/embeddings"
BAD = "bad"


def inputs_of(request: Request) -> list[str]:
    given = json.loads(request.body)["input"]
    return given if isinstance(given, list) else [given]


def vectors(given: Sequence[str]) -> bytes:
    """An honest answer, in the wrong order: only `index` says whose a vector is."""
    data = [{"object": "embedding", "index": at, "embedding": [len(text), at]} for at, text in enumerate(given)]
    tokens = sum(len(text) for text in given)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return json.dumps({"object": "list", "data": data[::-1], "model": "m", "usage": usage}).encode()


async def embed(request: Request, peer: Peer) -> None:
    if request.line.startswith("GET"):
        await peer.answer(200, b'{"data":[]}')
        return
    given = inputs_of(request)
    if BAD in given:
        await peer.answer(400, b'{"error":{"message":"a bad input"}}')
    else:
        await peer.answer(200, vectors(given))


class Gate:
    """Answers wait until the gate is open; with `allowed`, so many pass before."""

    def __init__(self, script: Script) -> None:
        self.opened = asyncio.Event()
        self._script = script

    async def __call__(self, request: Request, peer: Peer) -> None:
        await self.opened.wait()
        await self._script(request, peer)


def item(world: RouterWorld, text: Any, **more: Any) -> Call:
    body = json.dumps({"model": "m", "input": text, **more.pop("fields", {})}).encode()
    return world.call(body=body, endpoint=EMBEDDINGS, **more)


def grouped(url: str, inputs: int = 8, **more: Any) -> Any:
    return deployment(url, upstream_max_batch_inputs=inputs, **more)


def sizes(server: RawServer) -> list[int]:
    return [len(inputs_of(request)) for request in server.posts]


async def test_items_that_come_together_share_calls_and_each_gets_its_own(world: RouterWorld) -> None:
    async with RawServer(embed) as server, world.router(grouped(server.url)) as router:
        calls = [item(world, "x" * (number + 1)) for number in range(20)]
        answers = await together(router, calls)
    # Each call has a connection of its own: in which order they arrive is not certain.
    assert sorted(sizes(server)) == [4, 8, 8]
    for number, answer in enumerate(answers):
        assert isinstance(answer, Answer)
        body = json.loads(answer.body)
        assert [(one["index"], one["embedding"][0]) for one in body["data"]] == [(0, number + 1)]
        assert answer.deployment == "one"
        assert answer.usage.input_tokens == body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"]
    used = [answer.usage.input_tokens for answer in answers if isinstance(answer, Answer)]
    assert sum(used) == sum(range(1, 21)), "what the groups used is what their items used, to the token"


async def test_the_key_of_a_group_names_its_items_and_follows_from_theirs(world: RouterWorld) -> None:
    async with RawServer(embed) as server, world.router(grouped(server.url)) as router:
        calls = [item(world, "x") for _ in range(4)]
        await together(router, calls)
        await together(router, calls)
        await together(router, calls[:3])
    keys = [request.headers["Idempotency-Key"] for request in server.posts]
    assert keys[0].startswith(group_id("batch_1", [call.number for call in calls]) + "_")
    assert keys[0] == keys[1] != keys[2]


async def test_an_item_that_its_server_asked_to_wait_joins_no_group_before_its_time(world: RouterWorld) -> None:
    async with RawServer(embed) as server, world.router(grouped(server.url)) as router:
        calls = [item(world, "x") for _ in range(3)]
        until_ms = world.clock.monotonic + 30_000
        router._states["one"].refusals.refused(calls[1].idempotency_key, until_ms, 1_000)
        found = await together(router, calls)
    assert [type(one) for one in found] == [Answer, Throttled, Answer]
    assert sizes(server) == [2]


async def test_a_group_is_taken_back_no_more_often_than_any_item_of_it_may_be(
    world: RouterWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = list[Call]()
    async with RawServer(embed) as server, world.router(grouped(server.url)) as router:
        send = router._path.send

        async def noted(route: Any, call: Call, state: Any) -> Answer:
            sent.append(call)
            return await send(route, call, state)

        monkeypatch.setattr(router._path, "send", noted)
        await together(router, [item(world, "x", hand_backs=count) for count in (0, 2, 1)])
    assert [call.hand_backs for call in sent] == [2]


async def test_what_waits_for_a_slot_forms_the_next_group_and_no_item_waits_for_others(world: RouterWorld) -> None:
    gate = Gate(embed)
    async with RawServer(gate) as server, world.router(grouped(server.url, max_in_flight=1)) as router:
        first = asyncio.create_task(router.send(item(world, "alone")))
        await eventually(lambda: server.posts, "the first call, though no other item is there")
        rest = [asyncio.create_task(router.send(item(world, "x"))) for _ in range(11)]
        gate.opened.set()
        await asyncio.gather(first, *rest)
    assert sizes(server) == [1, 8, 3]


async def test_many_groups_are_in_flight_at_once(world: RouterWorld) -> None:
    gate = Gate(embed)
    async with RawServer(gate) as server, world.router(grouped(server.url, inputs=4, max_in_flight=8)) as router:
        assert router.free_slots("m") == 32
        tasks = [asyncio.create_task(router.send(item(world, "x"))) for _ in range(32)]
        await eventually(lambda: len(server.posts) == 8, "eight grouped calls at once")
        assert router.free_slots("m") == 0
        gate.opened.set()
        await asyncio.gather(*tasks)
    assert sizes(server) == [4] * 8


async def test_how_many_items_a_call_takes_is_known_of_one_model_and_of_all(world: RouterWorld) -> None:
    places = grouped("http://h/v1", name="a", models=("a",)), deployment("http://h/v1", "b", models=("b",))
    async with world.router(*places) as router:
        assert [router.items_per_call(model) for model in ("a", "b", None)] == [8, 1, 8]


async def test_a_slot_is_worth_several_items_only_while_they_fit_together(world: RouterWorld) -> None:
    gate = Gate(embed)
    async with RawServer(gate) as server, world.router(grouped(server.url, max_in_flight=2)) as router:
        assert (router.free_slots("m"), router.items_per_call("m"), router.items_per_call()) == (16, 8, 8)
        sending = asyncio.create_task(
            together(router, [item(world, "x", fields={"dimensions": 1 + at}) for at in range(2)])
        )
        await eventually(lambda: len(server.posts) == 2, "two calls of one item each")
        assert router.free_slots("m") == 0
        more = asyncio.create_task(router.send(item(world, "x")))
        await asyncio.sleep(0)
        assert router.free_slots("m") == 0
        gate.opened.set()
        await asyncio.gather(sending, more)
    assert sizes(server) == [1, 1, 1]


async def test_a_job_fills_its_groups_while_those_of_another_are_out(world: RouterWorld) -> None:
    gate = Gate(embed)
    async with RawServer(gate) as server, world.router(grouped(server.url, max_in_flight=3)) as router:
        tasks = [
            asyncio.create_task(router.send(msgspec.structs.replace(item(world, "x"), job_id=job)))
            for job in ("batch_1", "batch_2")
            for _ in range(8)
        ]
        await eventually(lambda: len(server.posts) == 2, "a group of each")
        assert router.free_slots("m") == 8
        tasks.append(asyncio.create_task(router.send(item(world, "x"))))
        await asyncio.sleep(0)
        assert router.free_slots("m") == 7, "its slot has room for seven more"
        gate.opened.set()
        await asyncio.gather(*tasks)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({}, {"fields": {"dimensions": 8}}),
        ({}, {"fields": {"encoding_format": "base64"}}),
        ({"share_owner": "a"}, {"share_owner": "b"}),
        ({"attempt_count": 0}, {"attempt_count": 1}),
        ({"budgets": ()}, {"budgets": (Budget(LimitBound.JOB, "batch_1", (Limit(Period.MINUTE, None, None),)),)}),
    ],
)
async def test_what_differs_in_anything_that_matters_does_not_share_a_call(
    world: RouterWorld, one: dict[str, Any], other: dict[str, Any]
) -> None:
    async with RawServer(embed) as server, world.router(grouped(server.url)) as router:
        calls = [item(world, "x", **dict(one)), item(world, "x", **dict(other))]
        calls += [item(world, "x", **dict(one)), item(world, "x", **dict(other))]
        answers = await together(router, calls)
    assert all(isinstance(answer, Answer) for answer in answers)
    assert sizes(server) == [2, 2]


@pytest.mark.parametrize("text", [["a", "b"], [[1, 2], [3]], [], None])
async def test_an_item_with_several_inputs_or_none_goes_as_it_is(world: RouterWorld, text: Any) -> None:
    async def script(request: Request, peer: Peer) -> None:
        await peer.answer(200, vectors(["x"]))

    async with RawServer(script) as server, world.router(grouped(server.url)) as router:
        calls = [item(world, text) for _ in range(3)]
        await together(router, calls)
    assert sorted(request.body for request in server.posts) == sorted(call.body for call in calls)


async def test_fewer_than_are_worth_a_group_go_alone(world: RouterWorld) -> None:
    place = grouped("http://x", upstream_min_batch_inputs=4)
    async with RawServer(embed) as server:
        place = grouped(server.url, upstream_min_batch_inputs=4)
        async with world.router(place) as router:
            await together(router, [item(world, "x") for _ in range(3)])
            await together(router, [item(world, "x") for _ in range(4)])
    assert sizes(server) == [1, 1, 1, 4]


async def test_without_the_setting_every_item_is_its_own_call(world: RouterWorld) -> None:
    async with RawServer(embed) as server, world.router(deployment(server.url)) as router:
        assert (router.items_per_call("m"), router.free_slots("m")) == (1, 64)
        await together(router, [item(world, "x") for _ in range(5)])
    assert sizes(server) == [1] * 5


async def test_a_bad_input_fails_alone_and_costs_the_others_nothing(world: RouterWorld) -> None:
    async with RawServer(embed) as server, world.router(grouped(server.url)) as router:
        answers = await together(router, [item(world, BAD if at == 3 else "x") for at in range(8)])
    assert [isinstance(answer, Refused) for answer in answers] == [at == 3 for at in range(8)]
    assert sizes(server) == [8] + [1] * 8


@pytest.mark.parametrize(
    "answer",
    [
        vectors(["one", "two"]),
        b'{"object":"list","data":[{"embedding":[1]},{"embedding":[2]},{"embedding":[3]}]}',
        b'{"data":[{"index":0,"embedding":[1]},{"index":0,"embedding":[1]},{"index":1,"embedding":[1]}]}',
        b"<html>",
        b'{"error":{"message":"no"},"data":[{"index":0}]}',
    ],
)
async def test_an_answer_that_cannot_be_taken_apart_isolates_its_items(world: RouterWorld, answer: bytes) -> None:
    async def script(request: Request, peer: Peer) -> None:
        given = inputs_of(request)
        await peer.answer(200, vectors(given) if len(given) == 1 else answer)

    async with RawServer(script) as server, world.router(grouped(server.url)) as router:
        answers = await together(router, [item(world, "x" * (at + 1)) for at in range(3)])
        assert [json.loads(one.body)["data"][0]["embedding"][0] for one in answers if isinstance(one, Answer)] == [
            1,
            2,
            3,
        ]
        assert sizes(server) == [3, 1, 1, 1]
        assert router.status()[0].state == "closed"


async def test_overload_is_put_off_first_and_then_the_groups_shrink_and_grow_again(world: RouterWorld) -> None:
    refusals = 2

    async def script(request: Request, peer: Peer) -> None:
        nonlocal refusals
        if request.line.startswith("POST") and refusals:
            refusals -= 1
            await peer.answer(429, b"{}", Retry_After="1")
        else:
            await embed(request, peer)

    async with RawServer(script) as server, world.router(grouped(server.url)) as router:
        for expected in ([8], [8]):
            calls = [item(world, "x") for _ in range(8)]
            found = await together(router, calls)
            assert all(isinstance(one, Throttled) for one in found), "no item was paid for, and none lost an attempt"
            assert sizes(server)[-len(expected) :] == expected
            [state] = router._states.values()
            until_ms = {state.refusals.waits_until_ms(call.idempotency_key) for call in calls}
            assert until_ms == {world.clock.monotonic_ms() + 1_000}, "each waits as long as their call was asked to"
            world.clock.advance(1_500)
        await together(router, [item(world, "x") for _ in range(8)])
        assert sizes(server)[2:] == [4, 4]
        for _ in range(4):
            await together(router, [item(world, "x") for _ in range(8)])
        assert sizes(server)[-1] == 8


async def test_a_group_that_may_have_been_billed_counts_for_each_and_the_last_try_is_alone(world: RouterWorld) -> None:
    async def script(request: Request, peer: Peer) -> None:
        if request.line.startswith("GET"):
            await peer.answer(200, b'{"data":[]}')
        elif len(inputs_of(request)) > 1:
            await peer.answer(500, b"{}")
        else:
            await embed(request, peer)

    async with RawServer(script) as server, world.router(grouped(server.url)) as router:
        found = await together(router, [item(world, "x") for _ in range(3)])
        assert all(type(one) is Ambiguous for one in found)
        assert len({id(one) for one in found}) == 3, "each may be written on"
        found = await together(router, [item(world, "x", attempt_count=2) for _ in range(3)])
        assert all(isinstance(one, Answer) for one in found)
    assert sizes(server) == [3, 1, 1, 1]


async def test_a_server_that_takes_no_groups_of_this_size_is_sent_smaller_ones(world: RouterWorld) -> None:
    async def script(request: Request, peer: Peer) -> None:
        given = inputs_of(request)
        await peer.answer(200, vectors(given)) if len(given) <= 2 else await peer.answer(400, b'{"error":{}}')

    async with RawServer(script) as server, world.router(grouped(server.url)) as router:
        for _ in range(3):
            found = await together(router, [item(world, "x") for _ in range(8)])
            assert all(isinstance(one, Answer) for one in found)
    assert sizes(server)[-4:] == [2, 2, 2, 2]


async def test_a_group_fails_over_only_to_who_takes_it(world: RouterWorld) -> None:
    async def busy(request: Request, peer: Peer) -> None:
        await peer.answer(429, b"{}", Retry_After="60")

    async with RawServer(busy) as first, RawServer(embed) as small, RawServer(embed) as large:
        places = (grouped(first.url, name="first", weight=1000.0), deployment(small.url, "small"))
        async with world.router(*places) as router:
            found = await together(router, [item(world, "x") for _ in range(8)])
            assert all(isinstance(one, Throttled) for one in found), (
                "the failure of the first is what they are put off with"
            )
            assert (sizes(first), sizes(small)) == ([8], [])
            found = await together(router, [item(world, "x") for _ in range(8)])
            assert all(isinstance(one, Answer) for one in found)
            assert sizes(small) == [1] * 8, "who takes no groups serves them one by one"
        first.requests.clear()
        places = (grouped(first.url, name="first", weight=1000.0), grouped(large.url, name="large"))
        async with world.router(*places) as router:
            found = await together(router, [item(world, "x") for _ in range(8)])
            assert {one.deployment for one in found if isinstance(one, Answer)} == {"large"}
            assert (sizes(first), sizes(large)) == ([8], [8])


async def test_a_rest_puts_off_all_who_wait_and_none_is_forgotten(world: RouterWorld) -> None:
    async def busy(request: Request, peer: Peer) -> None:
        await peer.answer(429, b"{}", Retry_After="60")

    async with RawServer(busy) as server, world.router(grouped(server.url)) as router:
        await together(router, [item(world, "x")])
        found = await together(router, [item(world, "x") for _ in range(20)])
        assert all(isinstance(one, Throttled) for one in found)
    assert sizes(server) == [1]


async def test_an_item_that_is_cancelled_takes_no_other_item_along(world: RouterWorld) -> None:
    gate = Gate(embed)
    fast = HttpLimits(pool_timeout_s=30)
    async with RawServer(gate) as server, world.router(grouped(server.url, max_in_flight=1), limits=fast) as router:
        first = asyncio.create_task(router.send(item(world, "x")))
        await eventually(lambda: server.posts, "the first call")
        tasks = [asyncio.create_task(router.send(item(world, "x" * at))) for at in range(2, 6)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        tasks[2].cancel()
        gate.opened.set()
        await first
        left = await asyncio.gather(tasks[1], tasks[3])
        assert [json.loads(one.body)["data"][0]["embedding"][0] for one in left] == [3, 5]
        assert all(task.cancelled() for task in (tasks[0], tasks[2]))
        assert not router._waiting_groups._by_route, "parameters of items name groups: none may pile up"
    assert sizes(server) == [1, 2]


async def test_a_leader_that_is_cancelled_costs_the_others_no_attempt(world: RouterWorld) -> None:
    """What they shared may have been billed, but it was we who cut it: with attempts, enough of it would fail an item."""

    async def script(request: Request, peer: Peer) -> None:
        await peer.until_gone()
        peer.close()

    async with RawServer(script) as server, world.router(grouped(server.url)) as router:
        tasks = [asyncio.create_task(router.send(item(world, "x"))) for _ in range(3)]
        await eventually(lambda: server.posts, "the group")
        tasks[0].cancel()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(one) for one in found] == [asyncio.CancelledError, HandedBack, HandedBack]
        for error in found[1:]:
            assert isinstance(error, HandedBack)
            assert error.billed
            again = decide(error, 2, 0, 60_000, RetryPolicy(attempts_max=3), 0.5)
            assert isinstance(again, RetryAt)
            assert not again.counts
        await eventually(server.posts[0].gone.is_set, "the upstream to see it")


async def test_one_request_and_the_sum_of_tokens_are_weighed(world: RouterWorld) -> None:
    gate = Gate(embed)
    place_of = {"max_in_flight": 4, "tokens_in_flight_max": 40}
    async with RawServer(gate) as server, world.router(grouped(server.url, **place_of)) as router:
        tasks = [asyncio.create_task(router.send(item(world, "x" * 40))) for _ in range(8)]
        await eventually(lambda: server.posts, "the first call")
        gate.opened.set()
        await asyncio.gather(*tasks)
    assert max(sizes(server)) < 8, "eight together would be more tokens than are allowed in flight"
    assert sum(sizes(server)) == 8


@pytest.mark.parametrize("stopped", ["both", "the second"])
async def test_no_group_is_sent_for_an_item_that_may_not_begin_any_more(world: RouterWorld, stopped: str) -> None:
    """Its job was paused, or the slice of one of the items was lost to another worker."""
    gate, paused = Gate(embed), asyncio.Event()
    async with RawServer(gate) as server, world.router(grouped(server.url, max_in_flight=1)) as router:
        first = asyncio.create_task(router.send(item(world, "first")))
        await eventually(lambda: len(server.posts) == 1, "the only slot to be taken")
        calls = [
            item(world, text, may_begin=lambda is_stopped=is_stopped: not (is_stopped and paused.is_set()))
            for text, is_stopped in (("one", stopped == "both"), ("two", True))
        ]
        waiting = asyncio.create_task(together(router, calls))
        await asyncio.sleep(0.01)
        paused.set()
        gate.opened.set()
        await first
        await waiting
    assert not [request for request in server.posts if "two" in inputs_of(request)]
    assert stopped == "the second" or len(server.posts) == 1


async def test_no_group_is_sent_for_an_item_whose_lease_may_be_over(world: RouterWorld) -> None:
    """A group is one call: it begins only while the lease of each of its items covers it."""
    gate = Gate(embed)
    async with RawServer(gate) as server, world.router(grouped(server.url, max_in_flight=1)) as router:
        now_ms = world.clock.monotonic
        first = asyncio.create_task(router.send(item(world, "first")))
        await eventually(lambda: len(server.posts) == 1, "the only slot to be taken")
        texts = {"one": 50_000, "over": 10_000, "two": 40_000}
        calls = [item(world, text, begin_by_ms=now_ms + lasts_ms) for text, lasts_ms in texts.items()]
        waiting = asyncio.create_task(together(router, calls))
        await asyncio.sleep(0.01)
        world.clock.advance(20_000)
        gate.opened.set()
        await first
        await waiting
    assert not [request for request in server.posts if "over" in inputs_of(request)]
