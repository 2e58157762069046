"""What every store does with files that come in parts."""

from __future__ import annotations

import asyncio

import pytest

from tests.contracts.store_world import StoreWorld
from tidegate.core.errors import ApiProblem
from tidegate.core.files import JoinedParts, NewFile, PartedUpload, Stamp, UploadPart, UploadRequest
from tidegate.core.nouns import Caller, Idempotency, Quotas
from tidegate.core.states import UploadState
from tidegate.store.tenants import uploads

pytestmark = pytest.mark.anyio

HOUR_MS = 3_600_000
JOINED = JoinedParts("hash", "ab" * 16)


async def begun(
    world: StoreWorld,
    caller: Caller,
    size_bytes: int = 30,
    quotas: Quotas | None = None,
    key: Idempotency | None = None,
) -> PartedUpload:
    request = UploadRequest(size_bytes, "batch", "in.jsonl", "application/jsonl", 5_000)
    return await world.store.create_upload(caller, world.id("upload"), request, idempotency=key, quotas=quotas)


async def part_of(world: StoreWorld, upload: PartedUpload, size_bytes: int = 10) -> UploadPart:
    blob = await world.log("upload")
    return UploadPart(world.id("part"), upload.id, blob.blob_id, Stamp(size_bytes, "ab" * 32))


async def joined(world: StoreWorld, size_bytes: int = 30) -> NewFile:
    blob = await world.log("upload")
    return NewFile(world.id("file"), blob.blob_id, Stamp(size_bytes, "cd" * 32), "batch", "in.jsonl", 3, 5_000)


async def test_parts_become_a_file_in_one_step(world: StoreWorld) -> None:
    caller = await world.caller()
    upload = await begun(world, caller)
    assert (upload.state, upload.expires_at - upload.created_at) == (UploadState.PENDING, HOUR_MS)
    parts = [await part_of(world, upload) for _ in range(3)]
    for part in [*parts, parts[0]]:
        kept = await world.store.add_upload_part(caller, part)
        assert (kept.id, kept.stamp) == (part.id, part.stamp)
    assert set(await world.store.upload_parts(caller.tenant_id, upload.id)) == {part.id for part in parts}
    file = await joined(world)
    completed, unused = await world.store.complete_upload(caller.tenant_id, upload.id, file, JOINED)
    assert (completed.state, completed.file_id, completed.joined) == (UploadState.COMPLETED, file.id, JOINED)
    assert unused == sorted(part.blob_id for part in parts)
    shown = await world.store.get_file(caller.tenant_id, file.id)
    assert shown is not None
    assert (shown.size_bytes, shown.line_count, shown.expires_at) == (30, 3, shown.created_at + 5_000)
    # Asked again, also with another file, it is what it was.
    again, none = await world.store.complete_upload(
        caller.tenant_id, upload.id, await joined(world), JoinedParts("other", None)
    )
    assert (again, none) == (completed, [])
    assert sorted(await world.store.condemn_uploads(unused)) == unused


async def test_only_a_pending_upload_changes(world: StoreWorld) -> None:
    caller, other_caller = await world.caller(), await world.caller("another")
    upload = await begun(world, caller)
    part = await world.store.add_upload_part(caller, await part_of(world, upload))
    for tenant_id in (other_caller.tenant_id, "none"):
        with pytest.raises(ApiProblem, match="No such Upload"):
            await world.store.cancel_upload(tenant_id, upload.id)
        with pytest.raises(ApiProblem, match="No such Upload"):
            await world.store.complete_upload(tenant_id, upload.id, await joined(world), JOINED)
        with pytest.raises(ApiProblem, match="No such Upload"):
            await world.store.upload_parts(tenant_id, upload.id)
    with pytest.raises(ApiProblem, match="No such Upload"):
        await world.store.add_upload_part(other_caller, await part_of(world, upload))
    cancelled, unused = await world.store.cancel_upload(caller.tenant_id, upload.id)
    assert (cancelled.state, unused) == (UploadState.CANCELLED, [part.blob_id])
    assert await world.store.cancel_upload(caller.tenant_id, upload.id) == (cancelled, [])
    with pytest.raises(ApiProblem, match="'cancelled'"):
        await world.store.add_upload_part(caller, await part_of(world, upload))
    file = await joined(world)
    with pytest.raises(ApiProblem, match="'cancelled'"):
        await world.store.complete_upload(caller.tenant_id, upload.id, file, JOINED)
    assert await world.store.get_file(caller.tenant_id, file.id) is None


async def test_an_upload_that_is_over_time_lets_go_of_its_parts(world: StoreWorld) -> None:
    caller = await world.caller()
    upload = await begun(world, caller)
    part = await world.store.add_upload_part(caller, await part_of(world, upload))
    await world.clock.advance(HOUR_MS)
    # Before the sweep sees it.
    with pytest.raises(ApiProblem, match="'expired'"):
        await world.store.add_upload_part(caller, await part_of(world, upload))
    with pytest.raises(ApiProblem, match="'expired'"):
        await world.store.complete_upload(caller.tenant_id, upload.id, await joined(world), JOINED)
    with pytest.raises(ApiProblem, match="'expired'"):
        await world.store.cancel_upload(caller.tenant_id, upload.id)
    other = await begun(world, caller)
    assert not await world.store.expire_upload(caller.tenant_id, other.id), "its time is not over"
    await world.store.cancel_upload(caller.tenant_id, other.id)
    assert await world.store.overdue_uploads(10) == [(caller.tenant_id, upload.id)]
    assert await world.store.expire_upload(caller.tenant_id, upload.id)
    assert not await world.store.expire_upload(caller.tenant_id, upload.id)
    assert await world.store.condemn_uploads([part.blob_id]) == [part.blob_id]
    await world.store.prune_uploads(HOUR_MS)
    assert await world.store.get_upload(caller.tenant_id, upload.id) is not None, "it is shown for a while"
    pending = await begun(world, caller)
    await world.clock.advance(HOUR_MS + 1)
    await world.store.prune_uploads(HOUR_MS)
    assert await world.store.get_upload(caller.tenant_id, upload.id) is None
    await world.clock.advance(HOUR_MS + 1)
    await world.store.prune_uploads(HOUR_MS)
    assert await world.store.overdue_uploads(10) == [(caller.tenant_id, pending.id)], "its parts are not let go yet"


async def test_uploads_whose_time_is_over_are_listed_oldest_first(world: StoreWorld) -> None:
    caller, ids = await world.caller(), list[str]()
    for _ in range(3):
        ids.append((await begun(world, caller)).id)
        await world.clock.advance(1)
    await world.clock.advance(HOUR_MS)
    assert [upload_id for _, upload_id in await world.store.overdue_uploads(10)] == ids
    assert [upload_id for _, upload_id in await world.store.overdue_uploads(2)] == ids[:2]


async def test_a_quota_counts_parts(world: StoreWorld) -> None:
    caller, quotas = await world.caller(), Quotas(stored_bytes_max=50)
    await world.file(caller, size_bytes=20, quotas=quotas)
    with pytest.raises(ApiProblem) as refused:
        await begun(world, caller, size_bytes=31, quotas=quotas)
    assert refused.value.code == "storage_quota_exceeded"
    upload = await begun(world, caller, quotas=quotas)
    for _ in range(3):
        await world.store.add_upload_part(caller, await part_of(world, upload), quotas=quotas)
    for refused_one in (
        world.store.add_upload_part(caller, await part_of(world, upload, 1), quotas=quotas),
        world.file(caller, size_bytes=1, quotas=quotas),
    ):
        with pytest.raises(ApiProblem) as refused:
            await refused_one
        assert refused.value.code == "storage_quota_exceeded"
    await world.store.complete_upload(caller.tenant_id, upload.id, await joined(world), JOINED)
    with pytest.raises(ApiProblem):
        await world.file(caller, size_bytes=1, quotas=quotas)


async def test_parts_may_have_twice_the_bytes_and_no_more(world: StoreWorld) -> None:
    caller = await world.caller()
    upload = await begun(world, caller, size_bytes=10)
    for _ in range(2):
        await world.store.add_upload_part(caller, await part_of(world, upload))
    with pytest.raises(ApiProblem) as refused:
        await world.store.add_upload_part(caller, await part_of(world, upload, 1))
    assert refused.value.code == "upload_bytes_exceeded"
    other = await begun(world, caller, size_bytes=10)
    assert await world.store.add_upload_part(caller, await part_of(world, other, 20)), "all of it in one part"


async def test_an_upload_has_a_bounded_number_of_parts(world: StoreWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "PARTS_MAX", 2)
    caller = await world.caller()
    upload = await begun(world, caller)
    for _ in range(2):
        await world.store.add_upload_part(caller, await part_of(world, upload, 1))
    with pytest.raises(ApiProblem) as refused:
        await world.store.add_upload_part(caller, await part_of(world, upload, 1))
    assert refused.value.code == "too_many_parts"


async def test_an_idempotency_key_makes_one_upload_and_one_part(world: StoreWorld) -> None:
    caller = await world.caller()
    key, other = Idempotency("k", "a"), Idempotency("k", "b")
    upload = await begun(world, caller, key=key)
    assert await begun(world, caller, key=key) == upload
    with pytest.raises(ApiProblem, match="different request"):
        await begun(world, caller, key=other)
    # The same key on another route is another key.
    part = await world.store.add_upload_part(caller, await part_of(world, upload), idempotency=key)
    assert await world.store.add_upload_part(caller, await part_of(world, upload), idempotency=key) == part
    with pytest.raises(ApiProblem, match="different request"):
        await world.store.add_upload_part(caller, await part_of(world, upload), idempotency=other)


async def test_of_a_completion_and_a_cancel_at_once_one_wins(world: StoreWorld) -> None:
    caller = await world.caller()
    for _ in range(5):
        upload = await begun(world, caller)
        part = await world.store.add_upload_part(caller, await part_of(world, upload))
        file = await joined(world)
        ends = await asyncio.gather(
            world.store.complete_upload(caller.tenant_id, upload.id, file, JOINED),
            world.store.cancel_upload(caller.tenant_id, upload.id),
            return_exceptions=True,
        )
        assert sum(isinstance(end, ApiProblem) for end in ends) == 1
        now = await world.store.get_upload(caller.tenant_id, upload.id)
        assert now is not None
        shown = await world.store.get_file(caller.tenant_id, file.id)
        assert (shown is not None) == (now.state is UploadState.COMPLETED)
        assert await world.store.condemn_uploads([part.blob_id]) == [part.blob_id]
