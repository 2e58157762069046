"""The rules for calls of leased slices: the lease, the states of keys, and the operator's policies.

- A key's state is never used for longer than two seconds.
- One statement asks for the keys of all leased slices: every second, and when a slice comes whose
  key is not known yet. Without slices that have a key, no question is asked.
- While the store does not answer, no call begins under a key.
"""

import asyncio
import math
from collections.abc import Mapping

from tidegate.core import keys
from tidegate.core.body_rules.caller_fields import FieldRules, rules_for
from tidegate.core.budgets.budget import LimitBound, with_limits
from tidegate.core.nouns import LeasedSlice
from tidegate.core.policies import Policies
from tidegate.core.policy.policy_rules import UNKNOWN, Denied, KeyState, judge
from tidegate.core.ports import Clock
from tidegate.core.retry import RetryPolicy
from tidegate.guards.guard import Guard, Guards
from tidegate.store.store import Store
from tidegate.store.tenants.keys import KeyRow
from tidegate.worker.leased_work import LeasedSliceState, LeasedWork
from tidegate.worker.registration import Registration

BELIEVED_MS = 2_000
ASKED_EVERY_MS = 1_000


class KeyStates:
    def __init__(self, store: Store, clock: Clock, model_of: Mapping[str, str]) -> None:
        self._store = store
        self._clock = clock
        self._model_of = model_of
        self._states: dict[str, KeyState] = {}
        # Most keys forbid nothing. This is computed once for each answer, not for each item.
        self._open: frozenset[str] = frozenset()
        self._asked_ms = -math.inf

    async def ask(self, worker_id: str) -> None:
        """Ask for the states of all keys whose slices this worker holds now."""
        # An answer's age counts from before the question. An answer to an older question is
        # ignored.
        asked_ms = self._clock.monotonic_ms()
        rows = await self._store.key_states(worker_id)
        if asked_ms >= self._asked_ms:
            self._states = {row.key_id: _state(row, asked_ms) for row in rows}
            self._open = frozenset(key_id for key_id, state in self._states.items() if _forbids_nothing(state))
            self._asked_ms = asked_ms

    def knows(self, key_id: str | None) -> bool:
        """Return whether the state of this key is known; True if there is no key."""
        return key_id is None or (key_id in self._states and self._clock.monotonic_ms() < self._asked_ms + BELIEVED_MS)

    def believed_until_ms(self, leased: LeasedSlice) -> float:
        """Return the monotonic moment after which a call of this slice must be judged again."""
        return math.inf if leased.key_id is None else self._asked_ms + BELIEVED_MS

    def of(self, leased: LeasedSlice) -> KeyState | None:
        """Return the state of a slice's key; None if it has no key or the state is not known."""
        return self._states.get(leased.key_id) if leased.key_id else None

    def denial(self, leased: LeasedSlice) -> Denied | None:
        """Return why an item of this slice may not be sent now; None if it may."""
        if leased.key_id is None:
            return None
        now_ms = self._clock.monotonic_ms()
        state = self._states.get(leased.key_id)
        if state is None or now_ms >= self._asked_ms + BELIEVED_MS:
            return UNKNOWN
        if leased.key_id in self._open:
            return None
        return judge(state, self._model_of.get(leased.model, leased.model), leased.model, int(now_ms))


class KeyWatch:
    """The service that asks for the states of keys while slices with a key are held."""

    def __init__(self, keys: KeyStates, leased_work: LeasedWork, me: Registration) -> None:
        self._keys = keys
        self._leased_work = leased_work
        self._me = me

    async def run(self) -> None:
        """Ask every second, without end."""
        while True:
            if self._leased_work.has_keys():
                await self._keys.ask(self._me.id)
            await asyncio.sleep(ASKED_EVERY_MS / 1000)


class LeasedCallRules:
    def __init__(self, leased_work: LeasedWork, keys: KeyStates, policies: Policies, guards: Guards) -> None:
        self._leased_work = leased_work
        self._keys = keys
        self._policies = policies
        self._guards = guards

    def bind(self, state: LeasedSliceState) -> None:
        """Bind calls of this slice to its owner's present budgets and its key's present state."""
        leased = state.slice
        key = self._keys.of(leased) if leased.key_id else None
        tenants = self._policies.tenants
        if state.bound_number == tenants.number and state.key is key:
            return
        budgets = self._policies.budgets(leased) if tenants.bind_calls or leased.limits else ()
        if key is not None and key.limits:
            budgets = with_limits(budgets, LimitBound.KEY, key.key_id, key.limits)
        parallel_max = 0 if key is None else key.parallel_max
        parallel = self._policies.parallel(leased, parallel_max) if tenants.bind_calls or parallel_max else ()
        state.bind(key, budgets, parallel, tenants.number)

    def denial(self, leased: LeasedSlice) -> Denied | None:
        return self._keys.denial(leased)

    def unknown_wait_ms(self, model: str) -> int:
        return self._policies.unknown_wait_ms(model)

    def begin_by_ms(self, leased: LeasedSlice) -> float:
        lease_until_ms = self._leased_work.lease_until_ms
        return lease_until_ms if leased.key_id is None else min(lease_until_ms, self._keys.believed_until_ms(leased))

    def fields(self, leased: LeasedSlice) -> FieldRules:
        return rules_for(self._policies.fields_of, leased.model)

    def guard(self, leased: LeasedSlice) -> Guard | None:
        return self._guards.of(leased.tenant, leased.key_id, leased.model) if self._guards.rules else None

    def retry(self, leased: LeasedSlice) -> RetryPolicy:
        policy = self._policies.retry(leased.model)
        return policy if leased.retry is None else policy.of_job(leased.retry)


def _forbids_nothing(key: KeyState) -> bool:
    """Return whether this state of a key can deny no call."""
    return not (key.deleted or key.revoked or key.models or key.resources) and key.expires_at_ms is None


def _state(row: KeyRow, asked_ms: float) -> KeyState:
    """Return a key's state with its moments on this process's monotonic clock."""
    return KeyState(
        row.key_id,
        keys.models_from(row.models),
        keys.models_from(row.resources),
        None if row.expires_in_ms is None else int(asked_ms) + row.expires_in_ms,
        revoked=row.revoked,
        deleted=row.deleted,
        limits=row.limits,
        parallel_max=row.parallel_max,
    )
