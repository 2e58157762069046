"""Callers of background responses: each is sent to a process that takes calls, and again to another until one of them has accepted it.

The process may be stopped or killed at any step, and what it wrote by then stays. However often it is sent, one job is made of it.
"""

import asyncio
import random
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial

from tests.simulation.world.customers import KEY_COUNT, LONG_WINDOW_MS, USER_COUNT, Customers, Order
from tests.simulation.world.estate import CHAT
from tests.simulation.world.plan import Plan
from tests.simulation.world.process import Process
from tests.simulation.world.trace import Trace
from tests.simulation.world.witness import Witnessed
from tidegate.core.errors import BlobError, StoreUnavailable
from tidegate.core.input.lines import LineRules
from tidegate.core.input.slices import plan_of_line
from tidegate.core.nouns import Caller, Quotas, ResponseTerms
from tidegate.core.schedule.share_owner import share_owner_of
from tidegate.stages.accept import Reception

_COUNT_MAX = 6
# Some callers ask again before the first process could answer.
_PATIENCES_S = (0.05, 4.0)
_KEPT_MS = 30 * 86_400_000
# After how long responses go like calls of users, and how long the worker may take to notice.
_TURNS_MS = (400, 1_500)
_NOTICED_S = 2.5
_CLOCKS = frozenset({"clock", "database_clock", "machine_clock"})


class NotingReception(Reception):
    """A door that says under which id a job may come to be, before it does."""

    def __init__(self, process: Process, note: Callable[[str], None]) -> None:
        store, blobs, me = process.store, process.blobs, process.me
        assert store is not None
        assert blobs is not None
        assert me is not None
        super().__init__(store, blobs, process, process, lambda: me.id)
        self._note = note

    def new_id(self, kind: str) -> str:
        made = super().new_id(kind)
        if kind == "batch":
            self._note(made)
        return made


class BackgroundCallers:
    def __init__(self, plan: Plan, customers: Customers, trace: Trace) -> None:
        self._plan = plan
        self._customers = customers
        self._trace = trace
        self._dice = random.Random(f"background/{plan.seed}")
        # Drawn apart, so that the seeds still mean what they meant.
        self._turn_dice = random.Random(f"turns/{plan.seed}")

    def orders(self) -> Iterable[Order]:
        """What will be asked for: jobs of one item, each of which has no id yet."""
        dice, plan = self._dice, self._plan
        if not plan.strength("background") or CHAT not in plan.estate.endpoints:
            return
        for number in range(plan.job_count, plan.job_count + dice.randint(1, _COUNT_MAX)):
            tenant = dice.randrange(len(plan.estate.tenants))
            begin_s = dice.uniform(0, plan.arrival_s)
            order = Order(
                name=f"j{number}",
                caller=Caller(
                    self._customers.tenant_ids[tenant],
                    f"key-{tenant}-{dice.randrange(KEY_COUNT)}",
                    user=f"user-{dice.randrange(USER_COUNT)}",
                ),
                tenant=tenant,
                limits=(),
                file_id="",
                job_id="",
                custom_ids=[],
                tags=[],
                begin_s=begin_s,
                window_ms=LONG_WINDOW_MS,
                ordered=False,
                invalid_lines="fail",
                refused=False,
                cancel_s=begin_s + dice.uniform(0, 4) if dice.random() < 0.25 else None,
                endpoint=CHAT,
                interactive_after_ms=self._turn_dice.choice((None, *_TURNS_MS)),
            )
            self._customers.add_request(order, dice)
            yield order

    async def call(
        self, order: Order, processes: Callable[[], Collection[Process]], note: Callable[[Order, str], None]
    ) -> None:
        """Ask until it is accepted."""
        await asyncio.sleep(order.begin_s)
        order.asked_s = asyncio.get_running_loop().time()
        while not order.job_id:
            serving = [process for process in processes() if process.takes_users]
            if not serving:
                await asyncio.sleep(0.5)
                continue
            answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            self._dice.choice(serving).begin(partial(self._ask, order=order, answer=answer, note=partial(note, order)))
            try:
                async with asyncio.timeout(self._dice.choice(_PATIENCES_S)):
                    order.job_id = await answer
            except TimeoutError:
                self._trace.note("customer", "asks again", order.name)
        order.accepted_s = asyncio.get_running_loop().time()
        self._trace.note("customer", "accepted", order.name, order.job_id)

    async def _ask(
        self, process: Process, order: Order, answer: "asyncio.Future[str]", note: Callable[[str], None]
    ) -> None:
        line = order.bodies[0] + b"\n"
        share_owner = share_owner_of(order.caller, self._plan.estate.scope_preference)
        terms = ResponseTerms(CHAT, _KEPT_MS, share_owner, Quotas(), order.interactive_after_ms)
        try:
            job = await NotingReception(process, note).create_response(
                order.caller, line, plan_of_line(line, LineRules(CHAT)), terms, f"key of {order.name}"
            )
            job_id = job.id
        except (StoreUnavailable, BlobError) as error:
            self._trace.note(process.name, "refused", order.name, type(error).__name__)
            job_id = ""
        if not answer.done():
            answer.set_result(job_id)


class TurnWatch:
    """A response that waits goes like a call of a user once its time has come: not before, and soon after where nothing is in the way."""

    def __init__(self, plan: Plan, orders: Mapping[str, Order], broken: Callable[[str], None]) -> None:
        self._orders = orders
        self._broken = broken
        self._time_holds = not _CLOCKS & set(plan.kinds)
        self._is_quiet = plan.kinds == ["background"] and plan.family == "waiting"

    def check(self, call: Witnessed) -> None:
        order = self._orders[call.job_id]
        after_ms = order.interactive_after_ms
        if after_ms is None:
            if call.is_turned:
                self._broken(f"turns: call {call.serial} of {order.name} goes like a user's, and was not to")
            return
        if call.is_turned and self._time_holds and call.sent_s < order.asked_s + after_ms / 1000:
            self._broken(f"turns: call {call.serial} of {order.name} goes like a user's before its time")
        waited_s = call.sent_s - order.accepted_s
        if self._is_quiet and waited_s > after_ms / 1000 + _NOTICED_S:
            self._broken(
                f"turns: call {call.serial} of {order.name} waited {waited_s:.1f} s, and {after_ms} ms are allowed"
            )
