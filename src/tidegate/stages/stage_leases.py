"""The stage leases of this process: its rights to publish jobs.

A stage lease ends with its owner's heartbeat. While the owner lives, no other process may take the
step. If the owner does not know how a step ended (the store did not answer, or a race was lost),
the owner must give it back itself, or the job would wait for ever.
"""

from tidegate.core.ports import Entropy
from tidegate.core.states import JobState
from tidegate.store.store import Store


class StageLeases:
    def __init__(self, store: Store, entropy: Entropy) -> None:
        self._store = store
        self._entropy = entropy
        self._open: dict[str, str] = {}

    async def take_step(self, job_id: str, state: JobState, worker_id: str) -> str | None:
        """Take a step and return its token; None if another process has it."""
        token = self._entropy.token_bytes(16).hex()
        self._open[token] = job_id
        if await self._store.take_step(job_id, state, worker_id, token):
            return token
        self.end_step(token)
        return None

    def end_step(self, token: str) -> None:
        """Forget a step whose end the store knows."""
        self._open.pop(token, None)

    async def give_back_leftovers(self) -> None:
        """Give back the steps whose end is unknown. A step that did end is not changed by this."""
        for token, job_id in list(self._open.items()):
            await self._store.drop_step(job_id, token, 0)
            self.end_step(token)
