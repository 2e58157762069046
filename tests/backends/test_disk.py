"""What is reported as durable was synced: its bytes after the last was written, and the directory after its name was made."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tidegate.backends import one_host
from tidegate.backends.blobs_local import LocalBlobs
from tidegate.backends.blobs_s3 import S3Blobs
from tidegate.backends.blobs_s3_client import S3Settings
from tidegate.backends.disk import AppendFile, make_directories, try_write, unavailable
from tidegate.core.errors import BlobUnavailable, BlobVoid

pytestmark = pytest.mark.anyio

BLOB = "blob_" + "a" * 22


class Syncs:
    """Every sync: of a directory the names in it, of a file its size."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen = list[tuple[Path, int | frozenset[str]]]()
        for name in ("fsync", "fdatasync"):
            monkeypatch.setattr(os, name, self._note)

    def _note(self, fd: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        self.seen.append((path, frozenset(os.listdir(path)) if path.is_dir() else os.fstat(fd).st_size))

    def names(self, directory: Path) -> frozenset[str]:
        """The names that survive in a directory."""
        found = [names for path, names in self.seen if path == directory and isinstance(names, frozenset)]
        return found[-1] if found else frozenset()


@pytest.fixture
def syncs(monkeypatch: pytest.MonkeyPatch) -> Syncs:
    return Syncs(monkeypatch)


def test_every_new_directory_has_a_name_that_survives(tmp_path: Path, syncs: Syncs) -> None:
    make_directories(tmp_path / "a" / "b")
    assert syncs.names(tmp_path) == {"a"}
    assert syncs.names(tmp_path / "a") == {"b"}
    assert {(tmp_path / place).stat().st_mode & 0o777 for place in ("a", "a/b")} == {0o700}, "for no other user to read"
    syncs.seen.clear()
    make_directories(tmp_path / "a" / "b")
    assert syncs.names(tmp_path / "a") == {"b"}, "the process that made it may have died before it synced it"


def test_a_failure_says_in_plain_words_what_the_system_reported(tmp_path: Path) -> None:
    full = str(unavailable(OSError(errno.ENOSPC, "No space left on device"), tmp_path, "writing a blob"))
    assert full.startswith(
        f"writing a blob in {tmp_path} failed (No space left on device): the disk or its inodes are full"
    )
    assert "failed (odd): check that directory" in str(unavailable(OSError("odd"), tmp_path, "writing a blob"))


def test_lines_are_synced_before_they_count(tmp_path: Path, syncs: Syncs) -> None:
    log = AppendFile(tmp_path / "log")
    assert syncs.names(tmp_path) == {"log"}
    for data, size in ((b"one\n", 4), (b"two\n", 8)):
        log.append(data)
        assert syncs.seen[-1] == (tmp_path / "log", size)
        assert log.durable_bytes == size


def test_a_directory_is_tried_with_a_sync_of_a_file_and_of_its_name(tmp_path: Path, syncs: Syncs) -> None:
    try_write(tmp_path, "probe")
    assert syncs.seen == [(tmp_path / "probe", 6), (tmp_path, frozenset({"probe"}))]
    assert list(tmp_path.iterdir()) == []


def test_a_directory_is_marked_for_good(tmp_path: Path, syncs: Syncs) -> None:
    os.close(one_host.claim(tmp_path, "here"))
    assert syncs.seen == [(tmp_path / one_host.MARK, 5), (tmp_path, frozenset({one_host.MARK}))]


async def test_a_blob_has_all_its_bytes_before_it_has_its_name(tmp_path: Path, syncs: Syncs) -> None:
    blobs = LocalBlobs(tmp_path / "blobs")
    writer = await blobs.create(BLOB)
    await writer.write(b"12345")
    syncs.seen.clear()
    await writer.finish()
    [(file, size), (directory, names)] = syncs.seen
    assert (file.name == BLOB, size) == (False, 5)
    assert isinstance(names, frozenset)
    assert BLOB in names
    assert directory == file.parent
    await blobs.close()


async def test_a_file_that_is_adopted_is_synced_before_it_moves_and_gone_from_where_it_was(
    tmp_path: Path, syncs: Syncs
) -> None:
    blobs = LocalBlobs(tmp_path / "blobs")
    source = tmp_path / "made"
    source.write_bytes(b"12345")
    syncs.seen.clear()
    await blobs.adopt(BLOB, source)
    assert (source, 5) in syncs.seen
    assert syncs.names(tmp_path) == {"blobs"}
    [place] = {path for path, names in syncs.seen if isinstance(names, frozenset) and BLOB in names}
    assert (place / BLOB).read_bytes() == b"12345"
    await blobs.close()


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ENOSPC])
async def test_a_file_that_cannot_be_moved_is_not_copied_and_stays_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Only another file system is a reason to copy: what keeps a name from being made is reported, and nothing is half done."""
    blobs = LocalBlobs(tmp_path / "blobs")
    source = tmp_path / "made"
    source.write_bytes(b"12345")

    def rename(path: Path, _: Path) -> None:
        if path == source:
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(BlobUnavailable, match=os.strerror(number)):
        await blobs.adopt(BLOB, source)
    assert source.read_bytes() == b"12345"
    assert await blobs.size(BLOB) is None
    await blobs.close()


async def test_what_a_killed_process_wrote_is_synced_before_it_is_relied_on(tmp_path: Path, syncs: Syncs) -> None:
    blobs = LocalBlobs(tmp_path / "blobs")
    writer = await blobs.create(BLOB)
    await writer.write(b"one\ntwo")
    await writer.finish()
    syncs.seen.clear()
    assert await blobs.recover(BLOB) == 4
    [(file, size), (directory, names)] = syncs.seen
    assert (file.name, size, directory) == (BLOB, 7, file.parent)
    assert isinstance(names, frozenset)
    assert BLOB in names
    await blobs.close()


async def test_what_a_killed_process_left_for_a_bucket_is_synced_before_it_is_relied_on(
    tmp_path: Path, syncs: Syncs
) -> None:
    blobs = S3Blobs(S3Settings("bucket"), tmp_path / "spool")
    (tmp_path / "spool" / BLOB).write_bytes(b"one\ntwo")
    syncs.seen.clear()
    assert await blobs.left_logs() == [BLOB]
    assert syncs.seen == [(tmp_path / "spool" / BLOB, 7)]
    await blobs.close()


async def test_lines_for_a_bucket_are_synced_before_they_are_taken(tmp_path: Path, syncs: Syncs) -> None:
    async def blob_id() -> str:
        return BLOB

    blobs = S3Blobs(S3Settings("bucket"), tmp_path / "spool")
    assert syncs.names(tmp_path) == {"spool"}
    log = await blobs.open_log(blob_id)
    for data, size in ((b"one\n", 4), (b"two\n", 8)):
        await log.append(data)
        assert syncs.seen[-1] == (tmp_path / "spool" / BLOB, size)
    assert syncs.names(tmp_path / "spool") == {BLOB}
    await log.close()
    await blobs.close()


def test_a_log_that_could_not_be_synced_takes_nothing_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second sync would succeed and prove nothing."""
    log = AppendFile(tmp_path / "log")
    log.append(b"one\n")

    def fail(_: int) -> None:
        raise OSError(errno.EIO, "the disk reported an error")

    with monkeypatch.context() as broken:
        broken.setattr(os, "fdatasync", fail)
        with pytest.raises(BlobUnavailable):
            log.append(b"two\n")
    with pytest.raises(BlobVoid):
        log.append(b"three\n")
    assert ((tmp_path / "log").read_bytes(), log.durable_bytes) == (b"one\n", 4)
