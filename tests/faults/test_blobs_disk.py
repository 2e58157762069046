"""Blobs on a disk that is full, broken, shared with another host, or dies with its process: nothing half counts."""

from __future__ import annotations

import asyncio
import errno
import gc
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.contracts.blobs_places import Place, descriptors_under, fresh_ids, new_id, put, s3_settings
from tests.faults.blobs_scenarios import LINES, LOG_RULES, WRITER_RULES
from tests.support.processes import Processes
from tests.support.s3 import S3Server
from tests.support.shims import DiskFault, Shims, preload_env
from tidegate.backends import one_host
from tidegate.backends.blobs_local import LocalBlobs
from tidegate.backends.disk import sync_directory
from tidegate.core.errors import BlobMissing, BlobUnavailable, StoreRefused

SYNC = "tidegate.backends.blobs_local.sync_directory"
ADVICE = {"enospc": "free some space", "edquot": "quota", "erofs": "read-only", "eio": "dmesg"}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place("local", str(tmp_path / "blobs"))


@pytest.fixture
def disk(shims: Shims, place: Place) -> DiskFault:
    return shims.disk(Path(place.directory))


def run(processes: Processes, place: Place, disk: DiskFault, scenario: str) -> Any:
    command = [sys.executable, "-m", "tests.faults.blobs_scenarios", place.to_json(), scenario]
    proc = processes.start(command, env=preload_env(disk))
    assert proc.wait(60) == 0, proc.logs()
    return json.loads(proc.stdout())


def assert_reported(outcome: list[str], rules: str, directory: str) -> None:
    kind, message = outcome
    assert kind == "BlobUnavailable", (rules, outcome)
    assert directory in message, (rules, outcome)
    assert any(advice in message for error, advice in ADVICE.items() if error in rules), (rules, outcome)


def test_a_failing_disk_leaves_no_blob_and_says_what_to_do(processes: Processes, place: Place, disk: DiskFault) -> None:
    outcomes = run(processes, place, disk, "writers")
    assert list(outcomes) == WRITER_RULES
    for rules, result in outcomes.items():
        assert_reported(result["during"], rules, place.directory)
        assert all(kind == "BlobVoid" for kind, _ in result["after"]), (rules, result)
        assert result["size"] is None, rules
        assert result["listed"] == [], rules
        assert result["healed"] == ["ok", ""], rules
    assert_reported(outcomes["enospc-write"]["checked"], "enospc", place.directory)


@pytest.mark.parametrize("kind", ["local", "s3"])
def test_a_log_on_a_failing_disk_is_void_for_good_and_keeps_what_was_durable(
    kind: str, processes: Processes, shims: Shims, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    place = Place("local", str(tmp_path / "blobs"))
    if kind == "s3":
        server: S3Server = request.getfixturevalue("s3_server")
        place = Place("s3", str(tmp_path / "spool"), s3_settings(server, request.getfixturevalue("s3_bucket")))
    outcomes = run(processes, place, shims.disk(Path(place.directory)), "logs")
    assert list(outcomes) == LOG_RULES
    for rules, result in outcomes.items():
        assert_reported(result["during"], rules, place.directory)
        assert [kind for kind, _ in result["after"]] == ["BlobVoid", "BlobVoid"], (rules, result)
        assert result["whole"], rules
        assert result["healed"], rules
        if "truncate" in rules:
            # Whole lines of the failed append may be found; none of them is torn, and none was ever referred to.
            assert 2 * len(LINES) <= result["recovered"] < 3 * len(LINES), rules
        else:
            assert result["recovered"] == 2 * len(LINES), rules


def test_too_few_descriptors_are_named_and_survived(processes: Processes, place: Place, disk: DiskFault) -> None:
    outcome = run(processes, place, disk, "few_descriptors")
    for kind, message in outcome["during"]:
        assert kind == "BlobUnavailable"
        assert "ulimit -n" in message
    assert outcome["healed"] == "content"


@pytest.mark.anyio
async def test_a_kill_before_any_system_call_loses_nothing_acknowledged(
    processes: Processes, place: Place, tmp_path: Path
) -> None:
    for step in range(1, 40):
        command = [sys.executable, "-m", "tests.faults.blobs_scenarios", place.to_json(), "killed_at", str(step)]
        proc = processes.start(command)
        code = proc.wait(30)
        reached: dict[str, Any] = {}
        for line in proc.stdout().splitlines():
            reached.update(json.loads(line))
        blobs = place.open()
        data = LINES if "finished" in reached else None
        if await blobs.size(reached["blob_id"]) is not None or data:
            assert await blobs.read(reached["blob_id"], 0, len(LINES)) == LINES, f"killed before call {step}"
        recovered = await blobs.recover(reached["log_id"]) or 0
        assert recovered >= reached.get("appended", 0) * len(LINES), f"killed before call {step}"
        assert recovered % len(LINES) == 0
        for left in await blobs.list_ids("", 10):
            await blobs.delete(left)
        assert await blobs.list_ids("", 10) == []
        await blobs.close()
        if code == 0:
            assert reached["survived"]
            assert step > 8, "the scenario must pass several system calls"
            return
    pytest.fail("the scenario never ended without a kill")


@pytest.mark.anyio
async def test_damaged_blobs_are_never_read_as_whole(place: Place, tmp_path: Path) -> None:
    blobs = place.open()
    (tmp_path / "outside").write_bytes(b"secret" * 10)
    for damage in ("shorter", "gone", "a link", "a pipe", "a directory"):
        blob_id = await put(blobs, b"0123456789")
        path = await blobs.local_path(blob_id, tmp_path)
        break_file(path, damage, tmp_path / "outside")
        with pytest.raises(BlobMissing if damage in ("shorter", "gone") else BlobUnavailable):
            await blobs.read(blob_id, 0, 10)
        with pytest.raises((BlobMissing, BlobUnavailable)):
            assert [piece async for piece in blobs.stream(blob_id, 0, 10)] == []
    await blobs.close()


def break_file(path: Path, damage: str, outside: Path) -> None:
    path.unlink()
    if damage == "shorter":
        path.write_bytes(b"01234")
    elif damage == "a link":
        path.symlink_to(outside)
    elif damage == "a pipe":
        os.mkfifo(path)
    elif damage == "a directory":
        path.mkdir()


@pytest.mark.anyio
async def test_a_directory_that_vanished_is_unavailable_not_empty(place: Place, tmp_path: Path) -> None:
    """A disk that is not mounted must not look like blobs that were deleted."""
    blobs = place.open()
    blob_id = await put(blobs, b"x")
    os.rename(place.directory, tmp_path / "unmounted")
    with pytest.raises(BlobUnavailable):
        await blobs.read(blob_id, 0, 1)
    with pytest.raises(BlobUnavailable):
        await blobs.size(blob_id)
    with pytest.raises(BlobUnavailable):
        await blobs.list_ids("", 10)
    with pytest.raises(BlobUnavailable):
        await blobs.check()
    os.rename(tmp_path / "unmounted", place.directory)
    assert await blobs.read(blob_id, 0, 1) == b"x"
    await blobs.close()


@pytest.mark.anyio
async def test_a_long_log_goes_on_in_another_blob(tmp_path: Path) -> None:
    blobs = LocalBlobs(tmp_path / "blobs", log_bytes_max=100)
    taken, next_blob_id = fresh_ids()
    log = await blobs.open_log(next_blob_id)
    for number in range(30):
        await log.append(b"line %06d\n" % number)
        placed = await log.seal()
        assert placed is not None
        assert await blobs.read(placed.blob_id, placed.at, placed.size_bytes) == b"line %06d\n" % number
    assert len(taken) == 4
    await log.close()
    await blobs.close()


@pytest.mark.anyio
async def test_two_hosts_may_not_share_a_directory(tmp_path: Path) -> None:
    root = tmp_path / "blobs"
    first = LocalBlobs(root, host="machine:one")
    second = LocalBlobs(root, host="machine:one")
    with pytest.raises(StoreRefused, match="another host"):
        LocalBlobs(root, host="machine:two")
    LocalBlobs(root, host="machine:two", other_hosts_accepted=True)
    await first.close()
    await second.close()
    with pytest.raises(StoreRefused, match="delete"):
        LocalBlobs(root, host="machine:two")
    assert descriptors_under(root) == []
    (root / one_host.MARK).unlink()
    await LocalBlobs(root, host="machine:two").close()


@pytest.mark.anyio
async def test_a_container_made_again_takes_its_directory_over(tmp_path: Path) -> None:
    """It has a new host name and the same disk, and its predecessor is gone; while that lives, it is refused."""
    root = tmp_path / "blobs"
    first = LocalBlobs(root, host="name:old")
    blob_id = await put(first, b"kept")
    with pytest.raises(StoreRefused):
        LocalBlobs(root, host="name:new")
    await first.close()
    second = LocalBlobs(root, host="name:new")
    assert await second.read(blob_id, 0, 4) == b"kept"
    with pytest.raises(StoreRefused):
        LocalBlobs(root, host="name:old")
    await second.close()


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(BlobUnavailable, match="check the configured path"):
        LocalBlobs(tmp_path / "file" / "blobs")


@pytest.mark.anyio
async def test_no_descriptor_is_left_behind(place: Place) -> None:
    blobs = place.open()
    before = descriptors_under(place.directory)
    for _ in range(20):
        blob_id = await put(blobs, bytes(600_000))
        async for _ in blobs.stream(blob_id, 0, 600_000):
            pass
        stream = blobs.stream(blob_id, 0, 600_000)
        await anext(stream)
        await stream.aclose()
        await (await blobs.create(new_id())).abort()
        await (await blobs.open_log(fresh_ids()[1])).append(b"dropped, not closed\n")
    gc.collect()
    assert descriptors_under(place.directory) == before
    await blobs.close()


@pytest.mark.anyio
async def test_a_file_that_changes_while_it_is_copied_from_another_disk_becomes_no_blob(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, blob_id, rename = tmp_path / "work", new_id(), Path.rename
    source.write_bytes(b"what was counted\n")

    def from_another_disk(path: Path, target: Path) -> Path:
        if path == source:
            source.write_bytes(b"what is there now\n")
            raise OSError(errno.EXDEV, "another disk")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", from_another_disk)
    blobs = place.open()
    with pytest.raises(BlobUnavailable, match="changed while it was copied"):
        await blobs.adopt(blob_id, source)
    assert await blobs.size(blob_id) is None
    await blobs.close()


@pytest.mark.anyio
async def test_a_file_that_moves_in_is_synced_out_of_its_old_directory_too(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a power cut may leave it under both names."""
    source, blob_id, synced = tmp_path / "scratch" / "work", new_id(), list[Path]()
    source.parent.mkdir()
    source.write_bytes(b"line\n")

    def note(directory: Path) -> None:
        synced.append(directory)
        sync_directory(directory)

    blobs = place.open()
    monkeypatch.setattr(SYNC, note)
    await blobs.adopt(blob_id, source)
    await blobs.close()
    assert source.parent in synced[:-1], "before the name that callers know"


@pytest.mark.anyio
async def test_a_blob_whose_end_was_cancelled_is_thrown_away_under_its_last_name_too(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread had given it its name already, and no caller knows of it."""
    renamed, go_on, blob_id = threading.Event(), threading.Event(), new_id()

    def wait(directory: Path) -> None:
        renamed.set()
        go_on.wait(60)
        sync_directory(directory)

    blobs = place.open()
    writer = await blobs.create(blob_id)
    await writer.write(b"line\n")
    monkeypatch.setattr(SYNC, wait)
    ending = asyncio.create_task(writer.finish())
    assert await asyncio.to_thread(renamed.wait, 60)
    ending.cancel()
    await asyncio.gather(ending, return_exceptions=True)
    go_on.set()
    await writer.abort()
    assert await blobs.size(blob_id) is None
    await blobs.close()
