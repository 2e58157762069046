"""Answers that must fit: asked for again, then from a stronger model, then filed; every answer is paid for and counted once."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

import pytest

from tests.worker.world import Script, WorkerWorld, chat_lines, working
from tidegate.core.answer_terms import AnswerTerms
from tidegate.core.errors import Refused, Throttled
from tidegate.core.nouns import Answer, Call, Usage
from tidegate.core.usage.prices import Price

pytestmark = pytest.mark.anyio

SCHEMA = json.dumps({"type": "object", "required": ["ok"]})
PRICE = {"here": Price.of("2", "1", "4", "1")}
DAY_MS = 86_400_000


def body(text: str) -> bytes:
    return json.dumps({"choices": [{"message": {"content": text}, "finish_reason": "stop"}]}).encode()


def answering(script: Script, good: Any) -> None:
    """Have calls answered with what fits where `good(call, how often its item was asked before)` says so."""
    asked: Counter[int] = Counter()

    async def answer(call: Call) -> Answer:
        asked[call.number] += 1
        text = '{"ok": 1}' if good(call, asked[call.number] - 1) else "no"
        return Answer(200, body(text), Usage(100, 0, 10, 0), "here")

    script.answers = answer


async def lines_of(live: WorkerWorld, job: Any) -> tuple[list[Any], list[Any]]:
    files = [await live.file_bytes(one) for one in (job.output_file_id, job.error_file_id)]
    return tuple([json.loads(line) for line in data.splitlines()] for data in files)  # type: ignore[return-value]


async def test_an_answer_that_does_not_fit_is_asked_for_again_and_all_are_paid_for(live: WorkerWorld) -> None:
    script = Script(live, "m")
    answering(script, lambda call, before: call.number % 2 == 0 or before == 1)
    job = await live.started(chat_lines(6), slice_items=3, answers=AnswerTerms(SCHEMA, tries_max=2))
    script.prices = PRICE
    async with working(live, script):
        job = await live.ended(job)
    output, errors = await lines_of(live, job)
    assert (job.answered_count, job.failed_count, job.schema_invalid_count) == (6, 0, 0)
    assert len(script.calls) == 9
    assert job.usage == Usage(900, 0, 90, 0)
    tries = [line["tidegate"]["tries"] for line in output if "tries" in line["tidegate"]]
    assert len(tries) == 3
    assert not errors
    for first, second in tries:
        assert "not valid JSON" in first["problem"]
        assert second["problem"] is None
        assert (first["model"], first["input_tokens"], first["output_tokens"], first["cost"]) == (
            "m",
            100,
            10,
            "0.00024",
        )
    assert len({call.idempotency_key for call in script.calls}) == 9, "a try has a key of its own"
    paid = sum(round(float(line["tidegate"]["cost"]) * 1e9) for line in output)
    today = live.clock.now_ms() // DAY_MS
    entries = await live.store.usage(today - 1, today + 1, by_job=True)
    assert paid == job.cost_nano == 9 * 240_000 == sum(one.spend.cost.total_nano for one in entries)
    assert sum(one.spend.calls for one in entries) == 9


async def test_the_stronger_model_is_asked_last_and_then_the_answer_is_filed(live: WorkerWorld) -> None:
    script = Script(live, "m", "strong")
    answering(script, lambda call, before: call.model == "strong" and call.number != 1)
    terms = AnswerTerms(SCHEMA, tries_max=1, escalate_to="strong")
    job = await live.started(chat_lines(2), answers=terms)
    script.prices = PRICE
    async with working(live, script):
        job = await live.ended(job)
    output, errors = await lines_of(live, job)
    assert (job.answered_count, job.failed_count, job.schema_invalid_count) == (1, 1, 1)
    assert [one["model"] for one in output[0]["tidegate"]["tries"]] == ["m", "m", "strong"]
    assert errors[0]["error"]["code"] == "schema_invalid"
    assert "3 tries" in errors[0]["error"]["message"]
    assert json.loads(errors[0]["tidegate"]["raw"])["choices"][0]["message"]["content"] == "no"
    assert len(errors[0]["tidegate"]["tries"]) == 3
    assert job.usage == Usage(600, 0, 60, 0)
    assert job.cost_nano == 6 * 240_000
    strong = [json.loads(call.body) for call in script.calls if call.model == "strong"]
    assert [one["model"] for one in strong] == ["strong", "strong"]
    today = live.clock.now_ms() // DAY_MS
    calls = Counter[str]()
    for one in await live.store.usage(today - 1, today + 1, by_job=True):
        calls[one.model] += one.spend.calls
    assert calls == {"m": 4, "strong": 2}


async def test_a_try_that_got_no_answer_is_none(live: WorkerWorld) -> None:
    """The line lists what was answered and paid for; that the last call was refused is its error."""
    script = Script(live, "m")
    asked = 0

    async def refused_the_second_time(call: Call) -> Answer:
        nonlocal asked
        asked += 1
        if asked > 1:
            raise Refused("no", status=400)
        return Answer(200, body("no"), Usage(100, 0, 10, 0), "here")

    script.answers = refused_the_second_time
    job = await live.started(chat_lines(1), answers=AnswerTerms(SCHEMA, tries_max=2))
    script.prices = PRICE
    async with working(live, script):
        job = await live.ended(job)
    _, [error] = await lines_of(live, job)
    assert [one["output_tokens"] for one in error["tidegate"]["tries"]] == [10]
    assert error["tidegate"]["tries"][0]["problem"] is not None
    assert (job.usage, job.cost_nano) == (Usage(100, 0, 10, 0), 240_000)


async def test_a_key_that_does_not_allow_the_stronger_model_is_not_passed_by(live: WorkerWorld) -> None:
    script = Script(live, "m", "strong")
    answering(script, lambda call, before: call.model == "strong")
    caller = await live.key(models='["m"]')
    terms = AnswerTerms(SCHEMA, tries_max=0, escalate_to="strong")
    job = await live.started(chat_lines(1), answers=terms, caller=caller)
    async with working(live, script):
        job = await live.ended(job)
    assert job.schema_invalid_count == 1
    assert [call.model for call in script.calls] == ["m"]


async def test_feedback_goes_with_the_next_try(live: WorkerWorld) -> None:
    script = Script(live, "m")
    answering(script, lambda call, before: before == 1)
    job = await live.started(chat_lines(1), answers=AnswerTerms(SCHEMA, feedback=True))
    async with working(live, script):
        await live.ended(job)
    turns = json.loads(script.calls[1].body)["messages"]
    assert [turn["role"] for turn in turns] == ["user", "assistant", "user"]
    assert turns[1]["content"] == "no"


async def test_tries_are_remembered_when_the_slice_goes_back(live: WorkerWorld) -> None:
    """The second try is put off for long: the slice goes back to the store, and its next worker goes on with the second try."""
    script = Script(live, "m")
    throttled: list[int] = []

    async def answer(call: Call) -> Answer:
        if len(script.calls) == 2:
            throttled.append(call.number)
            raise Throttled("later", retry_after_ms=6_000)
        return Answer(200, body("no"), Usage(100, 0, 10, 0), "here")

    script.answers = answer
    job = await live.started(chat_lines(1), answers=AnswerTerms(SCHEMA, tries_max=1))
    async with working(live, script):
        job = await asyncio.wait_for(live.ended(job), 30)
    assert throttled
    assert len(script.calls) == 3
    assert (job.schema_invalid_count, job.usage) == (1, Usage(200, 0, 20, 0))


async def test_a_request_whose_own_schema_cannot_be_used_is_refused_and_not_sent(live: WorkerWorld) -> None:
    script = Script(live, "m")
    ask = json.loads(chat_lines(1)[0])
    ask["body"]["response_format"] = {"type": "json_schema", "json_schema": {"schema": {"$ref": "https://example.com"}}}
    job = await live.started([json.dumps(ask).encode()], answers=AnswerTerms())
    async with working(live, script):
        job = await live.ended(job)
    _, errors = await lines_of(live, job)
    assert errors[0]["response"]["status_code"] == 400
    assert not script.calls
    assert errors[0]["response"]["body"]["error"]["code"] == "invalid_schema"
