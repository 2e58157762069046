"""Answers that must fit a schema, from an engine that spoils one of ten: how many are left that do not fit, what the tries cost in tokens,
and the CPU of a check.

Each item asks for a value of ten fields and has two more tries. The same road without a schema says what the tokens are without tries.
"""

import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import uvloop

from bench.inputs import MODEL
from bench.machinery import median, simulated_engine, table
from bench.throughput import settings_for, submit
from tidegate.core.answer_terms import AnswerTerms
from tidegate.core.answers.answer_checks import check_of
from tidegate.core.nouns import Job
from tidegate.core.states import JOB_ENDED, JobState
from tidegate.service import working

ENDPOINT = "/v1/chat/completions"
SPOILED = "unfit=0.1"
TRIES_MAX = 2
INVALID_SHARE_MAX, TOKENS_MAX, CPU_US_MAX = 0.002, 1.15, 15
_KINDS = (
    {"type": "string", "maxLength": 80},
    {"type": "integer", "minimum": 0},
    {"type": "number"},
    {"type": "boolean"},
    {"enum": ["low", "middle", "high"]},
)
FIELDS = {f"field_{number}": _KINDS[number % len(_KINDS)] for number in range(10)}
SCHEMA = {"type": "object", "properties": FIELDS, "required": list(FIELDS), "additionalProperties": False}
FITTING = {f"field_{number}": ("a few words", 7, 1.5, True, "low")[number % len(_KINDS)] for number in range(10)}


def _body(number: int) -> dict[str, object]:
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"Fill in form {number}."}],
        "max_tokens": 200,
        "response_format": {"type": "json_schema", "json_schema": {"name": "form", "schema": SCHEMA}},
    }


def _lines(count: int) -> list[bytes]:
    return [
        json.dumps({"custom_id": f"c{number}", "method": "POST", "url": ENDPOINT, "body": _body(number)}).encode()
        + b"\n"
        for number in range(count)
    ]


async def _run(url: str, lines: list[bytes], answers: AnswerTerms | None) -> Job:
    """The job when it has ended."""
    with tempfile.TemporaryDirectory() as data:
        async with working(settings_for(url, Path(data))) as process, process.running():
            job_id = await submit(process, lines, answers=answers)
            process.parts.wakes.inputs.notify()
            while True:
                job = await process.parts.store.any_job(job_id)
                assert job is not None
                if job.state in JOB_ENDED:
                    break
                await asyncio.sleep(0.05)
    if job.state is not JobState.COMPLETED or job.failed_count != job.schema_invalid_count:
        raise RuntimeError(f"the job ended as {job.state} with {job.failed_count} failures: {job.errors}")
    return job


def _check_us(terms: AnswerTerms, count: int) -> float:
    """CPU of checking one answer, in microseconds."""
    bodies = [msgspec.json.encode(_body(number)) for number in range(count)]
    message = {"role": "assistant", "content": json.dumps(FITTING)}
    usage = {"prompt_tokens": 40, "completion_tokens": 90, "total_tokens": 130}
    answer = msgspec.json.encode(
        {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": MODEL, "usage": usage,
         "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
    )  # fmt: skip
    began = time.process_time()
    for body in bodies:
        if check_of(terms, body).problem(answer) is not None:
            raise RuntimeError("a fitting answer was refused")
    return (time.process_time() - began) / count * 1e6


def _tokens(job: Job) -> int:
    return job.usage.input_tokens + job.usage.output_tokens


def main(quick: bool = False) -> dict[str, float]:
    count, rounds = (2_000, 3) if quick else (20_000, 5)
    lines, found, rows = _lines(count), dict[str, float](), []
    with simulated_engine("--mode", "instant", "--fault", SPOILED, "--seed", "1") as url:
        plain = _tokens(uvloop.run(_run(url, lines, None)))
        for name, terms in {
            "without feedback": AnswerTerms(tries_max=TRIES_MAX),
            "with feedback": AnswerTerms(tries_max=TRIES_MAX, feedback=True),
        }.items():
            job = uvloop.run(_run(url, lines, terms))
            found |= {f"invalid, {name}": job.schema_invalid_count / count, f"tokens, {name}": _tokens(job) / plain}
            is_bound = not terms.feedback
            figures = f"{100 * job.schema_invalid_count / count:.2f} %", f"{_tokens(job) / plain:.3f} times"
            rows += [
                (f"{name}: answers that do not fit", figures[0], f"at most {100 * INVALID_SHARE_MAX:g} %"),
                (f"{name}: tokens, of those without tries", figures[1], f"under {TOKENS_MAX}" if is_bound else ""),
            ]
    for name, terms in {
        "the job's schema": AnswerTerms(json.dumps(SCHEMA)),
        "each line's own response_format": AnswerTerms(),
    }.items():
        found[name] = median([_check_us(terms, count) for _ in range(rounds)])
        rows.append((f"CPU of a check, {name}", f"{found[name]:.1f} µs", f"at most {CPU_US_MAX} µs"))
    table(f"{count:,} items, a schema of ten fields, one of ten answers spoiled, {TRIES_MAX} more tries", rows)
    return found


if __name__ == "__main__":
    main("--quick" in sys.argv)
