"""Verbs about the deployments, resources and terms of models that an operator adds while everything runs, and about which are drained.

What such an entry says is a document that the settings understand; here it is text. Each change has a number, and an entry's last one is
its revision: who changes an entry names the one that they saw, so that no two operators undo each other unseen. Terms are all that an
operator decides about what may be sent where: the entries, and the limits that stand in the settings.
"""

import msgspec

from tidegate.core.errors import LostRace
from tidegate.core.nouns import FOREVER_MS
from tidegate.store.database.driver import Tx
from tidegate.store.database.table import Table, reads, writes

ENTRIES_MAX = 10_000
DEPLOYMENT = "deployment"
RESOURCE = "resource"
MODEL = "model"
# Whether a deployment is drained: of those in the settings, too.
DRAIN_STATE = "drain_state"


class RoutingEntry(msgspec.Struct, frozen=True):
    """One deployment, resource or model as it was last written."""

    kind: str
    name: str
    document: str
    revision: int
    changed_at: int


class RoutingFull(LostRace):
    """There are as many entries as there may be."""


class StoredRouting(Table):
    @reads
    async def routing_number(self, tx: Tx) -> int:
        """The number of the last change; 0 while there was none."""
        row = await tx.one("routing_number")
        return 0 if row is None else int(row[0])

    @reads
    async def routing(self, tx: Tx) -> tuple[int, list[RoutingEntry]]:
        """Every entry, and the number of the last change that they show."""
        row = await tx.one("routing_number")
        entries = [RoutingEntry(*found) for found in await tx.all("routing_all")]
        return (0 if row is None else int(row[0])), entries

    @writes
    async def put_routing(self, tx: Tx, kind: str, name: str, document: str, seen: int) -> int:
        """Write an entry whose revision is still the one that was seen, 0 for one that was not there. Gives the new one.

        What already says the same stays as it is, so a repeat does no harm. Raises LostRace where someone else was first.
        """
        number = await tx.one("routing_number_next")
        assert number is not None
        row = await tx.one("routing_one", kind=kind, name=name)
        if row is not None and row[0] == document:
            return int(row[1])
        if (0 if row is None else int(row[1])) != seen:
            raise LostRace(f"the {kind} {name!r} was changed meanwhile")
        if row is None:
            count = await tx.one("routing_count")
            if count is not None and int(count[0]) >= ENTRIES_MAX:
                raise RoutingFull(
                    f"there are {ENTRIES_MAX:,} deployments, resources and models already; remove some first"
                )
        await tx.all("routing_put", kind=kind, name=name, document=document, revision=number[0])
        return int(number[0])

    @writes
    async def drop_routing(self, tx: Tx, kind: str, name: str, seen: int) -> bool:
        """Remove an entry whose revision is still the one that was seen. False when there is none; LostRace when it is another."""
        await tx.one("routing_number_next")
        row = await tx.one("routing_one", kind=kind, name=name)
        if row is None:
            return False
        if int(row[1]) != seen:
            raise LostRace(f"the {kind} {name!r} was changed meanwhile")
        await tx.all("routing_drop", kind=kind, name=name)
        if kind == DEPLOYMENT:
            # Another deployment may get this name: it begins as any other.
            await tx.all("routing_drop", kind=DRAIN_STATE, name=name)
        return True

    @reads
    async def is_wanted(self, tx: Tx, model: str) -> bool:
        """Whether a batch that has not ended still has items for this model or resource."""
        return await tx.one("routing_wanted", model=model) is not None

    @reads
    async def terms(self, tx: Tx) -> str:
        """The digest of the terms under which work was last looked at; empty while there was none."""
        row = await tx.one("terms_get")
        return "" if row is None else str(row[0])

    @writes
    async def wake_under(self, tx: Tx, terms: str) -> None:
        """Let all that rests, perhaps for long because a limit was reached, be looked at again: the terms with this digest hold now."""
        await tx.all("terms_put", digest=terms)
        await tx.all("every_slice_wake", forever=FOREVER_MS)
        for statement in ("every_model_wake", "flows_refresh"):
            await tx.all(statement)
