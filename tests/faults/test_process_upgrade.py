"""A rolling upgrade: this version and a next one at work on one database, with batches in flight.

The next version is this one with a real additive migration: a column that it writes and the older one does not know.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

import tidegate
from tests.support.processes import Proc
from tests.support.tidegate import Site, behaving, requests

SLOW = behaving("latency=1500")


@pytest.fixture
def next_version(tmp_path: Path) -> Path:
    """A copy of the program whose schema is one additive step ahead."""
    tree = tmp_path / "next"
    package = tree / "tidegate"
    shutil.copytree(Path(tidegate.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "__init__.py").write_text((package / "__init__.py").read_text().replace(tidegate.__version__, "9.9.9"))
    schema, migrations = package / "store" / "schema.sql", package / "store" / "migrations"
    step = "alter table jobs add column made_by text;\n"
    (migrations / "0001_first.sql").write_text(schema.read_text())
    (migrations / "0002_made_by.sql").write_text(f"-- compatible_from: 1\n{step}")
    schema.write_text(schema.read_text() + step)
    queries = package / "store" / "queries" / "jobs.sql"
    text = queries.read_text()
    for old, new in (
        ("answers, traceparent\n)", "answers, traceparent, made_by\n)"),
        (":traceparent\n)", ":traceparent, 'next'\n)"),
    ):
        assert text.count(old) == 1
        text = text.replace(old, new)
    queries.write_text(text)
    return tree


def run_next(site: Site, tree: Path, *args: str) -> Proc:
    """Start a command of the next version, from its own files."""
    env = {**site.environment(), "PYTHONPATH": str(tree)}
    command = [sys.executable, "-u", "-m", "tidegate", *args, "--data", str(site.directory / "next-data")]
    return site.processes.start(command, name=f"next-{args[0]}", env=env)


@pytest.mark.soak
def test_two_versions_work_side_by_side_with_batches_in_flight(cluster: Site, next_version: Path) -> None:
    assert not list((Path(tidegate.__file__).parent / "store" / "migrations").glob("*.sql")), "use the real step now"
    old_worker = cluster.begin()
    old_api = cluster.url
    lines = requests(40, lambda number: f"{number} {SLOW}")
    in_flight = cluster.submit(lines)
    cluster.until_called(4)

    migrated = run_next(cluster, next_version, "migrate")
    assert migrated.wait(60) == 0, migrated.logs()
    stamps = {row["name"]: row["value"] for row in cluster.rows("select name, value from meta")}
    assert (stamps["schema_version"], stamps["compatible_from"]) == ("2", "1")
    # The old processes go on, and an old one may still start.
    assert cluster.batch(in_flight)["status"] == "in_progress"
    by_old_after = cluster.submit(requests(4))
    assert cluster.ended(by_old_after).batch["status"] == "completed"
    late = cluster.worker(name="late-old")

    new_api = run_next(cluster, next_version, "api")
    cluster.url = new_api.wait_for_line(r"tidegate listening on (http://\S+)", 60).group(1)
    by_new = cluster.submit(requests(4))
    assert cluster.ended(by_new).batch["status"] == "completed", "an old worker runs what a new API accepted"

    new_worker = run_next(cluster, next_version, "worker")
    new_worker.wait_for_line(r"tidegate worker_\w+ running", 60)
    for old in (old_worker, late):
        old.terminate()
        assert old.wait(60) == 0
    cluster.url = old_api
    by_old = cluster.submit(requests(4))
    assert cluster.ended(by_old).batch["status"] == "completed", "a new worker runs what an old API accepted"

    assert cluster.ended(in_flight, timeout_s=120).batch["status"] == "completed"
    made_by = {row["id"]: row["made_by"] for row in cluster.rows("select id, made_by from jobs")}
    assert made_by == {in_flight: None, by_old_after: None, by_new: "next", by_old: None}
    for batch_id, count in ((in_flight, 40), (by_old_after, 4), (by_new, 4), (by_old, 4)):
        results = cluster.ended(batch_id)
        assert {line["custom_id"] for line in results.output} == {f"c{number}" for number in range(count)}
        assert len(results.output) == count
    assert len(cluster.calls_of(in_flight)) == 40, "what was handed over was called once"
