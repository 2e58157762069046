"""Verbs about what an operator switches at run time, for every process."""

import msgspec

from tidegate.core.schedule.mode_override import ModeOverride
from tidegate.store.driver import Tx
from tidegate.store.table import Table

_SCHEDULER = "scheduler_switch"


class Switches(Table):
    async def mode_override(self) -> ModeOverride:
        """How the scheduler was switched; nothing of what another version wrote can break this one."""

        async def body(tx: Tx) -> ModeOverride:
            row = await tx.one("switch_get", name=_SCHEDULER)
            if row is None:
                return ModeOverride()
            try:
                return msgspec.json.decode(row[0], type=ModeOverride)
            except msgspec.MsgspecError:
                return ModeOverride()

        return await self._driver.read(body)

    async def override_mode(self, switch: ModeOverride) -> None:
        """Every process follows with its next look; an empty switch gives back what the settings say."""

        async def body(tx: Tx) -> None:
            await tx.all("switch_put", name=_SCHEDULER, value=msgspec.json.encode(switch).decode())

        await self._driver.write(body)
