"""Verbs about what an operator switches at run time, for every process."""

import msgspec

from tidegate.core.schedule.mode_override import ModeOverride
from tidegate.store.driver import Tx
from tidegate.store.table import Table, reads, writes

_SCHEDULER = "scheduler_switch"


class Switches(Table):
    @reads
    async def mode_override(self, tx: Tx) -> ModeOverride:
        """How the scheduler was switched; nothing of what another version wrote can break this one."""
        row = await tx.one("switch_get", name=_SCHEDULER)
        if row is None:
            return ModeOverride()
        try:
            return msgspec.json.decode(row[0], type=ModeOverride)
        except msgspec.MsgspecError:
            return ModeOverride()

    @writes
    async def override_mode(self, tx: Tx, switch: ModeOverride) -> None:
        """Every process follows with its next look; an empty switch gives back what the settings say."""
        await tx.all("switch_put", name=_SCHEDULER, value=msgspec.json.encode(switch).decode())
