"""PostgreSQL's disk is full: what needs room is refused with 507, results wait, and with room again everything is there."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import asyncpg
import pytest

from tests.faults.conftest import PATIENT, MakeSite
from tests.support.postgres import UNPRIVILEGED_ID, PostgresServer
from tests.support.tidegate import END_S, IN_FLIGHT, Site, behaving, requests

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(os.geteuid() != 0, reason="a small disk is mounted, which only root may do"),
]

SIZE_BYTES = 24 << 20


class SmallDisk:
    """A database whose tables lie on a small disk of their own; the write-ahead log lies elsewhere."""

    def __init__(self, server: PostgresServer, directory: Path) -> None:
        self.directory = directory
        self.url = server.url("crowded")
        asyncio.run(self._create(server.url()))

    async def _create(self, url: str) -> None:
        connection = await asyncpg.connect(url)
        await connection.execute(f"create tablespace small location '{self.directory}'")
        await connection.execute("create database crowded template template0 tablespace small")
        await connection.close()

    def fill(self) -> None:
        """Take all room that is left, by a file beside the tables."""
        with suppress(OSError):
            (self.directory / "filler").write_bytes(bytes(SIZE_BYTES))
        assert shutil.disk_usage(self.directory).free == 0

    def free(self) -> None:
        (self.directory / "filler").unlink()


@pytest.fixture
def small_disk(private_postgres_server: PostgresServer) -> Iterator[SmallDisk]:
    directory = private_postgres_server.directory / "small"
    directory.mkdir()
    mounted = subprocess.run(
        [
            "mount",
            "-t",
            "tmpfs",
            "-o",
            f"size={SIZE_BYTES},uid={UNPRIVILEGED_ID},gid={UNPRIVILEGED_ID},mode=700",
            "tmpfs",
            str(directory),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode != 0:
        pytest.skip(f"no small disk can be mounted here: {mounted.stderr}")
    try:
        yield SmallDisk(private_postgres_server, directory)
    finally:
        private_postgres_server.stop()
        subprocess.run(["umount", "-l", str(directory)], check=True)


@pytest.fixture
def crowded(make_site: MakeSite, small_disk: SmallDisk) -> Site:
    site = make_site("cluster")
    site.env["TIDEGATE_STORE_URL"] = small_disk.url
    return site


def test_an_upload_meets_a_full_database(crowded: Site, small_disk: SmallDisk) -> None:
    crowded.begin(more=PATIENT)
    lines = requests(8)
    small_disk.fill()
    refused = crowded.upload(lines)
    assert (refused.status_code, refused.json()["error"]["code"]) == (507, "storage_full"), refused.text
    small_disk.free()
    assert crowded.get("/v1/files")["data"] == []
    batch_id = crowded.submit(lines)
    crowded.judge(batch_id, lines)


def test_results_meet_a_full_database(crowded: Site, small_disk: SmallDisk) -> None:
    """Rows that are there can be changed; what takes new pages waits."""
    worker = crowded.begin(more=PATIENT)
    lines = requests(600, lambda number: behaving("latency=50"))
    batch_id = crowded.submit(lines)
    crowded.until_called(IN_FLIGHT + 1)
    small_disk.fill()
    worker.wait_for_line("record_postponed", END_S)
    small_disk.free()
    crowded.judge(batch_id, lines)
