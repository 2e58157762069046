"""Row 42 of the fault matrix: what an operator takes away or changes in the middle of a batch holds for what was not sent yet, and what is
in flight ends as it began."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.support.engine import Engine
from tests.support.processes import Processes, wait_until
from tests.support.tidegate import END_S, IN_FLIGHT, Results, Site, requests
from tidegate.storage import opened

ITEMS = 80
DONE_FIRST = 4
# So many that a batch is far from done whenever the word comes.
MANY = 400
AT_ONCE = 2
LATENCY_MS = 200
# A key's state is believed for two seconds: in that time no more calls can begin than the engine answers, and those that are out already.
FOLLOWED_CALLS_MAX = AT_ONCE * (2_000 // LATENCY_MS + 2)


class Running:
    """`tidegate serve` over an engine that takes a while and one that wants a key."""

    def __init__(self, processes: Processes, directory: Path) -> None:
        self.engine = Engine(processes, directory / "engine", latency_ms=LATENCY_MS)
        self.locked = Engine(processes, directory / "locked", "--api-key", "the-new-key")
        place = {"url": self.engine.url, "max_in_flight": AT_ONCE}
        price = {"input": 1_000, "output": 1_000}
        models = {"kept": {"deployments": [place]}, "priced": {"deployments": [{**place, "price": price}]}}
        self.keys = directory / "keys"
        self.keys.mkdir()
        self.site = Site("embedded", processes, directory, self.engine)
        self.site.configure(models=models, added={"folders": [str(self.keys)]})
        self.proc = self.site.begin()


class Changed:
    """A batch in the middle of which something is changed: what was called by then, and what may still be."""

    def __init__(self, caller: Site, model: str) -> None:
        self.caller = caller
        self.lines = requests(MANY, model=model)
        self.batch_id = caller.submit(self.lines)
        caller.until_done(self.batch_id, DONE_FIRST)

    def followed(self, results: Results, called_before: int) -> None:
        """Unsent items followed within two seconds, and nothing that the engine was asked for is lost."""
        calls = self.caller.calls_of(self.batch_id)
        assert len(calls) == len(results.output) >= DONE_FIRST
        assert len(calls) - called_before <= FOLLOWED_CALLS_MAX

    def called(self) -> int:
        return len(self.caller.calls_of(self.batch_id))


@pytest.fixture(scope="module")
def running(module_processes: Processes, module_directory: Path) -> Running:
    return Running(module_processes, module_directory)


def test_42_a_model_that_is_removed_fails_what_was_not_sent(running: Running) -> None:
    caller = running.site.keyed("models")
    added = {"model": "added", "url": running.engine.url, "max_in_flight": 2}
    running.site.operate("deployments/add", name="added", set=added)
    lines = requests(ITEMS, model="added")
    batch_id = caller.submit(lines)
    caller.until_done(batch_id, DONE_FIRST)
    running.site.operate("deployments/remove", name="added", force=True)
    results = caller.judge(batch_id, lines)
    assert set(results.error_codes()) == {"model_not_found"}
    # What was in flight was answered: nothing that the engine was asked for is lost.
    assert len(caller.calls_of(batch_id)) == len(results.output) >= DONE_FIRST


def test_42_a_key_that_is_revoked_fails_what_was_not_sent(running: Running) -> None:
    made = running.site.operate("keys", org="revoked")
    caller = running.site.as_caller(made["key"])
    lines = requests(ITEMS, model="kept")
    batch_id = caller.submit(lines)
    caller.until_done(batch_id, DONE_FIRST)
    running.site.operate(f"keys/{made['id']}/revoke")
    other = running.site.keyed("revoked")
    results = other.judge(batch_id, lines)
    assert set(results.error_codes()) == {"key_revoked"}
    assert len(caller.calls_of(batch_id)) == len(results.output) >= DONE_FIRST
    wait_until(lambda: caller.client().get("/v1/files").status_code == 401, END_S, "the key to be refused")


@pytest.mark.parametrize("what", ["key", "organization"])
def test_42_a_key_that_is_deleted_alone_or_with_its_organization_fails_what_was_not_sent(
    running: Running, what: str
) -> None:
    org = f"deleted {what}"
    made = running.site.operate("keys", org=org)
    changed = Changed(running.site.as_caller(made["key"]), "kept")
    deleted = running.site.operate("keys/delete", **({"id": made["id"]} if what == "key" else {"org": org}))
    assert deleted == {"deleted": [made["id"]]}
    called = changed.called()
    other = running.site.keyed(org)
    results = other.judge(changed.batch_id, changed.lines)
    assert set(results.error_codes()) == {"key_deleted"}
    assert "create the batch again with another key" in results.errors[0]["error"]["message"]
    changed.followed(results, called)
    wait_until(lambda: changed.caller.client().get("/v1/files").status_code == 401, END_S, "the key to be refused")


def test_42_a_budget_that_is_lowered_below_what_is_spent_fails_what_was_not_sent(running: Running) -> None:
    made = running.site.operate("keys", org="lowered", limits=[{"period": "lifetime", "cost": "1000"}])
    changed = Changed(running.site.as_caller(made["key"]), "priced")
    running.site.operate(f"keys/{made['id']}/change", limits=[{"period": "lifetime", "cost": "0.001"}])
    called = changed.called()
    results = changed.caller.judge(changed.batch_id, changed.lines)
    assert set(results.error_codes()) == {"budget_exceeded"}
    assert "the budget of this key" in results.errors[0]["error"]["message"]
    changed.followed(results, called)


def test_42_a_rate_that_is_lowered_holds_back_what_was_not_sent(running: Running) -> None:
    """It waits for the next day; and once the limit is raised again, for nothing."""
    made = running.site.operate("keys", org="rated", limits=[{"period": "day", "requests": 100_000}])
    changed = Changed(running.site.as_caller(made["key"]), "kept")
    running.site.operate(f"keys/{made['id']}/change", limits=[{"period": "day", "requests": 1}])
    called = changed.called()

    def rests() -> bool:
        """For longer than a moment: no worker looks at it before."""
        [row] = running.site.rows("select max(rests_until) - max(leased_at) as ms from job_models where state = 'open'")
        return bool(row["ms"] > 60_000)

    wait_until(rests, END_S, "the batch to rest")
    assert changed.called() - called <= FOLLOWED_CALLS_MAX
    state = changed.called()
    running.site.operate(f"keys/{made['id']}/change", limits=[{"period": "day", "requests": 100_000}])
    changed.caller.until_done(changed.batch_id, state + DONE_FIRST)
    changed.caller.cancel(changed.batch_id)
    results = changed.caller.judge(changed.batch_id, changed.lines, "cancelled")
    assert set(results.error_codes()) == {"batch_cancelled"}
    assert changed.called() == len(results.output)


@pytest.mark.parametrize("how", ["call", pytest.param("file", marks=pytest.mark.soak)])
def test_42_new_calls_have_a_providers_new_key_and_none_failed_for_the_old_one(running: Running, how: str) -> None:
    """By the operator's call, or by another key in the same file, seen without any."""
    keys = running.keys / how
    keys.mkdir()
    caller = running.site.keyed("rotated")
    for name in ("old", "new"):
        (keys / name).write_text(f"the-{name}-key\n")
    locked = {"model": f"locked by {how}", "url": running.locked.url, "api_key": f"file:{keys / 'old'}"}
    running.site.operate("deployments/add", name=f"locked by {how}", set=locked)
    lines = requests(ITEMS, model=f"locked by {how}")
    waiting = caller.submit(lines)
    running.proc.wait_for_line(f"upstream_key_rejected.*locked by {how}")
    if how == "call":
        running.site.operate("deployments/change", name=f"locked by {how}", set={"api_key": f"file:{keys / 'new'}"})
    else:
        (keys / "new").replace(keys / "old")
    for batch_id in (waiting, caller.submit(lines)):
        assert caller.judge(batch_id, lines, witnessed=False).errors == []


@pytest.mark.soak
def test_42_every_worker_of_a_cluster_learns_of_a_key_that_is_deleted(cluster: Site) -> None:
    """By whichever process it was taken away: two workers over PostgreSQL and S3, and an operator beside them."""

    async def delete_all() -> list[str]:
        async with opened(cluster.settings) as parts:
            return await parts.store.delete_keys_of("acme")

    cluster.begin()
    cluster.worker(name="second", data=cluster.directory / "second")
    made = cluster.operate("keys", org="acme", team="red")
    caller = cluster.as_caller(made["key"])
    lines = requests(3 * MANY)
    batch_id = caller.submit(lines)
    caller.until_done(batch_id, 4 * IN_FLIGHT)
    assert asyncio.run(delete_all()) == [made["id"]]
    other = cluster.keyed(team="red")
    results = other.judge(batch_id, lines)
    assert set(results.error_codes()) == {"key_deleted"}
    assert len(caller.calls_of(batch_id)) == len(results.output)
    # What was answered is the team's still, though its key is gone.
    [used] = cluster.rows("select team, sum(calls) as calls from usage group by team")
    assert (used["team"], int(used["calls"])) == ("red", len(results.output))
