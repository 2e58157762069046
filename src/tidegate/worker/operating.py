"""Carry out the operations that operators ask for."""

from tidegate.core.ports import Wakes
from tidegate.stages.operate import OperateStage
from tidegate.worker.registration import Registration
from tidegate.worker.supervisor import Supervisor


class Operating:
    """The service for operations.

    The notice for inputs starts them at once; polls find those of lost workers.
    """

    def __init__(
        self, stage: OperateStage, me: Registration, wakes: Wakes, supervisor: Supervisor, sweep_ms: int
    ) -> None:
        self._stage = stage
        self._me = me
        self._wakes = wakes
        self._supervisor = supervisor
        self._sweep_ms = sweep_ms

    async def run(self) -> None:
        listener = self._wakes.inputs.listen()
        while True:
            if not self._supervisor.is_working or not await self._stage.next_step(self._me.id):
                await listener.wait(self._sweep_ms / 1000)
