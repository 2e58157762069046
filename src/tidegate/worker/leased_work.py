"""What a worker holds: leased slices, their unsent items, and the calls in flight.

It decides which item may be sent next and never sends anything itself. It asks three things before it gives an item out: is the
lease surely alive, is the job still open, and does the model have a free slot.
"""

import asyncio
import math
from collections import deque
from collections.abc import Iterable
from itertools import takewhile

import msgspec

from tidegate.core.budgets.budget import Budget
from tidegate.core.nouns import Holding, Item, LeasedSlice
from tidegate.core.policy.policy_rules import KeyState
from tidegate.core.ports import Clock, Upstream
from tidegate.stages.record import Recorder
from tidegate.worker.supervisor import Supervisor

# What waits no longer than this stays with the worker; the rest goes back to the store.
SHORT_WAIT_MS = 5_000

# Tokens come back when calls in flight took less than was set aside for them, and the store hears nothing of it: work that waits for
# them is looked at again after this long at the latest, though a budget names a later moment.
TOKENS_REST_MS_MAX = 30_000

# Where calls are quick, as many items are worth holding as go out in this time: a lease for every handful would cost more than the calls.
AHEAD_MS = 200


class LeasedSliceState(msgspec.Struct, eq=False):
    """One leased slice in this worker's hands; `reading` until its items are here. No item from `sent_to` on was ever sent from here.
    `answered_number` is the last of its items that a model server answered. `is_lost`: it is not ours any more. With `rests_ms` nothing of
    it is sent for so long. From `interactive_at_ms` on its items go like interactive calls; `is_interactive` once they do."""

    slice: LeasedSlice
    deadline_ms: float
    interactive_at_ms: float = math.inf
    is_interactive: bool = False
    budgets: tuple[Budget, ...] = ()
    parallel: tuple[tuple[str, int], ...] = ()
    models: frozenset[str] = frozenset()
    key: KeyState | None = None
    bound_number: int = -1
    left: int = 0
    sent_to: int = 0
    in_flight: int = 0
    answered_number: int = -1
    deferred: int = 0
    deferred_until_ms: float = 0.0
    rests_ms: float = 0.0
    retry_at_ms: float = math.inf
    reading: bool = False
    dropped: bool = False
    closed: bool = False
    is_lost: bool = False
    settled: bool = False
    aborted: bool = False
    calls: set["asyncio.Task[None]"] = msgspec.field(default_factory=set)

    def bind(
        self, key: KeyState | None, budgets: tuple[Budget, ...], parallel: tuple[tuple[str, int], ...], number: int
    ) -> None:
        """Bind calls of this slice to what its key allows, to these budgets, and to so many at once by the name that is counted. `number`
        is that of what tenants may have."""
        self.bound_number = number
        self.key = key
        self.models = frozenset() if key is None else key.models
        self.budgets = budgets
        self.parallel = parallel

    def move_deadline(self, deadline_ms: float) -> None:
        """Let no call of this slice begin after this moment: its job's deadline was changed."""
        self.deadline_ms = deadline_ms

    def may_begin(self) -> bool:
        """Whether what is taken and waits for a slot, a budget or a connection may still be sent."""
        return not self.closed

    def turn_interactive(self) -> None:
        """From now on its items go like interactive calls."""
        self.is_interactive = True

    def rest(self, rests_ms: float) -> None:
        """Send nothing of this slice for so long; to be called before its items are here."""
        self.rests_ms = rests_ms

    def release_tail(self, item_count: int) -> None:
        """So many items at its end went back to the store."""
        self.left -= item_count

    def end_item(self, number: int, *, was_answered: bool) -> None:
        """Note that an item has its outcome; `was_answered` when a model server gave it."""
        self.left -= 1
        if was_answered:
            self.answered_number = number

    def abort(self) -> None:
        """End the calls of this slice in the air: their connections are closed."""
        self.aborted = True
        for task in list(self.calls):
            task.cancel()


class _Stock:
    """The items of one model: those that wait for a slot, how many are out, and how many went out of late."""

    __slots__ = ("_since_ms", "in_flight", "queue", "sent", "sent_before")

    def __init__(self) -> None:
        self.queue: deque[tuple[LeasedSliceState, Item]] = deque()
        self.in_flight = 0
        self._since_ms = -math.inf
        self.sent = self.sent_before = 0

    def goes(self, now_ms: float) -> None:
        """One more item goes out."""
        self.in_flight += 1
        if now_ms - self._since_ms >= AHEAD_MS:
            self.sent_before = self.sent if now_ms - self._since_ms < 2 * AHEAD_MS else 0
            self.sent = 0
            self._since_ms = now_ms
        self.sent += 1

    def ahead(self, now_ms: float) -> int:
        """How many went out in so much time, of late."""
        return max(self.sent, self.sent_before) if now_ms - self._since_ms < 2 * AHEAD_MS else 0

    def is_unused(self, now_ms: float) -> bool:
        return not self.queue and not self.in_flight and now_ms - self._since_ms >= 2 * AHEAD_MS


class LeasedWork:
    def __init__(self, upstream: Upstream, clock: Clock, recorder: Recorder, supervisor: Supervisor) -> None:
        self._upstream = upstream
        self._clock = clock
        self._recorder = recorder
        self._supervisor = supervisor
        self._stocks: dict[str, _Stock] = {}
        self._states: dict[tuple[str, int, str], LeasedSliceState] = {}
        self._parked: deque[asyncio.Future[None]] = deque()
        # Slices whose items go like interactive calls from a later moment on.
        self._turning: list[LeasedSliceState] = []
        self._is_inviting = False
        self._is_shut = False
        self.admitted: tuple[LeasedSliceState, Item] | None = None
        self.lease_until_ms = 0.0
        self.in_flight = 0
        # The most that were ever in flight from here at once, and how many calls have ended.
        self.in_flight_most = 0
        self.ended_count = 0

    @property
    def is_lease_safe(self) -> bool:
        """Whether the store surely counts this incarnation as alive: what is leased now is ours."""
        return self._clock.monotonic_ms() < self.lease_until_ms

    @property
    def is_open(self) -> bool:
        """Whether anything new may be taken and sent: not when the worker ends, nor when record cannot take more results."""
        return self._supervisor.is_working and not self._recorder.full

    @property
    def is_idle(self) -> bool:
        """Whether nothing is in flight and nothing waits here for a slot."""
        return not self.in_flight and not any(stock.queue for stock in self._stocks.values())

    @property
    def is_reading(self) -> bool:
        """Whether a slice is on its way into this worker's hands."""
        return any(state.reading for state in self._states.values())

    @property
    def slice_count(self) -> int:
        return len(self._states)

    def unsent(self, model: str) -> int:
        """How many items of a model wait here for a slot."""
        stock = self._stocks.get(model)
        return len(stock.queue) if stock else 0

    def calls(self, model: str) -> int:
        """How many items of a model are in flight from here."""
        stock = self._stocks.get(model)
        return stock.in_flight if stock else 0

    def ahead(self, model: str) -> int:
        """How many items of a model will be gone within a moment, at the pace of the last one."""
        stock = self._stocks.get(model)
        return stock.ahead(self._clock.monotonic_ms()) if stock else 0

    def is_low(self, model: str) -> bool:
        """Whether what waits here of a model will be gone soon."""
        stock = self._stocks.get(model)
        if stock is None:
            return True
        unsent = 2 * len(stock.queue)
        return unsent <= self.in_flight or unsent <= stock.sent or unsent <= stock.sent_before

    def models(self) -> list[str]:
        """Models of which slices are held."""
        return list({state.slice.model for state in self._states.values()})

    def interactive_count(self) -> int:
        """How many slices are held whose items go like interactive calls, now or later."""
        return sum(state.interactive_at_ms < math.inf for state in self._states.values())

    def has_keys(self) -> bool:
        """Whether anything here was asked for under a key."""
        return any(state.slice.key_id is not None for state in self._states.values())

    def state(self) -> list[LeasedSliceState]:
        return list(self._states.values())

    def extend_lease(self, until_ms: float) -> None:
        """A heartbeat was answered: calls may start until this moment, on the monotonic clock."""
        self.lease_until_ms = until_ms
        self.wake()

    def lose_lease(self) -> None:
        """This incarnation was declared gone: nothing more is sent under its leases."""
        self.lease_until_ms = 0.0
        for state in self.state():
            self._lose(state)

    def expect(self, state: LeasedSliceState) -> None:
        """A slice was leased and is being read: heartbeats already count it, so that it can be lost or closed before it is here."""
        leased = state.slice
        self._recorder.expect()
        state.reading = True
        self._states[leased.job_id, leased.first, leased.token] = state

    def forget(self, state: LeasedSliceState) -> None:
        """A slice that could not be read is not held after all."""
        leased = state.slice
        self._states.pop((leased.job_id, leased.first, leased.token), None)

    def add(self, state: LeasedSliceState, items: Iterable[Item]) -> None:
        """Take a freshly leased slice with the items of it that have no outcome yet."""
        leased = state.slice
        state.reading = False
        self._states[leased.job_id, leased.first, leased.token] = state
        queue = self._stock(leased.model).queue
        for item in items:
            state.left += 1
            if item.wait_ms > SHORT_WAIT_MS or state.rests_ms > 0:
                self.defer(state, max(item.wait_ms, state.rests_ms))
            elif item.wait_ms > 0:
                self.put_back(state, item, item.wait_ms)
            else:
                queue.append((state, item))
        if state.interactive_at_ms < math.inf:
            self._turning.append(state)
        self.wake()

    def take_item(self) -> tuple[LeasedSliceState, Item] | None:
        """The next item that may be sent now."""
        now_ms = self._clock.monotonic_ms()
        if now_ms >= self.lease_until_ms or not self.is_open:
            return None
        if self._is_shut:
            return self._take_admitted(now_ms)
        for model, stock in self._stocks.items():
            queue = stock.queue
            while queue and (queue[0][0].is_interactive or self._may_send(model)):
                state, item = queue.popleft()
                if state.dropped:
                    continue
                if now_ms >= state.deadline_ms:
                    self._defer(state, state.deadline_ms)
                    continue
                self._goes(stock, state, item, now_ms)
                if len(self._stocks) > 1:
                    self._stocks[model] = self._stocks.pop(model)
                return state, item
        return None

    def _goes(self, stock: _Stock, state: LeasedSliceState, item: Item, now_ms: float) -> None:
        state.in_flight += 1
        state.sent_to = max(state.sent_to, item.number + 1)
        self.in_flight += 1
        if self.in_flight > self.in_flight_most:
            self.in_flight_most = self.in_flight
        stock.goes(now_ms)

    # ---- one item at a time

    def shut(self) -> None:
        """Send nothing but what is admitted, one item at a time, until `reopen`."""
        self._is_shut = True

    def reopen(self) -> None:
        self._is_shut = False
        self.admitted = None
        self.wake()

    def admit(self, entry: tuple[LeasedSliceState, Item] | None) -> None:
        """Let this one item go out while nothing else may; None takes that back."""
        self.admitted = entry
        if entry is not None:
            self.wake_one()

    def queued(self) -> list[tuple[LeasedSliceState, Item]]:
        """Every item that waits here to be sent, of slices that are not dropped."""
        return [entry for stock in self._stocks.values() for entry in stock.queue if not entry[0].dropped]

    def _take_admitted(self, now_ms: float) -> tuple[LeasedSliceState, Item] | None:
        entry = self.admitted
        if entry is None or self.in_flight or entry[0].dropped or now_ms >= entry[0].deadline_ms:
            return None
        state, item = entry
        stock = self._stock(state.slice.model)
        if entry not in stock.queue or not (state.is_interactive or self._may_send(state.slice.model)):
            return None
        stock.queue.remove(entry)
        self.admitted = None
        self._goes(stock, state, item, now_ms)
        return entry

    def _stock(self, model: str) -> _Stock:
        stock = self._stocks.get(model)
        if stock is None:
            stock = self._stocks[model] = _Stock()
        return stock

    def _may_send(self, model: str) -> bool:
        return not model or self._upstream.free_slots(model) > 0 or not self._upstream.knows(model)

    async def next(self) -> tuple[LeasedSliceState, Item]:
        """Wait for an item that may be sent."""
        taken = self.take_item()
        if taken is not None:
            if self._parked and not self._is_inviting:
                self._is_inviting = True
                asyncio.get_running_loop().call_soon(self._invite)
            return taken
        while True:
            future = asyncio.get_running_loop().create_future()
            self._parked.append(future)
            await future
            taken = self.take_item()
            if taken is not None:
                return taken

    def _invite(self) -> None:
        """Where several items share a call, a slot that came free is worth several: let as many look as there are items to take."""
        self._is_inviting = False
        for model, stock in self._stocks.items():
            if stock.queue and model and self._upstream.items_per_call(model) > 1:
                for _ in range(min(self._upstream.free_slots(model), len(stock.queue))):
                    self.wake_one()

    def wake(self) -> None:
        """Something changed: let as many look again as there are items that may go."""
        now_ms = self._clock.monotonic_ms()
        if self._turning:
            self._turn_interactive(now_ms)
        # Callers choose the names of models: what is not needed must not pile up.
        for model in [name for name, stock in self._stocks.items() if stock.is_unused(now_ms)]:
            del self._stocks[model]
        may_go = sum(self._may_go(model, stock) for model, stock in self._stocks.items()) if self._parked else 0
        while self._parked and may_go:
            future = self._parked.popleft()
            if not future.done():
                future.set_result(None)
                may_go -= 1

    def _may_go(self, model: str, stock: _Stock) -> int:
        """How many of these items may be sent now, as far as the upstream is concerned."""
        queue = stock.queue
        if not queue or not model or queue[0][0].is_interactive or not self._upstream.knows(model):
            return len(queue)
        return min(len(queue), self._upstream.free_slots(model))

    def _turn_interactive(self, now_ms: float) -> None:
        """Put items that have waited long enough in front: they need no slot of background work. Where no deployment takes interactive
        calls of their model, they stay what they are."""
        due = [state for state in self._turning if now_ms >= state.interactive_at_ms]
        self._turning = [state for state in self._turning if now_ms < state.interactive_at_ms and not state.settled]
        for state in due:
            if state.dropped or not self._upstream.takes_interactive(state.slice.model):
                continue
            state.turn_interactive()
            queue = self._stock(state.slice.model).queue
            mine = [entry for entry in queue if entry[0] is state]
            for entry in mine:
                queue.remove(entry)
            queue.extendleft(reversed(mine))

    def wake_one(self) -> None:
        """One slot became free."""
        while self._parked:
            future = self._parked.popleft()
            if not future.done():
                future.set_result(None)
                return

    def mark_done(self, state: LeasedSliceState) -> None:
        """Note that a call ended, however it ended. Its runner takes the next item itself, so no other runner is woken."""
        state.in_flight -= 1
        self.in_flight -= 1
        self.ended_count += 1
        self._stocks[state.slice.model].in_flight -= 1

    def put_back(self, state: LeasedSliceState, item: Item, wait_ms: float) -> None:
        """Try this item again here after a short wait; a slice that is given back before is not ready earlier than that."""
        state.deferred_until_ms = max(state.deferred_until_ms, self._clock.monotonic_ms() + wait_ms)
        asyncio.get_running_loop().call_later(wait_ms / 1000, self._return, state, item)

    def _return(self, state: LeasedSliceState, item: Item) -> None:
        if not state.dropped:
            queue = self._stock(state.slice.model).queue
            ahead = 0 if state.is_interactive else sum(1 for _ in takewhile(lambda one: one[0].is_interactive, queue))
            queue.insert(ahead, (state, item))
            self.wake_one()

    def defer(self, state: LeasedSliceState, wait_ms: float) -> None:
        """This item waits longer than a worker should hold it: it goes back with its slice."""
        self._defer(state, self._clock.monotonic_ms() + wait_ms)

    def defer_for_budget(self, state: LeasedSliceState, wait_ms: float) -> None:
        """Defer an item that waits for a budget. No server asked for that rest, so the first of a slice to be worth a try wakes it."""
        state.deferred += 1
        state.retry_at_ms = min(state.retry_at_ms, self._clock.monotonic_ms() + min(wait_ms, TOKENS_REST_MS_MAX))

    def _defer(self, state: LeasedSliceState, until_ms: float) -> None:
        state.deferred += 1
        state.deferred_until_ms = max(state.deferred_until_ms, until_ms)

    def drop(self, state: LeasedSliceState) -> None:
        """Take nothing more of this slice; its calls go on."""
        state.dropped = True

    def _close(self, state: LeasedSliceState) -> None:
        """Send nothing more of this slice, not even what waits for a slot or a budget; calls that were sent go on."""
        state.closed = True
        self.drop(state)

    def _lose(self, state: LeasedSliceState) -> None:
        """Another worker may run what is left of this slice; its calls go on here, and whichever answer comes first counts."""
        state.is_lost = True
        self._close(state)

    def cut(self, state: LeasedSliceState) -> int:
        """How many items behind the last one that was sent are still open: they can be given back while the calls go on."""
        leased = state.slice
        return sum(number not in leased.done for number in range(state.sent_to, leased.first + leased.count))

    def drop_model(self, model: str, until_ms: float) -> None:
        """A model rests for longer than a worker should wait: its unsent items go back until then."""
        for state in self.state():
            if state.slice.model == model and not state.dropped and not state.is_interactive:
                # The rest may be one of background work alone.
                rests_until_ms = min(until_ms, state.interactive_at_ms)
                state.deferred_until_ms = max(state.deferred_until_ms, rests_until_ms)
                self.drop(state)
        stock = self._stocks.get(model)
        if stock is not None:
            stock.queue = deque(entry for entry in stock.queue if entry[0].is_interactive)

    def drop_spent(self, budgets: tuple[Budget, ...], until_ms: float) -> set[tuple[str, str]]:
        """Give back unsent items under these budgets, which allow nothing for longer than a worker should wait. Return of which
        jobs and models."""
        dropped = set()
        for state in self.state():
            if state.budgets == budgets and not state.dropped:
                state.deferred_until_ms = max(state.deferred_until_ms, until_ms)
                self.drop(state)
                dropped.add((state.slice.job_id, state.slice.model))
        return dropped

    def forget_if_done(self, state: LeasedSliceState) -> bool:
        """Forget a slice that has nothing more to do here: all of it done, or the rest deferred or dropped. Return whether it was, once."""
        if state.settled or state.reading or state.in_flight or not (state.dropped or state.left == state.deferred):
            return False
        state.settled = state.dropped = True
        self.forget(state)
        return True

    def release_wait_ms(self, state: LeasedSliceState) -> int:
        """How long a slice that is given back should rest."""
        until_ms = state.deferred_until_ms
        if state.retry_at_ms < math.inf:
            until_ms = max(until_ms, state.retry_at_ms)
        return max(0, int(until_ms - self._clock.monotonic_ms()))

    def compare(self, known: set[tuple[str, int, str]], holdings: list[Holding]) -> list[Holding]:
        """Hold the store's word against ours. Drops what we lost; returns what the store thinks is ours and we know nothing of."""
        listed = {(holding.job_id, holding.first, holding.token) for holding in holdings}
        for key in known - listed:
            state = self._states.get(key)
            if state is not None:
                self._lose(state)
        return [holding for holding in holdings if (holding.job_id, holding.first, holding.token) not in self._states]

    def move_deadlines(self, holdings: list[Holding], asked_ms: float) -> None:
        """Take over the deadlines of slices that are held, as the store reported them when it was asked at this moment."""
        for holding in holdings:
            state = self._states.get((holding.job_id, holding.first, holding.token))
            if state is not None:
                state.move_deadline(asked_ms + holding.expires_in_ms)

    def keys(self) -> set[tuple[str, int, str]]:
        return set(self._states)

    def close_job(self, job_id: str) -> list[LeasedSliceState]:
        """The job closes or is paused: send nothing more of it."""
        mine = [state for state in self.state() if state.slice.job_id == job_id]
        for state in mine:
            self._close(state)
        return mine
