"""What every store does with blobs and files."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.contracts.store_world import DAY_MS, START_MS, StoreWorld
from tests.contracts.test_store_budgets import rows
from tests.support.store_verbs import any_file
from tidegate.backends.blobs_local import LocalBlobs
from tidegate.core.errors import ApiProblem, BlobMissing, LostRace
from tidegate.core.files import AbandonedBlob, Extent, File, NewFile, Placed, Stamp, StoredBlob
from tidegate.core.job_shape import JobShape
from tidegate.core.nouns import Caller, Idempotency, Job, Quotas
from tidegate.core.states import FileState
from tidegate.core.webhooks import EndpointShape
from tidegate.store.file_bytes import file_bytes
from tidegate.store.tenants import files

pytestmark = pytest.mark.anyio


async def test_a_file_shows_a_durable_blob(world: StoreWorld) -> None:
    caller = await world.caller()
    file = await world.file(caller, size_bytes=1 << 40, line_count=7, expires_after_ms=5_000)
    assert (file.size_bytes, file.line_count, file.state) == (1 << 40, 7, FileState.READY)
    assert (file.created_at, file.expires_at) == (START_MS, START_MS + 5_000)
    assert await world.store.get_file(caller.tenant_id, file.id) == file
    assert await any_file(world.store, file.id) == file
    [extent] = await world.extents(file.id)
    assert (extent.at, extent.size_bytes, extent.blob_at) == (0, 1 << 40, 0)
    assert await world.store.knows_blob(extent.blob_id)


async def test_the_owner_of_a_file_is_found_while_the_file_may_be_seen(world: StoreWorld) -> None:
    theirs = await world.caller("theirs")
    file, short = await world.file(theirs), await world.file(theirs, expires_after_ms=5_000)
    assert [await world.store.file_owner(one) for one in (file.id, short.id, world.id("file"))] == [
        "theirs",
        "theirs",
        None,
    ]
    await world.store.delete_file(theirs.tenant_id, file.id)
    await world.clock.advance(5_001)
    assert [await world.store.file_owner(one.id) for one in (file, short)] == [None, None]


async def test_creating_a_file_may_be_replayed(world: StoreWorld) -> None:
    caller, blob, file_id = await world.caller(), await world.log("upload"), world.id("file")
    new = NewFile(file_id, blob.blob_id, Stamp(10, "aa"), "batch", "a", 1, None)
    first = await world.store.create_file(caller, new)
    again = await world.store.create_file(caller, new)
    assert first == again
    assert len(await world.extents(file_id)) == 1
    await world.store.delete_file(caller.tenant_id, file_id)
    assert await world.store.condemn_unused_blobs(-1, -1, 10) == 1


async def test_a_blob_that_was_given_up_cannot_become_a_file(world: StoreWorld) -> None:
    caller, blob = await world.caller(), await world.log("upload")
    for _ in range(2):
        await world.store.give_up_blob(blob.blob_id)
    with pytest.raises(LostRace):
        await world.store.create_file(
            caller, NewFile(world.id("file"), blob.blob_id, Stamp(1, "aa"), "batch", "a", 1, None)
        )
    assert await world.store.list_files(caller.tenant_id, after=None, count_max=10) == []
    assert await world.store.condemned_blobs(-1, -1, 10) == [blob.blob_id]
    for _ in range(2):
        await world.store.forget_blob(blob.blob_id)
    assert not await world.store.knows_blob(blob.blob_id)


async def test_another_tenants_file_is_like_an_absent_one(world: StoreWorld) -> None:
    ours, theirs = await world.caller("ours"), await world.caller("theirs")
    file, absent = await world.file(theirs), world.id("file")
    for file_id in (file.id, absent):
        assert await world.store.get_file(ours.tenant_id, file_id) is None
        assert await world.store.delete_file(ours.tenant_id, file_id) is False
        assert await world.store.list_files(ours.tenant_id, after=file_id, count_max=10) is None
        with pytest.raises(ApiProblem) as problem:
            await world.job(ours, replace(file, id=file_id))
        assert (problem.value.status, problem.value.param) == (404, "input_file_id")
        assert problem.value.message.replace(file_id, "ID").startswith("No such File object: ID. Files expire")
    assert await world.store.list_files(ours.tenant_id, after=None, count_max=10) == []
    assert await world.store.get_file(theirs.tenant_id, file.id) == file


@pytest.mark.parametrize("order", ["desc", "asc"])
async def test_pages_meet_files_of_the_same_moment_once_each(world: StoreWorld, order: str) -> None:
    caller, other_caller = await world.caller(), await world.caller("another")
    made = []
    for count in (4, 3):
        made += [await world.file(caller, purpose="batch" if n % 2 else "other") for n in range(count)]
        await world.file(other_caller)
        await world.clock.advance(1)
    expected = sorted(((file.created_at, file.id) for file in made), reverse=order == "desc")
    seen: list[tuple[int, str]] = []
    after = None
    while page := await world.store.list_files(caller.tenant_id, after=after, count_max=2, order=order):
        seen += [(file.created_at, file.id) for file in page]
        after = page[-1].id
    assert seen == expected
    batch = await world.store.list_files(caller.tenant_id, after=None, count_max=100, order=order, purpose="batch")
    assert batch is not None
    wanted = {file.id for file in made if file.purpose == "batch"}
    assert [file.id for file in batch] == [id for _, id in expected if id in wanted]


@pytest.mark.parametrize("order", ["desc", "asc"])
async def test_a_file_is_listed_until_it_expires(world: StoreWorld, order: str) -> None:
    caller = await world.caller()
    kept, short = await world.file(caller), await world.file(caller, expires_after_ms=5_000)
    for ids in ({kept.id, short.id}, {kept.id}):
        page = await world.store.list_files(caller.tenant_id, after=None, count_max=10, order=order)
        assert {file.id for file in page or ()} == ids
        await world.clock.advance(5_000)


async def test_a_deleted_file_still_marks_a_place_in_a_list(world: StoreWorld) -> None:
    caller = await world.caller()
    for _ in range(3):
        await world.file(caller)
    page = await world.store.list_files(caller.tenant_id, after=None, count_max=10)
    assert page is not None
    assert await world.store.delete_file(caller.tenant_id, page[1].id)
    rest = await world.store.list_files(caller.tenant_id, after=page[1].id, count_max=10)
    assert rest == page[2:]


async def test_a_deleted_file_is_gone_and_its_bytes_with_it(world: StoreWorld) -> None:
    caller = await world.caller()
    file = await world.file(caller)
    assert await world.store.condemn_unused_blobs(-1, -1, 10) == 0
    assert await world.store.delete_file(caller.tenant_id, file.id) is True
    assert await world.store.delete_file(caller.tenant_id, file.id) is False
    assert await world.store.get_file(caller.tenant_id, file.id) is None
    assert await world.extents(file.id) == []
    assert await world.store.condemn_unused_blobs(1, 1, 10) == 0, "too young"
    assert await world.store.condemn_unused_blobs(-1, -1, 10) == 1
    assert await world.store.condemn_unused_blobs(-1, -1, 10) == 0
    assert len(await world.store.condemned_blobs(-1, -1, 10)) == 1
    assert await world.store.condemned_blobs(1, 1, 10) == []


async def test_of_more_blobs_than_are_looked_at_the_oldest_are_found(world: StoreWorld) -> None:
    caller, gone, made, given_up, left = await world.caller(), await world.worker(), [], [], []
    for _ in range(3):
        file, blob = await world.file(caller), await world.log("upload")
        made.append((file.id, (await world.extents(file.id))[0].blob_id))
        given_up.append(blob.blob_id)
        left.append((await world.log("work", gone)).blob_id)
        await world.clock.advance(10)
    for blob_id in given_up:
        await world.store.give_up_blob(blob_id)
        await world.clock.advance(10)
    assert await world.store.condemned_blobs(-1, -1, 2) == given_up[:2]
    assert await world.store.declare_gone(gone, leaving=True)
    assert [one.id for one in await world.store.abandoned_blobs(2)] == left[:2]
    for blob_id in given_up:
        await world.store.forget_blob(blob_id)
    for file_id, _ in reversed(made):
        assert await world.store.delete_file(caller.tenant_id, file_id)
    assert await world.store.condemn_unused_blobs(-1, -1, 2) == 2
    assert set(await world.store.condemned_blobs(-1, -1, 9)) == {blob_id for _, blob_id in made[:2]}


async def job_of(world: StoreWorld, caller: Caller, file: File, *, is_first: bool) -> Job:
    """A job that reads this file first, or behind another one."""
    if is_first:
        return await world.job(caller, file)
    return await world.job(caller, shape=JobShape(more_inputs=(file.id,)))


@pytest.mark.parametrize("is_first", [True, False])
async def test_an_input_that_ingest_needs_is_not_deleted(world: StoreWorld, is_first: bool) -> None:
    caller = await world.caller()
    file = await world.file(caller, expires_after_ms=1_000)
    job = await job_of(world, caller, file, is_first=is_first)
    with pytest.raises(ApiProblem) as problem:
        await world.store.delete_file(caller.tenant_id, file.id)
    assert (problem.value.status, problem.value.code) == (409, "file_in_use")
    assert await world.store.get_file(caller.tenant_id, file.id) == file
    await world.clock.advance(2_000)
    assert await world.store.expired_files(10) == []
    await world.store.cancel_job(caller.tenant_id, job.id)
    await world.store.end_unstarted(job.id)
    assert await world.store.expired_files(10) == [(caller.tenant_id, file.id)]
    assert await world.store.delete_file(caller.tenant_id, file.id)


async def test_of_more_expired_files_than_are_looked_at_the_oldest_are_found(world: StoreWorld) -> None:
    caller = await world.caller()
    files = [await world.file(caller, expires_after_ms=keep_ms) for keep_ms in (3_000, 1_000, 2_000)]
    await world.clock.advance(5_000)
    assert await world.store.expired_files(2) == [(caller.tenant_id, files[at].id) for at in (1, 2)]


@pytest.mark.parametrize("is_first", [True, False])
async def test_a_file_is_taken_back_with_its_key_unless_a_job_was_made_of_it(world: StoreWorld, is_first: bool) -> None:
    caller, other_caller, key = await world.caller(), await world.caller("another"), Idempotency("k", "hash")
    file = await world.file(caller, idempotency=key)
    assert not await world.store.take_back_file(other_caller.tenant_id, file.id, "k")
    job = await job_of(world, caller, file, is_first=is_first)
    assert not await world.store.take_back_file(caller.tenant_id, file.id, "k"), "of which a job was made"
    await world.store.cancel_job(caller.tenant_id, job.id)
    await world.store.end_unstarted(job.id)
    assert not await world.store.take_back_file(caller.tenant_id, file.id, "k"), "though the job ended"
    await world.store.forget_job(job.id)
    assert await world.store.take_back_file(caller.tenant_id, file.id, "k")
    assert not await world.store.take_back_file(caller.tenant_id, file.id, "k")
    assert await world.store.condemn_unused_blobs(-1, -1, 10) == 1
    assert (await world.file(caller, idempotency=key)).id != file.id, "the key makes a new file"


async def test_a_file_that_is_taken_back_late_leaves_its_key_to_the_next_one(world: StoreWorld) -> None:
    caller, key = await world.caller(), Idempotency("k", "hash")
    file = await world.file(caller, idempotency=key)
    await world.clock.advance(DAY_MS)
    later = await world.file(caller, idempotency=key)
    assert later.id != file.id
    assert await world.store.take_back_file(caller.tenant_id, file.id, "k")
    assert await world.file(caller, idempotency=key) == later


async def test_a_key_whose_file_was_deleted_says_so(world: StoreWorld) -> None:
    caller, key = await world.caller(), Idempotency("k", "hash")
    file = await world.file(caller, idempotency=key)
    await world.store.delete_file(caller.tenant_id, file.id)
    with pytest.raises(ApiProblem) as problem:
        await world.file(caller, idempotency=key)
    assert (problem.value.status, problem.value.code) == (409, "idempotency_result_deleted")


async def test_an_expired_file_is_hidden_before_it_is_swept(world: StoreWorld) -> None:
    caller = await world.caller()
    file, kept = await world.file(caller, expires_after_ms=1_000), await world.file(caller)
    await world.clock.advance(999)
    assert await world.store.get_file(caller.tenant_id, file.id) == file
    assert await world.store.expired_files(10) == []
    await world.clock.advance(1)
    assert await world.store.get_file(caller.tenant_id, file.id) is None
    assert await world.store.list_files(caller.tenant_id, after=None, count_max=10) == [kept]
    with pytest.raises(ApiProblem):
        await world.job(caller, file)
    assert await world.store.expired_files(10) == [(caller.tenant_id, file.id)]


async def test_the_same_key_and_body_make_one_file_for_a_day(world: StoreWorld) -> None:
    caller, other_caller = await world.caller(), await world.caller("another")
    key = Idempotency("k", "body")
    first = await world.file(caller, idempotency=key)
    assert await world.file(caller, idempotency=key) == first
    assert (await world.file(other_caller, idempotency=key)).id != first.id
    with pytest.raises(ApiProblem) as problem:
        await world.file(caller, idempotency=Idempotency("k", "other body"))
    assert (problem.value.status, problem.value.code) == (422, "idempotency_key_reused")
    job = await world.job(caller, first, idempotency=key)
    assert job.id, "a key speaks of one route only"
    await world.clock.advance(DAY_MS - 1)
    assert await world.file(caller, idempotency=key) == first
    await world.clock.advance(1)
    later = await world.file(caller, idempotency=Idempotency("k", "other body"))
    assert later.id != first.id
    assert await world.file(caller, idempotency=Idempotency("k", "other body")) == later


async def test_a_key_whose_file_was_forgotten_is_refused_with_what_to_do(world: StoreWorld) -> None:
    caller, key = await world.caller(), Idempotency("k", "body")
    file = await world.file(caller, idempotency=key)
    await world.store.delete_file(caller.tenant_id, file.id)
    await world.clock.advance(2)
    await world.store.prune_files(2, 100)
    assert await any_file(world.store, file.id) is not None, "not yet"
    await world.store.prune_files(1, 100)
    assert await any_file(world.store, file.id) is None
    with pytest.raises(ApiProblem, match="Send a new key"):
        await world.file(caller, idempotency=key)


async def test_two_uploads_with_one_key_at_once_make_one_file(world: StoreWorld) -> None:
    caller, other = await world.caller(), await world.open_another()
    key = Idempotency("k", "body")
    made = await asyncio.gather(*(world.file(caller, idempotency=key, store=other) for _ in range(6)))
    assert len({file.id for file in made}) == 1
    listed = await world.store.list_files(caller.tenant_id, after=None, count_max=10)
    assert listed == made[:1]


async def test_stored_bytes_stop_at_their_limit(world: StoreWorld) -> None:
    caller, quotas = await world.caller(), Quotas(stored_bytes_max=1_000)
    first = await world.file(caller, size_bytes=600, quotas=quotas)
    with pytest.raises(ApiProblem) as problem:
        await world.file(caller, size_bytes=401, quotas=quotas)
    assert (problem.value.status, problem.value.code) == (429, "storage_quota_exceeded")
    assert problem.value.retry_after_s
    with pytest.raises(ApiProblem, match=r"600 of 1,000 bytes, and this takes 401 more\. Delete files"):
        await world.file(caller, size_bytes=401, quotas=quotas)
    with pytest.raises(ApiProblem, match=r"this takes 1,001 more\. It never fits: split it"):
        await world.file(caller, size_bytes=1_001, quotas=quotas)
    await world.file(caller, size_bytes=400, quotas=quotas)
    await world.file(await world.caller("another"), size_bytes=1_000, quotas=quotas)
    with pytest.raises(ApiProblem):
        await world.file(caller, size_bytes=1, quotas=quotas)
    await world.store.delete_file(caller.tenant_id, first.id)
    await world.file(caller, size_bytes=600, quotas=quotas)
    await world.file(caller, size_bytes=1, quotas=Quotas())


async def test_racing_uploads_cannot_pass_the_limit_together(world: StoreWorld) -> None:
    caller, other = await world.caller(), await world.open_another()
    quotas = Quotas(stored_bytes_max=300)
    tries = [world.file(caller, size_bytes=100, quotas=quotas, store=other) for _ in range(8)]
    done = await asyncio.gather(*tries, return_exceptions=True)
    assert sum(isinstance(one, File) for one in done) == 3
    assert all(isinstance(one, File | ApiProblem) for one in done)


async def test_replacing_extents_keeps_every_byte_and_frees_the_old_blobs(world: StoreWorld) -> None:
    job = await world.running(await world.caller(), 6)
    logs = [await world.log() for _ in range(3)]
    for number in range(6):
        await world.answer(logs[number % 3], job, number)
    before, old = await world.content(job.output_file_id), await world.extents(job.output_file_id)
    assert len(old) == 6
    assert [(job.output_file_id, 6)] == await world.store.crowded_files(5)
    assert await world.store.crowded_files(6) == []
    copy = await world.log("compacted")
    placed = copy.append([before[old[1].at : old[4].at]])
    assert job.output_file_id is not None
    for _ in range(2):
        await world.store.replace_extents(job.output_file_id, old[1:4], placed)
    assert len(await world.extents(job.output_file_id)) == 4
    assert await world.content(job.output_file_id) == before
    await world.judge(job)
    for log in logs:
        await world.store.settle_blob(log.blob_id)
    assert await world.store.condemn_unused_blobs(-1, -1, 10) == 0, "each log is still needed by one piece"


async def test_replacing_pieces_that_changed_is_a_lost_race(world: StoreWorld) -> None:
    """A piece that grew meanwhile has bytes that the copy lacks."""
    job = await world.running(await world.caller(), 6)
    first, second = await world.log(), await world.log()
    await world.answer(first, job, 0)
    await world.answer(second, job, 1)
    old, before = await world.extents(job.output_file_id), await world.content(job.output_file_id)
    await world.answer(second, job, 2)
    copy = await world.log("compacted")
    placed = copy.append([before])
    assert job.output_file_id is not None
    with pytest.raises(LostRace):
        await world.store.replace_extents(job.output_file_id, old, placed)
    with pytest.raises(LostRace):
        await world.store.replace_extents(world.id("file"), old, placed)
    await world.judge(job)
    grown = await world.extents(job.output_file_id)
    await world.store.give_up_blob(copy.blob_id)
    with pytest.raises(LostRace):
        await world.store.replace_extents(job.output_file_id, grown, Placed(copy.blob_id, 0, placed.size_bytes))
    assert await world.extents(job.output_file_id) == grown
    await world.judge(job)


async def test_extents_are_listed_from_the_one_that_holds_a_place(world: StoreWorld) -> None:
    job = await world.running(await world.caller(), 6)
    for number in range(3):
        await world.answer(await world.log(), job, number)
    every = await world.extents(job.output_file_id)
    assert job.output_file_id is not None
    middle: Extent = every[1]
    assert await world.store.list_extents(job.output_file_id, middle.at, 10) == every[1:]
    assert await world.store.list_extents(job.output_file_id, middle.at - 1, 10) == every
    assert await world.store.list_extents(job.output_file_id, middle.at, 1) == [middle]
    assert await world.store.list_extents(job.output_file_id, every[2].at + every[2].size_bytes, 10) == []


async def test_only_blobs_without_a_living_owner_are_abandoned(world: StoreWorld) -> None:
    alive, dead = await world.worker(60_000), await world.worker(1_000)
    await world.log("answers", alive)
    lost = await world.log("answers", dead)
    work = world.id("blob")
    await world.store.begin_blobs([work, work], "work", dead)
    assert await world.store.abandoned_blobs(10) == []
    await world.clock.advance(1_001)
    assert await world.store.declare_gone(dead)
    abandoned = {blob.id: blob for blob in await world.store.abandoned_blobs(10)}
    assert abandoned == {
        lost.blob_id: AbandonedBlob(lost.blob_id, "answers", 0, dead, 1),
        work: AbandonedBlob(work, "work", 0, dead, 1),
    }
    for _ in range(2):
        await world.store.settle_blob(lost.blob_id)
        await world.store.give_up_blob(work)
    assert await world.store.abandoned_blobs(10) == []
    assert await world.store.condemn_unused_blobs(0, 0, 10) == 1
    assert sorted(await world.store.condemned_blobs(-1, -1, 10)) == sorted([lost.blob_id, work])


async def test_a_settled_log_that_is_in_use_is_kept(world: StoreWorld) -> None:
    job, log = await world.running(await world.caller(), 2), await world.log()
    await world.answer(log, job, 0)
    await world.store.give_up_blob(log.blob_id)
    await world.store.settle_blob(log.blob_id)
    assert await world.store.condemn_unused_blobs(-1, -1, 10) == 0
    await world.answer(log, job, 1)
    await world.judge(job)


async def test_old_idempotency_keys_are_pruned_and_young_ones_are_not(world: StoreWorld) -> None:
    caller, key = await world.caller(), Idempotency("k", "body")
    first = await world.file(caller, idempotency=key)
    await world.clock.advance(DAY_MS - 1)
    await world.store.prune_files(1, 100)
    assert await world.file(caller, idempotency=key) == first
    await world.clock.advance(DAY_MS + 2)
    await world.store.prune_files(1, 100)
    assert (await world.file(caller, idempotency=key)).id != first.id


async def test_an_upload_can_go_with_the_file_that_was_made_of_it(world: StoreWorld) -> None:
    caller = await world.caller()
    file = await world.file(caller)
    blob_ids = [extent.blob_id for extent in await world.extents(file.id)]
    log = await world.log()
    await world.store.settle_blob(log.blob_id)
    assert await world.store.condemn_uploads(blob_ids) == [], "a file is made of it"
    assert await world.store.delete_file(caller.tenant_id, file.id)
    assert await world.store.condemn_uploads([*blob_ids, log.blob_id]) == blob_ids
    assert await world.store.condemn_uploads(blob_ids) == []
    assert await world.store.condemned_blobs(-1, -1, 10) == blob_ids


async def test_condemned_bytes_are_listed_in_the_order_in_which_they_were_condemned(world: StoreWorld) -> None:
    caller, condemned = await world.caller(), list[str]()
    for _ in range(3):
        file = await world.file(caller)
        blob_ids = [extent.blob_id for extent in await world.extents(file.id)]
        assert await world.store.delete_file(caller.tenant_id, file.id)
        condemned += await world.store.condemn_uploads(blob_ids)
        await world.clock.advance(1)
    assert await world.store.condemned_blobs(-1, -1, 10) == condemned
    assert await world.store.condemned_blobs(-1, -1, 2) == condemned[:2]
    await world.store.forget_blob(condemned[0])
    assert await world.store.condemned_blobs(-1, -1, 10) == condemned[1:]
    [kept] = await world.extents((await world.file(caller)).id)
    await world.store.forget_blob(kept.blob_id)
    assert await world.store.knows_blob(kept.blob_id)


async def test_a_log_that_was_finished_cannot_be_given_up_any_more(world: StoreWorld) -> None:
    log, other = await world.log(), await world.log()
    await world.store.settle_blob(log.blob_id)
    assert not await world.store.give_up_blob(log.blob_id)
    assert await world.store.give_up_blob(other.blob_id)
    assert await world.store.condemned_blobs(-1, -1, 10) == [other.blob_id]


async def test_bytes_that_no_log_holds_go_soon(world: StoreWorld) -> None:
    """A log waits for its safety period: its owner may wake and record more of it."""
    caller = await world.caller()
    for kind in ("answers", "errors"):
        await world.store.settle_blob((await world.log(kind)).blob_id)
        assert await world.store.give_up_blob((await world.log(kind)).blob_id)
    file = await world.file(caller)
    await world.store.delete_file(caller.tenant_id, file.id)
    await world.clock.advance(100)
    assert await world.store.condemn_unused_blobs(1_000, 99, 10) == 1
    await world.clock.advance(100)
    assert len(await world.store.condemned_blobs(1_000, 99, 10)) == 1


async def test_only_an_answer_log_that_is_not_collected_says_how_far_it_was_recorded(world: StoreWorld) -> None:
    worker, log = await world.worker(), await world.log()
    job = await world.running(await world.caller(), 2)
    await world.answer(log, job, 0)
    size_bytes = await world.store.answers_recorded_to(log.blob_id)
    assert size_bytes
    other = world.id("blob")
    await world.store.begin_blob(other, "errors", worker)
    assert await world.store.answers_recorded_to(other) is None
    assert await world.store.answers_recorded_to(world.id("blob")) is None


async def test_blobs_are_listed_by_id_with_what_needs_them(world: StoreWorld) -> None:
    caller = await world.caller()
    files = [await world.file(caller) for _ in range(3)]
    listed = await world.store.list_blobs("", 100)
    assert [blob.id for blob in listed] == sorted(blob.id for blob in listed)
    assert await world.store.list_blobs(listed[0].id, 1) == [listed[1]]
    needed = [blob for blob in listed if blob.is_needed]
    assert {(await world.store.files_of_blob(blob.id, 5))[0] for blob in needed} == {file.id for file in files}
    await world.store.delete_file(caller.tenant_id, files[0].id)
    assert len([blob for blob in await world.store.list_blobs("", 100) if blob.is_needed]) == 2


@pytest.mark.parametrize("has_keys", [True, False])
async def test_keys_and_places_past_their_day_go_in_pieces(
    world: StoreWorld, monkeypatch: pytest.MonkeyPatch, has_keys: bool
) -> None:
    caller, store = await world.caller(), world.store
    for number in range(7):
        await world.file(caller, idempotency=Idempotency(f"k{number}", "body") if has_keys else None)
        shape = EndpointShape(f"e{number}", "https://receiver.example/x", ("batch.completed",))
        made = await store.create_webhook_endpoint(caller.tenant_id, world.id("whk"), shape, b"1" * 32)
        assert await store.delete_webhook_endpoint(caller.tenant_id, made.id)
    await world.clock.advance(2 * DAY_MS + 2)
    pieces: list[bool] = []
    prune = store._prune_some

    async def watched(keep_ms: int, count_max: int) -> bool:
        pieces.append(await prune(keep_ms, count_max))
        return pieces[-1]

    monkeypatch.setattr(files, "PIECE_ROWS", 2)
    monkeypatch.setattr(files, "PIECES_MAX", 3)
    monkeypatch.setattr(store, "_prune_some", watched)
    await store.prune_files(DAY_MS * 30, 100)
    assert pieces == [True] * 3, "one pass is bounded, and six of seven are gone"
    await store.prune_files(DAY_MS * 30, 100)
    assert pieces == [True] * 3 + [False]


async def test_a_blob_begins_empty_and_unused(world: StoreWorld) -> None:
    log = await world.log()
    assert await world.store.list_blobs("", 10) == [StoredBlob(log.blob_id, "writing", 0, 0)]
    assert await world.store.answers_recorded_to(log.blob_id) == 0


async def test_the_oldest_idempotency_keys_are_forgotten_first(
    world: StoreWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "PIECE_ROWS", 1)
    monkeypatch.setattr(files, "PIECES_MAX", 1)
    caller = await world.caller()
    for key in ("b", "a", "c"):
        await world.file(caller, idempotency=Idempotency(key, "hash"))
        await world.clock.advance(1_000)
    await world.clock.advance(2 * DAY_MS - 3_000)
    await world.store.prune_files(DAY_MS, 10)
    assert len(await rows(world, "select key from idempotency")) == 3, "each is kept for two days"
    await world.clock.advance(3_000)
    for left in (["a", "c"], ["c"], []):
        await world.store.prune_files(DAY_MS, 10)
        assert await rows(world, "select key from idempotency order by created_at") == left


async def test_a_file_that_gets_other_pieces_while_it_is_read_is_read_whole(
    world: StoreWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that has just learned where the old pieces are finds them removed."""
    file, copy, blobs = await world.file(await world.caller(), size_bytes=3), world.id("blob"), LocalBlobs(tmp_path)
    old = await world.store.list_extents(file.id, 0, 10)
    await world.store.begin_blob(copy, "compacted", await world.worker())
    writer = await blobs.create(copy)
    await writer.write(b"abc")
    await writer.finish()
    await world.store.replace_extents(file.id, old, Placed(copy, 0, 3))
    assert {blob.id: blob.uses for blob in await world.store.list_blobs("", 9)} == {old[0].blob_id: 0, copy: 1}
    learned, ask = [old], world.store.list_extents

    async def look(file_id: str, from_at: int, count_max: int) -> list[Extent]:
        return learned.pop() if learned else await ask(file_id, from_at, count_max)

    monkeypatch.setattr(world.store, "list_extents", look)
    assert b"".join([chunk async for chunk in file_bytes(world.store, blobs, file.id, 0, 3)]) == b"abc"
    await blobs.close()


async def test_a_file_whose_bytes_are_gone_is_given_up(world: StoreWorld, tmp_path: Path) -> None:
    """They are looked for once more, because a file may get other pieces while it is read."""
    file, blobs = await world.file(await world.caller()), LocalBlobs(tmp_path / "blobs")
    with pytest.raises(BlobMissing):
        [chunk async for chunk in file_bytes(world.store, blobs, file.id, 0, file.size_bytes)]
    await blobs.close()
