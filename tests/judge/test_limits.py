"""Where the judge says nothing, says that it cannot say, or lets a repeat pass because it has a reason."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.judge.damage import add_call, attempt, calls_of, later
from tests.judge.world import JudgedWorld
from tidegate import judge
from tidegate.backends.blobs_local import LocalBlobs
from tidegate.judge.lines import ClaimedUsage, read_usage, split_item_id

WORKER = """
insert into workers (id, host, version, state, started_at, beat_at, alive_until, runs_items, report)
values (?, 'h', '0', ?, ?, ?, ?, 1, '')
"""


def cannot(world: JudgedWorld, name: str = "plain", *, witness: bool = False) -> str:
    with pytest.raises(judge.CannotJudge) as refusal:
        world.judged_now(name, witness=witness)
    return str(refusal.value)


def test_an_unknown_batch(world: JudgedWorld) -> None:
    world.jobs = {"plain": "batch_" + "0" * 22}
    assert "no batch" in cannot(world)


def test_no_store(world: JudgedWorld) -> None:
    world.store.unlink()
    assert "--data" in cannot(world)


def test_a_store_of_garbage(world: JudgedWorld) -> None:
    world.store.write_bytes(b"not a database at all" * 1000)
    assert "cannot be read" in cannot(world)


def test_an_older_store(world: JudgedWorld) -> None:
    world.sql("drop table attempts")
    assert "migrate" in cannot(world)


def test_a_database_that_is_away(tmp_path: Path) -> None:
    async def look() -> None:
        async with judge.postgres_records("postgresql://unknown@127.0.0.1:1/none"):
            raise AssertionError("there is none")

    with pytest.raises(judge.CannotJudge, match=r"store\.url"):
        asyncio.run(look())


def test_bytes_that_are_away_are_not_gone(world: JudgedWorld) -> None:
    """A disk that is not mounted says nothing about a promise."""

    async def look() -> None:
        blobs = LocalBlobs(world.blobs)
        for path in world.blobs.iterdir():
            path.rename(world.directory / path.name)
        async with judge.sqlite_records(world.store) as records:
            await judge.judge(records, blobs, world.jobs["plain"])

    with pytest.raises(judge.CannotJudge, match="cannot be read now"):
        asyncio.run(look())


@pytest.mark.parametrize("text", ["not json\n", "[]\n", '{"at": 1}\n', '{"at": 1, "status": "200"}\n'])
def test_a_witness_that_is_no_calls_log(world: JudgedWorld, text: str) -> None:
    world.witness.write_text(text)
    assert "line 1" in cannot(world, witness=True)


def test_no_witness(world: JudgedWorld) -> None:
    world.witness.unlink()
    assert "--witness" in cannot(world, witness=True)


def test_a_last_line_of_the_witness_that_is_being_written(world: JudgedWorld) -> None:
    with world.witness.open("a") as log:
        log.write('{"at": 17')
    assert world.judged_now("plain", witness=True, expect_no_repeats=True).ok


def test_calls_of_other_jobs_and_other_clients_do_not_count(world: JudgedWorld) -> None:
    with world.witness.open("a") as log:
        for key in (None, "my own key", "batch_req_" + "0" * 22 + "-0123456789abcdef"):
            log.write(json.dumps({"at": 1e10, "path": "/", "model": "m", "status": 200, "idempotency_key": key}) + "\n")
    assert world.judged_now("plain", witness=True, expect_no_repeats=True).ok


def test_a_repeat_with_an_attempt_on_record_is_no_violation(world: JudgedWorld) -> None:
    job_id = world.jobs["plain"]
    split = split_item_id(calls_of(world, job_id)[0]["idempotency_key"][:32])
    assert split is not None
    add_call(later(0.01))(world, job_id)
    assert world.judged_now("plain", witness=True).violated == ("repeats_have_reasons",)
    attempt(number=split[1])(world, job_id)
    assert world.judged_now("plain", witness=True).ok


def test_a_repeat_after_a_refusal_that_cost_nothing_needs_no_reason(world: JudgedWorld) -> None:
    add_call(later(-0.01, status=429))(world, world.jobs["plain"])
    assert world.judged_now("plain", witness=True).ok


def test_a_repeat_after_a_lost_owner_is_no_violation(world: JudgedWorld) -> None:
    """The first call's worker was gone by the second call, and another one lived then: P5 (a)."""
    job_id = world.jobs["plain"]
    first_ms = int(calls_of(world, job_id)[0]["at"] * 1000)
    add_call(later(2))(world, job_id)
    assert world.judged_now("plain", witness=True).violated == ("repeats_have_reasons",)
    world.sql("delete from workers")
    world.sql(WORKER, ("worker_lost", "gone", first_ms - 5_000, first_ms - 100, first_ms + 1_000))
    assert not world.judged_now("plain", witness=True).ok
    world.sql(WORKER, ("worker_next", "gone", first_ms - 4_000, first_ms + 4_000, first_ms + 5_000))
    assert world.judged_now("plain", witness=True).ok
    world.sql("update workers set beat_at = ? where id = 'worker_lost'", (first_ms + 3_500,))
    assert not world.judged_now("plain", witness=True).ok, "it still sent heartbeats after the repeat"


@pytest.mark.parametrize("lost_count", [0, 1])
def test_a_slice_that_lost_its_owner_explains_a_repeat(world: JudgedWorld, lost_count: int) -> None:
    job_id = world.jobs["running"]
    world.sql("update slices set lost_count = ? where job_id = ?", (lost_count, job_id))
    add_call(later(0.01))(world, job_id)
    assert world.judged_now("running", witness=True).ok == bool(lost_count)


def test_what_a_worker_holds_may_have_reasons_that_are_not_committed_yet(world: JudgedWorld) -> None:
    job_id = world.jobs["running"]
    add_call(later(0.01))(world, job_id)
    assert not world.judged_now("running", witness=True).ok
    held = "update slices set state = 'leased', lease_token = 't', worker_id = 'w', lease_count = 1 where job_id = ?"
    world.sql(held, (job_id,))
    assert world.judged_now("running", witness=True).ok


@pytest.mark.parametrize(
    ("counts", "usage"),
    [
        (None, ClaimedUsage()),
        ([], ClaimedUsage()),
        ({"prompt_tokens": 7, "completion_tokens": 3}, ClaimedUsage(7, 0, 3, 0)),
        ({"prompt_tokens": 7, "prompt_tokens_details": {"cached_tokens": 9}}, ClaimedUsage(7, 7, 0, 0)),
        (
            {"input_tokens": 5, "output_tokens": 2, "output_tokens_details": {"reasoning_tokens": 1}},
            ClaimedUsage(5, 0, 2, 1),
        ),
        (
            {"input_tokens": 5, "cache_read_input_tokens": 4, "cache_creation_input_tokens": 1},
            ClaimedUsage(10, 4, 0, 0),
        ),
        (
            {
                "input_tokens": 5,
                "output_tokens": 2,
                "iterations": [
                    {"type": "compaction", "input_tokens": 7, "cache_read_input_tokens": 3, "output_tokens": 4},
                    {"type": "message", "input_tokens": 5, "output_tokens": 2},
                ],
            },
            ClaimedUsage(15, 3, 6, 0),
        ),
        (
            {
                "prompt_tokens": 32,
                "completion_tokens": 9,
                "total_tokens": 135,
                "completion_tokens_details": {"reasoning_tokens": 94},
            },
            ClaimedUsage(32, 0, 103, 94),
        ),
        ({"input_tokens": 5, "iterations": {"type": "compaction", "input_tokens": 7}}, ClaimedUsage(5, 0, 0, 0)),
        ({"prompt_tokens": True}, ClaimedUsage()),
        ({"prompt_tokens": -1, "completion_tokens": 3}, ClaimedUsage(0, 0, 3, 0)),
        ({"prompt_tokens": 7.0, "completion_tokens": 2.5}, ClaimedUsage(7, 0, 0, 0)),
        ({"prompt_tokens": 1e300}, ClaimedUsage()),
        ({"output_tokens": 5, "output_tokens_details": {"thinking_tokens": 4}}, ClaimedUsage(0, 0, 5, 4)),
        ({"prompt_tokens": 1 << 41}, ClaimedUsage()),
        ({"prompt_tokens": 1, "prompt_tokens_details": 7}, ClaimedUsage(1, 0, 0, 0)),
    ],
)
def test_usage_is_read_in_every_dialect(counts: object, usage: ClaimedUsage) -> None:
    assert read_usage(counts) == usage


@pytest.mark.parametrize(
    "text",
    [
        "",
        "batch_req_",
        "batch_req_" + "a" * 21,
        "batch_req_" + "é" * 22,
        "req_" + "a" * 22,
        "batch_req_" + "a" * 22 + "\n",
    ],
)
def test_a_text_that_is_no_item_id(text: str) -> None:
    assert split_item_id(text) is None
