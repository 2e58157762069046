"""What interactive calls used and cost, for every caller and every end: counted once, and held to the key's own limits."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.ports import FairDice
from tests.support.processes import wait_until
from tests.upstream.raw_server import Peer, Request
from tests.upstream.world import deployment
from tests.web.gateway_world import ASK, CHAT, MESSAGES, GatewayWorld
from tests.web.upstream import STREAM_HEAD, answers, chat_with, chunk, chunked, event, streams
from tidegate.core.budgets.budget import Limit, Period
from tidegate.core.errors import StoreUnavailable
from tidegate.core.nouns import Caller, Usage
from tidegate.core.usage.prices import NANO
from tidegate.core.usage.spending import SpendEntry
from tidegate.interactive_usage import InteractiveUsageBook
from tidegate.settings.capacity import DeploymentPrice

# Only batch work gets the discount.
PRICE = {"price": DeploymentPrice(input=1_000, cached=100, output=2_000, batch_factor=0.5)}
DAY_MS = 86_400_000
USAGE = {"prompt_tokens": 10, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 6}}


def counted(world: GatewayWorld, calls: int) -> list[SpendEntry]:
    """What is on record, once so many calls are."""

    async def ask() -> list[SpendEntry]:
        today = world.web.clock.now_ms() // DAY_MS
        return await world.web.store.usage(today - 1, today + 2)

    def there() -> list[SpendEntry]:
        entries = world.web.run(ask())
        return entries if sum(entry.spend.calls for entry in entries) >= calls else []

    return wait_until(there, timeout_s=30, what=f"{calls} calls to be on record")


def test_each_call_is_on_record_once_with_its_tokens_and_its_cost(world: GatewayWorld) -> None:
    """Whole, streamed, and one that does not say what it used."""
    first = chunk("a"), chunk("b", finish="stop"), event({"choices": [], "usage": USAGE}), b"data: [DONE]\n\n"
    world.start(answers(chat_with("hi", 10, 4)), options=[PRICE])
    secret = world.web.make_key("acme", team="red", user="ann")
    client = world.client(secret)
    for _ in range(3):
        assert client.post(CHAT, json=ASK).status_code == 200
    [entry] = counted(world, 3)
    assert (entry.organization, entry.team, entry.user, entry.model, entry.deployment) == (
        "acme",
        "red",
        "ann",
        "m",
        "u0",
    )
    assert entry.key
    assert entry.key in secret
    assert (entry.spend.calls, entry.spend.usage.input_tokens, entry.spend.usage.output_tokens) == (3, 30, 12)
    assert entry.spend.cost.total_nano == 3 * (10 * NANO // 1_000 + 4 * NANO // 500)
    world.upstreams[0].becomes(streams(*first))
    with client.stream("POST", CHAT, json={**ASK, "stream": True}) as answer:
        assert b"".join(answer.iter_bytes()).endswith(b"[DONE]\n\n")
    [entry] = counted(world, 4)
    assert entry.spend.usage.cached_tokens == 6
    assert entry.spend.cost.cached_nano == 6 * NANO // 10_000
    world.upstreams[0].becomes(streams(chunk("four"), chunk("four!", finish="stop")))
    with client.stream("POST", CHAT, json={**ASK, "stream": True}) as answer:
        answer.read()
    [entry] = counted(world, 5)
    assert entry.spend.usage.output_tokens == 16 + 3, "by the text where no usage is reported"
    world.upstreams[0].becomes(answers(b'{"choices":[{"message":{"content":"four!"}}]}'))
    assert client.post(CHAT, json=ASK).status_code == 200
    [whole] = counted(world, 6)
    assert whole.spend.usage.output_tokens > entry.spend.usage.output_tokens, "and so of a whole answer"
    assert whole.spend.cost.input_nano > entry.spend.cost.input_nano


def test_a_client_that_leaves_pays_for_what_came(world: GatewayWorld) -> None:
    async def endless(request: Request, peer: Peer) -> None:
        await peer.send(STREAM_HEAD, *(chunked(chunk("a")) for _ in range(5)))
        await asyncio.sleep(60)

    world.start(endless)
    with world.client().stream("POST", CHAT, json={**ASK, "stream": True}) as answer:
        next(answer.iter_bytes())
    [entry] = counted(world, 1)
    assert entry.spend.usage.output_tokens >= 1
    assert entry.spend.usage.input_tokens > 0


def test_what_came_to_nothing_is_not_on_record(world: GatewayWorld) -> None:
    world.start(answers(b'{"error":{"message":"no"}}', 400))
    client = world.client()
    assert client.post(CHAT, json=ASK).status_code == 400
    world.upstreams[0].becomes(answers(chat_with("hi")))
    assert client.post(CHAT, json=ASK).status_code == 200
    [entry] = counted(world, 1)
    assert entry.spend.calls == 1


def test_a_store_that_is_away_loses_no_call_and_counts_none_twice(world: GatewayWorld) -> None:
    world.start(answers(chat_with("hi", 10, 4)))
    store: Any = world.web.store
    real = store.add_interactive
    numbers: list[int] = []

    async def lost_answers(writer: str, number: int, entries: list[SpendEntry]) -> None:
        numbers.append(number)
        if len(numbers) == 1:
            raise StoreUnavailable("it is away")
        await real(writer, number, entries)
        if len(numbers) == 2:
            raise StoreUnavailable("the connection broke after the commit was sent")

    store.add_interactive = lost_answers
    client = world.client()
    for _ in range(2):
        assert client.post(CHAT, json=ASK).status_code == 200
    counted(world, 2)
    wait_until(lambda: len(numbers) >= 3, timeout_s=30, what="the flush to be sent again")
    assert client.post(CHAT, json=ASK).status_code == 200
    [entry] = counted(world, 3)
    assert entry.spend.calls == 3
    assert numbers[0] == numbers[1] == numbers[2]


@pytest.mark.anyio
async def test_what_the_last_calls_used_is_written_when_the_process_stops() -> None:
    written: list[int] = []

    async def add_interactive(writer: str, number: int, entries: list[SpendEntry]) -> None:
        await asyncio.sleep(0)
        written.append(sum(one.spend.calls for one in entries))

    store: Any = SimpleNamespace(add_interactive=add_interactive)
    book = InteractiveUsageBook(store, FairDice(1))
    book.add(Caller("tenant"), "m", deployment("http://h/"), Usage(1, 0, 1))
    await book.close()
    assert written == [1]


def test_a_keys_own_limits_bind_its_interactive_calls(world: GatewayWorld) -> None:
    world.start(answers(chat_with("hi", 10, 4)), options=[PRICE])
    twice = world.client(world.web.make_key("acme", limits=(Limit(Period.DAY, 2),)))
    assert [twice.post(CHAT, json=ASK).status_code for _ in range(3)] == [200, 200, 429]
    poor = world.client(world.web.make_key("acme", limits=(Limit(Period.MONTH, nano=NANO),)))
    unbounded = poor.post(CHAT, json=ASK)
    assert (unbounded.status_code, unbounded.json()["error"]["code"]) == (400, "max_tokens_required")
    for dearer in ({"service_tier": "priority"}, {"tools": [{"type": "web_search"}]}):
        surcharged = poor.post(CHAT, json={**ASK, "max_tokens": 50, **dearer})
        assert (surcharged.status_code, surcharged.json()["error"]["code"]) == (400, "surcharge_unpriced")
        assert twice.post(CHAT, json={**ASK, **dearer}).status_code == 429, "its limit counts no money"
    dear = poor.post(CHAT, json={**ASK, "max_tokens": 500})
    assert (dear.status_code, dear.json()["error"]["code"]) == (429, "insufficient_quota")
    assert poor.post(CHAT, json={**ASK, "max_tokens": 50}).status_code == 200
    asked = {**ASK, "max_tokens": 500}
    anthropic = poor.post(MESSAGES, json=asked)
    assert (anthropic.status_code, anthropic.json()["error"]["code"]) == (429, "insufficient_quota")


def test_calls_of_one_tenant_leave_a_slot_to_another(world: GatewayWorld) -> None:
    async def held(request: Request, peer: Peer) -> None:
        await peer.send(STREAM_HEAD, chunked(chunk("a")))
        await peer.until_gone()

    world.start(held, options=[{"max_in_flight": 4}])
    ours, theirs = world.client(world.web.make_key("ours")), world.client(world.web.make_key("theirs"))
    asked = {**ASK, "stream": True}

    def one_more() -> int:
        with ours.stream("POST", CHAT, json=asked) as answer:
            return answer.status_code

    with ThreadPoolExecutor(1) as pool, ExitStack() as calls:
        for _ in range(3):
            calls.enter_context(ours.stream("POST", CHAT, json=asked))
        waiting = pool.submit(one_more)
        state = world.web.router._states["u0"]
        wait_until(lambda: state.interactive_waiting.total() + state.interactive_in_flight == 4, 20, "the fourth call")
        assert calls.enter_context(theirs.stream("POST", CHAT, json=asked)).status_code == 200
        assert not waiting.done()
        calls.close()
        assert waiting.result() == 200


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_key_has_only_so_many_calls_at_once(world: GatewayWorld, is_stream: bool) -> None:
    async def held(request: Request, peer: Peer) -> None:
        await peer.send(STREAM_HEAD, chunked(chunk("a")))
        await asyncio.sleep(60)

    world.start(held)
    client = world.client(world.web.make_key("acme", parallel_max=1))
    with client.stream("POST", CHAT, json={**ASK, "stream": True}) as answer:
        pieces = answer.iter_bytes()
        next(pieces)
        second = client.post(CHAT, json={**ASK, "stream": is_stream})
        assert (second.status_code, second.json()["error"]["code"]) == (429, "max_parallel_requests_exceeded")
        assert second.headers["Retry-After"] == "1"
    world.upstreams[0].becomes(answers(chat_with("hi")))
    # The place is given back when the gateway sees that its client left, which takes a moment.
    wait_until(lambda: client.post(CHAT, json=ASK).status_code == 200, timeout_s=30, what="the place to be given back")
    assert client.post(CHAT, json=ASK).status_code == 200
