"""The disk of an embedded site fills up or fails: uploads are refused whole, results wait, and afterwards everything is there."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from tests.faults.conftest import PATIENT
from tests.support.processes import wait_until
from tests.support.shims import Shims, preload_env
from tests.support.tidegate import END_S, IN_FLIGHT, Site, behaving, requests

SMALL_DISK_BYTES = 24 << 20


def slow(number: int) -> str:
    return behaving("latency=200")


def test_an_upload_meets_a_full_disk(embedded: Site, shims: Shims) -> None:
    disk = shims.disk(embedded.data)
    embedded.serve(more=preload_env(disk, base=PATIENT))
    lines = requests(8)
    disk.fail("enospc")
    refused = embedded.upload(lines, key="once")
    assert (refused.status_code, refused.json()["error"]["code"]) == (507, "storage_full"), refused.text
    disk.heal()
    assert embedded.get("/v1/files")["data"] == []
    file_id = embedded.upload(lines).json()["id"]
    disk.fail("enospc")
    assert embedded.create(file_id).status_code == 507, "a batch is one row, and needs room too"
    disk.heal()
    assert embedded.get("/v1/batches")["data"] == []
    batch_id = embedded.submit(lines)
    embedded.judge(batch_id, lines)
    embedded.end_all()
    embedded.collect_garbage()
    assert embedded.blobs() == embedded.named_blobs()


@pytest.mark.parametrize("rule", ["enospc", "erofs-write"])
def test_results_meet_a_full_disk(embedded: Site, shims: Shims, rule: str) -> None:
    disk = shims.disk(embedded.data)
    proc = embedded.serve(more=preload_env(disk, base=PATIENT))
    lines = requests(32, slow)
    batch_id = embedded.submit(lines)
    embedded.until_done(batch_id, IN_FLIGHT)
    disk.fail(rule)
    proc.wait_for_line("record_postponed")
    called = _until_calls_end(embedded)
    assert called < len(lines), "what cannot be kept must not be called for"
    assert embedded.client().get("/readyz").status_code == 503
    disk.heal()
    embedded.judge(batch_id, lines)


def test_a_failed_fsync_voids_the_log(embedded: Site, shims: Shims) -> None:
    """After a failed fsync it is unknown what is on the disk: the log is left, and its lines go to a new one from memory."""
    disk = shims.disk(embedded.data / "blobs")
    proc = embedded.serve(more=preload_env(disk, base=PATIENT))
    lines = requests(24, slow)
    batch_id = embedded.submit(lines)
    embedded.until_done(batch_id, IN_FLIGHT)
    disk.fail("eio-fsync")
    proc.wait_for_line("record_postponed")
    disk.heal()
    embedded.judge(batch_id, lines)
    logs = embedded.rows("select id from blobs where kind = 'answers'")
    assert len(logs) >= 2


@pytest.fixture
def on_a_small_disk(embedded: Site) -> Iterator[Site]:
    embedded.data.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK_BYTES},mode=700", "tmpfs", str(embedded.data)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"no small disk can be mounted here: {mounted.stderr}")
    try:
        yield embedded
    finally:
        subprocess.run(["umount", "-l", str(embedded.data)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="a small disk is mounted, which only root may do")
def test_a_full_disk_is_freed_through_the_product(on_a_small_disk: Site) -> None:
    """Deletes, cancels and a start go through where uploads are refused, also after a restart."""
    site = on_a_small_disk
    site.serve(more=PATIENT)
    lines = requests(400, lambda number: "word " * 400)
    ended = site.submit(requests(4))
    site.until_status(ended, "completed")
    waiting = site.create(site.upload(lines).json()["id"], not_before=int(time.time()) + 9999).json()["id"]
    site.until_status(waiting, "in_progress")
    unused = [site.upload(lines).json()["id"] for _ in range(2)]
    wait_until(lambda: (site.data / "tidegate.db.reserve").stat().st_size >= 8 << 20, END_S, "the room to be kept")
    _fill(site)
    assert site.upload(lines).status_code == 507
    client = site.client()
    assert client.post(f"/v1/batches/{waiting}/cancel").status_code == 200
    assert client.delete(f"/v1/batches/{ended}").status_code == 200
    site.end_all()
    _fill(site)
    site.serve(more=PATIENT)
    _fill(site)
    assert site.upload(lines).status_code == 507
    assert [site.client().delete(f"/v1/files/{one}").status_code for one in unused] == [200, 200]
    assert site.upload(lines).status_code == 200, "what was deleted is room again, at once"


def _fill(site: Site) -> None:
    """Take all room that is left on the site's disk, to the last block."""
    for size in (65_536, 4_096):
        with (site.data / f"filler-{time.monotonic_ns()}").open("wb", buffering=0) as file, suppress(OSError):
            while file.write(bytes(size)) == size:
                pass
    assert shutil.disk_usage(site.data).free == 0


def _until_calls_end(site: Site) -> int:
    """How many calls there were when the worker had logged why it takes no more, and those in flight had ended."""
    seen = [-1]

    def quiet() -> bool:
        before, seen[0] = seen[0], len(site.calls())
        return before == seen[0] and "cannot be stored" in site.client().get("/readyz").text

    wait_until(quiet, END_S, "the calls to end", poll_s=0.5)
    return seen[0]
