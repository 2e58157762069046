"""A key's state counts for every item as of now: what is revoked, expired or no longer allowed in the middle of a job is not sent."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.ports import PushedClock
from tests.support.store_verbs import lease_slices
from tests.worker.world import BODY, DEADLINE_S, HOUR_MS, Script, WorkerWorld, chat_lines, until, working
from tidegate import metrics
from tidegate.core.budgets.budget import Limit, LimitBound, Period
from tidegate.core.errors import StoreUnavailable
from tidegate.core.keys import models_text
from tidegate.core.nouns import Answer, Call, Job, Usage
from tidegate.store.tenants.keys import KeyRights
from tidegate.worker.call_rules import BELIEVED_MS, KeyStates

pytestmark = pytest.mark.anyio

ITEMS = 24


class Door:
    """An upstream that answers so many calls, and the others when it is opened."""

    def __init__(self, script: Script, count: int) -> None:
        self._left = count
        self.open = asyncio.Event()
        script.answers = self._answer

    async def _answer(self, call: Call) -> Answer:
        self._left -= 1
        if self._left < 0:
            await self.open.wait()
        return Answer(200, BODY, Usage(1, 0, 1, 0), "here")


async def codes(world: WorkerWorld, job: Job) -> set[str]:
    return {line["error"]["code"] for line in await world.file_lines(job.error_file_id)}


async def called(script: Script, count: int) -> None:
    await until(lambda: len(script.calls) >= count, "the first calls")


async def settled(world: WorkerWorld, run: Any) -> None:
    """The worker has asked for its keys' states since now: what it asked before may be believed no longer."""
    states: KeyStates = run.worker._items.keys
    since_ms = world.clock.monotonic_ms()
    await until(lambda: states._asked_ms > since_ms, "a fresh look at the keys")


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ("revoke", "key_revoked"),
        ("expire", "key_expired"),
        ("delete", "key_deleted"),
        ("models", "model_not_allowed"),
        ("resources", "resource_not_allowed"),
    ],
)
async def test_what_changes_in_the_middle_of_a_job_holds_for_the_rest_of_it(
    live: WorkerWorld, change: str, code: str
) -> None:
    """What is in flight ends as it would; nothing more is sent; the rest fails with a code that says why."""
    script = Script(live, "m")
    door = Door(script, 4)
    caller = await live.key()
    job = await live.started(chat_lines(ITEMS), slice_items=4, caller=caller)
    async with working(live, script) as run:
        await called(script, 8)
        match change:
            case "revoke":
                assert await live.store.revoke_key("k1")
            case "expire":
                assert await live.store.change_key("k1", KeyRights(expires_at=live.clock.now_ms() - 1))
            case "delete":
                await drop_key(live)
            case "models":
                assert await live.store.change_key("k1", KeyRights(models=models_text(["other"])))
            case "resources":
                assert await live.store.change_key("k1", KeyRights(resources=models_text(["other"])))
        await settled(live, run)
        door.open.set()
        done = await live.ended(job)
    assert (done.answered_count, done.failed_count, len(script.calls)) == (8, ITEMS - 8, 8)
    assert await codes(live, done) == {code}
    for line in await live.file_lines(done.error_file_id):
        assert ": " in line["error"]["message"], "a refusal says what to do next"


async def drop_key(world: WorkerWorld) -> None:
    async def body(tx: Any) -> None:
        tx._connection.execute("delete from keys where id = 'k1'")

    await world.store._driver.write(body)


async def test_a_key_that_expires_by_the_clock_needs_no_news(live: WorkerWorld) -> None:
    """The moment is known beforehand, so it holds to the millisecond and not to the next look."""
    states = KeyStates(live.store, live.clock, {})
    caller = await live.key(expires_at=live.clock.now_ms() + HOUR_MS)
    job = await live.started(chat_lines(1), caller=caller)
    worker = await live.worker()
    [leased] = await lease_slices(live.store, worker, job.id, "m", 1, "token")
    assert states.denial(leased) is not None, "no state was asked for yet"
    await states.ask(worker)
    assert states.denial(leased) is None
    assert states.believed_until_ms(leased) <= live.clock.monotonic_ms() + 2_000


async def test_an_allowlist_that_was_widened_lets_the_rest_pass(live: WorkerWorld) -> None:
    script = Script(live, "m", "n")
    door = Door(script, 0)
    caller = await live.key()
    first = await live.started(chat_lines(2, "n"), caller=caller)
    assert await live.store.change_key("k1", KeyRights(models=models_text(["m"])))
    async with working(live, script) as run:
        assert await codes(live, await live.ended(first)) == {"model_not_allowed"}
        assert await live.store.change_key("k1", KeyRights(models=models_text(["m", "n"])))
        await settled_or_idle(live, run)
        second = await live.started(chat_lines(2, "n"), caller=caller)
        door.open.set()
        assert (await live.ended(second)).answered_count == 2


async def settled_or_idle(world: WorkerWorld, run: Any) -> None:
    """Nothing under a key is held, so the worker does not ask: its last answer is too old by the time anything comes."""
    states: KeyStates = run.worker._items.keys
    await until(lambda: not states.knows("k1"), "forgetting")


async def test_a_resource_is_judged_by_the_model_behind_it(live: WorkerWorld) -> None:
    script = Script(live, "chat", "m")
    caller = await live.key()
    by_resource = await live.started(chat_lines(2, "chat"), caller=caller)
    by_model = await live.started(chat_lines(2, "m"), caller=caller)
    assert await live.store.change_key("k1", KeyRights(models=models_text(["m"]), resources=models_text(["chat"])))
    async with working(live, script, model_of={"chat": "m"}):
        assert (await live.ended(by_resource)).answered_count == 2
        assert await codes(live, await live.ended(by_model)) == {"resource_not_allowed"}


async def test_a_call_says_which_models_its_key_allows_now_so_that_no_fallback_leads_elsewhere(
    live: WorkerWorld,
) -> None:
    script = Script(live, "m")
    door = Door(script, 4)
    caller = await live.key()
    job = await live.started(chat_lines(ITEMS), slice_items=4, caller=caller)
    async with working(live, script) as run:
        await called(script, 8)
        assert await live.store.change_key("k1", KeyRights(models=models_text(["m", "n"])))
        await settled(live, run)
        door.open.set()
        await live.ended(job)
    assert (script.calls[0].models, script.calls[-1].models) == (frozenset(), frozenset({"m", "n"}))


async def test_nothing_is_sent_under_a_key_whose_state_cannot_be_asked(live: WorkerWorld) -> None:
    script = Script(live, "m")
    caller = await live.key()
    keyed = await live.started(chat_lines(3), caller=caller)
    free = await live.started(chat_lines(3))
    real = live.store.key_states

    async def away(worker_id: str) -> Any:
        raise StoreUnavailable("away")

    live.store.key_states = away  # type: ignore[method-assign]
    async with working(live, script):
        assert (await live.ended(free)).answered_count == 3
        assert {call.job_id for call in script.calls} == {free.id}
        live.store.key_states = real  # type: ignore[method-assign]
        assert (await live.ended(keyed)).answered_count == 3
    assert len(script.calls) == 6


async def test_a_key_has_limits_of_its_own_that_change_while_it_works(live: WorkerWorld) -> None:
    """They come beside what the settings say of every key, and of two for one period the tighter side counts."""
    minute, day = Limit(Period.MINUTE, requests=10, tokens=99), Limit(Period.DAY, tokens=50)
    script = Script(live, "m")
    door = Door(script, 4)
    caller = await live.key(limits=(minute, day))
    job = await live.started(chat_lines(ITEMS), slice_items=4, caller=caller)
    async with working(live, script) as run:
        await called(script, 8)
        assert await live.store.change_key("k1", KeyRights(limits=(Limit(Period.MINUTE, requests=5),)))
        await settled(live, run)
        door.open.set()
        await live.ended(job)
    [first] = script.calls[0].budgets
    assert (first.bound, first.name, first.limits) == (LimitBound.KEY, "k1", (minute, day))
    [last] = script.calls[-1].budgets
    assert last.limits == (Limit(Period.MINUTE, requests=5),)


async def test_one_question_is_asked_for_all_keys_and_none_without_any(live: WorkerWorld) -> None:
    asked = 0
    real = live.store.key_states

    async def counted(worker_id: str) -> Any:
        nonlocal asked
        asked += 1
        return await real(worker_id)

    live.store.key_states = counted  # type: ignore[method-assign]
    script = Script(live, "m")
    free = await live.started(chat_lines(40), slice_items=4)
    async with working(live, script):
        await live.ended(free)
        assert asked == 0
        keyed = await live.started(chat_lines(200), slice_items=50, caller=await live.key())
        async with asyncio.timeout(DEADLINE_S):
            await live.ended(keyed)
    assert 1 <= asked < 40, "a question a second, and one for what comes new: none for an item"


async def test_the_state_of_a_key_is_believed_for_two_seconds_and_no_longer(tmp_path: Path) -> None:
    """The store is there and does not answer; the key is revoked meanwhile. When two seconds have passed on the worker's clock nothing
    more is sent, without any news, and when the store answers the rest fails."""
    clock = PushedClock()
    world = WorkerWorld(tmp_path, clock)
    await world.store.migrate()
    script = Script(world, "m")
    door = Door(script, 4)
    job = await world.started(chat_lines(ITEMS), slice_items=4, caller=await world.key())
    real, asked, answer = world.store.key_states, asyncio.Event(), asyncio.Event()

    async def silent(worker_id: str) -> Any:
        asked.set()
        await answer.wait()
        return await real(worker_id)

    async with working(world, script):
        await called(script, 8)
        world.store.key_states = silent  # type: ignore[method-assign]
        async with asyncio.timeout(DEADLINE_S):
            await asked.wait()
        assert await world.store.revoke_key("k1")
        clock.ahead_ms += 2_000
        waits = metrics.counted(metrics.policy_waits).get("chat,key_state_unknown", 0)
        door.open.set()

        def waited() -> bool:
            return metrics.counted(metrics.policy_waits).get("chat,key_state_unknown", 0) > waits

        await until(waited, "an item to wait for news of its key")
        assert len(script.calls) == 8
        answer.set()
        done = await world.ended(job)
    assert (done.answered_count, done.failed_count, len(script.calls)) == (8, ITEMS - 8, 8)
    assert await codes(world, done) == {"key_revoked"}
    await world.blobs.close()
    await world.store.close()


async def test_a_late_answer_to_an_older_question_does_not_bring_a_revoked_key_back(world: WorkerWorld) -> None:
    job = await world.started(chat_lines(1), caller=await world.key())
    worker_id = await world.worker()
    assert await lease_slices(world.store, worker_id, job.id, "m", 1, "token")
    states, key_states, late = KeyStates(world.store, world.clock, {}), world.store.key_states, asyncio.Event()

    async def first_is_late(worker_id: str) -> Any:
        world.store.key_states = key_states  # type: ignore[method-assign]
        found = await key_states(worker_id)
        await late.wait()
        return found

    world.store.key_states = first_is_late  # type: ignore[method-assign]
    older = asyncio.create_task(states.ask(worker_id))
    await asyncio.sleep(0)
    assert await world.store.revoke_key("k1")
    world.clock.advance(1)
    await states.ask(worker_id)
    late.set()
    await older
    leased: Any = SimpleNamespace(key_id="k1", model="m")
    denied = states.denial(leased)
    assert denied is not None
    assert denied.code == "key_revoked"


async def test_no_call_may_begin_later_than_two_seconds_after_its_key_was_asked_about(live: WorkerWorld) -> None:
    """What waits for a place or a connection on its way is held to the same two seconds: the call itself says until when."""
    questions: list[float] = []
    real = live.store.key_states

    async def noted(worker_id: str) -> Any:
        questions.append(live.clock.monotonic_ms())
        return await real(worker_id)

    live.store.key_states = noted  # type: ignore[method-assign]
    script = Script(live, "m")
    seen: list[tuple[float, float]] = []

    async def answer(call: Call) -> Answer:
        seen.append((call.begin_by_ms, questions[-1]))
        return Answer(200, BODY, Usage(1, 0, 1, 0), "here")

    script.answers = answer
    job = await live.started(chat_lines(40), slice_items=4, caller=await live.key())
    async with working(live, script):
        await live.ended(job)
    assert len(seen) == 40
    assert all(begin_by_ms <= asked_ms + BELIEVED_MS for begin_by_ms, asked_ms in seen)
