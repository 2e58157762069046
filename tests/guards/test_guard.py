"""Hooks and guardrails on the way of batch items: what is sent, what is recorded, what fails with which code, and who pays."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import threading
import warnings
from typing import Any

import pytest
import structlog
from msgspec.structs import replace

from tests.conftest import OwnModule
from tests.worker.world import Script, WorkerWorld, until, working
from tidegate.core.deployments import Resource, reached_names
from tidegate.core.errors import Ambiguous
from tidegate.core.hooks import PolicyRule
from tidegate.core.nouns import Answer, Call, Job, Usage
from tidegate.core.usage.prices import Price
from tidegate.guards import own_code
from tidegate.guards.guard import Guards
from tidegate.guards.search_pool import THREADS_MAX, THREADS_PER_TENANT_MAX, SearchPool
from tidegate.settings import call_rules, load

pytestmark = pytest.mark.anyio

CANARY = "canary-7f3a"
OWN = """
import asyncio, threading, time
from tidegate.core.hooks import Later, Refuse

seen = []
never = threading.Event()
tries = {"count": 0}

def shout(body, about):
    seen.append(about)
    body["messages"][0]["content"] = body["messages"][0]["content"].upper()
    return body

async def shout_async(body, about):
    await asyncio.sleep(0)
    return shout(body, about)

def sign(body, about):
    return {"choices": body["choices"], "signed": about.custom_id}

def only_looks(body, about):
    body["messages"] = "changed in place, but not returned"

def refuses(body, about):
    raise Refuse("House rule 7: ask in the form of a question.")

def silently(body, about):
    raise Refuse

def later_once(body, about):
    tries["count"] += 1
    if tries["count"] == 1:
        raise Later(0.001, "the checker is busy")

def away_once(body, about):
    tries["count"] += 1
    if tries["count"] == 1:
        raise ConnectionRefusedError(str(body))

def much_later(body, about):
    raise Later(1_800 if "short" in str(body) else 86_400)

def breaks(body, about):
    raise KeyError(str(body))

async def breaks_async(body, about):
    raise KeyError(str(body))

def leaves(body, about):
    raise SystemExit(3)

def stops(body, about):
    raise StopIteration

async def gives_up(body, about):
    raise asyncio.CancelledError

def renames(body, about):
    return {**body, "model": "dearer"}

def streams(body, about):
    return {**body, "stream": True}

def says_text(body, about):
    return "hello"

def unsayable(body, about):
    return {**body, "messages": {1: object()}}

def forever(body, about):
    return [body]

def hangs(body, about):
    never.wait()

async def hangs_async(body, about):
    await asyncio.Event().wait()

async def blocks(body, about):
    never.wait()
"""


@pytest.fixture
def own(own_module: OwnModule) -> str:
    return own_module(OWN)


def rules(**groups: Any) -> tuple[PolicyRule, ...]:
    """As an operator writes them."""
    return call_rules(load(None, None, groups, {}).settings)


def lines(*texts: str, model: str = "m") -> list[bytes]:
    return [
        json.dumps(
            {"custom_id": f"c{n}", "body": {"model": model, "messages": [{"role": "user", "content": text}]}}
        ).encode()
        for n, text in enumerate(texts)
    ]


def answer_body(*texts: str) -> bytes:
    choices = [{"message": {"role": "assistant", "content": text}} for text in texts]
    return json.dumps({"choices": choices, "usage": {"prompt_tokens": 7, "completion_tokens": 3}}).encode()


def saying(script: Script, *texts: str) -> None:
    async def answer(call: Call) -> Answer:
        return Answer(200, answer_body(*texts), Usage(7, 0, 3, 0), "here")

    script.answers = answer


async def errors(world: WorkerWorld, job: Job) -> dict[str, tuple[str, str]]:
    return {
        line["custom_id"]: (line["error"]["code"], line["error"]["message"])
        for line in await world.file_lines(job.error_file_id)
    }


async def answers(world: WorkerWorld, job: Job) -> dict[str, Any]:
    return {line["custom_id"]: line["response"]["body"] for line in await world.file_lines(job.output_file_id)}


async def run(world: WorkerWorld, script: Script, work: list[bytes], made: tuple[PolicyRule, ...], **more: Any) -> Job:
    ask = {"caller": more.pop("caller")} if "caller" in more else {}
    job = await world.started(work, **ask)
    async with working(world, script, rules=made, **more):
        return await world.ended(job)


async def test_what_is_redacted_is_not_sent_and_a_retry_has_the_same_key(live: WorkerWorld) -> None:
    script = Script(live, "m")
    failures = iter([True, False, False])

    async def answer(call: Call) -> Answer:
        if next(failures):
            raise Ambiguous("broke")
        return Answer(200, answer_body(f"it is 123-45-6789 {CANARY}"), Usage(7, 0, 3, 0), "here")

    script.answers = answer
    made = rules(
        guardrails={
            "numbers": {"patterns": [r"\b\d{3}-\d{2}-\d{4}\b"], "action": "redact", "replacement": "[number]"},
            "names": {"patterns": [CANARY], "action": "redact", "applies_to": "answers"},
        }
    )
    job = await run(live, script, lines(f"my number is 123-45-6789 {CANARY}"), made)
    sent = [json.loads(call.body)["messages"][0]["content"] for call in script.calls]
    assert sent == [f"my number is [number] {CANARY}"] * 2
    assert len({call.idempotency_key for call in script.calls}) == 1
    [kept] = (await answers(live, job)).values()
    assert kept["choices"][0]["message"]["content"] == "it is [number] [redacted]"
    assert kept["usage"] == {"prompt_tokens": 7, "completion_tokens": 3}
    assert CANARY.encode() not in await live.file_bytes(job.output_file_id)


async def test_the_key_of_a_call_is_that_of_the_callers_own_bytes(live: WorkerWorld) -> None:
    """Switching a guardrail on in the middle of a job must not make an upstream take a retry for a new request."""
    keys = []
    for made in ((), rules(guardrails={"numbers": {"patterns": ["[0-9]{3}"], "action": "redact"}})):
        script = Script(live, "m")
        await run(live, script, lines("123"), made)
        keys.append(script.calls[0].idempotency_key.rpartition("-")[2])
    assert keys[0] == keys[1]


@pytest.mark.parametrize(
    ("entry", "code"),
    [
        ({"patterns": ["forbidden"]}, "guardrail_pattern"),
        ({"prompt_bytes_max": 80}, "guardrail_length"),
        ({"prompt_tokens_max": 20}, "guardrail_length"),
    ],
)
async def test_a_request_that_is_refused_is_not_sent(live: WorkerWorld, entry: dict[str, Any], code: str) -> None:
    script = Script(live, "m")
    job = await run(live, script, lines("fine", "this is forbidden" + " " * 90), rules(guardrails={"house": entry}))
    assert [json.loads(call.body)["messages"][0]["content"] for call in script.calls] == ["fine"]
    assert (job.answered_count, job.failed_count) == (1, 1)
    found = await errors(live, job)
    assert found["c1"][0] == code
    assert ": " in found["c1"][1], "a refusal says what to do next"
    assert "forbidden" not in found["c1"][1]


@pytest.mark.parametrize(
    ("entry", "code"),
    [
        ({"patterns": ["forbidden"], "applies_to": "answers"}, "guardrail_pattern"),
        ({"answer_bytes_max": 20}, "guardrail_length"),
        ({"schema": {"type": "object", "required": ["name"]}}, "guardrail_schema"),
    ],
)
async def test_a_refused_answer_was_paid_for(live: WorkerWorld, entry: dict[str, Any], code: str) -> None:
    script = Script(live, "m")
    saying(script, "this is forbidden")
    script.prices = {"here": Price.of("2", "1", "4", "0.5")}
    caller = await live.key()
    job = await run(live, script, lines("a", "b"), rules(guardrails={"house": entry}), caller=caller)
    assert (job.answered_count, job.failed_count, len(script.calls)) == (0, 2, 2)
    assert {one for one, _ in (await errors(live, job)).values()} == {code}
    assert (job.usage.input_tokens, job.usage.output_tokens) == (14, 6)
    today = live.clock.now_ms() // 86_400_000
    entries = await live.store.usage(today - 1, today + 1, by_job=True)
    assert sum(one.spend.calls for one in entries) == 2
    assert sum(one.spend.cost.total_nano for one in entries) == 2 * (7 * 1_000 + 3 * 2_000)
    assert {one.key for one in entries} == {"k1"}


async def test_an_answer_that_fits_its_schema_passes(live: WorkerWorld) -> None:
    script = Script(live, "m")
    saying(script, '{"name": "x"}')
    made = rules(
        guardrails={
            "house": {"schema": {"type": "object", "required": ["name"], "properties": {"name": {"const": None}}}}
        }
    )
    assert (await run(live, script, lines("a"), made)).failed_count == 1
    made = rules(guardrails={"house": {"schema": {"type": "object", "required": ["name"]}}})
    assert (await run(live, script, lines("a"), made)).answered_count == 1


async def test_rules_bind_those_whom_they_name(live: WorkerWorld) -> None:
    deny = {"patterns": ["x"]}
    for bound, is_refused in (
        ({"tenants": ["acme"]}, True),
        ({"tenants": ["other"]}, False),
        ({"keys": ["k1"]}, True),
        ({"keys": ["k2"]}, False),
        ({"models": ["m"]}, True),
        ({"models": ["chat"]}, True),
        ({"models": ["other"]}, False),
        ({"tenants": ["acme"], "models": ["other"]}, False),
    ):
        script = Script(live, "chat")
        caller = await live.key()
        made = rules(guardrails={"house": {**deny, **bound}})
        work = lines("x", model="chat")
        job = await run(live, script, work, made, caller=caller, reached_by={"chat": ("chat", "m")})
        assert (job.failed_count == 1) is is_refused, bound


def test_what_a_resource_leads_to_may_change_while_rules_stand() -> None:
    reached_by: dict[str, tuple[str, ...]] = {}
    guards = Guards(rules(guardrails={"house": {"patterns": ["x"], "models": ["m"]}}), reached_by)
    assert guards.of("acme", None, "chat") is None
    reached_by["chat"] = ("chat", "m")
    assert guards.of("acme", None, "chat") is not None
    del reached_by["chat"]
    assert guards.of("acme", None, "chat") is None


def test_guards_are_kept_for_so_many_kinds_of_calls_and_made_again_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller chooses the names of models, and could fill the memory with them."""
    monkeypatch.setattr("tidegate.guards.guard.KINDS_MAX", 3)
    guards = Guards(rules(guardrails={"house": {"patterns": ["x"], "models": ["m"]}}))
    for number in range(10):
        assert guards.of("acme", None, f"other-{number}") is None
        assert guards.of("acme", None, "m") is not None
        assert len(guards._known) <= 3


def test_a_rule_for_a_fallback_or_for_its_model_binds_the_call_from_the_start() -> None:
    named = [Resource("chat", "m", fallbacks=("spare",)), Resource("spare", "n", fallbacks=("far", "chat"))]
    reached_by = reached_names(named)
    assert reached_by == {"chat": ("chat", "m", "spare", "n", "far"), "spare": ("spare", "n", "far", "chat", "m")}
    for name in ("chat", "m", "spare", "n", "far"):
        guards = Guards(rules(guardrails={"house": {"patterns": ["x"], "models": [name]}}), reached_by)
        assert guards.of("acme", None, "chat") is not None
        assert guards.of("acme", None, "other") is None


@pytest.mark.parametrize("name", ["shout", "shout_async"])
async def test_a_hook_changes_what_is_sent_and_what_is_kept(live: WorkerWorld, own: str, name: str) -> None:
    script = Script(live, "m")
    saying(script, "hi")
    made = rules(hooks={"house": {"before": f"{own}:{name}", "after": f"{own}:sign"}})
    caller = replace(await live.key(user="ann"), user="ann")
    job = await run(live, script, lines("hello"), made, caller=caller)
    assert json.loads(script.calls[0].body)["messages"][0]["content"] == "HELLO"
    kept = (await answers(live, job))["c0"]
    assert kept["signed"] == "c0"
    assert kept["usage"] == {"prompt_tokens": 7, "completion_tokens": 3}, "a hook cannot lose what was paid"
    [about] = sys.modules[own].seen
    assert (about.endpoint, about.model, about.tenant, about.key_id, about.user) == (
        "/v1/chat/completions", "m", "acme", "k1", "ann",
    )  # fmt: skip
    assert (about.batch_id, about.custom_id) == (job.id, "c0")


async def test_a_hook_that_returns_nothing_leaves_the_bytes_alone(live: WorkerWorld, own: str) -> None:
    script = Script(live, "m")
    [line] = lines("hello")
    await run(live, script, [line], rules(hooks={"house": {"before": f"{own}:only_looks"}}))
    assert json.loads(script.calls[0].body) == json.loads(line)["body"]


async def test_guardrails_judge_what_hooks_made_of_it(live: WorkerWorld, own: str) -> None:
    script = Script(live, "m")
    made = rules(guardrails={"loud": {"patterns": ["HELLO"]}}, hooks={"house": {"before": f"{own}:shout"}})
    assert (await run(live, script, lines("hello"), made)).failed_count == 1
    assert script.calls == []


@pytest.mark.parametrize(
    ("name", "code", "says"),
    [
        ("refuses", "hook_refused", "House rule 7: ask in the form of a question."),
        ("silently", "hook_refused", "'house' does not let this pass"),
        ("breaks", "hook_failed", "KeyError"),
        ("breaks_async", "hook_failed", "KeyError"),
        ("leaves", "hook_failed", "RuntimeError"),
        ("stops", "hook_failed", "RuntimeError"),
        ("gives_up", "hook_failed", "RuntimeError"),
        ("renames", "hook_failed", "Misunderstood"),
        ("streams", "hook_failed", "Misunderstood"),
        ("says_text", "hook_failed", "Misunderstood"),
        ("unsayable", "hook_failed", "Misunderstood"),
        ("forever", "hook_failed", "Misunderstood"),
    ],
)
async def test_a_hook_that_refuses_or_breaks_ends_its_item_and_no_other(
    live: WorkerWorld, own: str, name: str, code: str, says: str
) -> None:
    script = Script(live, "m", "n")
    made = rules(hooks={"house": {"before": f"{own}:{name}", "models": ["m"]}})
    hooked = await live.started(lines("hello", CANARY))
    other = await live.started(lines("hello", model="n"))
    with structlog.testing.capture_logs() as logged:
        async with working(live, script, rules=made) as running:
            job = await live.ended(hooked)
            assert (await live.ended(other)).answered_count == 1
            assert running.worker.broken is None
    assert {call.model for call in script.calls} == {"n"}
    found = await errors(live, job)
    assert {one for one, _ in found.values()} == {code}
    assert all(says in text for _, text in found.values())
    assert CANARY not in str(logged) + str(found)


async def test_an_own_guardrail_has_a_code_of_its_own(live: WorkerWorld, own: str) -> None:
    made = rules(guardrails={"house": {"use": f"{own}:refuses", "applies_to": "requests"}})
    job = await run(live, Script(live, "m"), lines("hello"), made)
    assert await errors(live, job) == {"c0": ("guardrail_refused", "House rule 7: ask in the form of a question.")}


@pytest.mark.parametrize("name", ["later_once", "away_once"])
async def test_what_may_pass_later_is_tried_again_and_uses_up_no_attempt(
    live: WorkerWorld, own: str, name: str
) -> None:
    script = Script(live, "m")
    made = rules(hooks={"house": {"before": f"{own}:{name}", "retry_ms": 1}})
    with structlog.testing.capture_logs() as logged:
        job = await run(live, script, lines(CANARY), made)
    assert job.answered_count == 1
    assert sys.modules[own].tries["count"] == 2
    assert [call.attempt_count for call in script.calls] == [0]
    assert CANARY not in str(logged)


async def test_what_asks_for_a_long_wait_rests_until_a_known_moment(live: WorkerWorld, own: str) -> None:
    """Or until its job's window ends, where that is earlier."""
    script = Script(live, "m")
    made = rules(hooks={"house": {"before": f"{own}:much_later"}})
    job = await live.started(lines("short", "long"), slice_items=1)
    async with working(live, script, rules=made):
        rows = await rested(live, job, 2)
    assert script.calls == []
    assert [row[:3] for row in rows] == [(0, 0, "hook_deferred"), (1, 0, "hook_deferred")]
    waits = sorted(row[3] for row in rows)
    assert waits[0] < job.expires_at - 900_000, "half an hour of an hour"
    assert job.expires_at - 900_000 < waits[1] <= job.expires_at + 1_000


async def rested(world: WorkerWorld, job: Job, count: int) -> list[Any]:
    sql = "select number, count, reason, not_before from attempts where job_id = ? order by number"

    async def look() -> bool:
        free = await world.rows("select count(*) from slices where job_id = ? and state = 'ready'", job.id)
        return len(await world.rows(sql, job.id)) == count and free == [(count,)]

    await until(look, "the item to rest")
    return await world.rows(sql, job.id)


@pytest.mark.parametrize("name", ["breaks", "away", "hangs"])
async def test_a_hook_that_fails_after_the_answer_costs_the_answer(live: WorkerWorld, own: str, name: str) -> None:
    """What was paid for is charged; a moment's failure is asked again, here and not upstream."""
    script = Script(live, "m")
    saying(script, CANARY)
    path = f"{own}:{'away_once' if name == 'away' else name}"
    made = rules(hooks={"house": {"after": path, "timeout_ms": 1_000 if name == "away" else 20}})
    with structlog.testing.capture_logs() as logged:
        job = await run(live, script, lines("a"), made)
    assert len(script.calls) == 1
    assert (job.usage.input_tokens, job.usage.output_tokens) == (7, 3)
    assert job.answered_count == (name == "away")
    if name != "away":
        assert {one for one, _ in (await errors(live, job)).values()} == {"hook_failed"}
    assert CANARY not in str(logged)


@pytest.mark.parametrize("name", ["hangs", "hangs_async", "blocks"])
async def test_a_hook_that_hangs_holds_up_its_own_items_alone(live: WorkerWorld, own: str, name: str) -> None:
    """Its items wait; all others are answered; once it lets go, so are they."""
    script = Script(live, "m", "n")
    made = rules(hooks={"house": {"before": f"{own}:{name}", "models": ["m"], "timeout_ms": 100, "retry_ms": 20}})
    hooked = await live.started(lines("a", "b", "c"))
    other = await live.started(lines(*map(str, range(50)), model="n"))
    async with working(live, script, rules=made, in_flight_max=8) as running:
        assert (await live.ended(other)).answered_count == 50
        assert running.worker.broken is None
        assert {call.model for call in script.calls} == {"n"}
        if name != "hangs_async":
            sys.modules[own].never.set()
            assert (await live.ended(hooked)).answered_count == 3
    assert all(call.attempt_count == 0 for call in script.calls)


async def test_threads_that_never_come_back_are_bounded() -> None:
    never = threading.Event()
    code = own_code.OwnCode("bounded", never.wait, 0.001)
    for _ in range(own_code.LEFT_BEHIND_MAX + 20):
        with pytest.raises(own_code.Overran):
            await code.call()
    mine = [one for one in threading.enumerate() if one.name == "hook bounded"]
    assert len(mine) <= own_code.LEFT_BEHIND_MAX
    never.set()
    async with asyncio.timeout(20):
        while code._left_behind:  # noqa: ASYNC110 - threads come back when they are scheduled
            await asyncio.sleep(0.001)
    slow_enough = own_code.OwnCode("house", lambda: 7, 20)
    assert await slow_enough.call() == 7
    code.close()
    slow_enough.close()


async def test_calls_that_came_while_a_hook_blocked_its_loop_are_ended_and_not_left_lying(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """They have been given up long before; Python must not warn of coroutines that were never run."""
    began, never = threading.Event(), threading.Event()

    async def blocks() -> None:
        began.set()
        never.wait()

    code = own_code.OwnCode("blocked", blocks, 0.2)
    # What tests before this one left lying is none of its business.
    gc.collect()
    caplog.clear()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        first = asyncio.create_task(code.call())
        while not began.is_set():  # noqa: ASYNC110 - it happens in another thread
            await asyncio.sleep(0.001)
        answers = await asyncio.gather(first, *(code.call() for _ in range(4)), return_exceptions=True)
        assert [type(one) for one in answers] == [own_code.Overran] * 5
        never.set()
        async with asyncio.timeout(20):
            while any(one.name == "hook blocked" for one in threading.enumerate()):  # noqa: ASYNC110 - the same
                await asyncio.sleep(0.001)
        gc.collect()
    assert [str(one.message) for one in warned if "never awaited" in str(one.message)] == []
    assert "destroyed but it is pending" not in caplog.text
    code.close()


LOOSE = [r"\w+@\w+\.x"]
HOSTILE = "a" * 20_000 + "@.x " + CANARY


async def test_a_text_that_would_keep_pythons_engine_busy_for_minutes_is_looked_through_at_once(
    live: WorkerWorld,
) -> None:
    script = Script(live, "m", "n")
    made = rules(guardrails={"mail": {"patterns": [*LOOSE, CANARY], "models": ["m"]}})
    hostile = await live.started(lines(HOSTILE, "a" * 300_000))
    other = await live.started(lines(*map(str, range(50)), model="n"))
    with structlog.testing.capture_logs() as logged:
        async with working(live, script, rules=made, in_flight_max=8) as running:
            assert (await live.ended(other)).answered_count == 50
            job = await live.ended(hostile)
            assert running.worker.broken is None
    assert [call.model for call in script.calls].count("m") == 1
    found = await errors(live, job)
    assert {name: code for name, (code, _) in found.items()} == {"c0": "guardrail_pattern"}
    assert CANARY not in str(logged) + str(found)


async def test_what_is_long_is_looked_through_all_the_same(live: WorkerWorld) -> None:
    script = Script(live, "m")
    long = "words and words " * 5_000
    saying(script, long + " me@here.x")
    made = rules(guardrails={"mail": {"patterns": LOOSE, "action": "redact"}})
    job = await run(live, script, lines(f"{long} someone@there.x", long, "a@b.x"), made)
    sent = sorted(json.loads(call.body)["messages"][0]["content"] for call in script.calls)
    assert sent == sorted([f"{long} [redacted]", long, "[redacted]"])
    kept = await answers(live, job)
    assert {one["choices"][0]["message"]["content"] for one in kept.values()} == {long + " [redacted]"}


async def test_one_tenants_long_texts_leave_threads_to_others() -> None:
    """However many searches one tenant has waiting, another's next one begins at once; and they take turns."""
    pool = SearchPool()
    go = threading.Event()
    begun: list[bytes] = []

    def search(body: bytes) -> bytes:
        begun.append(body)
        if body.startswith(b"greedy"):
            go.wait()
        return body

    greedy = [asyncio.create_task(pool.run("a", search, b"greedy%d" % number)) for number in range(50)]
    await asyncio.sleep(0)
    assert await pool.run("b", search, b"quick") == b"quick"
    assert len(begun) <= THREADS_PER_TENANT_MAX + 1
    # A caller that gives up waiting leaves the turns to the others.
    for task in greedy[10:]:
        task.cancel()
    go.set()
    assert await asyncio.gather(*greedy[:10]) == [b"greedy%d" % number for number in range(10)]
    assert len(begun) == 11
    assert await pool.run("c", search, b"last") == b"last"
    assert not pool._lines
    pool.close()


async def test_a_search_that_was_given_up_frees_its_thread_when_it_ends() -> None:
    pool = SearchPool()
    go, begun = threading.Event(), threading.Semaphore(0)

    def search(body: bytes) -> bytes:
        begun.release()
        go.wait()
        return body

    tasks = [asyncio.create_task(pool.run(f"t{number}", search, b"x")) for number in range(THREADS_MAX)]
    for _ in tasks:
        await asyncio.to_thread(begun.acquire)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    go.set()
    assert await pool.run("later", search, b"y") == b"y"
    pool.close()
