"""What lines of a batch may not ask for: each becomes a 400 in the error file, and the others run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.guards.test_guard import rules
from tests.worker.world import Script, WorkerWorld, working
from tidegate.core.body_rules.caller_fields import FieldRules
from tidegate.core.nouns import Job

pytestmark = pytest.mark.anyio

NOT_ALLOWED = "parameter_not_allowed"
LARGE = {"image_url": "data:image/png;base64," + "A" * 70_000}


def saying(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"previous_response_id": "resp_1"}, NOT_ALLOWED, "body.previous_response_id"),
    (saying({"type": "file", "file": {"file_id": "f"}}), NOT_ALLOWED, "body.messages[0].content[0].file.file_id"),
    ({"priority": -1}, NOT_ALLOWED, "body.priority"),
    ({"Model": "dearer"}, "duplicate_parameter", "body.Model"),
    (saying({"image_url": "http://10.0.0.1/a"}), "media_not_allowed", "body.messages[0].content[0].image_url"),
    (saying(LARGE, {"file_id": "f"}), NOT_ALLOWED, "body.messages[0].content[1].file_id"),
]


def lines(*more: dict[str, Any]) -> list[bytes]:
    usual = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    return [json.dumps({"custom_id": f"c{n}", "body": {**usual, **one}}).encode() for n, one in enumerate(more)]


async def run(world: WorkerWorld, script: Script, work: list[bytes], **options: Any) -> Job:
    job = await world.started(work)
    async with working(world, script, **options):
        return await world.ended(job)


async def test_each_is_refused_alone_and_is_never_sent(live: WorkerWorld) -> None:
    script = Script(live, "m")
    job = await run(live, script, lines(*(body for body, _, _ in WRONG), {}))
    assert (job.state, job.answered_count, job.failed_count) == ("completed", 1, len(WRONG))
    assert len(script.calls) == 1
    found = {line["custom_id"]: line for line in await live.file_lines(job.error_file_id)}
    for number, (_, code, param) in enumerate(WRONG):
        line = found[f"c{number}"]
        assert line["error"] is None
        assert line["response"]["status_code"] == 400
        error = line["response"]["body"]["error"]
        assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", code, param)
        assert f"`{param.removeprefix('body.')}`" in error["message"]
    assert job.usage.input_tokens == 1


async def test_what_a_model_allows_is_sent_as_it_came(live: WorkerWorld) -> None:
    script = Script(live, "m")
    allowed = FieldRules(allowed=frozenset({"priority"}), media_hosts=frozenset({"images.example.com"}))
    image = {"type": "image_url", "image_url": {"url": "https://images.example.com/a"}}
    work = lines({"priority": -1}, saying(image), {"rid": "x"})
    job = await run(live, script, work, fields_of={"m": allowed})
    assert (job.answered_count, job.failed_count) == (2, 1)
    assert sorted(call.body for call in script.calls) == sorted(
        json.dumps(json.loads(line)["body"]).encode() for line in work[:2]
    )


async def test_what_a_hook_adds_is_the_operators_own(
    live: WorkerWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hook_of_lines.py").write_text("def first(body, about):\n    return {**body, 'priority': 7}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    script = Script(live, "m")
    made = rules(hooks={"first": {"before": "hook_of_lines:first"}})
    job = await run(live, script, lines({}, {"priority": 1}), rules=made)
    assert (job.answered_count, job.failed_count) == (1, 1)
    assert [json.loads(call.body)["priority"] for call in script.calls] == [7]
