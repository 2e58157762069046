"""A rolling upgrade: the program of the first schema version and this one at work on one database, with batches in flight."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import Proc
from tests.support.tidegate import Site, behaving, requests
from tidegate.store.schema import current_schema

SLOW = behaving("latency=1500")
# The last commit whose `schema.sql` is `migrations/0001_first.sql`.
FIRST = "f199d86c3ee099d740995268b9522c2b0933d1b1"
REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def first_version(tmp_path: Path) -> Path:
    """The program of the first schema version, as it was committed."""
    tree = tmp_path / "first"
    tree.mkdir()
    archived = subprocess.run(["git", "archive", FIRST, "src"], cwd=REPOSITORY, capture_output=True, check=False)
    if archived.returncode != 0:
        pytest.skip(f"the history of the repository is not here: {archived.stderr.decode()}")
    subprocess.run(["tar", "-x", "-C", str(tree)], input=archived.stdout, check=True)
    return tree / "src"


def run_first(site: Site, tree: Path, *args: str, name: str = "") -> Proc:
    """Start a command of the first version, from its own files."""
    env = {**site.environment(), "PYTHONPATH": str(tree)}
    command = [sys.executable, "-u", "-m", "tidegate", *args, "--data", str(site.directory / "first-data")]
    return site.processes.start(command, name=name or f"first-{args[0]}", env=env)


def running(worker: Proc) -> Proc:
    worker.wait_for_line(r"tidegate worker_\w+ running", 60)
    return worker


@pytest.mark.soak
def test_two_versions_work_side_by_side_with_batches_in_flight(
    cluster: Site, first_version: Path, postgres_url: str
) -> None:
    cluster.env["TIDEGATE_STORE_URL"] = postgres_url
    old_api = run_first(cluster, first_version, "api")
    old_url = cluster.url = old_api.wait_for_line(r"tidegate listening on (http://\S+)", 60).group(1)
    old_worker = running(run_first(cluster, first_version, "worker"))
    assert _stamps(cluster) == ("1", "1")
    lines = requests(40, lambda number: f"{number} {SLOW}")
    in_flight = cluster.submit(lines)
    cluster.until_called(4)

    migrated = cluster.processes.start(cluster.command("migrate"), name="migrate", env=cluster.environment())
    assert migrated.wait(60) == 0, migrated.logs()
    assert _stamps(cluster) == (str(current_schema().version), "1"), "every step since the first version is additive"
    # The old processes go on, and an old one may still start.
    assert cluster.batch(in_flight)["status"] == "in_progress"
    by_old_after = cluster.submit(requests(4))
    assert cluster.ended(by_old_after).batch["status"] == "completed"
    late = running(run_first(cluster, first_version, "worker", name="late-old"))

    cluster.api()
    by_new = cluster.submit(requests(4))
    assert cluster.ended(by_new).batch["status"] == "completed", "an old worker runs what a new API accepted"
    assert {row["input_tokens"] for row in cluster.rows("select input_tokens from rates")} == {0}

    cluster.worker(name="new-worker")
    for old in (old_worker, late):
        old.terminate()
        assert old.wait(60) == 0, old.logs()
    new_url, cluster.url = cluster.url, old_url
    by_old = cluster.submit(requests(4))
    assert cluster.ended(by_old).batch["status"] == "completed", "a new worker runs what an old API accepted"
    assert max(row["input_tokens"] for row in cluster.rows("select input_tokens from rates")) > 0

    results = cluster.ended(in_flight, timeout_s=120)
    assert results.batch["status"] == "completed"
    assert len(cluster.calls_of(in_flight)) == 40, "what was handed over was called once"
    old_api.terminate()
    assert old_api.wait(60) == 0, old_api.logs()
    cluster.url = new_url
    for batch_id, count in ((in_flight, 40), (by_old_after, 4), (by_new, 4), (by_old, 4)):
        cluster.judge(batch_id, requests(count), witnessed=False)


def _stamps(site: Site) -> tuple[str, str]:
    stamps = {row["name"]: row["value"] for row in site.rows("select name, value from meta")}
    return stamps["schema_version"], stamps["compatible_from"]
