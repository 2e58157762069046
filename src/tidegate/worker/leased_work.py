"""The leased work of a worker: slices, their unsent items, and the calls in flight.

`LeasedWork` decides which item may be sent next; the runners send. An item is given out only while
the lease is surely alive, the job is still open, and the model has a free slot.
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

# An item that waits no longer than this stays with the worker; any other goes back to the store.
SHORT_WAIT_MS = 5_000

# Calls in flight may use fewer tokens than were reserved, and the store is not notified of that. So
# work that waits for tokens is tried again after this time, even if a budget names a later moment.
TOKENS_REST_MS_MAX = 30_000

# With quick calls, hold as many items as go out in this time. Otherwise the leases would cost more
# than the calls.
AHEAD_MS = 200


class LeasedSliceState(msgspec.Struct, eq=False):
    """One slice that this worker has leased.

    - `reading` is true until its items are here.
    - Items from `sent_to` on were never sent by this worker.
    - `answered_number` is the last of its items that a model server answered.
    - If `is_lost`, this worker does not own it any more.
    - None of its items is sent for `rests_ms`.
    - From `interactive_at_ms` on its items go like interactive calls, and `is_interactive` is true
      once they do.
    """

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
        """Bind calls of this slice to a key's state, to budgets, and to limits of parallel calls.

        `number` is the version of the tenants' limits.
        """
        self.bound_number = number
        self.key = key
        self.models = frozenset() if key is None else key.models
        self.budgets = budgets
        self.parallel = parallel

    def move_deadline(self, deadline_ms: float) -> None:
        """Set the moment after which no call of this slice begins, after a change of its job."""
        self.deadline_ms = deadline_ms

    def may_begin(self) -> bool:
        """Return whether a taken item that still waits, for example for a slot, may be sent."""
        return not self.closed

    def turn_interactive(self) -> None:
        """Send items of this slice like interactive calls from now on."""
        self.is_interactive = True

    def rest(self, rests_ms: float) -> None:
        """Send no item of this slice for this time. Call this before its items are here."""
        self.rests_ms = rests_ms

    def release_tail(self, item_count: int) -> None:
        """Note that this many items at the end of the slice went back to the store."""
        self.left -= item_count

    def end_item(self, number: int, *, was_answered: bool) -> None:
        """Note that an item has its outcome; `was_answered` if a model server gave it."""
        self.left -= 1
        if was_answered:
            self.answered_number = number

    def abort(self) -> None:
        """Abort the calls of this slice that are in flight, and close their connections."""
        self.aborted = True
        for task in list(self.calls):
            task.cancel()


class _Stock:
    """The items of one model that wait for a slot, and counts of those in flight or sent lately."""

    __slots__ = ("_since_ms", "in_flight", "queue", "sent", "sent_before")

    def __init__(self) -> None:
        self.queue: deque[tuple[LeasedSliceState, Item]] = deque()
        self.in_flight = 0
        self._since_ms = -math.inf
        self.sent = self.sent_before = 0

    def goes(self, now_ms: float) -> None:
        """Count one more item that goes out."""
        self.in_flight += 1
        if now_ms - self._since_ms >= AHEAD_MS:
            self.sent_before = self.sent if now_ms - self._since_ms < 2 * AHEAD_MS else 0
            self.sent = 0
            self._since_ms = now_ms
        self.sent += 1

    def ahead(self, now_ms: float) -> int:
        """Return the most items that went out in this period of `AHEAD_MS` or in the last."""
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
        # Each turn lets one waiting runner look for an item. Count the runners that wait, less the
        # turns that were given up.
        self._turns = asyncio.Semaphore(0)
        self._idle_count = 0
        # Slices whose items will go like interactive calls later.
        self._turning: list[LeasedSliceState] = []
        self._is_inviting = False
        self._sends_one_at_a_time = False
        self.admitted: tuple[LeasedSliceState, Item] | None = None
        self.lease_until_ms = 0.0
        self.in_flight = 0
        # The most calls that were ever in flight at once, and the number of calls that have ended.
        self.in_flight_most = 0
        self.ended_count = 0

    @property
    def is_lease_safe(self) -> bool:
        """Return whether the store surely counts this incarnation as alive: new leases are ours."""
        return self._clock.monotonic_ms() < self.lease_until_ms

    @property
    def is_open(self) -> bool:
        """Return whether new items may be taken and sent.

        They may not when the worker ends, or while record cannot take more results.
        """
        return self._supervisor.is_working and not self._recorder.full

    @property
    def is_idle(self) -> bool:
        """Return whether no call is in flight and no item waits here for a slot."""
        return not self.in_flight and not any(stock.queue for stock in self._stocks.values())

    @property
    def is_reading(self) -> bool:
        """Return whether the items of a leased slice are being read."""
        return any(state.reading for state in self._states.values())

    @property
    def slice_count(self) -> int:
        return len(self._states)

    def unsent(self, model: str) -> int:
        """Return how many items of a model wait here for a slot."""
        stock = self._stocks.get(model)
        return len(stock.queue) if stock else 0

    def calls(self, model: str) -> int:
        """Return how many items of a model are in flight from here."""
        stock = self._stocks.get(model)
        return stock.in_flight if stock else 0

    def ahead(self, model: str) -> int:
        """Return how many items of a model will go out within `AHEAD_MS`, at the present pace."""
        stock = self._stocks.get(model)
        return stock.ahead(self._clock.monotonic_ms()) if stock else 0

    def is_low(self, model: str) -> bool:
        """Return whether the waiting items of a model will soon run out."""
        stock = self._stocks.get(model)
        if stock is None:
            return True
        unsent = 2 * len(stock.queue)
        return unsent <= self.in_flight or unsent <= stock.sent or unsent <= stock.sent_before

    def models(self) -> list[str]:
        """Return the models of all slices that are held."""
        return list({state.slice.model for state in self._states.values()})

    def interactive_count(self) -> int:
        """Return how many slices are held whose items go like interactive calls, now or later."""
        return sum(state.interactive_at_ms < math.inf for state in self._states.values())

    def has_keys(self) -> bool:
        """Return whether any slice here belongs to a job with a key."""
        return any(state.slice.key_id is not None for state in self._states.values())

    def state(self) -> list[LeasedSliceState]:
        return list(self._states.values())

    def extend_lease(self, until_ms: float) -> None:
        """Let calls begin until this moment of the monotonic clock, after an answered heartbeat."""
        self.lease_until_ms = until_ms
        self.wake()

    def lose_lease(self) -> None:
        """Close all slices, because this incarnation was declared gone."""
        self.lease_until_ms = 0.0
        for state in self.state():
            self._lose(state)

    def expect(self, state: LeasedSliceState) -> None:
        """Add a slice that was leased and is being read.

        Heartbeats already count it, so it can be lost or closed before its items are here.
        """
        leased = state.slice
        self._recorder.expect()
        state.reading = True
        self._states[leased.job_id, leased.first, leased.token] = state

    def forget(self, state: LeasedSliceState) -> None:
        """Remove a slice that could not be read, or whose work here is done."""
        leased = state.slice
        self._states.pop((leased.job_id, leased.first, leased.token), None)

    def add(self, state: LeasedSliceState, items: Iterable[Item]) -> None:
        """Add the unfinished items of a freshly leased slice."""
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
        """Take the next item that may be sent now; return None if there is none."""
        now_ms = self._clock.monotonic_ms()
        if now_ms >= self.lease_until_ms or not self.is_open:
            return None
        if self._sends_one_at_a_time:
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

    def send_one_at_a_time(self) -> None:
        """Send only admitted items, one at a time, until `reopen`."""
        self._sends_one_at_a_time = True

    def reopen(self) -> None:
        self._sends_one_at_a_time = False
        self.admitted = None
        self.wake()

    def admit(self, entry: tuple[LeasedSliceState, Item] | None) -> None:
        """Let this item alone be sent; None withdraws it."""
        self.admitted = entry
        if entry is not None:
            self.wake_one()

    def queued(self) -> list[tuple[LeasedSliceState, Item]]:
        """Return all items that wait here to be sent, of slices that are not dropped."""
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
            if self._idle_count > 0 and not self._is_inviting:
                self._is_inviting = True
                asyncio.get_running_loop().call_soon(self._invite)
            return taken
        while True:
            self._idle_count += 1
            try:
                await self._turns.acquire()
            except asyncio.CancelledError:
                # A turn that had come is passed on.
                self._idle_count -= 1
                raise
            taken = self.take_item()
            if taken is not None:
                return taken

    def _invite(self) -> None:
        """Wake a runner for each item that may go.

        If items share calls, one slot serves several.
        """
        self._is_inviting = False
        for model, stock in self._stocks.items():
            if stock.queue and model and self._upstream.items_per_call(model) > 1:
                for _ in range(min(self._upstream.free_slots(model), len(stock.queue))):
                    self.wake_one()

    def wake(self) -> None:
        """Wake a runner for each item that may be sent, after a change."""
        now_ms = self._clock.monotonic_ms()
        if self._turning:
            self._turn_interactive(now_ms)
        # Callers choose the names of models, so the table must not grow without a limit.
        for model in [name for name, stock in self._stocks.items() if stock.is_unused(now_ms)]:
            del self._stocks[model]
        if self._idle_count > 0:
            may_go = sum(self._may_go(model, stock) for model, stock in self._stocks.items())
            for _ in range(min(may_go, self._idle_count)):
                self.wake_one()

    def _may_go(self, model: str, stock: _Stock) -> int:
        """Return how many of these items the upstream would take now."""
        queue = stock.queue
        if not queue or not model or queue[0][0].is_interactive or not self._upstream.knows(model):
            return len(queue)
        return min(len(queue), self._upstream.free_slots(model))

    def _turn_interactive(self, now_ms: float) -> None:
        """Put items in front that go like interactive calls now: they need no background slot.

        If no deployment takes interactive calls of their model, they keep their places.
        """
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
        """Wake one runner, because one slot became free."""
        if self._idle_count > 0:
            self._idle_count -= 1
            self._turns.release()

    def mark_done(self, state: LeasedSliceState) -> None:
        """Note that a call ended, in whatever way.

        Its runner takes the next item itself, so no other is woken.
        """
        state.in_flight -= 1
        self.in_flight -= 1
        self.ended_count += 1
        self._stocks[state.slice.model].in_flight -= 1

    def put_back(self, state: LeasedSliceState, item: Item, wait_ms: float) -> None:
        """Try this item again here after a short wait.

        If its slice is given back before that, the slice rests until the same moment.
        """
        state.deferred_until_ms = max(state.deferred_until_ms, self._clock.monotonic_ms() + wait_ms)
        asyncio.get_running_loop().call_later(wait_ms / 1000, self._return, state, item)

    def _return(self, state: LeasedSliceState, item: Item) -> None:
        if not state.dropped:
            queue = self._stock(state.slice.model).queue
            ahead = 0 if state.is_interactive else sum(1 for _ in takewhile(lambda one: one[0].is_interactive, queue))
            queue.insert(ahead, (state, item))
            self.wake_one()

    def defer(self, state: LeasedSliceState, wait_ms: float) -> None:
        """Let this item go back with its slice, because its wait is too long for a worker."""
        self._defer(state, self._clock.monotonic_ms() + wait_ms)

    def defer_for_budget(self, state: LeasedSliceState, wait_ms: float) -> None:
        """Defer an item that waits for a budget.

        No server asked for that wait, so the slice is ready again as soon as one of its items is
        worth a try.
        """
        state.deferred += 1
        state.retry_at_ms = min(state.retry_at_ms, self._clock.monotonic_ms() + min(wait_ms, TOKENS_REST_MS_MAX))

    def _defer(self, state: LeasedSliceState, until_ms: float) -> None:
        state.deferred += 1
        state.deferred_until_ms = max(state.deferred_until_ms, until_ms)

    def drop(self, state: LeasedSliceState) -> None:
        """Take no more items of this slice; its calls in flight go on."""
        state.dropped = True

    def _close(self, state: LeasedSliceState) -> None:
        """Stop sending this slice, even its items that wait for a slot or a budget.

        Sent calls go on.
        """
        state.closed = True
        self.drop(state)

    def _lose(self, state: LeasedSliceState) -> None:
        """Close this slice, because another worker may run the rest of it.

        Its calls go on here, and the first answer counts.
        """
        state.is_lost = True
        self._close(state)

    def cut(self, state: LeasedSliceState) -> int:
        """Return how many open items stand behind the last sent one.

        These can be given back while the calls go on.
        """
        leased = state.slice
        return sum(number not in leased.done for number in range(state.sent_to, leased.first + leased.count))

    def drop_model(self, model: str, until_ms: float) -> None:
        """Give back the unsent items of a model that rests until this moment."""
        for state in self.state():
            if state.slice.model == model and not state.dropped and not state.is_interactive:
                # The rest may hold for background work alone, so items go again once they are
                # interactive.
                rests_until_ms = min(until_ms, state.interactive_at_ms)
                state.deferred_until_ms = max(state.deferred_until_ms, rests_until_ms)
                self.drop(state)
        stock = self._stocks.get(model)
        if stock is not None:
            stock.queue = deque(entry for entry in stock.queue if entry[0].is_interactive)

    def drop_spent(self, budgets: tuple[Budget, ...], until_ms: float) -> set[tuple[str, str]]:
        """Give back unsent items under these budgets, which are spent until this moment.

        Return their jobs and models.
        """
        dropped = set()
        for state in self.state():
            if state.budgets == budgets and not state.dropped:
                state.deferred_until_ms = max(state.deferred_until_ms, until_ms)
                self.drop(state)
                dropped.add((state.slice.job_id, state.slice.model))
        return dropped

    def forget_if_done(self, state: LeasedSliceState) -> bool:
        """Forget a slice if all its items are done, deferred or dropped.

        Return True once, when that is so.
        """
        if state.settled or state.reading or state.in_flight or not (state.dropped or state.left == state.deferred):
            return False
        state.settled = state.dropped = True
        self.forget(state)
        return True

    def release_wait_ms(self, state: LeasedSliceState) -> int:
        """Return how long a slice that is given back should rest."""
        until_ms = state.deferred_until_ms
        if state.retry_at_ms < math.inf:
            until_ms = max(until_ms, state.retry_at_ms)
        return max(0, int(until_ms - self._clock.monotonic_ms()))

    def compare(self, known: set[tuple[str, int, str]], holdings: list[Holding]) -> list[Holding]:
        """Compare our slices with the store's list.

        Close those that we lost; return those that we do not know.
        """
        listed = {(holding.job_id, holding.first, holding.token) for holding in holdings}
        for key in known - listed:
            state = self._states.get(key)
            if state is not None:
                self._lose(state)
        return [holding for holding in holdings if (holding.job_id, holding.first, holding.token) not in self._states]

    def move_deadlines(self, holdings: list[Holding], asked_ms: float) -> None:
        """Take over the deadlines that the store reported; `asked_ms` is when it was asked."""
        for holding in holdings:
            state = self._states.get((holding.job_id, holding.first, holding.token))
            if state is not None:
                state.move_deadline(asked_ms + holding.expires_in_ms)

    def keys(self) -> set[tuple[str, int, str]]:
        return set(self._states)

    def close_job(self, job_id: str) -> list[LeasedSliceState]:
        """Stop sending for a job that closes or is paused, and return its slices."""
        mine = [state for state in self.state() if state.slice.job_id == job_id]
        for state in mine:
            self._close(state)
        return mine
