"""Files and jobs that come in, over a real store in memory and real bytes on a disk: what is kept, what is refused, and what goes again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.contracts.store_world import CHAT, DAY_MS, StoreHandClock, plan_of
from tests.support.ports import FairDice, HandClock
from tests.support.processes import wait_until_async
from tidegate.backends.blobs_local import LocalBlobs
from tidegate.core.errors import ApiProblem, BlobUnavailable, StoreFull, StoreUnavailable
from tidegate.core.files import File
from tidegate.core.job_controls import RetryChoice
from tidegate.core.nouns import Caller, Idempotency, JobRequest, JobWebhook, Quotas, ResponseTerms
from tidegate.core.webhooks import EVENT_TYPES, SECRET_BYTES
from tidegate.stages import accept
from tidegate.stages.accept import Reception, Upload, request_hash, upload_hash
from tidegate.store.database.sqlite import SqliteDriver
from tidegate.store.store import Store

pytestmark = pytest.mark.anyio

LINE = b'{"custom_id": "one"}\n'
TERMS = ResponseTerms("/v1/responses", DAY_MS, "tenant:x", Quotas())


class Desk:
    """A reception with its store, its blobs and one caller."""

    def __init__(self, directory: Path) -> None:
        self.store = Store(SqliteDriver(None, StoreHandClock()))
        self.blobs = LocalBlobs(directory)
        self.clock = HandClock()
        self.reception = Reception(self.store, self.blobs, self.clock, FairDice(1), lambda: "worker")
        self.caller = Caller("")

    async def open(self) -> None:
        await self.store.migrate()
        await self.store.enlist_worker("worker", "host", "1", 30_000)
        self.caller = Caller(await self.store.put_tenant("tenant_1", "acme"))

    async def upload(self, data: bytes = LINE) -> Upload:
        upload = await self.reception.begin_upload(1_000)
        await upload.write(data)
        return upload

    async def file(self, key: str | None = None, data: bytes = LINE) -> File:
        upload = await self.upload(data)
        return await self.keep(upload, key)

    async def keep(self, upload: Upload, key: str | None = None) -> File:
        return await upload.keep(
            self.caller, purpose="batch", filename="in.jsonl", expires_after_ms=None, idempotency_key=key
        )

    async def response(self, key: str | None = None, terms: ResponseTerms = TERMS) -> Any:
        return await self.reception.create_response(self.caller, LINE, plan_of(1), terms, key)

    async def left(self) -> tuple[list[str], list[str]]:
        """The blobs that the store knows, and those of which there are bytes."""
        driver: Any = self.store._driver
        rows = driver._writer.execute("select id from blobs order by id").fetchall()
        return [row[0] for row in rows], await self.blobs.list_ids("", 100)


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    made = Desk(tmp_path)
    await made.open()
    yield made
    await made.blobs.close()
    await made.store.close()


def away(monkeypatch: pytest.MonkeyPatch, owner: object, verb: str, error: BaseException) -> None:
    async def fail(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(owner, verb, fail)


async def test_a_call_is_made_again_at_growing_distances_for_a_few_seconds(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses = list[float]()

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        desk.clock.advance(seconds * 1000)

    async def call() -> None:
        raise StoreUnavailable("away")

    monkeypatch.setattr(asyncio, "sleep", pause)
    with pytest.raises(StoreUnavailable):
        await desk.reception.replayed(call)
    assert pauses == pytest.approx([0.0375, 0.075, 0.15, 0.3, 0.6, *[0.75] * 5])


async def test_a_call_that_works_the_second_time_is_answered(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter((StoreUnavailable("away"), "made"))

    async def call() -> str:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def pause(_: float) -> None:
        return

    monkeypatch.setattr(asyncio, "sleep", pause)
    assert await desk.reception.replayed(call) == "made"


async def test_a_full_disk_is_not_asked_again(desk: Desk) -> None:
    tries = list[int]()

    async def call() -> None:
        tries.append(1)
        raise StoreFull("full")

    with pytest.raises(StoreFull):
        await desk.reception.replayed(call)
    assert tries == [1]


async def test_an_upload_that_cannot_begin_leaves_nothing(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    away(monkeypatch, desk.blobs, "create", BlobUnavailable("no disk"))
    with pytest.raises(BlobUnavailable):
        await desk.reception.begin_upload(10)
    assert await desk.left() == ([], [])


async def test_lines_are_counted_as_they_come(desk: Desk) -> None:
    upload = await desk.reception.begin_upload(10)
    seen = [upload.line_count]
    for data in (b"a", b"", b"b\n", b"\nc"):
        await upload.write(data)
        seen.append(upload.line_count)
    assert (seen, upload.size_bytes) == ([0, 1, 1, 1, 3], 5)
    await upload.abandon()


async def test_an_upload_may_be_as_large_as_is_allowed_and_no_larger(desk: Desk) -> None:
    own = ApiProblem(413, "too_many", "Send fewer.")
    for over, code in ((None, "file_too_large"), (own, "too_many")):
        upload = await desk.reception.begin_upload(4, over)
        await upload.write(b"1234")
        with pytest.raises(ApiProblem) as problem:
            await upload.write(b"5")
        assert (problem.value.status, problem.value.code) == (413, code)
        await upload.abandon()
    assert await desk.left() == ([], [])


@pytest.mark.parametrize("is_durable", [False, True])
async def test_an_abandoned_upload_leaves_nothing(
    desk: Desk, is_durable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload, aborted = await desk.upload(), list[int]()
    abort = upload._writer.abort

    async def note() -> None:
        aborted.append(1)
        await abort()

    monkeypatch.setattr(upload._writer, "abort", note)
    if is_durable:
        await upload.finish()
    await upload.abandon()
    assert (await desk.left(), len(aborted)) == (([], []), 0 if is_durable else 1)


async def test_an_abandoned_upload_leaves_nothing_though_its_caller_is_cancelled_meanwhile(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload, asked, answer = await desk.upload(), asyncio.Event(), asyncio.Event()
    give_up_blob = desk.store.give_up_blob

    async def slow(blob_id: str) -> bool:
        asked.set()
        await answer.wait()
        return await give_up_blob(blob_id)

    monkeypatch.setattr(desk.store, "give_up_blob", slow)
    abandoning = asyncio.create_task(upload.abandon())
    await asked.wait()
    abandoning.cancel()
    await asyncio.gather(abandoning, return_exceptions=True)
    answer.set()

    async def is_gone() -> bool:
        return await desk.left() == ([], [])

    await wait_until_async(is_gone, 30, "its bytes to go")


async def test_a_file_that_was_kept_outlives_the_end_of_its_upload(desk: Desk) -> None:
    upload = await desk.upload()
    file = await desk.keep(upload)
    await upload.abandon()
    assert (file.size_bytes, file.line_count, file.id) == (len(LINE), 1, upload.file_id)
    assert await desk.left() == ([upload.blob_id], [upload.blob_id])


async def test_the_same_upload_under_one_key_is_one_file(desk: Desk) -> None:
    first = await desk.file("k")
    before = await desk.left()
    assert await desk.file("k") == first
    assert await desk.left() == before, "the bytes that came twice are gone"
    assert (await desk.file()).id != first.id
    with pytest.raises(ApiProblem):
        await desk.file("k", b"other\n")


async def test_bytes_given_up_while_the_store_is_away_go_with_a_later_upload(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accept, "_UNWANTED_COUNT_MAX", 2)
    unwanted = [await desk.upload() for _ in range(3)]
    with monkeypatch.context() as patch:
        away(patch, desk.store, "give_up_blob", StoreUnavailable("away"))
        for upload in unwanted:
            await upload.abandon()
        last = await desk.upload()
        assert len((await desk.left())[0]) == 4
    await desk.keep(last)
    await desk.file()
    found, _ = await desk.left()
    assert len(found) == 3
    assert unwanted[2].blob_id in found, "more than so many are left to the sweeps"


async def test_leftovers_go_before_a_response_is_written(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    unwanted = await desk.upload()
    with monkeypatch.context() as patch:
        away(patch, desk.store, "give_up_blob", StoreUnavailable("away"))
        await unwanted.abandon()
    job = await desk.response()
    assert await desk.left() == ([job.work_blob_id], [job.work_blob_id])


@pytest.mark.parametrize("silent", [False, True])
async def test_bytes_that_cannot_be_removed_now_are_left_to_the_sweeps(
    desk: Desk, silent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload = await desk.upload()
    await upload.finish()
    monkeypatch.setattr(accept, "REMOVE_WAIT_S", 0)

    async def hang(_: str) -> None:
        await asyncio.Event().wait()

    if silent:
        monkeypatch.setattr(desk.blobs, "delete", hang)
    else:
        away(monkeypatch, desk.blobs, "delete", BlobUnavailable("no disk"))
    await upload.abandon()
    assert await desk.left() == ([upload.blob_id], [upload.blob_id])
    assert await desk.store.condemned_blobs(-1, -1, 10) == [upload.blob_id]


async def test_a_deleted_file_takes_its_bytes_along(desk: Desk) -> None:
    file, kept = await desk.file(), await desk.upload()
    await desk.keep(kept)
    assert not await desk.reception.delete_file("tenant_2", file.id)
    assert len((await desk.left())[1]) == 2
    assert await desk.reception.delete_file(desk.caller.tenant_id, file.id)
    assert await desk.left() == ([kept.blob_id], [kept.blob_id])


async def test_a_file_that_is_taken_back_frees_its_key_and_one_in_use_stays(desk: Desk) -> None:
    file, used = await desk.file("k"), await desk.file()
    await desk.reception.create_job(desk.caller, JobRequest(CHAT, used.id, DAY_MS, "24h"))
    for one in (used, file):
        await desk.reception.take_back_file(desk.caller.tenant_id, one.id, "k" if one is file else None)
    assert [len(some) for some in await desk.left()] == [1, 1]
    assert (await desk.file("k", b"other\n")).id != file.id


async def test_a_response_has_its_line_and_its_trailer_as_work(desk: Desk) -> None:
    job = await desk.response("k")
    assert job.work_blob_id is not None
    work = LINE + b"\x01\x00\x00\x00"
    assert await desk.blobs.size(job.work_blob_id) == len(work)
    assert await desk.blobs.read(job.work_blob_id, 0, len(work)) == work
    assert await desk.response("k") == job
    assert await desk.left() == ([job.work_blob_id], [job.work_blob_id]), "the bytes that came twice are gone"
    await desk.response("soon", replace(TERMS, interactive_after_ms=5))
    for key, after_ms in (("k", 5), ("soon", 6), ("soon", None)):
        with pytest.raises(ApiProblem):
            await desk.response(key, replace(TERMS, interactive_after_ms=after_ms))
    assert (await desk.response()).id != job.id


@pytest.mark.parametrize("verb", ["begin_blob", "create_response"])
async def test_a_response_that_is_not_made_leaves_nothing(
    desk: Desk, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    away(monkeypatch, desk.store, verb, StoreFull("full"))
    with pytest.raises(StoreFull):
        await desk.response()
    assert await desk.left() == ([], [])


async def test_a_response_whose_bytes_cannot_be_written_leaves_nothing(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    create, aborted = desk.blobs.create, list[int]()

    async def broken(blob_id: str) -> Any:
        writer = await create(blob_id)
        abort = writer.abort

        async def note() -> None:
            aborted.append(1)
            await abort()

        away(monkeypatch, writer, "finish", BlobUnavailable("no disk"))
        monkeypatch.setattr(writer, "abort", note)
        return writer

    monkeypatch.setattr(desk.blobs, "create", broken)
    with pytest.raises(BlobUnavailable):
        await desk.response()
    assert (await desk.left(), aborted) == (([], []), [1])


async def test_a_job_is_made_once_under_a_key_and_its_webhook_gets_a_secret(desk: Desk) -> None:
    file = await desk.file()
    hook = JobWebhook("https://hooks.example.com/", EVENT_TYPES)
    request = JobRequest(CHAT, file.id, DAY_MS, "24h", webhook=hook)
    job = await desk.reception.create_job(desk.caller, request, idempotency_key="k")
    spelled_otherwise = replace(request, window_text="1440m", traceparent="00-1")
    assert await desk.reception.create_job(desk.caller, spelled_otherwise, idempotency_key="k") == job
    assert (await desk.reception.create_job(desk.caller, request)).id != job.id
    with pytest.raises(ApiProblem):
        await desk.reception.create_job(desk.caller, replace(request, ordered=True), idempotency_key="k")
    own = await desk.store.webhook_endpoint_of_job(desk.caller.tenant_id, job.id)
    assert own is not None
    assert len(own.secret.reveal()) > SECRET_BYTES
    assert await desk.reception.retry_job(desk.caller, "batch_none", RetryChoice(("failed",))) is None


def test_a_key_is_bound_to_what_is_asked_for() -> None:
    request = JobRequest(CHAT, "file-1", DAY_MS, "24h")
    assert request_hash(request) == request_hash(replace(request, window_text="x", traceparent="y"))
    assert request_hash(request) != request_hash(replace(request, window_ms=1))
    asked = ("ab", "batch", "in.jsonl", None)
    changed = [("cd", *asked[1:]), ("ab", "vision", *asked[2:]), ("ab", "batch", "x", None), (*asked[:3], 5)]
    assert len({upload_hash(*one) for one in (asked, *changed)}) == 5


async def test_a_key_of_a_retry_is_bound_to_its_job_and_its_choice(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    hashes: list[str] = []

    async def noted(*_: Any, idempotency: Idempotency, **more: Any) -> None:
        hashes.append(idempotency.body_hash)

    monkeypatch.setattr(desk.store, "retry_job", noted)
    failed, cancelled = RetryChoice(("failed",)), RetryChoice(("cancelled",))
    for job_id, choice in (("one", failed), ("one", cancelled), ("two", failed), ("one", failed)):
        await desk.reception.retry_job(desk.caller, job_id, choice, idempotency_key="k")
    assert (len(set(hashes)), hashes[-1]) == (3, hashes[0])
