"""What every store does with tenants and keys."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.contracts.store_world import MODEL, START_MS, StoreWorld
from tidegate.core.budgets.budget import Limit, Period
from tidegate.core.job_controls import JobControls
from tidegate.core.nouns import Caller, Job
from tidegate.core.schedule.snapshot import ModelRoom
from tidegate.store.tenants.keys import KeyRights

pytestmark = pytest.mark.anyio


async def put(world: StoreWorld, key_id: str, tenant_id: str, **fields: Any) -> None:
    label, team, user = fields.pop("label", "a key"), fields.pop("team", None), fields.pop("user", None)
    await world.store.put_key(Caller(tenant_id, key_id, team, user), b"\x00\xff hash", label, KeyRights(**fields))


async def test_a_tenant_is_made_once_per_name(world: StoreWorld) -> None:
    assert await world.store.tenant_by_name("acme") is None
    first = world.id("tenant")
    made = await asyncio.gather(*(world.store.put_tenant(world.id("tenant"), "acme") for _ in range(4)))
    assert len(set(made)) == 1
    assert await world.store.put_tenant(first, "acme") == made[0]
    assert await world.store.tenant_by_name("acme") == made[0]
    assert await world.store.put_tenant(world.id("tenant"), "Acme") != made[0]
    assert await world.store.put_tenant(first, "é' or 1=1 --") == first
    assert await world.store.tenant_name(first) == "é' or 1=1 --"
    assert await world.store.tenant_name(made[0]) == "acme"
    assert await world.store.tenant_ids(["acme", "unknown"]) == {"acme": made[0]}
    assert await world.store.tenant_name(world.id("tenant")) is None


async def test_a_key_is_kept_as_it_was_made(world: StoreWorld) -> None:
    tenant = await world.store.put_tenant(world.id("tenant"), "acme")
    assert not await world.store.any_key()
    await put(world, "k1", tenant, team="red", user="ann", scopes="read", models="m1 m2", expires_at=START_MS + 9)
    assert await world.store.any_key()
    key = await world.store.get_key("k1")
    assert key is not None
    assert (key["tenant_id"], bytes(key["secret_hash"])) == (tenant, b"\x00\xff hash")
    assert (key["team"], key["user_name"], key["scopes"], key["models"]) == ("red", "ann", "read", "m1 m2")
    assert (key["expires_at"], key["revoked_at"], key["now"]) == (START_MS + 9, None, START_MS)
    assert await world.store.get_key("k2") is None
    [listed] = await world.store.list_keys(10)
    assert (listed["id"], listed["tenant"], listed["label"], listed["last_used_at"]) == ("k1", "acme", "a key", None)
    assert "secret_hash" not in listed


async def test_making_a_key_may_be_replayed(world: StoreWorld) -> None:
    tenant = await world.store.put_tenant(world.id("tenant"), "acme")
    for label in ("first", "second"):
        await put(world, "k1", tenant, label=label)
    [listed] = await world.store.list_keys(10)
    assert listed["label"] == "first"


async def test_a_revoked_key_stays_revoked(world: StoreWorld) -> None:
    tenant = await world.store.put_tenant(world.id("tenant"), "acme")
    await put(world, "k1", tenant)
    assert await world.store.revoke_key("k1")
    await world.clock.advance(5)
    assert not await world.store.revoke_key("k1")
    assert not await world.store.revoke_key("k2")
    key = await world.store.get_key("k1")
    assert key is not None
    assert key["revoked_at"] == START_MS
    assert await world.store.any_key(), "a revoked key still means that every call needs one"


async def test_how_the_keys_of_open_calls_stand(world: StoreWorld) -> None:
    tenant = await world.store.put_tenant(world.id("tenant"), "acme")
    names = [f"key{number:05}" for number in range(300)]
    for name in names[:4]:
        await put(world, name, tenant, expires_at=START_MS + 9 if name == names[1] else None)
    await world.store.revoke_key(names[2])
    await world.store.delete_key(names[3])
    assert await world.store.key_facts([]) == {}
    found = await world.store.key_facts(names)
    assert sorted(found) == names[:3]
    assert [found[name]["revoked_at"] for name in names[:3]] == [None, None, START_MS]
    assert [found[name]["expires_at"] for name in names[:2]] == [None, START_MS + 9]
    assert (bytes(found[names[0]]["secret_hash"]), found[names[0]]["now"]) == (b"\x00\xff hash", START_MS)
    with pytest.raises(ValueError, match="fixed length"):
        await world.store.key_facts(["short"])


async def test_a_deleted_key_is_nowhere_but_its_id_never_comes_back(world: StoreWorld) -> None:
    tenant = await world.store.put_tenant(world.id("tenant"), "acme")
    other = await world.store.put_tenant(world.id("tenant"), "other")
    for name, whose in (("k1", tenant), ("k2", tenant), ("k3", tenant), ("k4", other)):
        await put(world, name, whose)
    assert await world.store.delete_key("k1")
    assert not await world.store.delete_key("k1")
    assert not await world.store.delete_key("unknown")
    assert "k1" not in [row["id"] for row in await world.store.key_page(None, after=None, count_max=9) or ()]
    assert await world.store.get_key("k1") is None
    assert not await world.store.revoke_key("k1")
    assert not await world.store.change_key("k1", KeyRights(models="[]"))
    assert not await world.store.rotate_key("k1", b"new", 0)
    await put(world, "k1", tenant)
    assert await world.store.get_key("k1") is None, "making it again does not bring it back"
    assert await world.store.delete_keys_of("unknown") == []
    assert await world.store.delete_keys_of("acme") == ["k2", "k3"]
    assert [key["id"] for key in await world.store.list_keys(10)] == ["k4"]
    assert await world.store.delete_keys_of("other") == ["k4"]
    assert await world.store.list_keys(10) == []
    assert await world.store.any_key(), "where there was a key every call needs one, also when the last was deleted"


async def test_what_a_deleted_keys_last_call_used_is_its_teams(world: StoreWorld) -> None:
    tenant = await world.store.put_tenant(world.id("tenant"), "acme")
    await put(world, "k1", tenant, team="red")
    worker = await world.worker()
    job = await world.running(Caller(tenant, "k1"), 1)
    [piece] = await world.lease(worker, job)
    assert await world.store.delete_key("k1")
    [state] = await world.store.key_states(worker)
    assert state.deleted
    await world.answer(await world.log(worker_id=worker), job, 0, token=piece.token)
    today = START_MS // 86_400_000
    [entry] = await world.store.usage(today, today + 1, by_job=True)
    assert (entry.team, entry.key, entry.spend.calls) == ("red", "k1", 1)


async def test_what_rests_is_looked_at_again_when_its_key_stands_otherwise(world: StoreWorld) -> None:
    """It may rest for long, because a budget is spent; and a process that says so just after the change does not know it yet."""
    tenant = await world.store.put_tenant(world.id("tenant"), "acme")
    await put(world, "k1", tenant)
    await put(world, "k2", tenant)
    worker, hour_ms = await world.worker(10**9), 3_600_000

    async def resting(key_id: str, for_ms: int = hour_ms) -> Job:
        job = await world.running(Caller(tenant, key_id), 1)
        [piece] = await world.lease(worker, job)
        await world.store.rest_job(job.id, MODEL, for_ms)
        assert await world.store.release_slice(job.id, 0, piece.token, for_ms)
        assert await world.lease(worker, job) == []
        return job

    job, other = await resting("k1"), await resting("k2", 9 * hour_ms)
    assert await world.store.change_key("k1", KeyRights(limits=(Limit(Period.DAY, requests=9),)))
    [piece] = await world.lease(worker, job)
    assert await world.lease(worker, other) == []
    await world.store.rest_job(job.id, MODEL, hour_ms)
    assert await world.store.release_slice(job.id, 0, piece.token, hour_ms)
    await world.clock.advance(1_001)
    [piece] = await world.lease(worker, job)
    await world.clock.advance(3_000)
    assert await world.store.release_slice(job.id, 0, piece.token, hour_ms), "by now every process knows the change"
    await world.clock.advance(hour_ms - 1)
    assert await world.lease(worker, job) == []
    assert await world.store.revoke_key("k1")
    assert len(await world.lease(worker, job)) == 1
    assert await world.store.delete_keys_of("acme") == ["k1", "k2"]
    assert len(await world.lease(worker, other)) == 1


async def test_a_changed_key_wakes_the_flow_of_its_own_jobs_alone(world: StoreWorld) -> None:
    jobs = []
    for key_id, name in (("k1", "acme"), ("k2", "other")):
        tenant = await world.store.put_tenant(world.id("tenant"), name)
        await put(world, key_id, tenant)
        jobs.append(await world.running(Caller(tenant, key_id), 1))
        await world.store.rest_job(jobs[-1].id, MODEL, 3_600_000)
        assert await world.store.rest_flow(MODEL, jobs[-1].share_owner)
    assert await world.store.wake_rested(10) == 0
    assert await world.store.change_key("k1", KeyRights(parallel_max=2))
    assert await world.store.wake_rested(10) == 1
    assert [flow.share_owner for flow in await world.store.awake_flows(None, 10)] == [jobs[0].share_owner]


async def test_a_rest_of_a_job_ends_when_its_key_changes_and_no_process_that_missed_that_makes_a_long_one(
    world: StoreWorld,
) -> None:
    tenant, hour_ms = await world.store.put_tenant(world.id("tenant"), "acme"), 3_600_000
    await put(world, "k1", tenant)
    job = await world.running(Caller(tenant, "k1"), 1)

    async def is_offered() -> bool:
        look = await world.store.snapshot("", {MODEL: ModelRoom(9)}, slice_items=4, slices_max=9)
        return [view.job_id for view in look.jobs] == [job.id]

    await world.store.rest_job(job.id, MODEL, hour_ms)
    assert not await is_offered()
    assert await world.store.change_key("k1", KeyRights(limits=(Limit(Period.DAY, requests=9),)))
    assert await is_offered()
    await world.store.rest_job(job.id, MODEL, hour_ms)
    assert not await is_offered()
    await world.clock.advance(1_000)
    assert await is_offered(), "that process may not have known the new rights"
    await world.clock.advance(3_000)
    await world.store.rest_job(job.id, MODEL, hour_ms)
    await world.clock.advance(hour_ms - 1)
    assert not await is_offered()
    assert await world.store.revoke_key("k1")
    await world.store.rest_job(job.id, MODEL, hour_ms)
    await world.clock.advance(1_000)
    assert await is_offered(), "nor that it was revoked"


async def test_a_changed_key_begins_no_job_before_its_moment(world: StoreWorld) -> None:
    tenant = await world.store.put_tenant(world.id("tenant"), "acme")
    await put(world, "k1", tenant)
    job = await world.running(Caller(tenant, "k1"), 1, controls=JobControls(not_before=START_MS + 1_000))

    async def offered() -> list[str]:
        look = await world.store.snapshot("", {MODEL: ModelRoom(9)}, slice_items=4, slices_max=9)
        return [view.job_id for view in look.jobs]

    assert await world.store.change_key("k1", KeyRights(limits=(Limit(Period.DAY, requests=9),)))
    assert await offered() == []
    await world.clock.advance(1_000)
    assert await offered() == [job.id]


async def test_use_is_marked_at_most_once_a_minute(world: StoreWorld) -> None:
    tenant = await world.store.put_tenant(world.id("tenant"), "acme")
    await put(world, "k1", tenant)
    await put(world, "k2", tenant)

    async def used_at(key_id: str = "k1") -> object:
        return {row["id"]: row["last_used_at"] for row in await world.store.list_keys(2)}[key_id]

    await world.store.mark_key_used("k1")
    assert await used_at() == START_MS
    await world.clock.advance(60_000)
    await world.store.mark_key_used("k1")
    assert await used_at() == START_MS
    await world.clock.advance(1)
    await world.store.mark_key_used("k1")
    assert await used_at() == START_MS + 60_001
    await world.store.mark_key_used("unknown")
    assert await used_at("k2") is None


async def test_keys_are_listed_oldest_first_and_bounded(world: StoreWorld) -> None:
    tenant = await world.store.put_tenant(world.id("tenant"), "acme")
    for name in ("c", "a", "b"):
        await put(world, name, tenant)
        await world.clock.advance(1)
    assert [key["id"] for key in await world.store.list_keys(10)] == ["c", "a", "b"]
    assert [key["id"] for key in await world.store.list_keys(2)] == ["c", "a"]


async def test_a_worker_reads_the_states_of_the_keys_of_its_slices(world: StoreWorld) -> None:
    """In one answer for all of them; what others hold, and jobs without a key, are not in it."""
    tenant = await world.store.put_tenant(world.id("tenant"), "acme")
    limits = (Limit(Period.MINUTE, requests=3),)
    await put(world, "k1", tenant, models='["m"]', resources='["r"]', limits=limits, expires_at=START_MS + 9)
    await put(world, "k2", tenant)
    mine, other = await world.worker(), await world.worker()
    for key_id in ("k1", "k1", "k2", "gone", None):
        await world.lease(mine, await world.running(Caller(tenant, key_id)))
    await put(world, "k3", tenant)
    await world.lease(other, await world.running(Caller(tenant, "k3")))
    await world.store.revoke_key("k2")
    await world.clock.advance(4)
    found = {row.key_id: row for row in await world.store.key_states(mine)}
    assert sorted(found) == ["gone", "k1", "k2"]
    assert (found["k1"].models, found["k1"].resources, found["k1"].limits) == ('["m"]', '["r"]', limits)
    assert (found["k1"].expires_in_ms, found["k1"].revoked, found["k1"].deleted) == (5, False, False)
    assert (found["k2"].revoked, found["k2"].expires_in_ms) == (True, None)
    assert found["gone"].deleted
    assert await world.store.key_states(world.id("worker")) == []


async def test_only_what_is_given_of_a_key_changes(world: StoreWorld) -> None:
    tenant = await world.store.put_tenant(world.id("tenant"), "acme")
    limits = (Limit(Period.DAY, tokens=3),)
    await put(world, "k1", tenant, scopes="read", models='["m"]', limits=limits)
    assert await world.store.change_key("k1", KeyRights(models="[]"))
    assert await world.store.change_key("k1", KeyRights(resources='["r"]', scopes="write"))
    key = await world.store.get_key("k1")
    assert key is not None
    assert (key["models"], key["resources"], key["scopes"], key["expires_at"]) == ("[]", '["r"]', "write", None)
    assert key["addresses"] == ""
    for addresses in ('["10.0.0.0/8"]', ""):
        assert await world.store.change_key("k1", KeyRights(addresses=addresses))
        assert await world.store.change_key("k1", KeyRights(scopes="write"))
        [listed] = await world.store.list_keys(10)
        assert listed["addresses"] == addresses
    assert await world.store.change_key("k1", KeyRights(environments='["prod"]'))
    assert await world.store.change_key("k1", KeyRights(scopes="write"))
    assert [one["environments"] for one in await world.store.list_keys(10)] == ['["prod"]']
    assert '"day"' in key["limits"]
    assert await world.store.change_key("k1", KeyRights(limits=(), expires_at=START_MS + 1))
    key = await world.store.get_key("k1")
    assert key is not None
    assert (key["limits"], key["expires_at"]) == ("[]", START_MS + 1)
    assert not await world.store.change_key("k2", KeyRights(models="[]"))
    await world.store.revoke_key("k1")
    assert not await world.store.change_key("k1", KeyRights(models='["n"]')), "a revoked key stays as it was"


async def test_a_rotated_key_keeps_its_old_secret_for_a_while(world: StoreWorld) -> None:
    tenant = await world.store.put_tenant(world.id("tenant"), "acme")
    await put(world, "k1", tenant)
    for _ in range(2):
        assert await world.store.rotate_key("k1", b"new", 60_000), "and a replay changes nothing"
        await world.clock.advance(10)
    key = await world.store.get_key("k1")
    assert key is not None
    assert (bytes(key["secret_hash"]), bytes(key["old_hash"])) == (b"new", b"\x00\xff hash")
    assert key["old_until"] == START_MS + 60_000
    assert not await world.store.rotate_key("k2", b"new", 0)
    await world.store.revoke_key("k1")
    assert not await world.store.rotate_key("k1", b"newer", 0)
    await put(world, "k3", tenant, expires_at=START_MS)
    assert not await world.store.rotate_key("k3", b"newer", 0), "a key that is over does not come back"


async def test_keys_are_hashed_with_one_pepper(world: StoreWorld) -> None:
    """While there are no keys any pepper will do; from the first key on it is the one that was noted last."""
    tenant_id = await world.store.put_tenant(world.id("tenant"), "acme")
    assert await world.store.pepper_fingerprint() is None
    assert await world.store.claim_pepper("a")
    assert await world.store.claim_pepper("b")
    assert await world.store.pepper_fingerprint() == "b"
    await put(world, "k1", tenant_id)
    assert await world.store.claim_pepper("b")
    assert not await world.store.claim_pepper("a")
    assert await world.store.revoke_key("k1")
    assert not await world.store.claim_pepper("a"), "a revoked key is still shown, and may have been meant to last"
    assert await world.store.delete_key("k1")
    assert await world.store.claim_pepper("a")


async def test_a_session_that_ended_before_its_time_is_remembered_until_it_would_be_over(world: StoreWorld) -> None:
    ends_at = await world.store.now_ms() + 1_000
    for _ in range(2):
        await world.store.end_session("n1", ends_at)
    await world.store.end_session("n2", ends_at + 1)
    assert [await world.store.is_session_ended(nonce) for nonce in ("n1", "n2", "n3")] == [True, True, False]
    await world.clock.advance(1_500)
    await world.store.prune_sessions(500)
    assert [await world.store.is_session_ended(nonce) for nonce in ("n1", "n2")] == [False, True]


async def test_a_page_goes_on_behind_a_key_that_was_deleted_meanwhile(world: StoreWorld) -> None:
    tenant = await world.store.put_tenant(world.id("tenant"), "acme")
    for name in ("a", "b", "c", "d"):
        await put(world, name, tenant)
        await world.clock.advance(1)
    first = await world.store.key_page(None, after=None, count_max=2)
    assert [key["id"] for key in first or ()] == ["d", "c"]
    assert await world.store.delete_key("c")
    rest = await world.store.key_page("acme", after="c", count_max=9)
    assert [key["id"] for key in rest or ()] == ["b", "a"]
    assert await world.store.key_page(None, after="z", count_max=2) is None
