"""Verbs about the scheduling mode that an operator sets at run time, for every process."""

import msgspec

from tidegate.core.schedule.policy import ModeOverride
from tidegate.store.driver import Tx
from tidegate.store.table import Table, reads, writes

MODE = "mode_override"


class ModeOverrides(Table):
    @reads
    async def mode_override(self, tx: Tx) -> ModeOverride:
        """Return the mode that an operator set; nothing of what another version wrote can break this one."""
        row = await tx.one("mode_override_get", name=MODE)
        if row is None:
            return ModeOverride()
        try:
            return msgspec.json.decode(row[0], type=ModeOverride)
        except msgspec.MsgspecError:
            return ModeOverride()

    @writes
    async def override_mode(self, tx: Tx, wanted: ModeOverride) -> None:
        """Every process follows with its next look; an empty override gives back what the settings say."""
        await tx.all("mode_override_put", name=MODE, value=msgspec.json.encode(wanted).decode())
