"""The right to publish a job, as this process holds it.

A step dies with its owner's heartbeat. While the owner lives, no other process may take it, so a step whose end the owner does not know
(the store did not answer, a race was lost) must be given back by the owner itself, or its job would wait for ever.
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
        """The token of a step that is ours now; None when it is someone else's."""
        token = self._entropy.token_bytes(16).hex()
        self._open[token] = job_id
        if await self._store.take_step(job_id, state, worker_id, token):
            return token
        self.end_step(token)
        return None

    def end_step(self, token: str) -> None:
        """The store knows how this step ended."""
        self._open.pop(token, None)

    async def give_back_leftovers(self) -> None:
        """Let go of the steps whose end is unknown; one that did end is not changed by this."""
        for token, job_id in list(self._open.items()):
            await self._store.drop_step(job_id, token, 0)
            self.end_step(token)
