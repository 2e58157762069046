"""Verbs about the scheduling mode that an operator sets at run time, for all processes."""

import msgspec

from tidegate.core.schedule.policy import ModeOverride
from tidegate.store.database.driver import Row, Tx
from tidegate.store.database.table import Table, reads, writes

MODE = "mode_override"


class ModeOverrides(Table):
    @reads
    async def mode_override(self, tx: Tx) -> ModeOverride:
        """Return the mode that an operator set; none if this version cannot read it."""
        return _override_from(await tx.one("mode_override_get", name=MODE))

    @writes
    async def override_mode(self, tx: Tx, mode: str | None = None, shadow_mode: str | None = None) -> ModeOverride:
        """Set the mode, which each process follows with its next look.

        An empty name returns to the settings. None leaves a mode as it is.
        """
        before = _override_from(await tx.one("mode_override_lock", name=MODE))
        after = ModeOverride(
            before.mode if mode is None else mode, before.shadow_mode if shadow_mode is None else shadow_mode
        )
        await tx.all("mode_override_put", name=MODE, value=msgspec.json.encode(after).decode())
        return after


def _override_from(row: Row | None) -> ModeOverride:
    if row is None:
        return ModeOverride()
    try:
        return msgspec.json.decode(row[0], type=ModeOverride)
    except msgspec.MsgspecError:
        return ModeOverride()
