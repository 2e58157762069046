"""A worker among models whose circuits are open, blobs that are away, calls that break, and orders to stop."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.guards.test_guard import rules
from tests.support.store_verbs import lease_slices, slice_counts
from tests.worker import world as worker_world
from tests.worker.world import BODY, DEADLINE_S, Script, WorkerWorld, chat_lines, here, until, working
from tidegate import metrics
from tidegate.core.budgets.budget import Budget, Limit, LimitBound, Period
from tidegate.core.errors import BlobUnavailable, Unavailable, Withheld
from tidegate.core.input.lines import LineRules
from tidegate.core.input.turns import IngestLane, IngestLimits
from tidegate.core.nouns import Answer, Attempts, Call, Caller, IngestPlan, JobFlush, KeepTimes, Usage
from tidegate.core.operations import OperationScope
from tidegate.core.policies import Policies
from tidegate.core.schedule import Mode, Policy
from tidegate.core.states import JobState, OperationState
from tidegate.core.usage.prices import Price
from tidegate.stages.record import SPARE_COUNT, FlushLimits
from tidegate.stages.ship import QUICK
from tidegate.store.tenants.keys import KeyRights
from tidegate.worker import leasing
from tidegate.worker.leased_work import TOKENS_REST_MS_MAX
from tidegate.worker.scheduler import Scheduler

pytestmark = pytest.mark.anyio


async def test_slices_of_a_model_with_an_open_circuit_do_not_fill_the_hand_for_ever(live: WorkerWorld) -> None:
    """A worker full of small slices of a model whose circuit had just opened kept every other model waiting until it came back."""
    script = Script(live, "unhealthy", "open")
    opening = asyncio.Event()

    async def fails(call: Call) -> Answer:
        if call.model == "unhealthy" and not opening.is_set():
            await opening.wait()
            raise Unavailable("refused", retry_after_ms=1)
        return Answer(200, BODY, Usage(), "here")

    script.answers = fails
    jobs = [await live.started(chat_lines(1, "unhealthy")) for _ in range(6)]
    async with working(live, script, slice_count_max=3):
        await until(lambda: len(script.calls) == 3, "a full worker")
        script.open_circuits.add("unhealthy")
        opening.set()
        other = await live.started(chat_lines(2, "open"))
        await live.completed(other)
        script.open_circuits.clear()
        await live.rows("update slices set ready_at = 0")
        for job in jobs:
            await live.completed(job)


async def test_any_number_of_jobs_for_a_closed_model_hides_no_open_one(live: WorkerWorld) -> None:
    """A look at what is ready is bounded: all that it shows could wait for a model that is away."""
    one_by_one = Policy(flows_per_decision_max=1, jobs_per_flow_max=1)
    script = Script(live, "unhealthy", "closed", "open")
    script.open_circuits |= {"unhealthy", "closed"}
    for _ in range(4):
        await live.started([*chat_lines(1, "unhealthy"), *chat_lines(1, "closed", 1)])
    job = await live.started(chat_lines(2, "open"))
    bad = await live.started([*chat_lines(1, "open"), b"not json"], invalid_lines="error_file")
    async with working(live, script, scheduling=one_by_one):
        await live.completed(job)
        await live.completed(bad)


async def test_a_model_without_deployments_fails_its_items_and_no_others(live: WorkerWorld) -> None:
    script = Script(live, "m")
    job = await live.started([*chat_lines(3, "unknown"), *chat_lines(3, "m", 3)])
    async with working(live, script):
        await live.completed(job)
    done = await live.look(job)
    assert (done.answered_count, done.failed_count) == (3, 3)


@pytest.mark.parametrize("is_leased", [False, True], ids=["left alone", "leased before it was known"])
async def test_items_of_an_unknown_model_wait_while_another_process_may_know_it(
    live: WorkerWorld, monkeypatch: pytest.MonkeyPatch, is_leased: bool
) -> None:
    """New settings reach processes one after another, and a batch may come between two of them."""
    asked, wait_ms = [0], [10_000]

    def unknown_wait_ms(_: Policies, model: str) -> int:
        assert model == "new"
        asked[0] += 1
        return wait_ms[0]

    monkeypatch.setattr(Policies, "unknown_wait_ms", unknown_wait_ms)
    if is_leased:
        monkeypatch.setattr(Scheduler, "_room_of", lambda self, room, model: (room(model)[0], None))
    script = Script(live, "m")
    job = await live.started([*chat_lines(3, "new"), *chat_lines(3, "m", 3)])
    async with working(live, script):
        await until(lambda: asked[0] >= 3, "it to be asked for")
        [rest] = await settled(live, "select ready_at, state, lease_count from slices where model = 'new'")
        assert (rest[0] > live.clock.now_ms(), rest[1:]) == (is_leased, ("ready", int(is_leased)))
        assert (await live.look(job)).failed_count == 0
        wait_ms[0] = 0
        await live.rows("update slices set ready_at = 0")
        await live.completed(job)
    done = await live.look(job)
    assert (done.answered_count, done.failed_count) == (3, 3)


async def settled(world: WorkerWorld, sql: str) -> list[Any]:
    """The rows once no slice of them is out."""
    found = await world.rows(sql)
    while any(row[1] == "leased" for row in found):
        await asyncio.sleep(0.01)
        found = await world.rows(sql)
    return found


@pytest.mark.parametrize("invalid_lines", ["fail", "error_file"])
async def test_a_wrong_body_parameter_is_a_400_for_its_own_item(live: WorkerWorld, invalid_lines: str) -> None:
    script = Script(live, "m")
    good = chat_lines(3, "m")
    wrong = [good[0].replace(b'"c0"', b'"zero"').replace(b'"model"', b'"n": 0, "model"')]
    wrong.append(good[0].replace(b'"c0"', b'"none"').replace(b"messages", b"massages"))
    job = await live.started([wrong[0], *good, wrong[1]], invalid_lines=invalid_lines)
    async with working(live, script):
        await live.completed(job)
    done = await live.look(job)
    assert (done.state, done.answered_count, done.failed_count) == (JobState.COMPLETED, 3, 2)
    lines = {line["custom_id"]: line for line in await live.file_lines(done.error_file_id)}
    assert [(line["error"], line["response"]["status_code"]) for line in lines.values()] == [(None, 400)] * 2
    zero, none = (lines[name]["response"]["body"]["error"] for name in ("zero", "none"))
    assert (zero["type"], zero["code"], zero["param"]) == ("invalid_request_error", "invalid_request", "n")
    assert (none["code"], none["param"]) == ("missing_required_parameter", "messages")
    assert "(line 5)" in none["message"]
    assert {call.number for call in script.calls} == {0, 1, 2}, "nothing wrong was sent"


async def test_a_call_that_breaks_in_an_unforeseen_way_fails_its_item_alone(live: WorkerWorld) -> None:
    """The runner died of it, the item was forgotten while its slice stayed leased, and the worker took no more work at all."""
    script = Script(live, "m")

    async def broken(call: Call) -> Answer:
        if call.number == 1:
            raise ZeroDivisionError("secret prompt")
        return Answer(200, BODY, Usage(), "here")

    script.answers = broken
    job = await live.started(chat_lines(5, "m"))
    with capture_logs() as logs:
        async with working(live, script) as run:
            await live.completed(job)
            assert run.worker.trouble() is None
    assert {one["kind"] for one in logs if one["event"] == "item_call_crashed"} == {"ZeroDivisionError"}
    assert "secret" not in str(logs)
    done = await live.look(job)
    assert (done.answered_count, done.failed_count) == (4, 1)
    [line] = await live.file_lines(done.error_file_id)
    assert (line["custom_id"], line["error"]["code"]) == ("c1", "internal_error")
    assert "secret" not in line["error"]["message"]
    assert [call.number for call in script.calls].count(1) == 3


async def test_prompts_of_two_owners_never_count_as_beginning_alike(live: WorkerWorld) -> None:
    """Whose prompts share a server's cache would show in how quickly it answers."""
    script = Script(live, "m")
    jobs = [await live.started(chat_lines(2), caller=await live.caller(name)) for name in ("a", "b")]
    async with working(live, script):
        for job in jobs:
            await live.completed(job)
    groups = {job.id: {call.prefix_group for call in script.calls if call.job_id == job.id} for job in jobs}
    mine, theirs = groups.values()
    assert "" not in mine
    assert not mine & theirs


class AwayToRead:
    """Blobs of which nothing can be read while `away`."""

    def __init__(self, world: WorkerWorld) -> None:
        self._inner: Any = world.blobs
        self.away = True
        self.reads = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def read(self, blob_id: str, at: int, count: int) -> bytes:
        self.reads += 1
        if self.away:
            raise BlobUnavailable("away")
        return bytes(await self._inner.read(blob_id, at, count))


async def test_a_blob_store_that_is_away_is_not_asked_for_slice_after_slice(live: WorkerWorld) -> None:
    """Each slice that could not be read was given back and the next one leased at once, through all there were, again and again."""
    script, blobs = Script(live, "m"), AwayToRead(live)
    job = await live.started(chat_lines(200), slice_items=1)
    async with working(live, script, blobs, poll_ms=60_000):
        await until(lambda: blobs.reads > 0, "a try")
        for _ in range(50):
            await asyncio.sleep(0.002)
        assert blobs.reads <= 8, "one round, then a pause"
    assert not script.calls
    assert await slice_counts(live.store, job.id) == {"ready": 200}


async def test_a_lease_under_way_at_a_stop_is_handed_back_and_no_worker_is_blamed(live: WorkerWorld) -> None:
    """It was leased after everything else was given back, stayed leased, and counted as a lost worker's."""
    script = Script(live, "m")
    job = await live.started(chat_lines(8), slice_items=4)
    reading, resume_timeout = asyncio.Event(), asyncio.Event()

    class Slow(AwayToRead):
        async def read(self, blob_id: str, at: int, count: int) -> bytes:
            reading.set()
            await resume_timeout.wait()
            return bytes(await self._inner.read(blob_id, at, count))

    async with working(live, script, Slow(live)) as run:
        async with asyncio.timeout(10):
            await reading.wait()
        leaving = asyncio.create_task(run.leave())
        while run.worker._supervisor.is_working:  # noqa: ASYNC110 - a few turns of the loop
            await asyncio.sleep(0)
        resume_timeout.set()
        await leaving
    assert not script.calls
    rows = await live.rows("select state, lost_count from slices where job_id = ?", job.id)
    assert rows == [("ready", 0), ("ready", 0)]


async def test_a_long_deferral_that_outlived_its_worker_is_not_held_in_the_next_ones_hand(live: WorkerWorld) -> None:
    """An item that may not be sent for an hour kept its slice, and one of the worker's places, for that hour."""
    script = Script(live, "m")
    job = await live.started(chat_lines(4))
    lost = await live.worker()
    assert await lease_slices(live.store, lost, job.id, "m", 1, "t")
    await _defer(live, job.id, number=2, for_ms=3_600_000)
    assert await live.store.declare_gone(lost, leaving=True)
    async with working(live, script) as run:
        await until(lambda: len(script.calls) == 3, "the other items")
        await until(lambda: run.worker._items.leased_work.slice_count == 0, "no leased work")

        async def rests() -> bool:
            rows = await live.rows("select state, ready_at - now_ms() > 3000000 from slices where job_id = ?", job.id)
            return rows == [("ready", 1)]

        await until(rests, "a slice that rests in the store")


async def _defer(world: WorkerWorld, job_id: str, number: int, for_ms: int) -> None:
    note = ("t", Attempts(number, 1, for_ms, "upstream_throttled"))
    await world.store.record_outcomes([JobFlush(job_id, attempts=[note])], [], [])


async def test_names_of_models_do_not_pile_up_in_the_hand(live: WorkerWorld) -> None:
    names = [f"model-{number}" for number in range(30)]
    script = Script(live, *names)
    lines = [line for number, name in enumerate(names) for line in chat_lines(1, name, number)]
    job = await live.started(lines)
    async with working(live, script) as run:
        await live.completed(job)
        leased_work = run.worker._items.leased_work
        await until(lambda: len(leased_work._stocks) <= 1, "no leased work")


async def test_a_suspect_of_one_job_keeps_no_other_job_waiting(live: WorkerWorld) -> None:
    """While a worker held one suspect, a job that had only suspects left took all the room of its model and gave nothing for it."""
    script = Script(live, "m")
    gate = asyncio.Event()
    suspects = await live.started(chat_lines(4))
    for _ in range(3):
        dying = await live.worker()
        assert await lease_slices(live.store, dying, suspects.id, "m", 1, dying)
        assert await live.store.declare_gone(dying, leaving=True)
        assert await live.store.reclaim_slices(dying) == 1

    async def slow(call: Call) -> Answer:
        if call.job_id == suspects.id:
            await gate.wait()
        return Answer(200, BODY, Usage(), "here")

    script.answers = slow
    async with working(live, script, in_flight_max=3):
        await until(lambda: len(script.calls) == 2, "the first half of the suspects")
        other = await live.started(chat_lines(3))
        await live.completed(other)
        assert [call.job_id for call in script.calls].count(suspects.id) == 2
        gate.set()
        await live.completed(suspects)


async def test_a_publish_that_hangs_keeps_no_other_job_from_being_cancelled(live: WorkerWorld) -> None:
    """Expiry, cancel and publishing took turns in one loop, so a blob store that answered slowly held up what needs no blobs."""
    script = Script(live, "m")
    state = asyncio.Event()

    class Hanging(AwayToRead):
        async def create(self, blob_id: str) -> Any:
            await state.wait()
            return await self._inner.create(blob_id)

        async def read(self, blob_id: str, at: int, count: int) -> bytes:
            return bytes(await self._inner.read(blob_id, at, count))

    script.open_circuits.add("m")
    stuck, waiting = await live.started(chat_lines(3)), await live.job(chat_lines(2))
    await live.store.take_step(waiting.id, JobState.VALIDATING, await live.worker(1), "t")
    async with working(live, script, Hanging(live)):
        await live.store.cancel_job(stuck.tenant_id, stuck.id)
        await live.reaches(stuck, JobState.FINALIZING)
        await live.store.cancel_job(waiting.tenant_id, waiting.id)
        await live.reaches(waiting, JobState.CANCELLED)
        state.set()
        await live.reaches(stuck, JobState.CANCELLED)


async def test_a_call_that_waits_in_the_router_may_not_begin_when_its_job_is_paused(live: WorkerWorld) -> None:
    script, gate = Script(live, "m"), asyncio.Event()

    async def waits(call: Call) -> Answer:
        await gate.wait()
        assert call.may_begin is not None
        if not call.may_begin():
            raise Withheld("paused", until_ms=live.clock.monotonic_ms(), code="lease_over")
        return Answer(200, BODY, Usage(), "here")

    script.answers = waits
    job = await live.started(chat_lines(2))
    async with working(live, script):
        await until(lambda: len(script.calls) == 2, "both calls to wait for a slot")
        await live.store.pause_job(job.tenant_id, job.id)
        await until(lambda: not any(one.may_begin() for one in script.calls if one.may_begin), "the worker to know")
        gate.set()
        await until(lambda: _handed_back(live, job), "its slices to be handed back")
        assert (await live.look(job)).answered_count == 0
        await live.store.resume_job(job.tenant_id, job.id)
        await live.completed(job)
    assert len(script.calls) == 4


async def _handed_back(world: WorkerWorld, job: Any) -> bool:
    return not [row for row in await world.rows("select job_id from slices where state = 'leased'") if row[0] == job.id]


@pytest.mark.parametrize(
    ("limit", "rest_ms_max"),
    [(Limit(Period.HOUR, requests=1), 3_600_000), (Limit(Period.HOUR, tokens=1), TOKENS_REST_MS_MAX)],
)
async def test_items_of_a_job_whose_budget_is_spent_go_back_until_it_allows_something(
    live: WorkerWorld, limit: Limit, rest_ms_max: int
) -> None:
    """They are neither kept leased nor looked at: other jobs of the same model run meanwhile, and none asks again before. Only tokens
    are looked for sooner: calls in flight may give back what they did not take."""
    script = Script(live, "m")
    budget = Budget(LimitBound.JOB, "mine", (limit,))

    async def spent(call: Call) -> Answer:
        if call.budgets and script.spent_until:
            raise Withheld("spent", until_ms=script.spent_until, retry_after_ms=30_000)
        return Answer(200, BODY, Usage(), "here")

    script.answers = spent
    limited = await live.started(chat_lines(8, "m"))
    script.spent_until = live.clock.monotonic_ms() + 3_600_000
    async with working(live, script, job_budgets={limited.id: (budget,)}):
        await until(lambda: rests(live, limited), "the job at rest")
        [(rest_ms,)] = await live.rows("select max(rests_until) - now_ms() from job_models")
        assert rest_ms_max / 2 < rest_ms <= rest_ms_max
        free = await live.started(chat_lines(8, "m"))
        await live.completed(free)
        assert (await live.look(limited)).answered_count == 0
        assert await live.rows("select max(count) from attempts") in ([(0,)], [(None,)]), "waiting is no attempt"
        await until(lambda: _sleeps(live), "its flow asleep until then")
        script.spent_until = 0.0
        await until(lambda: _cleared(live, limited), "the job that waited")


async def _cleared(world: WorkerWorld, job: Any) -> bool:
    """A rest from before may still be on its way to the store, so nothing rests or sleeps at each look."""
    await world.rows("update job_models set rests_until = 0")
    await world.rows("update slices set ready_at = 0")
    await world.rows("update flows set wakes_at = 0 where state = 'asleep'")
    return (await world.look(job)).state is JobState.COMPLETED


async def _sleeps(world: WorkerWorld) -> bool:
    return bool(await world.rows("select 1 from flows where state = 'asleep' and wakes_at > now_ms()"))


async def rests(world: WorkerWorld, job: Any) -> bool:
    resting = [
        row
        for row in await world.rows("select job_id from job_models where rests_until > now_ms()")
        if row[0] == job.id
    ]
    state = [row for row in await world.rows("select job_id from slices where state = 'leased'") if row[0] == job.id]
    return bool(resting) and not state


async def test_a_response_that_has_waited_is_leased_and_sent_though_the_tide_is_closed(live: WorkerWorld) -> None:
    """The tide leaves background work no slot: only what goes like an interactive call runs, and a full worker does not matter."""
    script = Script(live, "m")
    script.full.add("m")
    waiting, turned = await live.started(chat_lines(1, "m")), await live.started(chat_lines(1, "m"))
    async with working(live, script, slice_count_max=1):
        await asyncio.sleep(0.1)
        assert not script.calls
        await live.rows("update jobs set interactive_at = now_ms() where id = ?", turned.id)
        await live.completed(turned)
        assert (script.calls, [owner for _, owner in script.interactive_calls]) == ([], [""])
        assert (await live.look(waiting)).begun_at is None
        done = await live.look(turned)
        assert b'"tidegate":{"service_tier":"default"}' in await live.file_bytes(done.output_file_id)
        script.full.clear()
        await live.completed(waiting)
        assert len(script.calls) == 1


async def test_what_was_sent_like_an_interactive_call_counts_and_costs_like_one(live: WorkerWorld) -> None:
    """Under a key its slots are its organization's, and it is not paid for at the price of batch work."""
    script = Script(live, "m")
    script.full.add("m")
    tenant_id = await live.store.put_tenant(live.id("tenant"), "acme")
    await live.store.put_key(Caller(tenant_id, "k1"), b"hash", "", KeyRights(models="[]"))
    job = await live.started(chat_lines(1, "m"), caller=Caller(tenant_id, "k1"))
    await live.rows("update jobs set interactive_at = now_ms() where id = ?", job.id)
    price = Price(input_nano=1_000_000, output_nano=2_000_000, batch_factor_ppm=500_000)
    script.prices = {"here": price}
    async with working(live, script):
        await live.completed(job)
    assert [owner for _, owner in script.interactive_calls] == [tenant_id]
    assert (await live.look(job)).cost_nano == 3


async def test_so_many_at_most_are_held_that_go_like_interactive_calls(
    live: WorkerWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leasing, "LONG_WAITING_MAX", 1)
    monkeypatch.setattr(leasing, "LONG_WAITING_EVERY_MS", 1)
    models = ["a", "b", "c"]
    script, gate = Script(live, *models), asyncio.Event()
    script.full.update(models)

    async def slow(call: Call) -> Answer:
        await gate.wait()
        return Answer(200, BODY, Usage(), "here")

    script.answers = slow
    jobs = [await live.started(chat_lines(1, model)) for model in models]
    await live.rows("update jobs set interactive_at = now_ms()")
    async with working(live, script):
        await until(lambda: bool(script.interactive_calls), "the first of them")
        await asyncio.sleep(0.1)
        assert len(script.interactive_calls) == 1
        gate.set()
        for job in jobs:
            await live.completed(job)


async def test_a_response_of_a_model_for_batches_alone_stays_where_it_is(live: WorkerWorld) -> None:
    """Leased for a turn that it never gets, it would keep its place in this worker and be of use to none."""
    script, asked = Script(live, "m"), asyncio.Event()
    script.full.add("m")

    def takes_none(model: str) -> bool:
        asked.set()
        return False

    script.takes_interactive = takes_none  # type: ignore[method-assign]
    job = await live.started(chat_lines(1, "m"))
    await live.rows("update jobs set interactive_at = now_ms()")
    async with working(live, script):
        await asyncio.wait_for(asked.wait(), 20)
        await asyncio.sleep(0.1)
        assert (await live.look(job)).begun_at is None


async def test_an_item_costs_one_row_and_a_share_of_what_is_written_for_many(live: WorkerWorld) -> None:
    """Also where a door wants events of items; the row of the job is written for flushes, not for items."""
    tables = [row[0] for row in await live.rows("select name from sqlite_master where type = 'table'")]
    await live.rows("create table row_writes (name text)")
    for name in tables:
        for kind in ("insert", "update", "delete"):
            noted = f"insert into row_writes values ('{name}')"  # noqa: S608 - names of our own schema
            await live.rows(f"create trigger {kind}_{name} after {kind} on {name} begin {noted}; end")
    job = await live.started(chat_lines(1_024), door="{}")
    await live.rows("delete from row_writes")
    flush = FlushLimits(50, 256, 1 << 20, 64 << 20)
    async with working(live, Script(live, "m"), in_flight_max=256, slice_count_max=64, flush=flush):
        await live.completed(job)
        writes = dict(await live.rows("select name, count(*) from row_writes group by name"))
    # Those of heartbeats and of the store's clock are a matter of time.
    counts = {name: count for name, count in writes.items() if name not in ("workers", "clock", "meta")}
    assert counts["outcomes"] == 1_024
    assert sum(counts.values()) < 1_024 * 1.5
    assert counts["jobs"] < 1_024 / 8


async def test_a_worker_that_was_declared_gone_sends_nothing_again_that_it_has_the_answer_of(
    live: WorkerWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answers wait for a store that hangs. They are committed before the next life leases the items that they belong to."""
    script = Script(live, "m")
    job = await live.started(chat_lines(8), slice_items=2)
    gate, record_outcomes = asyncio.Event(), live.store.record_outcomes

    async def hanging(*asked: Any) -> Any:
        await gate.wait()
        return await record_outcomes(*asked)

    monkeypatch.setattr(live.store, "record_outcomes", hanging)
    async with working(live, script, in_flight_max=8) as run:
        await until(lambda: len(script.calls) == 8 and not run.worker._items.leased_work.in_flight, "eight answers")
        lost = run.me.id
        assert await live.store.declare_gone(lost, leaving=True)
        assert await live.store.reclaim_slices(lost) == 4
        # A heartbeat at once.
        run.worker._items.recorder.job_stopped.set()
        await until(lambda: run.me.id != lost, "the next life")
        await until(lambda: run.worker._items.recorder.full, "the answers to be waited for")
        gate.set()
        await live.completed(job)
    assert sorted(call.number for call in script.calls) == list(range(8))


async def test_a_next_life_writes_to_no_log_that_was_begun_while_it_was_enlisted(
    live: WorkerWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a log belongs to the life that ended: it would be collected under the lines of the next one."""
    script, gate, asked = Script(live, "m"), asyncio.Event(), asyncio.Event()
    job = await live.started(chat_lines(8), slice_items=2)
    enlist_worker = live.store.enlist_worker

    async def slow(*args: Any) -> None:
        asked.set()
        await gate.wait()
        await enlist_worker(*args)

    async with working(live, script, in_flight_max=8) as run:
        await live.completed(job)
        recorder, lost = run.worker._items.recorder, run.me.id
        spares = recorder._spare_blob_ids["answers"]
        monkeypatch.setattr(live.store, "enlist_worker", slow)
        assert await live.store.declare_gone(lost, leaving=True)
        recorder.job_stopped.set()
        await asked.wait()
        # Something to do for the recorder: it begins logs ahead.
        recorder._announce()
        await until(lambda: len(spares) == SPARE_COUNT, "logs of the life that ended")
        theirs = set(spares)
        gate.set()
        await until(lambda: run.me.id != lost, "the next life")
        assert not theirs.intersection(spares)
        again = await live.started(chat_lines(2))
        await live.completed(again)
        await until(lambda: len(spares) == SPARE_COUNT, "its logs")
        owners = await live.rows("select distinct worker_id from blobs where state = 'writing' and kind = 'answers'")
    assert owners == [(run.me.id,)]


async def test_results_that_take_long_to_put_in_order_are_published_too(live: WorkerWorld) -> None:
    script = Script(live, "m")
    body = json.dumps({"text": "x" * (QUICK.bytes_max // 2)}).encode()

    async def answer_at_length(call: Call) -> Answer:
        return Answer(200, body, Usage(1, 0, 1, 0), "here")

    script.answers = answer_at_length
    async with working(live, script):
        job = await live.completed(await live.job(chat_lines(2), ordered=True))
    assert len(await live.file_bytes(job.output_file_id)) > QUICK.bytes_max


async def test_a_large_input_is_read_in_its_own_lane_by_the_operators_bound(
    live: WorkerWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_in: list[IngestLane] = []

    async def noted(input_path: Path, work_path: Path, rules: LineRules, lane: IngestLane) -> IngestPlan:
        read_in.append(lane)
        return await here(input_path, work_path, rules, lane)

    monkeypatch.setattr(worker_world, "here", noted)
    async with working(live, Script(live, "m"), ingest=IngestLimits(small_bytes_max=1)):
        await live.completed(await live.job(chat_lines(1)))
    assert read_in == [IngestLane.LARGE]


async def test_a_worker_follows_a_switch_of_the_mode(live: WorkerWorld) -> None:
    def followed() -> set[str]:
        [samples] = [one.samples for one in metrics.REGISTRY.collect() if one.name == "tidegate_scheduler_config_info"]
        return {sample.labels["mode"] for sample in samples}

    async with working(live, Script(live, "m")):
        assert followed() == {Policy().mode}
        await live.store.override_mode(Mode.FIFO)
        await until(lambda: followed() == {Mode.FIFO}, "the mode to be followed")


async def test_a_worker_carries_out_what_an_operator_asked_for_many_jobs(live: WorkerWorld) -> None:
    jobs = [await live.started(chat_lines(1)) for _ in range(2)]
    made = await live.store.put_operation(live.id("op"), "operator", OperationScope("cancel"))
    script = Script(live, "m")
    script.full.add("m")
    async with working(live, script):
        ends = [await live.ended(job) for job in jobs]
        assert [job.state for job in ends] == [JobState.CANCELLED, JobState.CANCELLED]

        async def is_completed() -> bool:
            operation = await live.store.get_operation(made.id)
            return operation is not None and operation.state is OperationState.COMPLETED

        await until(is_completed, "the operation to be completed")


async def test_a_worker_forgets_what_ended_long_ago(live: WorkerWorld) -> None:
    async with working(live, Script(live, "m"), sweep_ms=5, keep=KeepTimes(completed_ms=1, metadata_ms=1)):
        job = await live.job(chat_lines(1))

        async def is_forgotten() -> bool:
            return await live.store.any_job(job.id) is None

        await until(is_forgotten, "the job to be forgotten")


async def test_a_worker_that_stopped_leaves_no_thread_of_a_hook(
    live: WorkerWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hook_of_a_stop.py").write_text("def first(body, about):\n    return body\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    made = rules(hooks={"of_a_stop": {"before": "hook_of_a_stop:first"}})
    async with working(live, Script(live, "m"), rules=made):
        await live.completed(await live.job(chat_lines(1)))
        [thread] = [one for one in threading.enumerate() if one.name == "hook of_a_stop"]
    await asyncio.to_thread(thread.join, DEADLINE_S)
    assert not thread.is_alive()
