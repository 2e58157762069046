"""Verbs about routing entries: deployments, resources and models that an operator adds at run time.

The content of an entry is a document for the settings; here it is text. Each change has a number,
and the last number of an entry is its revision. A change names the revision that its operator saw,
so that no operator undoes another's change unseen.

Terms are all that an operator decides about what may be sent where: the entries, and the limits in
the settings. The entries also say which deployments are drained.
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
# The kind of entry that drains a deployment, also one from the settings.
DRAIN_STATE = "drain_state"


class RoutingEntry(msgspec.Struct, frozen=True):
    """The last version of one deployment, resource or model."""

    kind: str
    name: str
    document: str
    revision: int
    changed_at: int


class RoutingFull(LostRace):
    """Raised if there are as many entries as are allowed."""


class StoredRouting(Table):
    @reads
    async def routing_number(self, tx: Tx) -> int:
        """Return the number of the last change; 0 if there was none."""
        row = await tx.one("routing_number")
        return 0 if row is None else int(row[0])

    @reads
    async def routing(self, tx: Tx) -> tuple[int, list[RoutingEntry]]:
        """Return the number of the last change, and all entries."""
        row = await tx.one("routing_number")
        entries = [RoutingEntry(*found) for found in await tx.all("routing_all")]
        return (0 if row is None else int(row[0])), entries

    @writes
    async def put_routing(self, tx: Tx, kind: str, name: str, document: str, seen: int) -> int:
        """Write an entry if its revision is still the one that was seen. Return the new revision.

        `seen` is 0 for a new entry. An entry with the same document is not changed, so a repeat is
        harmless. Raise LostRace if another operator was first.
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
        """Remove an entry; False if there is none.

        Raise LostRace if its revision is not the one seen.
        """
        await tx.one("routing_number_next")
        row = await tx.one("routing_one", kind=kind, name=name)
        if row is None:
            return False
        if int(row[1]) != seen:
            raise LostRace(f"the {kind} {name!r} was changed meanwhile")
        await tx.all("routing_drop", kind=kind, name=name)
        if kind == DEPLOYMENT:
            # Another deployment may get this name, and must not begin as drained.
            await tx.all("routing_drop", kind=DRAIN_STATE, name=name)
        return True

    @reads
    async def is_wanted(self, tx: Tx, model: str) -> bool:
        """Return whether an open batch still has items for this model or resource."""
        return await tx.one("routing_wanted", model=model) is not None

    @reads
    async def terms(self, tx: Tx) -> str:
        """Return the digest of the terms under which work was last woken; empty if it never was."""
        row = await tx.one("terms_get")
        return "" if row is None else str(row[0])

    @writes
    async def wake_under(self, tx: Tx, terms: str) -> None:
        """Wake all resting work, which may rest for long because of a limit: new terms apply now.

        `terms` is the digest of the new terms.
        """
        await tx.all("terms_put", digest=terms)
        await tx.all("every_slice_wake", forever=FOREVER_MS)
        for statement in ("every_model_wake", "flows_refresh"):
            await tx.all(statement)
