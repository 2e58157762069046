"""Blobs on an S3 store that resets, hangs, goes away, answers too little or keeps the wrong bytes: never half, never lost."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import obstore
import pytest
from obstore.store import S3Store

from tests.contracts.blobs_places import fresh_ids, new_id, put, s3_settings
from tests.support.processes import wait_until_async
from tests.support.proxy import Proxies, Proxy
from tests.support.s3 import S3Server
from tidegate.backends import blobs_s3_writer
from tidegate.backends.blobs_s3 import S3Blobs
from tidegate.backends.blobs_s3_client import Objects, S3Settings, StoredObject
from tidegate.backends.blobs_s3_log import UNSEALED_BYTES_MAX, SpooledLog
from tidegate.backends.blobs_s3_writer import S3Writer
from tidegate.backends.disk import write_all
from tidegate.core.errors import BlobMissing, BlobUnavailable, BlobVoid
from tidegate.core.files import Placed

if TYPE_CHECKING:
    from obstore import PutMode

pytestmark = pytest.mark.anyio

MIB = 1_048_576


@pytest.fixture
def proxy(s3_server: S3Server, proxies: Proxies) -> Proxy:
    return proxies.open(s3_server.port)


@pytest.fixture
def direct(s3_server: S3Server, s3_bucket: str) -> S3Store:
    """The store without the proxy, to see what is really there."""
    return s3_server.store(s3_bucket, "some/prefix")


@pytest.fixture
def settings(s3_server: S3Server, s3_bucket: str, proxy: Proxy) -> S3Settings:
    return s3_settings(s3_server, s3_bucket, endpoint=f"http://127.0.0.1:{proxy.port}")


@pytest.fixture
async def patient(settings: S3Settings, tmp_path: Path) -> AsyncIterator[S3Blobs]:
    """Tries long enough for a fault that a test heals."""
    blobs = S3Blobs(settings, tmp_path / "spool")
    yield blobs
    await blobs.close()


@pytest.fixture
async def hasty(settings: S3Settings, tmp_path: Path) -> AsyncIterator[S3Blobs]:
    """Gives up soon, for a fault that lasts."""
    quick = msgspec.structs.replace(settings, connect_timeout_ms=1_000, request_timeout_ms=1_500, retry_for_ms=500)
    blobs = S3Blobs(quick, tmp_path / "spool")
    yield blobs
    await blobs.close()


async def upload(writer: S3Writer, data: bytes) -> None:
    for start in range(0, len(data), MIB):
        await writer.write(data[start : start + MIB])
    await writer.finish()


def keys(direct: S3Store) -> list[str]:
    return [meta["path"] for page in obstore.list(direct) for meta in page]


@pytest.mark.parametrize("size_bytes", [MIB, 20 * MIB])
async def test_a_put_that_keeps_breaking_leaves_nothing(
    hasty: S3Blobs, patient: S3Blobs, proxy: Proxy, direct: S3Store, size_bytes: int
) -> None:
    writer = await hasty.create(new_id())
    proxy.cut(200_000, "up")
    with pytest.raises(BlobUnavailable, match="check that the store is up"):
        await upload(writer, os.urandom(size_bytes))
    with pytest.raises(BlobVoid):
        await writer.finish()
    proxy.heal()
    await writer.abort()
    assert keys(direct) == []
    assert await patient.read(await put(patient, b"again"), 0, 5) == b"again"


@pytest.mark.parametrize("size_bytes", [MIB, 20 * MIB])
async def test_a_put_that_breaks_for_a_while_succeeds(patient: S3Blobs, proxy: Proxy, size_bytes: int) -> None:
    writer = await patient.create(blob_id := new_id())
    data = os.urandom(size_bytes)
    proxy.blackhole()
    task = asyncio.create_task(upload(writer, data))
    await wait_until_async(lambda: proxy.links >= 1, 10, "the upload to reach the proxy")
    proxy.reset()
    proxy.heal()
    await task
    assert await patient.read(blob_id, 0, size_bytes) == data


async def test_a_put_whose_answer_was_lost_is_not_refused_as_a_double(
    patient: S3Blobs, proxy: Proxy, direct: S3Store
) -> None:
    writer = await patient.create(blob_id := new_id())
    await writer.write(b"kept once")
    proxy.cut(5, "down")
    task = asyncio.create_task(writer.finish())
    await wait_until_async(lambda: keys(direct) == [blob_id], 10, "the PUT to arrive")
    proxy.heal()
    assert (await task).size_bytes == 9
    assert await patient.read(blob_id, 0, 9) == b"kept once"


async def test_a_store_that_is_away_loses_no_line(
    hasty: S3Blobs, patient: S3Blobs, proxy: Proxy, direct: S3Store
) -> None:
    """Sealing fails while it is away; appending goes on, and the next seal brings everything."""
    taken, next_blob_id = fresh_ids()
    log = await hasty.open_log(next_blob_id)
    await log.append(b"one\n")
    proxy.refuse()
    proxy.reset()
    for _ in range(2):
        with pytest.raises(BlobUnavailable):
            await log.seal()
        await log.append(b"more\n")
    assert keys(direct) == []
    proxy.heal()

    async def sealed() -> Placed | None:
        with contextlib.suppress(BlobUnavailable):
            return await log.seal()
        return None

    assert await wait_until_async(sealed, 30, "the store to take the lines") == Placed(taken[0], 0, 14)
    assert await patient.read(taken[0], 0, 14) == b"one\nmore\nmore\n"
    assert len(taken) == 1


async def test_a_spool_does_not_grow_for_ever(patient: S3Blobs) -> None:
    log = await patient.open_log(fresh_ids()[1])
    line = b"x" * (8 * MIB - 1) + b"\n"
    for _ in range(UNSEALED_BYTES_MAX // len(line)):
        await log.append(line)
    with pytest.raises(BlobUnavailable, match="seal them first"):
        await log.append(line)
    placed = await log.seal()
    assert placed is not None
    assert placed.size_bytes == UNSEALED_BYTES_MAX
    await log.append(line)


async def test_sealed_spool_files_go_and_unsealed_ones_stay(patient: S3Blobs, tmp_path: Path) -> None:
    taken, next_blob_id = fresh_ids()
    log = await patient.open_log(next_blob_id)
    for number in range(3):
        await log.append(b"%d\n" % number)
        await log.seal()
        assert spooled(tmp_path) == [taken[number]]
    await log.append(b"unsealed\n")
    await log.close()
    assert spooled(tmp_path) == [taken[3]]
    assert await patient.list_ids("", 10) == sorted(taken)
    assert [await patient.holds_end(blob_id) for blob_id in taken] == [False, False, False, True]
    assert await patient.recover(taken[3]) == 9
    assert not await patient.holds_end(taken[3])
    assert spooled(tmp_path) == []
    assert await patient.read(taken[3], 0, 9) == b"unsealed\n"


def spooled(tmp_path: Path) -> list[str]:
    return sorted(os.listdir(tmp_path / "spool"))


async def test_a_log_whose_object_another_process_wrote_is_void(patient: S3Blobs, direct: S3Store) -> None:
    taken, next_blob_id = fresh_ids()
    log = await patient.open_log(next_blob_id)
    await log.append(b"mine\n")
    obstore.put(direct, taken[0], b"mine\nand another's\n")
    with pytest.raises(BlobVoid, match="someone else"):
        await log.seal()
    with pytest.raises(BlobVoid):
        await log.append(b"more\n")
    await log.close()


async def test_listing_never_lets_a_spool_file_overtake_objects(patient: S3Blobs) -> None:
    objects = [await put(patient, b"x") for _ in range(7)]
    taken, next_blob_id = fresh_ids()
    logs = [await patient.open_log(next_blob_id) for _ in range(6)]
    for log in logs:
        await log.append(b"line\n")
    listed: list[str] = []
    while page := await patient.list_ids(listed[-1] if listed else "", 2):
        listed += page
    assert listed == sorted(objects + taken)


async def test_a_log_of_another_host_is_out_of_reach(patient: S3Blobs, settings: S3Settings, tmp_path: Path) -> None:
    taken, next_blob_id = fresh_ids()
    log = await patient.open_log(next_blob_id)
    await log.append(b"line\n")
    other = S3Blobs(settings, tmp_path / "other-host")
    assert await other.recover(taken[0]) is None
    assert await patient.recover(taken[0]) == 5
    assert await other.recover(taken[0]) == 5
    await other.close()


async def test_a_hanging_store_ends_in_a_time_out(
    hasty: S3Blobs, patient: S3Blobs, proxy: Proxy, tmp_path: Path
) -> None:
    blob_id = await put(patient, b"0123456789")
    proxy.blackhole()
    outcomes = await asyncio.gather(
        hasty.read(blob_id, 0, 10),
        hasty.size(blob_id),
        hasty.create(new_id()),
        hasty.delete(new_id()),
        hasty.list_ids("", 10),
        hasty.local_path(blob_id, tmp_path),
        hasty.check(),
        return_exceptions=True,
    )
    assert [type(outcome) for outcome in outcomes] == [BlobUnavailable] * 7
    proxy.heal()
    assert await patient.read(blob_id, 0, 10) == b"0123456789"
    assert os.listdir(tmp_path) == ["spool"]


async def test_a_silent_store_is_given_up_sooner_where_hardly_any_bytes_go(
    settings: S3Settings, proxy: Proxy, tmp_path: Path
) -> None:
    """Long before a part of a large file would be given up."""
    quick = msgspec.structs.replace(settings, small_timeout_ms=200, retry_for_ms=300, request_timeout_ms=600_000)
    blobs = S3Blobs(quick, tmp_path / "spool")
    proxy.blackhole()
    async with asyncio.timeout(60):
        outcomes = await asyncio.gather(blobs.create(new_id()), blobs.delete(new_id()), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [BlobUnavailable] * 2
    assert all("no answer within 0.2 s" in str(outcome) for outcome in outcomes)
    await blobs.close()


async def test_a_truncated_answer_is_never_taken_for_the_whole(
    hasty: S3Blobs, patient: S3Blobs, proxy: Proxy, tmp_path: Path
) -> None:
    data = os.urandom(6 * MIB)
    blob_id = await put(patient, data)
    proxy.cut(100_000, "down")
    with pytest.raises(BlobUnavailable):
        await hasty.read(blob_id, 0, len(data))
    with pytest.raises(BlobUnavailable):
        assert [piece async for piece in hasty.stream(blob_id, 0, len(data))] == []
    with pytest.raises(BlobUnavailable):
        await hasty.local_path(blob_id, tmp_path)
    assert os.listdir(tmp_path) == ["spool"]
    proxy.heal()
    assert await patient.read(blob_id, 0, len(data)) == data


async def test_a_copy_that_cannot_be_written_is_tried_again_later(patient: S3Blobs, tmp_path: Path) -> None:
    blob_id = await put(patient, b"0123456789")
    with pytest.raises(BlobUnavailable, match=f"copying blob {blob_id}"):
        await patient.local_path(blob_id, tmp_path / "nowhere")
    assert (await patient.local_path(blob_id, tmp_path)).read_bytes() == b"0123456789"


async def test_a_copy_that_is_given_up_never_writes_into_another_file(
    patient: S3Blobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that writes may come to it only when the descriptor's number belongs to another file."""
    blob_id, came, may_write, written = await put(patient, b"0123456789"), *(threading.Event() for _ in range(3))

    def write_late(fd: int, data: bytes) -> None:
        came.set()
        may_write.wait()
        with contextlib.suppress(OSError):
            write_all(fd, data)
        written.set()

    monkeypatch.setattr("tidegate.backends.blobs_s3.write_all", write_late)
    copying = asyncio.create_task(patient.local_path(blob_id, tmp_path))
    await asyncio.to_thread(came.wait)
    copying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await copying
    with contextlib.ExitStack() as others:
        files = [others.enter_context((tmp_path / f"other-{at}").open("wb")) for at in range(5)]
        may_write.set()
        await asyncio.to_thread(written.wait)
        assert [os.fstat(file.fileno()).st_size for file in files] == [0] * 5
    assert sorted(os.listdir(tmp_path)) == [*(f"other-{at}" for at in range(5)), "spool"]


async def test_an_object_that_shrank_or_was_removed_is_missing(patient: S3Blobs, direct: S3Store) -> None:
    blob_id = await put(patient, b"0123456789")
    obstore.put(direct, blob_id, b"01234")
    for at, count in [(0, 10), (5, 5), (8, 2)]:
        with pytest.raises(BlobMissing):
            await patient.read(blob_id, at, count)
    obstore.delete(direct, blob_id)
    with pytest.raises(BlobMissing):
        await patient.read(blob_id, 0, 5)


async def test_an_object_that_is_not_there_for_a_moment_is_not_gone(
    settings: S3Settings, tmp_path: Path, direct: S3Store
) -> None:
    """Nothing of a batch fails by it: a reader tries again, and believes it only after minutes."""
    blobs = S3Blobs(msgspec.structs.replace(settings, missing_after_ms=600_000), tmp_path / "spool")
    blob_id = await put(blobs, b"0123456789")
    obstore.delete(direct, blob_id)

    async def streamed() -> bytes:
        return b"".join([piece async for piece in blobs.stream(blob_id, 0, 10)])

    for ask in (lambda: blobs.read(blob_id, 0, 10), lambda: blobs.local_path(blob_id, tmp_path), streamed):
        with pytest.raises(BlobUnavailable, match="asked for again"):
            await ask()
    obstore.put(direct, blob_id, b"0123456789")
    assert await blobs.read(blob_id, 0, 10) == b"0123456789"
    assert await streamed() == b"0123456789"
    obstore.delete(direct, blob_id)
    with pytest.raises(BlobUnavailable):
        await blobs.read(blob_id, 0, 10)
    blobs._missed[blob_id] -= 601
    with pytest.raises(BlobMissing):
        await blobs.read(blob_id, 0, 10)
    await blobs.close()


async def test_a_read_that_is_answered_with_404_once_goes_on(
    settings: S3Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs = S3Blobs(settings, tmp_path / "spool")
    blob_id = await put(blobs, b"0123456789")
    get, misses = obstore.get_range_async, [1]

    async def missing_once(*given: Any, **more: Any) -> Any:
        if misses:
            misses.pop()
            raise FileNotFoundError("Object at location x not found: status code: 404")
        return await get(*given, **more)

    monkeypatch.setattr(obstore, "get_range_async", missing_once)
    assert b"".join([piece async for piece in blobs.stream(blob_id, 0, 10)]) == b"0123456789"
    assert misses == []
    await blobs.close()


@pytest.mark.parametrize("asked", ["put_async", "head_async"])
async def test_an_upload_that_is_answered_with_404_once_goes_on(
    settings: S3Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    blobs = S3Blobs(settings, tmp_path / "spool")
    writer = await blobs.create(blob_id := new_id())
    answer, misses = getattr(obstore, asked), [1]

    async def missing_once(*given: Any, **more: Any) -> Any:
        if misses:
            misses.pop()
            raise FileNotFoundError("Object at location x not found: status code: 404")
        return await answer(*given, **more)

    monkeypatch.setattr(obstore, asked, missing_once)
    await upload(writer, b"0123456789")
    assert misses == []
    misses.append(1)
    copy = await blobs.local_path(blob_id, tmp_path)
    assert copy.read_bytes() == b"0123456789"
    await blobs.close()


class Careless(Objects):
    """Sends other bytes than it was given, to a store that keeps them faithfully."""

    careless = True

    async def put(self, key: str, data: bytes, mode: PutMode = "overwrite") -> None:
        await super().put(key, data[:-1] + b"?" if self.careless else data, mode)


class Opaque(Objects):
    """A store whose ETags say nothing of the bytes, as with encryption by a managed key."""

    async def head(self, key: str) -> StoredObject | None:
        state = await super().head(key)
        return state and msgspec.structs.replace(state, etag="0" * 32)


class CarelessAndOpaque(Careless, Opaque):
    pass


@pytest.mark.parametrize("objects", [Careless, CarelessAndOpaque])
async def test_wrong_bytes_in_the_store_are_noticed(
    objects: type[Objects], settings: S3Settings, direct: S3Store
) -> None:
    writer = S3Writer(objects(settings), ThreadPoolExecutor(1), new_id())
    await writer.write(b"the right bytes")
    with pytest.raises(BlobUnavailable, match="other bytes"):
        await writer.finish()
    await writer.abort()
    assert keys(direct) == []


async def test_an_upload_that_failed_unseen_or_was_stopped_says_nothing_of_its_own() -> None:
    """What is wrong is reported by `write` and `finish`; the loop's own log would show the failure again, without a name."""
    logged: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(str(context)))
    nowhere = S3Settings(
        "any",
        endpoint="http://127.0.0.1:9",
        access_key_id="a",
        secret_access_key="s",
        allow_http=True,
        retry_for_ms=0,
    )
    for is_stopped in (False, True):
        with ThreadPoolExecutor(1) as threads:
            writer = S3Writer(Objects(nowhere), threads, new_id())
            await writer.write(bytes(blobs_s3_writer.PART_BYTES + 1))
            upload = writer._upload
            assert upload is not None
            if is_stopped:
                upload.cancel()
            await asyncio.wait({upload})
            await writer.abort()
        del upload, writer
        gc.collect()
        await asyncio.sleep(0)
    assert logged == []


async def test_a_seal_replaces_wrong_bytes_of_its_own(settings: S3Settings, tmp_path: Path) -> None:
    objects = Careless(settings)
    taken, next_blob_id = fresh_ids()
    with ThreadPoolExecutor(1) as threads:
        log = SpooledLog(objects, threads, next_blob_id, tmp_path)
        await log.append(b"line\n")
        with pytest.raises(BlobUnavailable, match="does not keep the bytes"):
            await log.seal()
        objects.careless = False
        assert await log.seal() == Placed(taken[0], 0, 5)
        assert await objects.read(taken[0], 0, 5) == b"line\n"
        await log.close()


async def test_a_late_request_never_shortens_a_log(settings: S3Settings, direct: S3Store) -> None:
    """A seal that was given up arrives in the store after a longer one was recorded."""

    class Overtaken(Objects):
        """Between looking and putting, the longer object comes in on another connection."""

        async def put(self, key: str, data: bytes, mode: PutMode = "overwrite") -> None:
            obstore.put(direct, key, b"one\ntwo\n")
            await super().put(key, data, mode)

    blob_id = new_id()
    assert await Overtaken(settings).grow(blob_id, b"one\n") == 8
    assert bytes(obstore.get(direct, blob_id).bytes()) == b"one\ntwo\n"


@pytest.mark.parametrize("size_bytes", [15, 9 * MIB])
async def test_right_bytes_pass_without_a_telling_etag(settings: S3Settings, size_bytes: int) -> None:
    writer = S3Writer(Opaque(settings), ThreadPoolExecutor(1), new_id())
    await writer.write(bytes(size_bytes))
    assert (await writer.finish()).size_bytes == size_bytes


async def test_a_missing_bucket_and_a_wrong_key_are_named(settings: S3Settings, tmp_path: Path) -> None:
    for change, advice in (
        ({"bucket": "no-such-bucket"}, "create it"),
        ({"secret_access_key": "wrong-secret-of-ours"}, "check blobs.secret_access_key"),
        ({"access_key_id": "unknown"}, "check blobs.access_key_id"),
    ):
        wrong = msgspec.structs.replace(settings, **change)
        blobs = S3Blobs(wrong, tmp_path / "spool")
        with pytest.raises(BlobUnavailable, match=advice) as raised:
            await blobs.check()
        assert "wrong-secret-of-ours" not in str(raised.value)
        assert len(str(raised.value)) < 700
        await blobs.close()
    assert str(settings.secret_access_key) not in repr(settings)


async def test_an_endpoint_in_the_environment_does_not_win(
    settings: S3Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as outside:
        outside.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
        outside.setenv("AWS_ACCESS_KEY_ID", "someone else's")
        blobs = S3Blobs(settings, tmp_path / "spool")
        await blobs.check()
    await blobs.close()


KEYS = {"access_key_id": "acme", "secret_access_key": "c2VjcmV0"}


@pytest.mark.parametrize(
    ("given", "azure", "s3"),
    [
        ({"endpoint": "http://here"}, {"endpoint": "http://here"}, {"endpoint": "http://here", "endpoint_url_s3": "http://here"}),
        (KEYS, {"account_name": "acme", "account_key": "c2VjcmV0"}, KEYS),
        ({"access_key_id": "acme"}, {}, {}),
        ({"secret_access_key": "c2VjcmV0"}, {}, {}),
    ],
)  # fmt: skip
def test_an_address_and_a_whole_key_are_used_and_half_a_key_leaves_it_to_the_machine(
    given: dict[str, str], azure: dict[str, str], s3: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "machine")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "bWFjaGluZQ==")
    always = {"region": "us-east-1", "virtual_hosted_style_request": "false", "disable_bulk_delete": "true"}
    in_azure = Objects(S3Settings("box", is_azure=True, **given))  # type: ignore[arg-type]
    assert in_azure.store.config == {"container_name": "box", **azure}
    assert Objects(S3Settings("box", **given)).store.config == {"bucket": "box", **always, **s3}  # type: ignore[arg-type]


async def test_giving_up_waits_for_no_store_that_is_away(
    patient: S3Blobs, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What may have arrived is left to a sweep: the caller is waiting for an answer."""
    monkeypatch.setattr(blobs_s3_writer, "ABORT_WAIT_S", 0.2)
    writer = await patient.create(new_id())
    await writer.write(b"x" * MIB)
    proxy.cut(0)
    finishing = asyncio.create_task(writer.finish())
    await wait_until_async(lambda: proxy.connections_accepted > 0)
    await asyncio.sleep(0.1)
    finishing.cancel()
    with contextlib.suppress(asyncio.CancelledError, BlobUnavailable):
        await finishing
    # The store is tried for 30 s otherwise.
    async with asyncio.timeout(20):
        await writer.abort()
