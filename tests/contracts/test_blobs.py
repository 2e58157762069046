"""What every blob store does, whichever it is."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import json
import os
import sys
import tempfile
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.contracts.blobs_places import Place, azure_settings, descriptors_under, fresh_ids, new_id, put, s3_settings
from tests.support.azure import AzureServer
from tests.support.processes import Proc, Processes, wait_until
from tests.support.s3 import S3Server
from tidegate.core import ids
from tidegate.core.errors import BlobError, BlobMissing, BlobUnavailable, BlobVoid
from tidegate.core.files import Placed
from tidegate.core.ports import Blobs, ResultLog

pytestmark = pytest.mark.anyio

MIB = 1_048_576
NOT_OURS = [
    "",
    "blob_",
    "x",
    "../../etc/passwd",
    "blob_../../../etc/passwd",
    "file-" + "a" * 22,
    "blob_" + "a" * 21 + "/",
]
NOT_OURS += [
    "blob_" + "a" * 23,
    "blob_" + "a" * 22 + "\n",
    "BLOB_" + "a" * 22,
    "blob_" + "é" * 22,
    "blob_" + "a" * 21 + "\0",
]


# Azure's server comes from npm and takes a while to start.
@pytest.fixture(params=["local", "s3", pytest.param("az", marks=pytest.mark.soak)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "local":
        return Place("local", str(tmp_path / "blobs"))
    if request.param == "az":
        azure: AzureServer = request.getfixturevalue("azure")
        return Place("az", str(tmp_path / "spool"), azure_settings(azure, azure.create_container()))
    server: S3Server = request.getfixturevalue("s3_server")
    return Place("s3", str(tmp_path / "spool"), s3_settings(server, request.getfixturevalue("s3_bucket")))


@pytest.fixture
async def blobs(place: Place) -> AsyncIterator[Blobs]:
    opened = place.open()
    yield opened
    await opened.close()


@pytest.fixture
async def elsewhere(place: Place) -> AsyncIterator[Blobs]:
    """The same blobs as another process sees them."""
    opened = place.open()
    yield opened
    await opened.close()


async def streamed(blobs: Blobs, blob_id: str, at: int, count: int) -> list[bytes]:
    return [piece async for piece in blobs.stream(blob_id, at, count)]


def process(processes: Processes, place: Place, *command: str) -> Proc:
    return processes.start([sys.executable, "-m", "tests.contracts.blobs_process", place.to_json(), *command])


def files_under(directory: Path | str, pattern: str = "*") -> list[Path]:
    return sorted(path for path in Path(directory).rglob(pattern) if path.is_file())


def parts_left(server: S3Server, bucket: str) -> list[object]:
    """The uploads begun and not ended, as the server's file view shows them."""
    port = json.loads((server.directory / "server.json").read_text())["ports"]["filer"]
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/buckets/{bucket}/.uploads/", headers={"Accept": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return list(json.load(answer)["Entries"] or [])


@pytest.fixture
def file_elsewhere(tmp_path: Path) -> Iterator[Path]:
    """A file on another file system than the tests' own directory."""
    here = tmp_path.stat().st_dev
    [other, *_] = (one for one in ("/dev/shm", "/var/tmp", "/run") if os.stat(one).st_dev != here)
    with tempfile.TemporaryDirectory(dir=other) as directory:
        path = Path(directory) / new_id()
        path.write_bytes(b"from afar")
        yield path


# Whole blobs


@pytest.mark.parametrize("size_bytes", [0, 1, 100, 262_143, 262_144, 262_145, 8 * MIB, 8 * MIB + 1, 20 * MIB + 17])
async def test_the_exact_bytes_come_back(blobs: Blobs, elsewhere: Blobs, size_bytes: int) -> None:
    data = os.urandom(size_bytes)
    writer = await blobs.create(blob_id := new_id())
    for start in range(0, size_bytes, 700_001):
        await writer.write(data[start : start + 700_001])
    stamp = await writer.finish()
    assert (stamp.size_bytes, stamp.sha256) == (size_bytes, hashlib.sha256(data).hexdigest())
    assert await elsewhere.size(blob_id) == size_bytes
    assert await elsewhere.read(blob_id, 0, size_bytes) == data
    assert b"".join(await streamed(elsewhere, blob_id, 0, size_bytes)) == data


async def test_ranges_are_exact(blobs: Blobs) -> None:
    data = os.urandom(5 * MIB)
    blob_id = await put(blobs, data)
    for at, count in [(0, 1), (1, 1), (5 * MIB - 1, 1), (262_143, 2), (1_000, 4 * MIB + 100), (77, 0)]:
        assert await blobs.read(blob_id, at, count) == data[at : at + count]
        pieces = await streamed(blobs, blob_id, at, count)
        assert b"".join(pieces) == data[at : at + count]
        assert all(0 < len(piece) <= 262_144 for piece in pieces)


async def test_bytes_beyond_the_end_are_missing(blobs: Blobs) -> None:
    blob_id = await put(blobs, b"0123456789")
    for at, count in [(0, 11), (9, 2), (10, 1), (500, 5)]:
        with pytest.raises(BlobMissing):
            await blobs.read(blob_id, at, count)
        with pytest.raises(BlobMissing):
            await streamed(blobs, blob_id, at, count)


async def test_an_absent_blob_is_missing(blobs: Blobs, tmp_path: Path) -> None:
    assert await blobs.size(new_id()) is None
    assert await blobs.recover(new_id()) is None
    for count in (0, 1):
        with pytest.raises(BlobMissing):
            await blobs.read(new_id(), 0, count)
        with pytest.raises(BlobMissing):
            await streamed(blobs, new_id(), 0, count)
    with pytest.raises(BlobMissing):
        await blobs.local_path(new_id(), tmp_path)


async def test_disk_work_whose_caller_was_cancelled_reports_no_error(blobs: Blobs) -> None:
    """A sweep is cancelled while it looks for a log that was begun and never written."""
    loop, reported = asyncio.get_running_loop(), list[object]()
    loop.set_exception_handler(lambda _, context: reported.append(context))
    looking = asyncio.create_task(blobs.recover(new_id()))
    await asyncio.sleep(0)
    looking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await looking
    await asyncio.sleep(0.05)
    gc.collect()
    assert reported == []


async def test_an_id_that_exists_is_refused(blobs: Blobs, elsewhere: Blobs, tmp_path: Path) -> None:
    blob_id = await put(blobs, b"first")
    with pytest.raises(BlobError, match="exists"):
        await elsewhere.create(blob_id)
    (tmp_path / "file").write_bytes(b"third")
    with pytest.raises(BlobError, match="exists"):
        await elsewhere.adopt(blob_id, tmp_path / "file")
    assert await blobs.read(blob_id, 0, 5) == b"first"
    assert (tmp_path / "file").read_bytes() == b"third"


async def test_two_writers_of_one_id_never_mix(blobs: Blobs, elsewhere: Blobs) -> None:
    blob_id = new_id()
    writers = [await blobs.create(blob_id)]
    with contextlib.suppress(BlobError):
        writers.append(await elsewhere.create(blob_id))
    finished = 0
    for number, writer in enumerate(writers):
        await writer.write(b"%d" % number * 10)
        try:
            await writer.finish()
            finished += 1
        except BlobError:
            await writer.abort()
    assert finished == 1
    assert await blobs.read(blob_id, 0, 10) == b"0" * 10


@pytest.mark.parametrize("size_bytes", [0, 10, MIB, 20 * MIB])
async def test_abort_leaves_nothing(blobs: Blobs, size_bytes: int) -> None:
    writer = await blobs.create(blob_id := new_id())
    await writer.write(b"x" * size_bytes)
    await writer.abort()
    await writer.abort()
    assert await blobs.size(blob_id) is None
    assert await blobs.list_ids("", 100) == []
    for call in (writer.write(b"more"), writer.finish()):
        with pytest.raises(BlobVoid):
            await call


async def test_an_aborted_upload_leaves_no_parts(s3_server: S3Server, s3_bucket: str, tmp_path: Path) -> None:
    """Asked of the server's own file view, because S3's list does not show parts."""
    blobs = Place("s3", str(tmp_path), s3_settings(s3_server, s3_bucket)).open()
    writer = await blobs.create(new_id())
    for _ in range(20):
        await writer.write(bytes(MIB))
    await writer.abort()
    assert parts_left(s3_server, s3_bucket) == []


async def test_abort_after_finish_keeps_the_blob(blobs: Blobs) -> None:
    writer = await blobs.create(blob_id := new_id())
    await writer.write(b"kept")
    await writer.finish()
    await writer.abort()
    assert await blobs.read(blob_id, 0, 4) == b"kept"
    with pytest.raises(BlobVoid):
        await writer.finish()


async def test_an_unfinished_blob_is_invisible(blobs: Blobs, elsewhere: Blobs) -> None:
    writer = await blobs.create(blob_id := new_id())
    await writer.write(bytes(9 * MIB))
    assert await elsewhere.size(blob_id) is None
    with pytest.raises(BlobMissing):
        await elsewhere.read(blob_id, 0, 1)
    await writer.abort()


async def test_a_cancelled_write_voids_the_writer(blobs: Blobs) -> None:
    writer = await blobs.create(blob_id := new_id())
    task = asyncio.create_task(writer.write(bytes(MIB)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(BlobVoid):
        await writer.finish()
    await writer.abort()
    assert await blobs.size(blob_id) is None
    assert await blobs.list_ids("", 10) == []


async def test_a_file_is_adopted(blobs: Blobs, tmp_path: Path) -> None:
    for data in (b"", os.urandom(3 * MIB + 1), os.urandom(9 * MIB)):
        path = tmp_path / "work"
        path.write_bytes(data)
        await blobs.adopt(blob_id := new_id(), path)
        assert await blobs.size(blob_id) == len(data)
        assert not path.exists()
        assert await blobs.read(blob_id, 0, len(data)) == data


async def test_a_file_from_another_file_system_is_adopted(blobs: Blobs, file_elsewhere: Path) -> None:
    await blobs.adopt(blob_id := new_id(), file_elsewhere)
    assert await blobs.read(blob_id, 0, 9) == b"from afar"
    assert files_under(file_elsewhere.parent) == []


async def test_adopting_what_is_not_there_leaves_nothing(blobs: Blobs, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/etc/passwd")
    for name in ("absent", "link"):
        with pytest.raises(BlobUnavailable):
            await blobs.adopt(new_id(), tmp_path / name)
    assert await blobs.list_ids("", 10) == []


async def test_a_local_path_holds_the_whole_blob(blobs: Blobs, tmp_path: Path) -> None:
    for data in (b"", os.urandom(5 * MIB)):
        blob_id = await put(blobs, data)
        for _ in range(2):
            path = await blobs.local_path(blob_id, tmp_path)
            assert path.read_bytes() == data


async def test_what_was_asked_or_refused_leaves_no_file_open(blobs: Blobs, tmp_path: Path) -> None:
    blob_id, (taken, next_blob_id) = await put(blobs, b"line\n"), fresh_ids()
    log = await blobs.open_log(next_blob_id)
    await log.append(b"line\n")
    (scratch := tmp_path / "scratch").mkdir()
    before = descriptors_under(tmp_path)
    assert await blobs.read(blob_id, 0, 5) == b"line\n"
    assert [await blobs.size(blob_id), await blobs.recover(taken[0]), await blobs.holds_end(taken[0])] == [5, 5, True]
    assert await blobs.left_logs() == []
    assert (await blobs.local_path(blob_id, scratch)).stat().st_size == 5
    (scratch / "whole").write_bytes(b"adopted")
    await blobs.adopt(new_id(), scratch / "whole")
    await blobs.check()
    with pytest.raises(BlobError, match="exists already"):
        await blobs.create(blob_id)
    with pytest.raises(BlobUnavailable):
        await blobs.adopt(new_id(), scratch / "nowhere")
    with pytest.raises(BlobMissing):
        await blobs.read(blob_id, 0, 6)
    assert descriptors_under(tmp_path) == before
    await log.close()


async def test_large_blobs_take_little_memory(place: Place, processes: Processes, tmp_path: Path) -> None:
    size_bytes = 96 * MIB
    proc = process(processes, place, "move", str(size_bytes), str(tmp_path))
    assert proc.wait(100) == 0, proc.logs()
    report = json.loads(proc.stdout())
    assert report["written"] == report["read"] == report["adopted"] == size_bytes
    assert report["grown_bytes"] < 32 * MIB, report


async def test_a_process_ends_without_an_error_right_after_its_last_blob(place: Place, processes: Processes) -> None:
    """Threads of a client library must not bring the process down when it ends under them."""
    procs = [process(processes, place, "once") for _ in range(8)]
    assert [proc.wait(60) for proc in procs] == [0] * len(procs)


async def test_many_readers_at_once(blobs: Blobs, elsewhere: Blobs) -> None:
    data = os.urandom(2 * MIB)
    blob_id = await put(blobs, data)

    async def read(number: int) -> bool:
        reader = (blobs, elsewhere)[number % 2]
        at = number * 1_001
        if number % 3:
            return await reader.read(blob_id, at, MIB) == data[at : at + MIB]
        return b"".join(await streamed(reader, blob_id, at, MIB)) == data[at : at + MIB]

    assert all(await asyncio.gather(*(read(number) for number in range(40))))


# Names


@pytest.mark.parametrize("name", NOT_OURS)
async def test_an_id_that_is_not_ours_is_refused(blobs: Blobs, tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_bytes(b"x")
    before = files_under(tmp_path)
    for call in (
        blobs.create(name),
        blobs.adopt(name, tmp_path / "file"),
        blobs.read(name, 0, 1),
        blobs.size(name),
        blobs.recover(name),
        blobs.delete(name),
        blobs.local_path(name, tmp_path),
        streamed(blobs, name, 0, 1),
    ):
        with pytest.raises(BlobError, match="no id of a blob"):
            await call

    async def bad_id() -> str:
        return name

    log = await blobs.open_log(bad_id)
    with pytest.raises(BlobError):
        await log.append(b"line\n")
    assert files_under(tmp_path) == before


async def test_ids_are_listed_in_order_and_in_pages(blobs: Blobs) -> None:
    assert await blobs.list_ids("", 10) == []
    neighbours = ["blob_" + "0" * 21 + last for last in "xyz"]
    for blob_id in neighbours:
        await (await blobs.create(blob_id)).finish()
    expected = sorted([*neighbours, *[await put(blobs, b"x") for _ in range(20)]])
    assert await blobs.list_ids("", 100) == expected
    for page in (1, 5, 23):
        listed: list[str] = []
        while ids_page := await blobs.list_ids(listed[-1] if listed else "", page):
            assert len(ids_page) <= page
            listed += ids_page
        assert listed == expected
    assert await blobs.list_ids(expected[10], 3) == expected[11:14]
    assert await blobs.list_ids(ids.make("blob", b"\xff" * 16), 10) == []


async def test_deleting_twice_is_fine(blobs: Blobs) -> None:
    blob_id, other = await put(blobs, b"x"), await put(blobs, b"y")
    await blobs.delete(blob_id)
    await blobs.delete(blob_id)
    await blobs.delete(new_id())
    assert await blobs.size(blob_id) is None
    assert await blobs.list_ids("", 10) == [other]


async def test_check_passes_and_leaves_nothing(blobs: Blobs) -> None:
    await asyncio.gather(*(blobs.check() for _ in range(3)))
    assert await blobs.list_ids("", 10) == []


# Logs


async def test_a_log_says_where_its_lines_lie(blobs: Blobs, elsewhere: Blobs) -> None:
    taken, next_blob_id = fresh_ids()
    log = await blobs.open_log(next_blob_id)
    assert taken == [], "a log without lines needs no blob"
    assert await log.seal() is None
    await log.append(b"one\ntwo\n")
    await log.append(b"three\n")
    first = await log.seal()
    assert first is not None
    assert first.blob_id == taken[-1]
    assert await log.seal() is None
    await log.append(b"four\n")
    second = await log.seal()
    assert second is not None
    assert second.blob_id == taken[-1]
    assert await elsewhere.read(first.blob_id, first.at, first.size_bytes) == b"one\ntwo\nthree\n"
    assert await elsewhere.read(second.blob_id, second.at, second.size_bytes) == b"four\n"
    await log.close()
    await log.close()
    for call in (log.append(b"five\n"), log.seal()):
        with pytest.raises(BlobVoid):
            await call
    assert await blobs.recover(second.blob_id) == second.at + second.size_bytes
    assert await blobs.list_ids("", 10) == sorted(set(taken))


async def test_a_log_says_when_to_seal(blobs: Blobs) -> None:
    log = await blobs.open_log(fresh_ids()[1])
    assert 10 <= log.seal_after_ms <= 10_000
    assert MIB <= log.seal_after_bytes <= 16 * MIB


async def test_a_log_takes_whole_lines_only(blobs: Blobs) -> None:
    log = await blobs.open_log(fresh_ids()[1])
    for data in (b"", b"half"):
        with pytest.raises(ValueError, match="newline"):
            await log.append(data)
    await log.append(b"whole\n")
    assert await log.seal() is not None


async def test_a_log_survives_a_store_that_gives_no_id(blobs: Blobs) -> None:
    """The row of a new blob could not be written: nothing happened to the log."""
    answers: list[str | Exception] = [RuntimeError("no database"), new_id()]

    async def next_blob_id() -> str:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    log = await blobs.open_log(next_blob_id)
    with pytest.raises(RuntimeError, match="no database"):
        await log.append(b"line\n")
    await log.append(b"line\n")
    assert await log.seal() is not None


async def test_a_log_never_writes_into_a_blob_that_exists(blobs: Blobs) -> None:
    taken = new_id()

    async def same_id() -> str:
        return taken

    log = await blobs.open_log(same_id)
    await log.append(b"mine\n")
    other = await blobs.open_log(same_id)
    with pytest.raises(BlobError):
        await other.append(b"yours\n")
    placed = await log.seal()
    assert placed == Placed(taken, 0, 5)
    assert await blobs.read(taken, 0, 5) == b"mine\n"


async def test_a_cancelled_append_voids_the_log(blobs: Blobs) -> None:
    log = await blobs.open_log(fresh_ids()[1])
    await log.append(b"in\n")
    task = asyncio.create_task(log.append(b"perhaps\n"))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    for call in (log.append(b"more\n"), log.seal()):
        with pytest.raises(BlobVoid):
            await call
    await log.close()


async def test_appends_at_once_stay_whole(blobs: Blobs) -> None:
    log: ResultLog = await blobs.open_log(fresh_ids()[1])
    lines = [b"%d" % number * 1_000 + b"\n" for number in range(30)]
    await asyncio.gather(*(log.append(line) for line in lines))
    placed = await log.seal()
    assert placed is not None
    data = await blobs.read(placed.blob_id, placed.at, placed.size_bytes)
    assert sorted(data.splitlines(keepends=True)) == sorted(lines)


async def test_what_a_killed_process_appended_is_recovered(place: Place, blobs: Blobs, processes: Processes) -> None:
    proc = process(processes, place, "append")
    wait_until(lambda: proc.stdout().count("\n") >= 20 or not proc.running, 60, "twenty appends")
    proc.kill()
    reports = [json.loads(line) for line in proc.stdout().splitlines() if line.endswith("}")]
    durable, blob_id = reports[-1]["durable"], reports[-1]["blob_id"]
    size = await blobs.recover(blob_id)
    assert size is not None
    lines = (await blobs.read(blob_id, 0, size)).splitlines(keepends=True)
    assert [json.loads(line)["line"] for line in lines] == list(range(len(lines)))
    assert len(lines) >= durable >= 20
    assert await blobs.recover(blob_id) == size
    await blobs.delete(blob_id)
    assert await blobs.recover(blob_id) is None
    assert await blobs.list_ids("", 10) == []


async def test_a_torn_line_is_not_recovered(place: Place, blobs: Blobs, processes: Processes) -> None:
    proc = process(processes, place, "append")
    wait_until(lambda: proc.stdout().count("\n") >= 2 or not proc.running, 60, "two appends")
    proc.kill()
    blob_id = json.loads(proc.stdout().splitlines()[0])["blob_id"]
    (path,) = files_under(place.directory, blob_id)
    whole = path.read_bytes()
    whole = whole[: whole.rfind(b"\n") + 1]
    path.write_bytes(whole + b'{"line": "torn' + b"x" * 200_000)
    assert await blobs.recover(blob_id) == len(whole)
    assert await blobs.read(blob_id, 0, len(whole)) == whole


async def test_a_log_is_recovered_while_its_owner_lives(blobs: Blobs, elsewhere: Blobs) -> None:
    """A worker that only seemed dead goes on; neither side shortens what the other made readable."""
    taken, next_blob_id = fresh_ids()
    log = await blobs.open_log(next_blob_id)
    await log.append(b"one\n")
    assert await elsewhere.recover(taken[0]) == 4
    await log.append(b"two\n")
    assert await elsewhere.recover(taken[0]) == 8
    await log.append(b"three\n")
    placed = await log.seal()
    assert placed is not None
    assert await elsewhere.recover(taken[0]) == 14
    assert await elsewhere.read(taken[0], 0, 14) == b"one\ntwo\nthree\n"


async def test_an_upload_that_was_killed_is_no_blob(place: Place, blobs: Blobs, processes: Processes) -> None:
    proc = process(processes, place, "write")
    wait_until(lambda: proc.stdout().count("\n") >= 200 or not proc.running, 60, "12 MB to be written")
    proc.kill()
    blob_id = json.loads(proc.stdout().splitlines()[0])["blob_id"]
    assert await blobs.size(blob_id) is None
    await blobs.delete(blob_id)
    assert await blobs.list_ids("", 10) == []
    assert files_under(place.directory, "blob_*") == []
