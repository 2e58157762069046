"""Answers that must fit, with real processes: tries are counted and paid for once, though workers and the database die."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.faults.conftest import CLUSTER_IN_SOAK, PATIENT
from tests.support.postgres import PostgresServer
from tests.support.tidegate import IN_FLIGHT, Site, behaving

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}, "word": {"type": "string"}}, "required": ["n"]}
ANSWERS = {"schema": "response_format", "tries_max": 2}
COUNT = 48


def asking(count: int) -> list[str]:
    """Lines whose own schema must be fitted: every third answer does not fit at first, and every twelfth never does."""
    lines = []
    for number in range(count):
        unfit = "unfit" if number % 12 == 0 else "unfitx1" if number % 3 == 0 else "latency=200"
        body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": behaving(unfit)}]}
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
        # A script counts the calls of one prompt, so prompts must differ.
        body["messages"].insert(0, {"role": "system", "content": f"item {number}"})
        lines.append(
            json.dumps({"custom_id": f"c{number}", "method": "POST", "url": "/v1/chat/completions", "body": body})
        )
    return lines


@CLUSTER_IN_SOAK
def test_a_killed_worker_leaves_the_tries_of_its_items_to_the_next(site: Site) -> None:
    lines = asking(COUNT)
    worker = site.begin()
    batch_id = site.submit(lines, answers=ANSWERS)
    site.until_called(3 * IN_FLIGHT)
    worker.kill()
    site.relieve()
    results = site.judge(batch_id, lines, repeats_max=2 * COUNT)
    check(results.batch, results.output, results.errors)


@pytest.mark.soak
def test_the_database_crashes_between_two_tries(crashing: Site, private_postgres_server: PostgresServer) -> None:
    lines = asking(COUNT)
    crashing.begin(more=PATIENT)
    crashing.worker(more=PATIENT)
    batch_id = crashing.submit(lines, answers=ANSWERS)
    crashing.until_called(2 * IN_FLIGHT)
    private_postgres_server.restart_immediate()
    results = crashing.judge(batch_id, lines, repeats_max=2 * COUNT)
    check(results.batch, results.output, results.errors)


def check(batch: dict[str, Any], output: list[dict[str, Any]], errors: list[dict[str, Any]]) -> None:
    """Every answer in the output fits; what never did is filed with its last answer."""
    never = {f"c{number}" for number in range(0, COUNT, 12)}
    assert {line["custom_id"] for line in errors} == never
    assert batch["tidegate"]["schema_invalid"] == len(never)
    for line in errors:
        assert line["error"]["code"] == "schema_invalid"
        assert len(line["tidegate"]["tries"]) == 3
        assert "choices" in json.loads(line["tidegate"]["raw"])
    for line in output:
        fitted = json.loads(line["response"]["body"]["choices"][0]["message"]["content"])
        assert isinstance(fitted["n"], int)
