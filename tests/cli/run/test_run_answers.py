"""Answers that validate, at scale: a model that spoils a tenth of its answers, and a schema that every one must fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Desk
from tests.support.engine import Engine

SCHEMA = {
    "type": "object",
    "properties": {f"field_{number}": {"type": ("string", "integer", "boolean")[number % 3]} for number in range(10)},
    "required": [f"field_{number}" for number in range(10)],
    "additionalProperties": False,
}
UNFIT_SHARE = 0.1


@pytest.mark.parametrize(
    ("count", "invalid_share_max", "timeout_s"),
    [(1_000, 0.01, 60), pytest.param(20_000, 0.002, 600, marks=[pytest.mark.soak, pytest.mark.timeout(700)])],
)
def test_two_more_tries_leave_few_invalid_answers_and_cost_few_tokens(
    desk: Desk, tmp_path: Path, count: int, invalid_share_max: float, timeout_s: float
) -> None:
    engine = Engine(desk.processes, tmp_path / "spoiling", "--fault", f"unfit={UNFIT_SHARE}", "--seed", "7")
    asked = {"type": "json_schema", "json_schema": {"name": "ten", "schema": SCHEMA}}
    lines = []
    for number in range(count):
        body = {"model": "m", "messages": [{"role": "user", "content": f"record {number}"}], "response_format": asked}
        lines.append(
            json.dumps({"custom_id": f"c{number}", "url": "/v1/chat/completions", "method": "POST", "body": body})
        )
    desk.write(lines)
    usual = ("run", "requests.jsonl", "--upstream", engine.url, "-o", "r.jsonl", "--json")
    proc = desk.start(*usual, "--schema", "response_format", "--no-check")
    assert proc.wait(timeout_s) in (0, 1), proc.logs()
    summary = json.loads(proc.stdout())
    # Answers are as long each time, so an item that was asked once says what each try takes.
    once = [line for line in desk.results("r.jsonl") if "tidegate" not in line]
    assert 0.85 * count < len(once) < 0.95 * count, "a tenth is spoiled at first"
    each = sum(line["response"]["body"]["usage"]["total_tokens"] for line in once) / len(once)
    assert summary["input_tokens"] + summary["output_tokens"] < 1.15 * each * count
    assert summary["failed"] <= invalid_share_max * count
    for line in desk.results("r.jsonl"):
        assert len(json.loads(line["response"]["body"]["choices"][0]["message"]["content"])) == 10
    desk.done("verify", summary["batch"], "--witness", str(engine.calls_log))
