"""The delivery loop over a real store and real receivers: retries, slow receivers, a store that goes away, and a send that breaks."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Self

import pytest
from structlog.testing import capture_logs

from tests.support.ports import PushedClock
from tests.upstream.raw_server import Peer, RawServer, Request, eventually
from tests.worker.world import WorkerWorld, chat_lines
from tidegate import metrics
from tidegate.backends.callback_sender import CallbackSender
from tidegate.core.callback_targets import CallbackReply, TargetRules
from tidegate.core.errors import BlobMissing, BlobUnavailable, StoreUnavailable
from tidegate.core.nouns import Caller, JobWebhook
from tidegate.core.states import DeliveryState
from tidegate.core.webhooks import EVENT_TYPES, EndpointShape, LeasedDelivery
from tidegate.stages import deliver
from tidegate.stages.deliver import WebhookDeliveries

pytestmark = pytest.mark.anyio

RULES = TargetRules(frozenset({"127.0.0.1", "localhost"}), allow_http=True)


class DeliveryWorld(WorkerWorld):
    """The worker's world, whose clock a test pushes, with deliveries in it and receivers on real sockets."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, PushedClock())
        self.sender = CallbackSender(RULES, "Tidegate/test")
        self.deliveries = self.made(self.sender)

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self.worker_id = await self.worker(30 * 86_400_000)
        return self

    async def __aexit__(self, *wrong: object) -> None:
        await self.sender.close()
        await super().__aexit__()

    def made(self, callbacks: Any, bodies: Any = None) -> WebhookDeliveries:
        return WebhookDeliveries(self.store, callbacks, self.clock, self.entropy, lambda: self.worker_id, bodies)

    async def endpoint(self, caller: Caller, url: str) -> str:
        shape = EndpointShape("one", url, EVENT_TYPES)
        made = await self.store.create_webhook_endpoint(caller.tenant_id, self.id("whk"), shape, b"s" * 32)
        return made.id

    async def end_job(self, caller: Caller, webhook: JobWebhook | None = None) -> str:
        job = await self.job(chat_lines(1), caller=caller, webhook=webhook)
        await self.store.cancel_job(caller.tenant_id, job.id)
        assert await self.store.end_unstarted(job.id)
        return job.id

    async def states(self, caller: Caller) -> list[tuple[str, int, str | None]]:
        found = await self.store.list_webhook_deliveries(caller.tenant_id, None, None, 1_000)
        return [(one.state.value, one.attempt_count, one.failure) for one in found or []]


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[DeliveryWorld]:
    async with DeliveryWorld(tmp_path) as opened:
        yield opened


@pytest.fixture
async def running(world: DeliveryWorld, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[DeliveryWorld]:
    monkeypatch.setattr(deliver, "POLL_S", 0.02)
    task = asyncio.create_task(world.deliveries.run())
    yield world
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def answering(status: Callable[[], int]) -> Callable[[Request, Peer], Awaitable[None]]:
    async def script(_: Request, peer: Peer) -> None:
        await peer.answer(status(), b"")

    return script


async def settled(world: DeliveryWorld, caller: Caller, wanted: list[tuple[str, int, str | None]]) -> None:
    async with asyncio.timeout(10):
        while await world.states(caller) != wanted:  # noqa: ASYNC110 - nothing announces what the loop records
            await asyncio.sleep(0.01)


async def test_an_event_is_tried_ten_times_over_three_days_and_then_listed(running: DeliveryWorld) -> None:
    caller = await running.caller("acme")
    async with RawServer(answering(lambda: 503)) as receiver:
        await running.endpoint(caller, receiver.url)
        await running.end_job(caller)
        for attempt, wait_s in enumerate((5, 300, 1_800, 7_200, 18_000, 36_000, 50_400, 72_000, 86_400), start=1):
            await settled(running, caller, [("pending", attempt, "http_5xx")])
            running.clock.ahead_ms += wait_s * 1_000
        await settled(running, caller, [("failed", 10, "http_5xx")])
        running.clock.ahead_ms += 86_400_000
        await asyncio.sleep(0.1)
        assert len(receiver.requests) == 10
    assert len({request.headers["webhook-id"] for request in receiver.requests}) == 1
    stamps = [int(request.headers["webhook-timestamp"]) for request in receiver.requests]
    assert stamps == sorted(set(stamps)), "each try has the time at which it was sent"


async def test_a_receiver_that_recovers_gets_the_event(running: DeliveryWorld) -> None:
    caller, statuses = await running.caller("acme"), iter([500, 302, 200])
    before = metrics.counted(metrics.webhook_deliveries)
    async with RawServer(answering(lambda: next(statuses))) as receiver:
        await running.endpoint(caller, receiver.url)
        await running.end_job(caller)
        await settled(running, caller, [("pending", 1, "http_5xx")])
        running.clock.ahead_ms += 6_000
        await settled(running, caller, [("pending", 2, "http_3xx")])
        running.clock.ahead_ms += 400_000
        await settled(running, caller, [("delivered", 3, None)])
    counted = Counter(metrics.counted(metrics.webhook_deliveries))
    counted.subtract(before)
    assert +counted == {"postponed": 2, "delivered": 1}


async def test_one_tenants_hanging_receivers_do_not_hold_up_another(running: DeliveryWorld) -> None:
    slow, quick = await running.caller("slow"), await running.caller("quick")
    async with RawServer(lambda _, peer: peer.until_gone()) as hanging, RawServer(answering(lambda: 200)) as receiver:
        await running.endpoint(slow, hanging.url)
        for _ in range(40):
            await running.end_job(slow)
        await eventually(lambda: hanging.open_count == 5, "the hanging receiver to be called")
        await running.endpoint(quick, receiver.url)
        await running.end_job(quick)
        await settled(running, quick, [("delivered", 1, None)])
        assert hanging.open_count == 5, "those of the other tenant still hang"
        assert len([task for task in running.deliveries._sending if not task.done()]) <= deliver.TENANT_MAX


async def test_the_end_of_the_loop_waits_for_no_receiver(world: DeliveryWorld) -> None:
    """What is under way is sent again by another process, under the same id."""
    caller = await world.caller("acme")
    async with RawServer(lambda _, peer: peer.until_gone()) as hanging:
        await world.endpoint(caller, hanging.url)
        await world.end_job(caller)
        task = asyncio.create_task(world.deliveries.run())
        await eventually(lambda: hanging.open_count == 1, "the receiver to be called")
        task.cancel()
        async with asyncio.timeout(10):
            await asyncio.gather(task, return_exceptions=True)
        await eventually(lambda: hanging.open_count == 0, "the call to be given up")


async def test_the_fewer_turns_are_free_the_fewer_a_tenant_gets(
    world: DeliveryWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deliver, "SLOTS", 10)
    slow, quick = await world.caller("slow"), await world.caller("quick")
    async with RawServer(lambda _, peer: peer.until_gone()) as hanging:
        for caller in (slow, quick):
            await world.endpoint(caller, hanging.url)
        for _ in range(12):
            await world.end_job(slow)
        assert [await world.deliveries.lease() for _ in range(3)] == [5, 0, 0]
        for _ in range(12):
            await world.end_job(quick)
        assert [await world.deliveries.lease() for _ in range(3)] == [2, 0, 0]
        for task in world.deliveries._sending:
            task.cancel()


async def test_a_receiver_that_hangs_leaves_some_slots_to_the_others_of_its_tenant(world: DeliveryWorld) -> None:
    caller = await world.caller("acme")
    async with RawServer(lambda _, peer: peer.until_gone()) as hanging, RawServer(answering(lambda: 200)) as receiver:
        await world.endpoint(caller, hanging.url)
        for _ in range(deliver.TENANT_MAX):
            await world.end_job(caller)
        assert await world.deliveries.lease() < deliver.TENANT_MAX
        await world.end_job(caller, JobWebhook(receiver.url.replace("127.0.0.1", "localhost"), EVENT_TYPES, b"s" * 32))
        assert await world.deliveries.lease() == 1
        await eventually(lambda: len(receiver.requests) == 1, "the other receiver to be called")
        for task in world.deliveries._sending:
            task.cancel()


async def test_events_that_failed_together_do_not_come_back_together(
    world: DeliveryWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller, record, waits_ms = await world.caller("acme"), world.store.record_webhook, list[int]()
    chances = iter([min, max])

    async def noted(leased: LeasedDelivery, reply: CallbackReply, wait_ms: int) -> DeliveryState | None:
        waits_ms.append(wait_ms)
        return await record(leased, reply, wait_ms)

    def drawn(low: float, high: float) -> float:
        return next(chances)(low, high)

    monkeypatch.setattr(world.store, "record_webhook", noted)
    monkeypatch.setattr(world.entropy, "uniform", drawn)
    async with RawServer(answering(lambda: 503)) as receiver:
        await world.endpoint(caller, receiver.url)
        for _ in range(2):
            await world.end_job(caller)
        assert await world.deliveries.lease() == 2
        await eventually(lambda: len(waits_ms) == 2, "both tries to fail")
    assert waits_ms[0] < waits_ms[1]


async def test_a_delivery_that_waited_here_has_the_time_at_which_it_is_sent(world: DeliveryWorld) -> None:
    caller = await world.caller("acme")
    async with RawServer(answering(lambda: 200)) as receiver:
        await world.endpoint(caller, receiver.url)
        await world.end_job(caller)
        assert await world.deliveries.lease() == 1
        world.clock.ahead_ms += 3_600_000
        leased_s = world.clock.now_ms() // 1000
        await settled(world, caller, [("delivered", 1, None)])
        assert int(receiver.requests[0].headers["webhook-timestamp"]) >= leased_s


async def test_a_receivers_own_headers_replace_none_of_ours(world: DeliveryWorld) -> None:
    caller = await world.caller("acme")
    async with RawServer(answering(lambda: 200)) as receiver:
        own = {"webhook-id": "forged", "webhook-signature": "forged", "X-Own": "kept"}
        await world.end_job(caller, JobWebhook(receiver.url, EVENT_TYPES, b"s" * 32, headers=own))
        assert await world.deliveries.lease() == 1
        await settled(world, caller, [("delivered", 1, None)])
        headers = receiver.requests[0].headers
    assert headers["X-Own"] == "kept"
    assert "forged" not in (headers["webhook-id"], headers["webhook-signature"])


async def test_what_was_sent_is_recorded_once_the_store_is_back(
    world: DeliveryWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller, record, failures = await world.caller("acme"), world.store.record_webhook, iter([True] * 3)

    async def away(*args: Any) -> DeliveryState | None:
        if next(failures, False):
            raise StoreUnavailable("gone")
        return await record(*args)

    async with RawServer(answering(lambda: 200)) as receiver:
        await world.endpoint(caller, receiver.url)
        await world.end_job(caller)
        monkeypatch.setattr(world.store, "record_webhook", away)
        assert await world.deliveries.lease() == 1
        await settled(world, caller, [("delivered", 1, None)])
        assert len(receiver.requests) == 1


async def test_a_lease_that_may_have_committed_is_not_forgotten(
    world: DeliveryWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller, lease, lost = await world.caller("acme"), world.store.lease_webhooks, iter([True])

    async def unknown(*args: Any, **more: Any) -> Any:
        leased = await lease(*args, **more)
        if next(lost, False):
            raise StoreUnavailable("the answer was lost")
        return leased

    async with RawServer(answering(lambda: 200)) as receiver:
        await world.endpoint(caller, receiver.url)
        await world.end_job(caller)
        monkeypatch.setattr(world.store, "lease_webhooks", unknown)
        with pytest.raises(StoreUnavailable):
            await world.deliveries.lease()
        assert await world.deliveries.lease() == 1
        await settled(world, caller, [("delivered", 1, None)])


async def test_a_store_that_is_away_stops_nothing_for_good(
    running: DeliveryWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller, look, failures = await running.caller("acme"), running.store.any_webhook_due, iter([True] * 5)

    async def away() -> bool:
        if next(failures, False):
            raise StoreUnavailable("gone")
        return await look()

    monkeypatch.setattr(running.store, "any_webhook_due", away)
    async with RawServer(answering(lambda: 200)) as receiver:
        await running.endpoint(caller, receiver.url)
        await running.end_job(caller)
        await settled(running, caller, [("delivered", 1, None)])


async def test_a_send_that_breaks_counts_as_a_failed_try(world: DeliveryWorld) -> None:
    class Broken:
        async def post(self, url: str, body: bytes, headers: Mapping[str, str], *, owner: str) -> CallbackReply:
            raise RuntimeError("a fault of ours")

    caller = await world.caller("acme")
    await world.endpoint(caller, "https://hooks.example.com/")
    await world.end_job(caller)
    assert await world.made(Broken()).lease() == 1
    await settled(world, caller, [("pending", 1, "internal_error")])


@pytest.mark.parametrize(
    ("problems", "recorded"),
    [
        ([BlobUnavailable("away"), StoreUnavailable("away")], ("delivered", 1, None)),
        ([BlobMissing("lost")], ("pending", 1, "results_missing")),
        ([ValueError("a fault of the door")], ("pending", 1, "internal_error")),
    ],
    ids=["storage is away for a moment", "results are lost", "the door has a fault"],
)
async def test_an_event_that_cannot_be_worded_is_a_try_that_failed(
    world: DeliveryWorld, problems: list[Exception], recorded: tuple[str, int, str | None]
) -> None:
    left = list(problems)

    class Door:
        async def event_body(self, _: LeasedDelivery) -> bytes:
            if left:
                raise left.pop(0)
            return b"{}"

    caller = await world.caller("acme")
    async with RawServer(answering(lambda: 200)) as receiver:
        await world.end_job(caller, JobWebhook(receiver.url, EVENT_TYPES, b"s" * 32, door="own"))
        assert await world.made(world.sender, {"own": Door()}).lease() == 1
        await settled(world, caller, [recorded])
        assert len(receiver.requests) == (recorded[0] == "delivered")


async def test_what_is_away_is_asked_again_ever_more_rarely_but_at_least_every_five_seconds(
    world: DeliveryWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait, pauses, left = asyncio.sleep, list[float](), {"body": 9, "record": 9}
    record = world.store.record_webhook

    async def note(pause_s: float) -> None:
        if pause_s >= 0.1:
            pauses.append(pause_s)
        await wait(0)

    def away(what: str) -> bool:
        left[what] -= 1
        return left[what] > 0

    class Door:
        async def event_body(self, _: LeasedDelivery) -> bytes:
            if away("body"):
                raise BlobUnavailable("away")
            return b"{}"

    async def recorded(*args: Any) -> DeliveryState | None:
        if away("record"):
            raise StoreUnavailable("away")
        return await record(*args)

    monkeypatch.setattr(world.store, "record_webhook", recorded)
    caller = await world.caller("acme")
    async with RawServer(answering(lambda: 200)) as receiver:
        await world.end_job(caller, JobWebhook(receiver.url, EVENT_TYPES, b"s" * 32, door="own"))
        monkeypatch.setattr(asyncio, "sleep", note)
        assert await world.made(world.sender, {"own": Door()}).lease() == 1
        await settled(world, caller, [("delivered", 1, None)])
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0] * 2


async def test_an_event_that_is_given_up_is_logged_and_no_other_is(world: DeliveryWorld) -> None:
    caller, statuses = await world.caller("acme"), iter([200, 503, 410])
    async with RawServer(answering(lambda: next(statuses))) as receiver:
        endpoint = await world.endpoint(caller, receiver.url)
        with capture_logs() as logs:
            for wanted in ("delivered", "pending", "failed"):
                await world.end_job(caller)
                assert await world.deliveries.lease() == 1
                async with asyncio.timeout(10):
                    while (await world.states(caller))[0][0] != wanted:  # noqa: ASYNC110 - nothing announces it
                        await asyncio.sleep(0.01)
    given_up = [line for line in logs if line["event"] == "webhook_failed"]
    assert [(line["endpoint"], line["failure"]) for line in given_up] == [(endpoint, "http_4xx")]
