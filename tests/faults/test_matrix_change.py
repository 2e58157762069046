"""Row 42 of the fault matrix: what an operator takes away or changes in the middle of a batch holds for what was not sent yet, and what is
in flight ends as it began."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.engine import Engine
from tests.support.processes import Processes, wait_until
from tests.support.run_directory import RunDirectory
from tests.support.tidegate import END_S, Site, requests

ITEMS = 80
DONE_FIRST = 4


class Running:
    """`tidegate serve` over an engine that takes a while and one that wants a key."""

    def __init__(self, processes: Processes, directory: Path) -> None:
        self.engine = Engine(processes, directory / "engine", "--latency-ms", "200", mode="fixed")
        self.locked = Engine(processes, directory / "locked", "--api-key", "the-new-key")
        config = directory / "tidegate.yaml"
        config.write_text(
            json.dumps({"models": {"kept": {"deployments": [{"url": self.engine.url, "max_in_flight": 2}]}}})
        )
        self.site = Site("embedded", processes, directory, self.engine, {"TIDEGATE_CONFIG": str(config)})
        self.proc = self.site.begin()
        self._token = json.loads((self.site.data / "control.json").read_text())["token"]

    def operate(self, path: str, **body: Any) -> Any:
        headers = {"X-Tidegate-Control": self._token}
        answer = httpx2.post(f"{self.site.url}/control/{path}", json=body, headers=headers, timeout=30)
        assert answer.status_code == 200, answer.text
        return answer.json()


@pytest.fixture(scope="module")
def running(run_directory: RunDirectory, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    directory: Path = tmp_path_factory.mktemp("change")
    processes = Processes(directory / "process-logs", run_directory.process_registry())
    try:
        yield Running(processes, directory)
    finally:
        processes.close()


def test_42_a_model_that_is_removed_fails_what_was_not_sent(running: Running) -> None:
    caller = running.site.as_caller(running.operate("keys", org="models")["key"])
    added = {"model": "added", "url": running.engine.url, "max_in_flight": 2}
    running.operate("deployments/add", name="added", set=added)
    lines = requests(ITEMS, model="added")
    batch_id = caller.submit(lines)
    caller.until_done(batch_id, DONE_FIRST)
    running.operate("deployments/remove", name="added", force=True)
    results = caller.judge(batch_id, lines)
    assert set(results.error_codes()) == {"model_not_found"}
    # What was in flight was answered: nothing that the engine was asked for is lost.
    assert len(caller.calls_of(batch_id)) == len(results.output) >= DONE_FIRST


def test_42_a_key_that_is_revoked_fails_what_was_not_sent(running: Running) -> None:
    made = running.operate("keys", org="revoked")
    caller = running.site.as_caller(made["key"])
    lines = requests(ITEMS, model="kept")
    batch_id = caller.submit(lines)
    caller.until_done(batch_id, DONE_FIRST)
    running.operate(f"keys/{made['id']}/revoke")
    other = running.site.as_caller(running.operate("keys", org="revoked")["key"])
    results = other.judge(batch_id, lines)
    assert set(results.error_codes()) == {"key_revoked"}
    assert len(caller.calls_of(batch_id)) == len(results.output) >= DONE_FIRST
    wait_until(lambda: caller.client().get("/v1/files").status_code == 401, END_S, "the key to be refused")


@pytest.mark.parametrize("how", ["call", "file"])
def test_42_new_calls_have_a_providers_new_key_and_none_failed_for_the_old_one(
    running: Running, tmp_path: Path, how: str
) -> None:
    """By the operator's call, or by another key in the same file, seen without any."""
    caller = running.site.as_caller(running.operate("keys", org="rotated")["key"])
    for name in ("old", "new"):
        (tmp_path / name).write_text(f"the-{name}-key\n")
    locked = {"model": f"locked by {how}", "url": running.locked.url, "api_key": f"file:{tmp_path / 'old'}"}
    running.operate("deployments/add", name=f"locked by {how}", set=locked)
    lines = requests(ITEMS, model=f"locked by {how}")
    waiting = caller.submit(lines)
    running.proc.wait_for_line(f"upstream_key_rejected.*locked by {how}")
    if how == "call":
        running.operate("deployments/change", name=f"locked by {how}", set={"api_key": f"file:{tmp_path / 'new'}"})
    else:
        (tmp_path / "new").replace(tmp_path / "old")
    for batch_id in (waiting, caller.submit(lines)):
        assert caller.judge(batch_id, lines, witnessed=False).errors == []
