"""The tide over real sockets: batch stands back for interactive calls and comes again, learns what it may take, and is never stuck.

The clock stands still until a test moves it. A prompt of a megabyte waits for its first token, by any estimate, for longer than a test
takes; a short one has it at once.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from tests.support.ports import HandClock
from tests.upstream.raw_server import CHAT, Peer, RawServer, Request, eventually
from tests.upstream.world import CHAT_ENDPOINT, RouterWorld, deployment
from tidegate.core.deployments import EngineKind, HttpLimits, Serves, TideMode
from tidegate.core.errors import HandedBack, StoreUnavailable, Throttled, UpstreamError
from tidegate.core.nouns import Answer, Call
from tidegate.core.ports import FleetReport, Present
from tidegate.core.schedule import Reason
from tidegate.core.tide.learner import ROUND_CALLS_MIN
from tidegate.core.tide.signals import Decision, Signals
from tidegate.store.database.sqlite import SqliteDriver
from tidegate.store.store import Store
from tidegate.upstream.calls.exchange import UpstreamResponse
from tidegate.upstream.calls.router import Router
from tidegate.upstream.calls.traffic import Traffic
from tidegate.upstream.calls.translation import Shaped
from tidegate.upstream.routing.slots import Capacity
from tidegate.upstream.tide import tide_loop
from tidegate.upstream.tide.tides import OWN_EVENTS_MS, DeploymentTide

pytestmark = pytest.mark.anyio

LONG_BYTES, MIDDLE_BYTES, SHORT_BYTES = 2_000_000, 4_000, 600
PATIENT = HttpLimits(pool_timeout_s=300)
STREAM_HEAD = b"HTTP/1.1 200 X\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
USAGE = {"prompt_tokens": 3, "completion_tokens": 5}
ANSWER = json.dumps({**json.loads(CHAT), "usage": USAGE}).encode()


def gauges(running: float, waiting: float) -> bytes:
    return (
        f'vllm:num_requests_running{{model_name="m"}} {running}\nvllm:num_requests_waiting{{model_name="m"}} {waiting}\n'
        'vllm:kv_cache_usage_perc{model_name="m"} 0.1\n'
    ).encode()


class Model:
    """A model server. Batch calls are answered when they are let go, interactive ones stream a first token when they may and end when
    they are let go; `page` is what its metrics say, and `status` what every batch call gets."""

    def __init__(self) -> None:
        self.page: bytes | None = None
        self.scrapes = 0
        self.status = 200
        self.batch, self.first_token, self.end = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.flying: list[Request] = []

    def scraped_since(self, scrapes: int) -> bool:
        return self.scrapes > scrapes

    async def __call__(self, request: Request, peer: Peer) -> None:
        if request.path == "/metrics":
            self.scrapes += 1
            await peer.answer(200 if self.page is not None else 404, self.page or b"")
        elif request.line.startswith("GET"):
            await peer.answer(body=b'{"data":[]}')
        elif b"interactive" in request.body:
            await self.first_token.wait()
            await peer.send(STREAM_HEAD, b"data: {}\n\n")
            await self.end.wait()
            await peer.send(b"data: [DONE]\n\n")
            peer.close()
        else:
            self.flying.append(request)
            waits = [asyncio.create_task(one) for one in (self.batch.wait(), peer.until_gone())]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                self.flying.remove(request)
                for one in waits:
                    one.cancel()
                await asyncio.gather(*waits, return_exceptions=True)
            await peer.answer(self.status, ANSWER)


class Sea:
    """A router over one model server, whose batch and interactive calls a test begins."""

    def __init__(self, world: RouterWorld, server: RawServer, model: Model, router: Router) -> None:
        self.world, self.server, self.model, self.router = world, server, model, router
        self.tasks: list[asyncio.Task[Any]] = []

    @property
    def tide(self) -> DeploymentTide:
        tide = self.router._states["one"].tide
        assert tide is not None
        return tide

    def call(self, size: int, **more: Any) -> Call:
        return self.world.call(body=b'{"model":"m","x":"' + b"x" * size + b'"}', left_ms=3_600_000, **more)

    def send(self, size: int = SHORT_BYTES, **more: Any) -> asyncio.Task[Answer]:
        task = asyncio.create_task(self.router.send(self.call(size, **more)))
        self.tasks.append(task)
        return task

    def open(self, flex_wait_s: float = 0.0, size: int = 0) -> asyncio.Task[UpstreamResponse]:
        body = b'{"model":"m","stream":true,"user":"interactive","x":"%b"}' % (b"x" * size)
        shaped, call = Shaped(CHAT_ENDPOINT, body), self.world.call(body=body)
        task = asyncio.create_task(self.router.open(call, Traffic(lambda engine: shaped, True, flex_wait_s)))
        self.tasks.append(task)
        return cast(asyncio.Task[UpstreamResponse], task)

    def users_are(self, in_flight: int, awaiting: int) -> None:
        """Count so many interactive calls, though none is there."""
        state = self.router._states["one"]
        state.interactive_in_flight, state.interactive_awaiting = in_flight, awaiting
        self.tide.users_changed()

    async def arrived(self, count: int) -> None:
        await eventually(lambda: len(self.server.posts) >= count, f"{count} calls to arrive")

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        """Time passes until it holds: what an engine says at the very moment of its last word is no news."""

        def look() -> bool:
            self.world.clock.advance(1)
            return condition()

        await eventually(look, what)

    async def turned(self) -> None:
        """The loop went round: it looked and acted with all that was so before."""
        seen = self.tide._asked_ms
        self.world.clock.advance(1)
        await eventually(lambda: self.tide._asked_ms > seen, "the tide to turn")


@asynccontextmanager
async def sea(
    limits: HttpLimits = PATIENT, capacity: Capacity | None = None, clock: HandClock | None = None, **place: Any
) -> AsyncIterator[Sea]:
    world, model = RouterWorld(), Model()
    world.clock = clock or world.clock
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(RawServer(model))
        options = {"engine": EngineKind.VLLM, "models": ("m",), **place}
        router = await stack.enter_async_context(
            world.router(deployment(server.url, **options), limits=limits, capacity=capacity)
        )
        made = Sea(world, server, model, router)
        try:
            yield made
        finally:
            for task in made.tasks:
                task.cancel()
            ended = await asyncio.gather(*made.tasks, return_exceptions=True)
            for one in ended:
                if isinstance(one, UpstreamResponse):
                    one.close()


# Standing back.


async def test_calls_without_a_first_token_come_back_and_no_others() -> None:
    async with sea() as at:
        early = at.send(SHORT_BYTES)
        await at.arrived(1)
        await eventually(lambda: not at.tide._awaiting_tokens, "its first token, by the estimate")
        late = [at.send(LONG_BYTES, hand_backs=count) for count in (0, 1)]
        spared = at.send(LONG_BYTES, hand_backs=2)
        await at.arrived(4)
        user = at.open()
        for task in late:
            with pytest.raises(HandedBack):
                await task
        await eventually(lambda: len(at.model.flying) == 2, "the server to see them gone")
        assert not early.done()
        assert not spared.done(), "twice is enough for any item"
        assert at.router._states["one"].in_flight == 2
        attempts = at.router._states["one"].budget.attempts(at.world.clock.monotonic_ms())
        assert attempts == 3, "what was taken back allows no retries and uses none up"
        at.model.first_token.set()
        at.model.batch.set()
        assert [(await task).status for task in (early, spared)] == [200, 200]
        await user
        assert at.router.status()[0].failures == {}


async def test_nothing_begins_while_a_user_waits_and_it_goes_on_at_once_afterwards() -> None:
    """Its pool timeout is far longer than the test waits: the calls are woken."""
    async with sea() as at:
        user = at.open()
        await at.arrived(1)
        waiting = [at.send() for _ in range(3)]
        for _ in range(3):
            await at.turned()
        assert (len(at.server.posts), at.router.free_slots("m")) == (1, 0)
        assert at.router.closed("m") == Reason.TIDE_CLOSED
        at.model.first_token.set()
        response = await user
        await at.arrived(2)
        for _ in range(3):
            await at.turned()
        assert len(at.model.flying) == 1, "one at a time beside a user"
        at.model.batch.set()
        assert [(await task).status for task in waiting] == [200] * 3
        at.model.end.set()
        while await response.read():
            pass
        await eventually(lambda: at.router.free_slots("m") > 1, "the lull")


async def test_an_item_that_waited_long_enough_goes_like_a_user_and_counts_as_one() -> None:
    async with sea() as at:
        at.open()
        await at.arrived(1)
        held_back = at.send()
        await at.turned()
        turned = asyncio.create_task(at.router.send_interactive(at.call(SHORT_BYTES), "tenant"))
        at.tasks.append(turned)
        await at.arrived(2)
        assert (at.router.interactive("one")[0], at.router._states["one"].in_flight) == (2, 0)
        assert not held_back.done()
        at.model.batch.set()
        answer = await turned
        assert (answer.body, answer.usage.output_tokens, answer.deployment) == (ANSWER, 5, "one")
        assert at.router.interactive("one")[0] == 1


async def test_a_user_who_leaves_lets_batch_go_on() -> None:
    async with sea() as at:
        user = at.open()
        await at.arrived(1)
        waiting = at.send()
        await at.turned()
        user.cancel()
        at.model.batch.set()
        assert (await waiting).status == 200


async def test_a_hosted_provider_hands_nothing_back() -> None:
    """It may have billed the call, and users do not feel it."""
    async with sea(engine=EngineKind.GENERIC, is_capacity_known=False) as at:
        flying = at.send(LONG_BYTES)
        await at.arrived(1)
        at.open()
        await at.arrived(2)
        more = at.send(LONG_BYTES)
        await at.arrived(3)
        at.model.batch.set()
        assert [(await task).status for task in (flying, more)] == [200, 200]
        assert at.model.scrapes == 0


async def test_a_process_without_a_worker_looks_at_the_engine_for_flex_calls_alone() -> None:
    async with sea(capacity=Capacity(runs_items=False)) as at:
        user = at.open()
        await at.arrived(1)
        at.model.first_token.set()
        await user
        await at.turned()
        await at.turned()
        assert (at.model.scrapes, at.tide.present().why) == (0, "")
        at.open(flex_wait_s=60.0)
        await eventually(lambda: at.model.scrapes > 0, "a look for the flex call")


@pytest.mark.parametrize("engine", list(EngineKind))
async def test_switched_off_it_leaves_the_ceiling_alone(engine: EngineKind) -> None:
    async with sea(engine=engine, tide=TideMode.OFF, max_in_flight=40, batch_fraction=0.5) as at:
        assert at.router._states["one"].tide is None
        endpoint = "/v1/messages" if engine is EngineKind.ANTHROPIC else CHAT_ENDPOINT
        flying = [at.send(LONG_BYTES, endpoint=endpoint) for _ in range(3)]
        await at.arrived(3)
        at.open()
        await at.arrived(4)
        assert at.router.free_slots("m") == 20 - 3
        assert not any(task.done() for task in flying)
        assert at.model.scrapes == 0


# Cancelled from outside.


@pytest.mark.parametrize("first", ["tide", "outside"])
async def test_a_call_that_is_cancelled_while_it_comes_back_is_cancelled(first: str) -> None:
    async with sea() as at:
        task = at.send(LONG_BYTES)
        await at.arrived(1)
        if first == "outside":
            task.cancel()
        at.users_are(1, 1)
        if first == "tide":
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelled()
        assert (at.router._states["one"].in_flight, at.tide.present().calls) == (0, 0)


async def test_the_caller_goes_on_after_its_call_was_handed_back() -> None:
    async with sea() as at:

        async def caller() -> tuple[int, int]:
            with pytest.raises(HandedBack):
                await at.router.send(at.call(LONG_BYTES))
            answer = await at.router.send(at.call(SHORT_BYTES))
            task = asyncio.current_task()
            assert task is not None
            return answer.status, task.cancelling()

        task = asyncio.create_task(caller())
        await at.arrived(1)
        at.users_are(1, 1)
        at.model.batch.set()
        at.users_are(0, 0)
        assert await task == (200, 0)


# Long prompts.


async def test_a_prompt_that_is_too_long_beside_users_waits_and_goes_some_day() -> None:
    """Short ones never stop coming, and would take its room each time."""
    async with sea() as at:
        user = at.open()
        at.model.first_token.set()
        await user
        long = at.send(MIDDLE_BYTES)
        at.model.batch.set()
        for _ in range(3):
            assert (await at.send()).status == 200
            await at.turned()
        assert not any(len(request.body) > MIDDLE_BYTES for request in at.server.posts)

        async def short() -> None:
            while not long.done():
                await at.router.send(at.call(SHORT_BYTES))

        at.world.clock.advance(61_000)
        at.tasks += [asyncio.create_task(short()) for _ in range(4)]
        async with asyncio.timeout(30):
            assert (await long).status == 200


async def test_a_prompt_that_was_sent_elsewhere_or_was_given_up_is_not_waited_for() -> None:
    async with sea() as at:
        user = at.open()
        at.model.first_token.set()
        await user
        given_up = at.send(MIDDLE_BYTES)
        await eventually(lambda: at.tide._waiting, "it to be held")
        at.world.clock.advance(61_000)
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)
        assert not at.tide._waiting
        at.model.batch.set()
        assert (await at.send()).status == 200


async def test_a_prompt_that_waited_in_vain_holds_up_no_other_until_it_comes_again() -> None:
    async with sea(limits=HttpLimits(pool_timeout_s=0.2)) as at:
        user = at.open()
        at.model.first_token.set()
        await user
        with pytest.raises(UpstreamError):
            await at.send(MIDDLE_BYTES)
        assert [waiting.stands for waiting in at.tide._waiting.values()] == [False]


async def test_of_a_call_that_never_came_again_nothing_is_kept() -> None:
    async with sea() as at:
        at.users_are(1, 0)
        at.tide.stands("ghost", b"x" * MIDDLE_BYTES)
        at.tide.leaves("ghost")
        await at.turned()
        assert not at.tide.is_idle
        at.world.clock.advance(31_000)
        await at.turned()
        assert not at.tide._waiting


# What the engine says.


async def test_metrics_are_read_though_every_connection_of_the_pool_is_taken() -> None:
    limits = HttpLimits(pool_timeout_s=300, connections_max=1, kept_alive_max=1)
    async with sea(limits=limits) as at:
        at.model.page = gauges(1, 0)
        at.send()
        await at.arrived(1)
        await eventually(lambda: at.tide._sample is not None, "a sample")
        at.model.page = gauges(6, 2)
        await at.until(lambda: at.router.closed("m") == Reason.TIDE_CLOSED, "to stand back for users it cannot see")
        at.model.page = gauges(1, 0)
        await at.until(lambda: at.tide.calls > 1, "to go on")


async def test_an_engine_without_metrics_is_learned_and_asked_rarely() -> None:
    async with sea() as at:
        at.send()
        await at.arrived(1)
        await eventually(lambda: at.model.scrapes == 1, "a look")
        for _ in range(5):
            await at.turned()
        assert (at.model.scrapes, at.tide.calls) == (1, 64)
        assert at.tide.decision.why == "learned: 64 calls"
        at.model.page = gauges(1, 0)
        at.world.clock.advance(5_000)
        await eventually(lambda: at.tide._sample is not None, "a later look")
        at.model.page = None
        await eventually(lambda: at.tide._reading is None, "the end of metrics")
        at.world.clock.advance(4_000)
        await at.turned()
        assert at.tide.decision.why.startswith("unseen")
        assert at.tide.calls == 16


HOSTILE = [
    b"",
    b"\x00\xff\xfe" * 1000,
    b"<html>",
    b"vllm:num_requests_running{",
    b"vllm:num_requests_running nan\nvllm:num_requests_waiting -1",
    b"vllm:num_requests_running 1e400\nvllm:num_requests_waiting 1e308",
    b"vllm:num_requests_running " + b"9" * 5_000,
    gauges(0, 0) + b'vllm:time_to_first_token_seconds_sum{model_name="m"} 1e300\n'
    b'vllm:time_to_first_token_seconds_count{model_name="m"} 1e-300\n',
    b'vllm:num_requests_running{a="}",b=} 3 # {} 4\n' * 100,
    b"#" * 3_000_000,
    b"\n" * 900_000,
]


async def test_no_page_of_metrics_stops_the_tide() -> None:
    async with sea() as at:
        flying = at.send()
        await at.arrived(1)
        for page in HOSTILE:
            at.model.page = page
            scrapes = at.model.scrapes
            at.world.clock.advance(6_000)
            await eventually(partial(at.model.scraped_since, scrapes), f"a look at {page[:30]!r}")
            await at.turned()
            assert at.tide.calls >= 1, page[:80]
        at.model.page = gauges(1, 0)
        at.world.clock.advance(6_000)
        now_ms = at.world.clock.monotonic
        await eventually(lambda: at.tide._sample is not None and at.tide._sample.at_ms >= now_ms, "a good page")
        at.model.batch.set()
        assert (await flying).status == 200


# Capacity that is not known.


async def test_unknown_capacity_begins_safe_grows_while_calls_succeed_and_shrinks_while_they_are_refused() -> None:
    async with sea(engine=EngineKind.GENERIC, is_capacity_known=False, max_in_flight=40) as at:
        seen = [at.router.free_slots("m")]
        while seen[-1] < 40:
            at.model.batch.clear()
            before = len(at.server.posts)
            round_of_calls = [at.send() for _ in range(seen[-1])]
            await at.arrived(before + seen[-1])
            assert at.router.free_slots("m") == 0
            await at.turned()
            at.model.batch.set()
            await asyncio.gather(*round_of_calls)
            await at.turned()
            seen.append(at.router.free_slots("m"))
            assert seen[-1] > seen[-2]
        assert (seen[0], seen[-1]) == (16, 40)
        at.model.status = 429
        allowed = []
        for _ in range(120):
            with pytest.raises(Throttled):
                await at.send()
            at.world.clock.advance(120_000)
            allowed.append(at.router.free_slots("m"))
        assert allowed[0] >= 38, "one refusal is one call in many"
        assert allowed[-1] == 1
        at.model.status = 200
        assert (await at.send()).status == 200


async def test_an_answer_that_can_change_nothing_yet_is_left_to_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tide_loop, "TICK_S", 1_000)
    async with sea(engine=EngineKind.GENERIC, is_capacity_known=False) as at:
        at.model.batch.set()
        asked = []
        for _ in range(2 * ROUND_CALLS_MIN):
            at.world.clock.advance(OWN_EVENTS_MS)
            await at.send()
            asked.append(at.tide._asked_ms == at.world.clock.monotonic_ms())
        assert asked == [False] * (ROUND_CALLS_MIN - 1) + [True] + [False] * (ROUND_CALLS_MIN - 1) + [True]
        at.model.status = 429
        with pytest.raises(Throttled):
            await at.send()
        assert at.tide._asked_ms == at.world.clock.monotonic_ms(), "a refusal is noticed at once"


async def test_calls_that_wait_for_a_limit_that_grows_are_woken() -> None:
    async with sea(engine=EngineKind.GENERIC, is_capacity_known=False) as at:
        calls = [at.send() for _ in range(60)]
        await at.arrived(16)
        await at.turned()
        assert len(at.server.posts) == 16
        at.model.batch.set()
        assert {(await task).status for task in calls} == {200}


# Other processes, and the one that was here before.


class Ocean:
    """The presence of other processes in a real store, which may be away."""

    def __init__(self, clock: HandClock) -> None:
        self.store = Store(SqliteDriver(None, clock.now_ms))
        self.away = False
        self.refused = 0
        self.reported: list[Present] = []

    async def report_to_fleet(
        self, worker_id: str, mine: Mapping[str, Present]
    ) -> Mapping[str, Mapping[str, FleetReport]]:
        if self.away:
            self.refused += 1
            raise StoreUnavailable("away")
        self.reported += mine.values()
        return await self.store.report_to_fleet(worker_id, mine)

    async def learned_calls(self, worker_id: str) -> Mapping[str, int]:
        return await self.store.learned_calls(worker_id)

    async def other(self, present: Present) -> None:
        await self.store.report_to_fleet("worker_other", {"one": present})


@asynccontextmanager
async def shared() -> AsyncIterator[tuple[Sea, Ocean]]:
    clock = HandClock()
    ocean = Ocean(clock)
    await ocean.store.migrate()
    capacity = Capacity(fleet=ocean, worker_id=lambda: "worker_me")
    try:
        async with sea(capacity=capacity, clock=clock) as at:
            yield at, ocean
    finally:
        await ocean.store.close()


async def test_users_of_other_processes_count_until_they_go() -> None:
    async with shared() as (at, ocean):
        await ocean.other(Present(1, 3, 1, 1, True))
        at.world.clock.advance(1_000)
        at.send(LONG_BYTES, hand_backs=2)
        await eventually(lambda: at.router.closed("m") == Reason.TIDE_CLOSED, "another's user to count")
        await ocean.other(Present(1, 3, 0, 0, True))
        at.world.clock.advance(600)
        await eventually(lambda: at.router.free_slots("m") > 0, "the report that they are gone")
        assert at.tide.others.workers == 1
        await eventually(lambda: any(one.calls for one in ocean.reported), "our call to be reported")


@pytest.mark.parametrize("end", ["silent", "away"])
async def test_a_process_with_nothing_to_do_is_not_closed_for_ever_by_the_last_report(end: str) -> None:
    async with shared() as (at, ocean):
        await ocean.other(Present(1, 3, 1, 1, True))
        await eventually(lambda: at.router.closed("m") == Reason.TIDE_CLOSED, "another's user to count")
        ocean.away = end == "away"
        at.world.clock.advance(4_000)
        await eventually(lambda: at.router.free_slots("m") > 0, "to go on without word of them")
        at.model.batch.set()
        assert (await at.send()).status == 200


async def test_a_store_that_is_away_is_one_line_and_gets_the_reports_when_it_is_back() -> None:
    async with shared() as (at, ocean):
        at.send(LONG_BYTES)
        await eventually(lambda: any(one.calls for one in ocean.reported), "the first report")
        with capture_logs() as lines:
            ocean.away = True
            for count in range(1, 6):
                at.world.clock.advance(600)
                await eventually(lambda count=count: ocean.refused >= count, "a report that fails")  # type: ignore[misc]
            reported_count = len(ocean.reported)
            ocean.away = False
            at.world.clock.advance(600)
            await eventually(lambda: len(ocean.reported) > reported_count, "a report that arrives")
        logged = [(one["event"], one["log_level"]) for one in lines if one["event"].startswith("tide_")]
        assert logged == [("tide_report_failed", "warning")]


async def test_calls_that_other_processes_report_are_not_taken_for_users() -> None:
    async with shared() as (at, ocean):
        at.model.page = gauges(6, 0)
        at.send()
        await at.arrived(1)
        await at.until(lambda: at.tide._tide._outside == 5, "five calls that no process has reported")
        await ocean.other(Present(1, 3, 2, 0, True))
        at.world.clock.advance(600)
        await at.until(lambda: at.tide._tide._outside == 0, "them to be known")


async def test_calls_that_another_process_had_no_time_to_report_are_not_taken_for_users() -> None:
    async with shared() as (at, ocean):
        at.model.page = gauges(1, 0)
        at.send()
        await at.arrived(1)
        await ocean.other(Present(1, 0, 0, 0, False))
        at.world.clock.advance(600)
        await at.until(lambda: at.tide.others.workers == 1, "another to be reported")
        await at.until(lambda: at.tide._tide._outside == 0, "a sample")
        seen = at.tide._sample
        at.model.page = gauges(9, 0)
        await at.until(lambda: at.tide._sample is not seen and at.tide._reading.running == 9, "eight more to be seen")  # type: ignore[union-attr]
        assert at.tide._tide._outside == 0, "another process may have begun them a moment ago"
        at.world.clock.advance(1_100)
        await at.until(lambda: at.tide._tide._outside == 8, "them to be users, for no process reported them")


async def test_without_reports_of_the_others_the_calls_of_an_engine_are_not_assigned() -> None:
    async with shared() as (at, ocean):
        await ocean.other(Present(1, 3, 0, 0, False))
        at.model.page = gauges(4, 0)
        at.send()
        await at.arrived(1)
        await at.until(lambda: at.tide.others.calls == 3 and at.tide._tide._outside == 0, "another to be reported")
        ocean.away = True
        at.world.clock.advance(4_000)
        await at.until(lambda: at.tide._sample is not None and at.tide._sample.known is None, "to lose sight")
        await eventually(lambda: at.tide.decision.why.startswith("unseen"), "to be careful")


async def test_first_tokens_of_other_processes_users_teach_nothing_about_our_prompts() -> None:
    def page(count: int) -> bytes:
        sums = f'vllm:time_to_first_token_seconds_sum{{model_name="m"}} {count * 9.0}\n'
        return gauges(1, 0) + f'{sums}vllm:time_to_first_token_seconds_count{{model_name="m"}} {count}\n'.encode()

    async with shared() as (at, ocean):
        at.model.page = page(1)
        at.send(hand_backs=2)
        await at.arrived(1)
        await at.until(lambda: at.tide._reading is not None, "a first look")
        await ocean.other(Present(0, 0, 1, 0, True))
        at.world.clock.advance(600)
        await at.until(lambda: at.tide.others.interactive == 1, "a user to be reported")
        before = at.tide._prefill.first_token_ms(1_000)
        at.send(hand_backs=2)
        at.tide._ahead.append(150)
        at.model.page = page(2)
        await at.until(lambda: at.tide._sample is not None and at.tide._sample.ttft_ms == 9_000, "a slow first token")
        assert at.tide._prefill.first_token_ms(1_000) == before
        await ocean.other(Present(0, 0, 0, 0, True))
        at.world.clock.advance(600)
        await at.until(lambda: at.tide.others.interactive == 0, "the user to be gone")
        await at.until(lambda: at.tide._sample is not None and at.tide._sample.ttft_ms is None, "a look without news")
        at.tide._ahead.append(150)
        at.model.page = page(3)
        await at.until(lambda: at.tide._prefill.first_token_ms(1_000) > before, "a lesson of our own")


# Who is counted.


async def test_where_no_users_are_sent_there_are_none_until_the_engine_shows_them() -> None:
    async with sea(serves=Serves.BATCH) as at:
        at.model.page = gauges(1, 0)
        at.send()
        await at.arrived(1)
        await at.until(lambda: at.tide._sample is not None, "a look")
        await at.turned()
        at.world.clock.advance(9_000)
        await at.turned()
        assert (at.tide.decision.why.partition(":")[0], at.tide.decision.prompt_tokens) == ("quiet", 8_192)
        at.model.page = gauges(4, 0)
        await at.until(lambda: at.tide.decision.why.startswith("beside: 3 "), "unknown calls to count all the same")


async def test_a_flex_call_is_one_of_the_tides_flights_and_is_never_taken_back() -> None:
    async with sea() as at:
        at.model.page = gauges(1, 0)
        flex = at.open(flex_wait_s=30, size=LONG_BYTES)
        await at.arrived(1)
        assert at.tide.present().calls == 1
        assert at.tide._awaiting_tokens > LONG_BYTES // 8
        await at.until(lambda: at.tide._tide._outside == 0, "it to be known as ours")
        at.users_are(1, 1)
        assert at.tide.decision.hand_back == 1
        at.model.first_token.set()
        response = await flex
        assert at.tide._awaiting_tokens == 0, "its first token is seen, not estimated"
        assert at.tide.present().calls == 1
        at.users_are(0, 0)
        at.model.end.set()
        while await response.read():
            pass
        assert (at.tide.present().calls, at.router._states["one"].in_flight) == (0, 0)


async def test_first_tokens_in_a_row_ask_the_controller_once_and_wake_waiting_calls() -> None:
    async with sea() as at:
        now_ms = at.world.clock.monotonic_ms()
        flights = [at.tide.begin_flight(f"k{number}", b"x" * SHORT_BYTES, now_ms) for number in range(50)]
        asked = 0
        observe = at.tide._tide.observe

        def counted(signals: Signals) -> Decision:
            nonlocal asked
            asked += 1
            return observe(signals)

        at.tide._tide.observe = counted  # type: ignore[method-assign]
        at.world.clock.advance(100)
        for flight in flights:
            at.tide.first_token(flight)
        assert (asked, at.tide._awaiting_tokens) == (1, 0)
        for flight in flights:
            at.tide.end_flight(flight, None)


@pytest.mark.parametrize(("before", "begins"), [(40, 40), (3, 16), (900, 64)])
async def test_a_restarted_process_begins_with_the_calls_that_were_learned_before(before: int, begins: int) -> None:
    clock = HandClock()
    ocean = Ocean(clock)
    await ocean.store.migrate()
    try:
        await ocean.store.report_to_fleet("", {"one": Present(1, 2, tide=before), "gone": Present(1, 9, tide=9)})
        learned: dict[str, Any] = {"engine": EngineKind.GENERIC, "is_capacity_known": False, "max_in_flight": 64}
        async with sea(capacity=Capacity(fleet=ocean), clock=clock, **learned) as at:
            await eventually(lambda: bool(ocean.reported), "the first report")
            assert at.router.free_slots("m") == begins
    finally:
        await ocean.store.close()
