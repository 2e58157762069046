"""What every store does with the audit: a change and its row are one transaction."""

from __future__ import annotations

import asyncio
import hashlib
import json
from typing import Any
from urllib.parse import urlsplit

import apsw
import asyncpg
import pytest
from msgspec.structs import replace

from tests.contracts.store_world import DAY_MS, StoreWorld
from tests.contracts.test_store_webhooks import BROKEN, cancelled, endpoint, lease
from tests.support.postgres import PostgresServer
from tests.support.store_verbs import postgres_driver
from tidegate.core.audit_chain import AuditEntry, ChainCheck
from tidegate.core.errors import LostRace
from tidegate.core.files import NewFile, Stamp
from tidegate.core.nouns import Caller, JobRequest, KeepTimes
from tidegate.core.operations import OperationScope
from tidegate.stages.tend import retention
from tidegate.store.fleet.mode_overrides import MODE
from tidegate.store.operators.audit import AuditFilter, AuditNote
from tidegate.store.store import Store
from tidegate.store.tenants.keys import KeyRights

pytestmark = pytest.mark.anyio

ANY = AuditFilter()


def note(world: StoreWorld, action: str, kind: str, target: str, actor: str = "operator") -> AuditNote:
    return AuditNote(world.id("aud"), actor, action, kind, target)


async def test_the_oldest_changes_go_first_and_only_so_many_at_a_time(world: StoreWorld) -> None:
    notes = []
    for number in range(4):
        notes.append(note(world, "deployment.add", "deployment", f"gpu{number}"))
        await world.store.audited(notes[-1]).put_routing("deployment", f"gpu{number}", "{}", 0)
        await world.clock.advance(1_000)

    async def left() -> list[str]:
        found = await world.store.list_audit(ANY, after=None, count_max=10)
        return [one.id for one in found or ()][::-1]

    ids = [one.id for one in notes]
    await world.store.prune_audit(3_500, 10)
    assert await left() == ids[1:]
    await world.store.prune_audit(500, 1)
    assert await left() == ids[2:]
    await retention.tend(world.store, KeepTimes(audit_ms=1_500))
    assert await left() == ids[3:]


async def test_a_change_is_noted_as_it_was_and_is(world: StoreWorld) -> None:
    store = world.store
    added = note(world, "deployment.add", "deployment", "gpu")
    revision = await store.audited(added).put_routing("deployment", "gpu", '{"model":"m"}', 0)
    await world.clock.advance(5)
    changed = replace(note(world, "deployment.change", "deployment", "gpu", "key:abcdefgh"), address="192.0.2.7")
    await store.audited(changed).put_routing("deployment", "gpu", '{"model":"n"}', revision)
    found = await store.list_audit(ANY, after=None, count_max=10)
    assert found is not None
    assert [(one.id, one.actor, one.action, one.target, one.address) for one in found] == [
        (changed.id, "key:abcdefgh", "deployment.change", "gpu", "192.0.2.7"),
        (added.id, "operator", "deployment.add", "gpu", None),
    ]
    assert [(one.before, one.after) for one in found] == [
        ({"document": '{"model":"m"}'}, {"document": '{"model":"n"}'}),
        (None, {"document": '{"model":"m"}'}),
    ]
    assert found[0].happened_at == found[1].happened_at + 5
    assert await store.list_audit(ANY, after=changed.id, count_max=10) == found[1:]
    assert await store.list_audit(ANY, after=world.id("aud"), count_max=10) is None
    assert await store.list_audit(AuditFilter(actor="operator"), after=None, count_max=10) == found[1:]
    assert await store.list_audit(AuditFilter(action="key.create"), after=None, count_max=10) == []
    assert await store.list_audit(AuditFilter(target="gpu"), after=None, count_max=1) == found[:1]


async def test_changes_of_one_moment_are_listed_by_id_page_by_page(world: StoreWorld) -> None:
    notes = [note(world, "deployment.add", "deployment", f"gpu{number}") for number in range(4)]
    for one in notes:
        await world.store.audited(one).put_routing("deployment", one.target, "{}", 0)
    found = list[str]()
    while page := await world.store.list_audit(ANY, after=found[-1] if found else None, count_max=1):
        found += [one.id for one in page]
    assert found == sorted((one.id for one in notes), reverse=True)


@pytest.mark.parametrize("kind", ["deployment", "drain_state", "resource", "model"])
async def test_a_look_tells_names_and_kinds_of_routing_apart(world: StoreWorld, kind: str) -> None:
    for other in ("deployment", "drain_state", "resource", "model"):
        await world.store.put_routing(other, "other", '{"other":1}', 0)
        if other != kind:
            await world.store.put_routing(other, "gpu", '{"kind":1}', 0)
    await world.store.audited(note(world, f"{kind}.add", kind, "gpu")).put_routing(kind, "gpu", '{"own":1}', 0)
    found = await world.store.list_audit(ANY, after=None, count_max=10)
    assert [(one.before, one.after) for one in found or ()] == [(None, {"document": '{"own":1}'})]


async def test_what_is_new_is_noted_as_new_beside_others_of_its_kind(world: StoreWorld) -> None:
    store, caller = world.store, await world.caller()
    await world.job(caller)
    await store.put_operation(world.id("op"), "operator", OperationScope("pause"))
    file_id, blob, job_id, operation_id = world.id("file"), await world.log("upload"), world.id("batch"), world.id("op")
    file = NewFile(file_id, blob.blob_id, Stamp(77, "ab" * 32), "batch", "new.jsonl", 3, None)
    await store.audited(note(world, "file.create", "file", file_id)).create_file(caller, file)
    request = JobRequest("/v1/chat/completions", file_id, DAY_MS, "24h")
    await store.audited(note(world, "batch.create", "input", file_id)).create_job(caller, job_id, request)
    noting = store.audited(note(world, "operation.create", "operation", operation_id))
    await noting.put_operation(operation_id, "operator", OperationScope("resume"))
    found = {one.action: one for one in await store.list_audit(ANY, after=None, count_max=10) or ()}
    assert [one.before for one in found.values()] == [None] * 3
    assert found["file.create"].after == {"filename": "new.jsonl", "purpose": "batch", "size_bytes": 77}
    assert found["batch.create"].after == {"batch": job_id, "endpoint": "/v1/chat/completions"}
    assert found["operation.create"].after["action"] == "resume"


async def test_a_key_that_is_deleted_has_no_old_secret_left(world: StoreWorld) -> None:
    owner = Caller((await world.caller("acme")).tenant_id, "k1")
    await world.store.put_key(owner, b"hash", "", KeyRights())
    assert await world.store.rotate_key("k1", b"new", 60_000)
    assert await world.store.audited(note(world, "key.delete", "key", "k1")).delete_key("k1")
    found = await world.store.list_audit(ANY, after=None, count_max=10)
    until = world.clock.now + 60_000
    assert [(one.before["old_until"], one.after["old_until"]) for one in found or ()] == [(until, None)]


async def test_what_changes_nothing_or_fails_is_not_noted(world: StoreWorld) -> None:
    store = world.store
    again = note(world, "deployment.add", "deployment", "gpu")
    for _ in range(2):
        await store.audited(again).put_routing("deployment", "gpu", '{"model":"m"}', 0)
    with pytest.raises(LostRace):
        await store.audited(note(world, "deployment.change", "deployment", "gpu")).put_routing(
            "deployment", "gpu", '{"model":"n"}', 99
        )
    assert not await store.audited(note(world, "key.revoke", "key", "k1")).revoke_key("k1")
    found = await store.list_audit(ANY, after=None, count_max=10)
    assert found is not None
    assert [one.id for one in found] == [again.id]


async def test_a_job_that_is_queued_again_is_noted_with_how_many_slices_rested(world: StoreWorld) -> None:
    job, worker = await world.running(await world.caller(), 1, 1, 1), await world.worker()
    for held in await world.lease(worker, job, 2):
        await world.store.release_slice(job.id, held.first, held.token, 60_000)
    assert await world.store.audited(note(world, "batch.requeue", "batch", job.id)).requeue_job(job.id)
    found = await world.store.list_audit(ANY, after=None, count_max=10)
    assert [(one.before["slices_resting"], one.after["slices_resting"]) for one in found or ()] == [(2, 0)]


async def test_a_delivery_that_is_sent_again_is_noted_alone(world: StoreWorld) -> None:
    """Beside others of its event and others of its endpoint."""
    caller = await world.caller()
    for name in ("one", "two"):
        await endpoint(world, caller, name=name)
    for _ in range(2):
        await cancelled(world, caller)
    held = await lease(world, await world.worker())
    assert len(held) == 4
    for failed in held[1:3]:
        await world.store.record_webhook(failed, BROKEN, None)
        noting = note(world, "delivery.replay", "delivery", f"{failed.event_id}.{failed.endpoint_id}")
        assert await world.store.audited(noting).replay_webhook(caller.tenant_id, failed.event_id, failed.endpoint_id)
    found = await world.store.list_audit(AuditFilter(action="delivery.replay"), after=None, count_max=10)
    again = ({"state": "failed", "attempt_count": 1}, {"state": "pending", "attempt_count": 0})
    assert [(one.before, one.after) for one in found or ()] == [again] * 2


async def test_a_switched_mode_is_noted_as_it_was_and_is(world: StoreWorld) -> None:
    await world.store.override_mode("", "")
    for mode in ("fifo_v1", ""):
        await world.store.audited(note(world, "scheduler.mode", "scheduler", MODE)).override_mode(mode)
        await world.clock.advance(1)
    found = await world.store.list_audit(AuditFilter(action="scheduler.mode"), after=None, count_max=10)
    modes = [[json.loads(look["value"]).get("mode", "") for look in (one.before, one.after)] for one in found or ()]
    assert modes == [["fifo_v1", ""], ["", "fifo_v1"]]


async def test_keys_of_an_organization_that_are_deleted_are_noted_once(world: StoreWorld) -> None:
    owner = Caller((await world.caller("acme")).tenant_id, "k1")
    await world.store.put_key(owner, b"hash", "", KeyRights())
    for _ in range(2):
        await world.store.audited(note(world, "org.delete_keys", "org", "acme")).delete_keys_of("acme")
    found = await world.store.list_audit(ANY, after=None, count_max=10)
    assert [(one.action, one.target) for one in found or ()] == [("org.delete_keys", "acme")]


async def test_what_was_read_is_noted_once(world: StoreWorld) -> None:
    read = note(world, "batch.item_read", "batch", "batch_1")
    for _ in range(2):
        await world.store.note_read(read, {"custom_id": "a"})
    found = await world.store.list_audit(ANY, after=None, count_max=10)
    assert [(one.id, one.before, one.after) for one in found or ()] == [(read.id, None, {"custom_id": "a"})]


async def test_a_store_beside_an_audited_one_notes_nothing(world: StoreWorld) -> None:
    world.store.audited(note(world, "deployment.add", "deployment", "gpu"))
    await world.store.put_routing("deployment", "gpu", "{}", 0)
    assert await world.store.list_audit(ANY, after=None, count_max=10) == []


ODD = 'ä "quoted" \\ \n\t\x1f \x7f 水 😀'
DAMAGE = {
    "altered": ("update audit set actor = 'somebody' where number = 3", ["entry 3 was altered"]),
    "a look altered": ("update audit set before = after where number = 3", ["entry 3 was altered"]),
    "a moment altered": ("update audit set happened_at = happened_at + 1 where number = 3", ["entry 3 was altered"]),
    "removed": ("delete from audit where number = 3", ["entry 3 was removed"]),
    "several removed": ("delete from audit where number in (3, 4)", ["entries 3 to 4 were removed"]),
    "the first removed": ("delete from audit where number = 1", ["entry 1 was removed"]),
    "the last removed": ("delete from audit where number = 5", ["entry 5 was removed"]),
    "all removed": ("delete from audit", ["entries 1 to 5 were removed"]),
    "reordered": (
        "update audit set number = case number when 2 then -4 else -2 end where number in (2, 4); "
        "update audit set number = -number where number < 0",
        [
            "entry 1 was replaced: entry 2 follows another one",
            "entry 2 was altered",
            "entry 2 was replaced: entry 3 follows another one",
            "entry 3 was replaced: entry 4 follows another one",
            "entry 4 was altered",
            "entry 4 was replaced: entry 5 follows another one",
        ],
    ),
    "taken out of the chain": ("update audit set number = null where number = 3", ["entry 3 was removed"]),
    "the end of the chain moved back": (
        "delete from audit where number = 5; update audit_chain set number = 4",
        ["entry 4 is not the one that the chain ended with"],
    ),
    "the beginning of the chain moved on": (
        "delete from audit where number <= 2; update audit_chain set pruned_number = 2",
        ["entry 3 does not follow the last entry that retention removed"],
    ),
}


GUARDS = ("audit_unchanged", "audit_kept", "audit_chain_goes_on", "audit_chain_kept")


async def run_sql(world: StoreWorld, text: str, *, is_guarded: bool = False) -> None:
    """Do to the database what no verb does, as its owner, who first takes away what keeps the audit."""
    driver: Any = world.store._driver
    if world.store.dialect == "postgresql":
        pool = await driver._opened()
        async with pool.acquire() as connection, connection.transaction():
            if not is_guarded:
                await connection.execute("set local session_replication_role = replica")
            await connection.execute(text)
    else:
        if not is_guarded:
            [driver._writer.execute(f"drop trigger if exists {name}").fetchall() for name in GUARDS]
        driver._writer.execute(text).fetchall()


async def noted(world: StoreWorld, count: int, store: Store | None = None) -> list[AuditNote]:
    notes = [note(world, "deployment.add", "deployment", f"{world.token()} {ODD}", ODD) for _ in range(count)]
    for one in notes:
        await (store or world.store).audited(one).put_routing("deployment", one.target, '{"model":"m"}', 0)
        await world.clock.advance(1_000)
    return notes


async def checked(store: Store, expected: tuple[int, str] | None = None, count_max: int = 2) -> ChainCheck:
    check, is_more = ChainCheck(expected), True
    while is_more:
        ends, entries = await store.audit_entries(check.number, count_max)
        check.look(ends, entries)
        is_more = bool(entries)
    return check


def texts_of(check: ChainCheck) -> list[str]:
    return [one.text.replace(f" ({one.id})", "") for one in check.findings]


async def every_entry(world: StoreWorld) -> list[AuditEntry]:
    return (await world.store.audit_entries(0, 1_000))[1]


async def test_each_entry_carries_the_hash_of_the_one_before_it(world: StoreWorld) -> None:
    notes = await noted(world, 3)
    check = await checked(world.store)
    assert (check.findings, check.entry_count, check.number) == ([], 3, 3)
    entries = await every_entry(world)
    assert [one.id for one in entries] == [one.id for one in notes]
    before = ""
    for number, one in enumerate(entries, 1):
        parts = [before, number, one.id, one.happened_at, one.actor, one.action, one.kind, one.target]
        parts += [one.before, one.after, one.address]
        text = json.dumps(parts, ensure_ascii=False, separators=(",", ":"))
        assert (one.number, one.previous_hash) == (number, before)
        assert one.hash == hashlib.sha256(text.encode()).hexdigest()
        before = one.hash
    assert check.hash == before
    shown = await world.store.list_audit(ANY, after=None, count_max=10)
    assert [(one.number, one.hash) for one in shown or ()] == [(one.number, one.hash) for one in reversed(entries)]


@pytest.mark.parametrize("damage", DAMAGE)
async def test_a_check_names_the_entry_that_was_changed(world: StoreWorld, damage: str) -> None:
    await noted(world, 5)
    sql, findings = DAMAGE[damage]
    await run_sql(world, sql)
    for count_max in (1, 2, 100):
        assert texts_of(await checked(world.store, count_max=count_max)) == findings


REFUSED = {
    "altered": "update audit set actor = 'somebody' where number = 3",
    "taken out of the chain": "update audit set number = null where number = 3",
    "the end of the chain moved back": "update audit_chain set number = 4",
    "the beginning of the chain moved back": "update audit_chain set pruned_number = 0",
    "the beginning of the chain moved behind its end": "update audit_chain set pruned_number = 6",
    "the ends of the chain removed": "delete from audit_chain",
}


@pytest.mark.parametrize("damage", REFUSED)
async def test_a_store_refuses_to_alter_its_audit(world: StoreWorld, damage: str) -> None:
    await noted(world, 5)
    await world.store.prune_audit(4_500, 1)
    before = await world.store.audit_entries(0, 10)
    with pytest.raises((asyncpg.RaiseError, apsw.ConstraintError), match="audit"):
        await run_sql(world, REFUSED[damage], is_guarded=True)
    assert await world.store.audit_entries(0, 10) == before


async def test_a_delete_leaves_every_entry_that_retention_has_not_come_to(world: StoreWorld) -> None:
    """Programs of the first schema prune by age alone, and must not fail where they meet a chain."""
    await noted(world, 3)
    before = await world.store.audit_entries(0, 10)
    for sql in ("delete from audit", "delete from audit where number = 2", "delete from audit where happened_at > 0"):
        await run_sql(world, sql, is_guarded=True)
        assert await world.store.audit_entries(0, 10) == before
    await world.store.prune_audit(1_500, 10)
    assert [one.number for one in await every_entry(world)] == [3]
    assert texts_of(await checked(world.store)) == []


async def test_postgresql_does_not_empty_its_audit(postgres_world: StoreWorld) -> None:
    await noted(postgres_world, 2)
    for table in ("audit", "audit_chain"):
        with pytest.raises(asyncpg.RaiseError, match="audit is kept"):
            await run_sql(postgres_world, f"truncate {table}", is_guarded=True)
    assert texts_of(await checked(postgres_world.store)) == []


async def test_a_chain_whose_hashes_were_computed_again_does_not_fit_a_hash_noted_elsewhere(world: StoreWorld) -> None:
    await noted(world, 2)
    seen = await checked(world.store)
    expected = (seen.number, seen.hash)
    await noted(world, 2)
    assert texts_of(await checked(world.store, expected)) == []
    await run_sql(world, "delete from audit; delete from audit_chain")
    assert texts_of(await checked(world.store, expected)) == ["entries 1 to 2 were removed"]
    await noted(world, 4)
    assert texts_of(await checked(world.store)) == []
    assert texts_of(await checked(world.store, expected)) == ["entry 2 is not the one whose hash was noted"]


async def test_what_retention_removes_keeps_the_chain_whole(world: StoreWorld) -> None:
    await noted(world, 5)
    await world.store.prune_audit(2_500, 2)
    assert [one.number for one in await every_entry(world)] == [3, 4, 5]
    assert texts_of(await checked(world.store)) == []
    await noted(world, 1)
    await world.store.prune_audit(500, 100)
    check = await checked(world.store)
    assert (texts_of(check), check.entry_count, check.number) == ([], 0, 6)
    await noted(world, 1)
    check = await checked(world.store)
    assert (texts_of(check), check.first_number, check.number) == ([], 7, 7)


async def test_entries_pruned_and_added_during_a_check_are_no_findings(world: StoreWorld) -> None:
    await noted(world, 5)
    check = ChainCheck()
    check.look(*await world.store.audit_entries(check.number, 1))
    await noted(world, 1)
    await world.store.prune_audit(2_500, 100)
    for _ in range(2):
        check.look(*await world.store.audit_entries(check.number, 100))
    assert (texts_of(check), check.number) == ([], 6)


async def test_two_processes_that_note_at_once_make_one_chain(world: StoreWorld) -> None:
    other = await world.open_another()

    async def add(store: Store) -> None:
        # The clock stands still: the connection that moves it takes one question at a time.
        for _ in range(10):
            await store.note_read(note(world, "batch.item_read", "batch", world.token()), {})

    await asyncio.gather(*(add(store) for store in (world.store, other, world.store, other)))
    check = await checked(world.store)
    assert (texts_of(check), check.entry_count, check.number) == ([], 40, 40)


async def test_a_change_that_fails_or_is_made_again_leaves_no_gap(world: StoreWorld) -> None:
    (one,) = await noted(world, 1)
    read = note(world, "batch.item_read", "batch", "batch_1")
    for _ in range(2):
        await world.store.note_read(read, {"custom_id": ODD})
    with pytest.raises(LostRace):
        await world.store.audited(note(world, "deployment.change", "deployment", one.target)).put_routing(
            "deployment", one.target, "{}", 99
        )
    await noted(world, 1)
    check = await checked(world.store)
    assert (texts_of(check), check.entry_count, check.number) == ([], 3, 3)


async def test_entries_of_an_earlier_version_are_chained_oldest_first(world: StoreWorld) -> None:
    for number in range(5):
        await run_sql(
            world,
            "insert into audit (id, happened_at, actor, action, kind, target, after) "  # noqa: S608
            f"values ('aud_{number}', {1_000 - number}, 'operator', 'key.create', 'key', 'k{number}', '{{}}')",
        )
    assert await world.store.unchained_audit_count() == 5
    assert [await world.store.chain_audit(3) for _ in range(3)] == [3, 2, 0]
    assert await world.store.unchained_audit_count() == 0
    assert [one.id for one in await every_entry(world)] == ["aud_4", "aud_3", "aud_2", "aud_1", "aud_0"]
    await noted(world, 1)
    assert texts_of(await checked(world.store)) == []
    await run_sql(world, "update audit set target = 'k9' where id = 'aud_3'")
    assert texts_of(await checked(world.store)) == ["entry 2 was altered"]


async def test_a_sweep_chains_what_an_earlier_version_wrote_beside_it(world: StoreWorld) -> None:
    await noted(world, 1)
    await run_sql(
        world,
        "insert into audit (id, happened_at, actor, action, kind, target) "  # noqa: S608
        f"values ('aud_0', {world.clock.now}, 'operator', 'key.create', 'key', 'k')",
    )
    await retention.tend(world.store, KeepTimes())
    check = await checked(world.store)
    assert (texts_of(check), check.number, await world.store.unchained_audit_count()) == ([], 2, 0)


RIGHTS = "select, insert, update, delete"


async def test_a_role_that_owns_nothing_can_work_and_cannot_take_the_guards_away(
    postgres_server: PostgresServer,
) -> None:
    """As docs/operations.md says: the owner migrates, and the processes run with these rights alone."""
    url = postgres_server.create_database()
    owner = Store(postgres_driver(url))
    await owner.migrate()
    await owner.close()
    role = f"app_{urlsplit(url).path.strip('/')}"
    made: Any = await asyncpg.connect(url)
    await made.execute(f"create role {role} login; grant {RIGHTS} on all tables in schema public to {role}")
    as_role = url.replace("//postgres@", f"//{role}@")
    store = Store(postgres_driver(as_role))
    connection: Any = await asyncpg.connect(as_role)
    try:
        for number in range(3):
            await store.note_read(AuditNote(f"aud_{number}", "operator", "batch.item_read", "batch", "b"), {})
        for sql in (
            "set session_replication_role = replica",
            "alter table audit disable trigger all",
            "drop trigger audit_kept on audit",
            "drop function keep_audit() cascade",
            "truncate audit",
        ):
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await connection.execute(sql)
        with pytest.raises(asyncpg.RaiseError):
            await connection.execute("update audit set actor = 'somebody'")
        assert await connection.execute("delete from audit") == "DELETE 0"
        assert texts_of(await checked(store)) == []
        await store.prune_audit(-1_000, 2)
        assert [one.number for one in (await store.audit_entries(0, 10))[1]] == [3]
    finally:
        await connection.close()
        await store.close()
        await made.execute(f"drop owned by {role}; drop role {role}")
        await made.close()
        postgres_server.drop_database(url)


async def test_a_page_behind_an_entry_that_was_pruned_meanwhile_is_the_rest(world: StoreWorld) -> None:
    await noted(world, 4)
    newest_first = [one.id for one in await world.store.list_audit(ANY, after=None, count_max=10) or ()]
    await world.store.prune_audit(0, 2)
    # What was older went with it.
    assert await world.store.list_audit(ANY, after=newest_first[2], count_max=10) == []
    rest = await world.store.list_audit(ANY, after=newest_first[0], count_max=10)
    assert [one.id for one in rest or ()] == [newest_first[1]]
    assert await world.store.list_audit(ANY, after=world.id("aud"), count_max=10) is None
    assert texts_of(await checked(world.store)) == []
