"""What every store does with the audit: a change and its row are one transaction."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.contracts.store_world import World
from tidegate.core.errors import LostRace
from tidegate.core.nouns import KeepTimes
from tidegate.stages.tend import retention
from tidegate.store.audit import AuditFilter, AuditNote

pytestmark = pytest.mark.anyio

ANY = AuditFilter()


def note(world: World, action: str, kind: str, target: str, actor: str = "operator") -> AuditNote:
    return AuditNote(world.id("aud"), actor, action, kind, target)


async def test_the_oldest_changes_go_first_and_only_so_many_at_a_time(world: World) -> None:
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


async def test_a_change_is_noted_as_it_was_and_is(world: World) -> None:
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


async def test_what_changes_nothing_or_fails_is_not_noted(world: World) -> None:
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


async def test_what_was_read_is_noted_once(world: World) -> None:
    read = note(world, "batch.item_read", "batch", "batch_1")
    for _ in range(2):
        await world.store.note_read(read, {"custom_id": "a"})
    found = await world.store.list_audit(ANY, after=None, count_max=10)
    assert [(one.id, one.before, one.after) for one in found or ()] == [(read.id, None, {"custom_id": "a"})]


async def test_a_store_beside_an_audited_one_notes_nothing(world: World) -> None:
    world.store.audited(note(world, "deployment.add", "deployment", "gpu"))
    await world.store.put_routing("deployment", "gpu", "{}", 0)
    assert await world.store.list_audit(ANY, after=None, count_max=10) == []
