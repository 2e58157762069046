"""Interactive calls beside the jobs: who sends them, to which process, and what must come of each.

A user gets the answer to this very call or an error, in bounded time, and is never charged twice for one call. Some leave before the end.
"""

import asyncio
import random
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import apsw
import msgspec

from tests.simulation.world.customers import KEY_COUNT, USER_COUNT, Customers
from tests.simulation.world.estate import CALL_TOKENS_MAX, CHAT, MESSAGES
from tests.simulation.world.plan import Plan
from tests.simulation.world.process import Process
from tests.simulation.world.provider import Provider
from tests.simulation.world.trace import Trace
from tests.simulation.world.witness import MARK, User, Visit, Witnessed
from tidegate.core.errors import ApiProblem, HandedBack, UpstreamError
from tidegate.core.nouns import Answer, Call, Caller
from tidegate.upstream.calls.exchange import UpstreamResponse
from tidegate.upstream.calls.traffic import Traffic
from tidegate.web.gateway.dialects import Dialect

_DEADLINE_MS = 600_000
_LEAVES_SHARE = 0.15
_FLEX_SHARE, _FLEX_WAIT_S = 0.25, 30.0
# The wait for a slot and for a budget, and the longest call at each deployment of the model.
_ANSWERED_S_MAX = 90.0
# After these a call may go to another deployment, or in another form to the same.
_UNBILLED = ("throttle", "away", "refuse")
# What a server refuses costs nothing; a call that broke off may have cost something.
_UNDONE = ("throttle", "refuse", "away")
_HOLDS_UP = frozenset({"pause", "store_slow", "store_away", "store_fail", "store_unknown"})


class Users:
    def __init__(
        self, plan: Plan, customers: Customers, provider: Provider, trace: Trace, broken: Callable[[str], None]
    ) -> None:
        self._plan = plan
        self._customers = customers
        self._provider = provider
        self._trace = trace
        self._broken = broken
        self._dice = random.Random(f"users/{plan.seed}")
        # Drawn apart from everything else.
        self._flex_dice = random.Random(f"flex/{plan.seed}")
        self._calls: dict[str, list[Witnessed]] = {}
        self.waiting = 0
        self.visits: list[Visit] = []

    async def come(self, processes: Callable[[], Collection[Process]]) -> None:
        """Send calls for as long as this runs, each to a process that takes some."""
        while True:
            await asyncio.sleep(self._dice.expovariate(self._plan.strength("users")))
            serving = [process for process in processes() if process.takes_users]
            if serving:
                user = self._user()
                self._dice.choice(serving).begin(partial(self._visit, user=user, tag=self._tag(user)))

    def _tag(self, user: User) -> str:
        tag = f"u{len(self._provider.users)}-0"
        self._provider.users[tag] = user
        return tag

    def _user(self) -> User:
        dice, tenant = self._dice, self._dice.randrange(len(self._plan.estate.tenants))
        return User(
            tenant,
            self._customers.tenant_ids[tenant],
            f"key-{tenant}-{dice.randrange(KEY_COUNT)}",
            f"user-{dice.randrange(USER_COUNT)}",
            dice.choice(self._plan.estate.names),
            is_stream=dice.random() < 0.5,
            is_flex=self._flex_dice.random() < _FLEX_SHARE,
        )

    async def _visit(self, process: Process, user: User, tag: str) -> None:
        """One call. A process that dies takes it along."""
        self.waiting += 1
        visit = Visit(user, process.loop.time())
        self.visits.append(visit)
        leaves_s = self._dice.uniform(0.05, 3.0) if self._dice.random() < _LEAVES_SHARE else None
        try:
            async with asyncio.timeout(leaves_s):
                await self._ask(process, user, tag)
        except TimeoutError:
            self._trace.note(process.name, "user left", tag)
        except HandedBack:
            self._broken(f"users: {tag} was taken back by the tide, and a user waits for it")
        except (UpstreamError, ApiProblem) as error:
            self._trace.note(process.name, "user refused", tag, error.code)
        except Exception as error:
            self._broken(f"an internal error: {tag} of a user: {error!r}")
        self.waiting -= 1
        visit.ended_s = process.loop.time()
        waited_s = visit.ended_s - visit.came_s
        if waited_s > _ANSWERED_S_MAX and not _HOLDS_UP & set(self._plan.kinds):
            self._broken(f"users: {tag} waited for {waited_s:.0f} s")

    async def _ask(self, process: Process, user: User, tag: str) -> None:
        router, book = process.router, process.book
        assert router is not None
        assert book is not None
        endpoint = CHAT if self._plan.estate.endpoints == (CHAT,) else self._dice.choice((CHAT, MESSAGES))
        is_stream = user.is_stream and endpoint == CHAT
        content = f"{tag} {'x' * self._dice.choice((0, 20, 120))}"
        body = {"model": user.asks_for, "messages": [{"role": "user", "content": content}], "max_tokens": 20}
        wire = msgspec.json.encode({**body, "stream": True} if is_stream else body)
        dialect = Dialect(endpoint, wire, process.now_ms() // 1000)
        caller = Caller(user.tenant_id, user.key_id, user=user.name)
        tenant = self._plan.estate.tenants[user.tenant]
        call = Call(
            job_id="",
            number=0,
            endpoint=endpoint,
            model=user.asks_for,
            body=wire,
            idempotency_key=f"req-{tag}",
            deadline_ms=process.monotonic_ms() + _DEADLINE_MS,
            budgets=tenant.budgets(user.tenant_id, user.name, user.key_id),
            share_owner=f"tenant:{user.tenant_id}",
        )
        traffic = Traffic(
            dialect.shape,
            is_stream,
            flex_wait_s=_FLEX_WAIT_S if user.is_flex else 0.0,
            on_usage=partial(book.add, caller, user.asks_for),
            owner=user.tenant_id,
        )
        response = await router.open(call, traffic)
        text = response.body if isinstance(response, Answer) else await self._read(response)
        found = MARK.search(text)
        if found is None or found[2].decode() != tag:
            self._broken(f"P3: the user of {tag} got the answer of another call: {text[:80]!r}")
        self._trace.note(process.name, "user answered", tag)

    async def _read(self, response: UpstreamResponse) -> bytes:
        """A stream to its end; who leaves meanwhile closes it."""
        text = b""
        try:
            while piece := await response.read():
                text += piece
        finally:
            response.close()
        return text

    def judge(self, connection: apsw.Connection) -> None:
        """The usage that answers reported is in the books, once; what was broken off is there by an estimate, and no more."""
        rows: list[Any] = connection.execute(
            "select coalesce(sum(calls), 0), coalesce(sum(input_tokens + output_tokens), 0) from usage_interactive"
        ).fetchall()
        ((calls, tokens),) = rows
        seen = self._provider.user_calls
        known = [one for one in seen if one.mood == "ok" and one.received_s is not None]
        sure = [one for one in known if not one.process.dead and not one.process.is_ended_in_trouble]
        unknown = [one for one in seen if one not in known and (one.left or one.mood not in _UNDONE)]
        most = sum(map(_tokens, known)) + len(unknown) * CALL_TOKENS_MAX
        if not len(sure) <= calls <= len(known) + len(unknown) or not sum(map(_tokens, sure)) <= tokens <= most:
            self._broken(
                f"usage: the books say {calls} calls of users with {tokens} tokens; {len(sure)} with"
                f" {sum(map(_tokens, sure))} are sure, {len(known) + len(unknown)} with {most} are possible"
            )

    def check(self, call: Witnessed) -> None:
        """No call of a user is sent again once it may have been billed."""
        before = self._calls.setdefault(call.key, [])
        for earlier in before:
            if earlier.mood not in _UNBILLED:
                self._broken(f"P5: call {call.serial} of a user repeats call {earlier.serial} ({earlier.mood})")
        before.append(call)


def _tokens(call: Witnessed) -> int:
    return call.usage.input_tokens + call.usage.output_tokens
