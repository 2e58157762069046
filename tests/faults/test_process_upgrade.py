"""A rolling upgrade: the wheel of the first schema version and today's on one database, with batches in flight."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import Proc
from tests.support.tidegate import Site, behaving, requests
from tidegate.store.database.schema import current_schema

SLOW = behaving("latency=1500")
# The last commit whose `schema.sql` is `migrations/0001_first.sql`.
FIRST = "f199d86c3ee099d740995268b9522c2b0933d1b1"
REPOSITORY = Path(__file__).resolve().parents[2]
PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")


class InstalledWheel:
    """A wheel that was built from a tree of the sources and installed in a directory; only its dependencies come from elsewhere."""

    def __init__(self, sources: Path, place: Path) -> None:
        self._installed = place / "installed"
        wheels = place / "wheels"
        built = ("--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels), str(sources))
        subprocess.run([*PIP, "wheel", *built], cwd=place, check=True)
        [wheel] = wheels.glob("tidegate-*.whl")
        subprocess.run([*PIP, "install", "--no-deps", "--target", str(self._installed), str(wheel)], check=True)

    def start(self, site: Site, *args: str, name: str) -> Proc:
        env = {**site.environment(), "PYTHONPATH": str(self._installed)}
        where = [sys.executable, "-c", "import tidegate; print(tidegate.__file__)"]
        loaded = subprocess.run(where, env=env, cwd=site.directory, capture_output=True, text=True, check=True).stdout
        assert Path(loaded.strip()).is_relative_to(self._installed), "the command runs what the wheel holds"
        data = site.directory / f"{self._installed.parent.name}-data"
        command = [sys.executable, "-u", "-m", "tidegate", *args, "--data", str(data)]
        return site.processes.start(command, name=name, env=env, cwd=site.directory)


@pytest.fixture
def first_wheel(tmp_path: Path) -> InstalledWheel:
    """The wheel of the first schema version, built from its commit."""
    tree = tmp_path / "first" / "sources"
    tree.mkdir(parents=True)
    archived = subprocess.run(["git", "archive", FIRST], cwd=REPOSITORY, capture_output=True, check=False)
    if archived.returncode != 0:
        pytest.fail(
            f"This test builds the wheel of commit {FIRST[:8]}, which is not in this checkout: {archived.stderr.decode().strip()}. "
            "Run it in a clone with the whole history (`git fetch --unshallow` completes one)."
        )
    subprocess.run(["tar", "-x", "-C", str(tree)], input=archived.stdout, check=True)
    return InstalledWheel(tree, tree.parent)


@pytest.fixture
def new_wheel(tmp_path: Path) -> InstalledWheel:
    """Today's wheel."""
    place = tmp_path / "new"
    place.mkdir()
    return InstalledWheel(REPOSITORY, place)


def listening(api: Proc) -> str:
    return api.wait_for_line(r"tidegate listening on (http://\S+)", 60).group(1)


def running(worker: Proc) -> Proc:
    worker.wait_for_line(r"tidegate worker_\w+ running", 60)
    return worker


@pytest.mark.soak
def test_two_versions_work_side_by_side_with_batches_in_flight(
    cluster: Site, first_wheel: InstalledWheel, new_wheel: InstalledWheel, postgres_url: str
) -> None:
    cluster.env["TIDEGATE_STORE_URL"] = postgres_url
    old_api = first_wheel.start(cluster, "api", name="old-api")
    old_url = cluster.url = listening(old_api)
    old_worker = running(first_wheel.start(cluster, "worker", name="old-worker"))
    assert _stamps(cluster) == ("1", "1")
    lines = requests(40, lambda number: f"{number} {SLOW}")
    in_flight = cluster.submit(lines)
    cluster.until_called(4)

    migrated = new_wheel.start(cluster, "migrate", name="migrate")
    assert migrated.wait(60) == 0, migrated.logs()
    assert _stamps(cluster) == (str(current_schema().version), "1"), "every step since the first version is additive"
    # The old processes go on, and an old one may still start.
    assert cluster.batch(in_flight)["status"] == "in_progress"
    by_old_after = cluster.submit(requests(4))
    assert cluster.ended(by_old_after).batch["status"] == "completed"
    late = running(first_wheel.start(cluster, "worker", name="late-old-worker"))

    new_url = cluster.url = listening(new_wheel.start(cluster, "api", name="new-api"))
    by_new = cluster.submit(requests(4))
    assert cluster.ended(by_new).batch["status"] == "completed", "an old worker runs what a new API accepted"
    assert {row["input_tokens"] for row in cluster.rows("select input_tokens from rates")} == {0}

    running(new_wheel.start(cluster, "worker", name="new-worker"))
    for old in (old_worker, late):
        old.terminate()
        assert old.wait(60) == 0, old.logs()
    cluster.url = old_url
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
