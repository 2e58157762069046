"""The state of one deployment: its slots, rests, breaker and budgets, and its calls so far.

A deployment state decides whether the deployment may get one more call, and learns from the end of
each call. It neither chooses between deployments nor sends calls. Time is an argument, in the
clock's monotonic milliseconds.
"""

import math
from collections import Counter, OrderedDict
from typing import TypeVar

import msgspec
from yarl import URL

from tidegate.core.answers.redaction import KeyRedactor
from tidegate.core.budgets.budget import Budget, Limit, LimitBound, Period
from tidegate.core.deployments import Deployment, EngineKind
from tidegate.core.errors import (
    Ambiguous,
    AnswerUnusable,
    BrokenAnswer,
    KeyRejected,
    Refused,
    Throttled,
    Unavailable,
    UpstreamError,
)
from tidegate.core.nouns import Call
from tidegate.upstream.budgets.quota import Quota
from tidegate.upstream.budgets.rate_limit_headers import QuotaLeft, RateLimitHeaders
from tidegate.upstream.http.transport import Client, QueuedClient, StreamingClient
from tidegate.upstream.routing.deployment_status import DeploymentStatus
from tidegate.upstream.routing.health import Breaker, BreakerPolicy, BreakerState, Refusals
from tidegate.upstream.routing.priority_hints import PriorityHints
from tidegate.upstream.routing.slots import Slots
from tidegate.upstream.tide.peers import Users
from tidegate.upstream.tide.tides import DeploymentTide

# A 403 may be about the request (moderation), so only three in a row pause a deployment.
FORBIDDEN_IN_A_ROW_MAX = 3
CALLS_REMEMBERED_MAX = 10_000

# The code of a call that is not sent because its deployment answered the last ones with errors.
FAILING = "upstream_failing"
# The code of a call whose server does not accept our certificate, or demands one.
TLS_REJECTED = "upstream_tls_rejected"

# An operator may set another key at any moment. So calls wait at most this long for a deployment
# that rejected our key, though its probes are rarer.
KEY_REST_MS_MAX = 6_000

# While interactive calls come, and for this long after the last one, background work leaves this
# part of a deployment's slots free for the next ones.
FREE_FOR_USERS = 1 / 8
USERS_COME_MS = 60_000.0
# One owner's calls leave this part of the slots, if there are at least 4, to owners without calls.
FREE_FOR_OTHERS = 1 / 16
FREE_FOR_OTHERS_FROM = 4

# An operator may resume a drained deployment at any moment, so calls that wait for it look again
# after this time.
DRAINED_WAIT_MS = 5_000

# Prefix of the name of background work's part of a deployment's slots, if that is not all of them.
BACKGROUND_SLOTS = "background:"

# Headers that show that an answer reports its deployment's limits.
LIMIT_HEADERS = ("x-ratelimit-limit-requests", "x-ratelimit-limit-tokens")
ANTHROPIC_LIMIT_HEADERS = ("anthropic-ratelimit-requests-limit", "anthropic-ratelimit-tokens-limit")

_T = TypeVar("_T")


class RetryBudgetPolicy(msgspec.Struct, frozen=True):
    share: float = 0.1
    retries_min: int = 3
    window_s: int = 60


# Retries of queued requests are not limited: the processor takes requests at its own pace.
QUEUED_RETRIES = RetryBudgetPolicy(retries_min=1_000_000)


class DeploymentPolicy(msgspec.Struct, frozen=True):
    breaker: BreakerPolicy = msgspec.field(default_factory=BreakerPolicy)
    retry_budget: RetryBudgetPolicy = msgspec.field(default_factory=RetryBudgetPolicy)
    retry_after_ms_max: int = 86_400_000
    throttle_backoff_ms: int = 1_000
    throttle_backoff_ms_max: int = 60_000
    attempts_grouped: int = 2
    """An item with this many attempts is sent alone, even if others share a call."""
    model_rest_ms_min: int = 5_000
    model_rest_ms_max: int = 300_000
    patience_ms: int = 2_000
    """A call waits here for a budget that is free this soon, so that the budget is used early."""


# A counted call: its second, and whether it is a retry. `undo` needs both.
Attempt = tuple[int, bool]


class RetryBudget:
    """The retries of a deployment: a share of its first attempts in the last minute, and some more.

    Many retries would make it harder for a failing server to recover. Only a call that this same
    deployment failed before is a retry here; one that comes from another deployment is a first
    attempt. A retry without budget does not fail, it is put off. The window moves in whole seconds,
    rounded so that it never allows more than an exact one.
    """

    def __init__(self, policy: RetryBudgetPolicy) -> None:
        self._policy = policy
        # One more bucket than seconds, because the oldest second is only partly inside the window.
        self._length = policy.window_s + 1
        self._firsts = [0] * self._length
        self._retries = [0] * self._length
        self._first_sum = 0
        self._retry_sum = 0
        self._second = 0

    def allows_retry(self, now_ms: float) -> bool:
        second = int(now_ms // 1000)
        if second != self._second:
            self._move_to(second)
        # In the oldest, partial second first attempts do not count; retries do.
        firsts = self._first_sum - self._firsts[(second + 1) % self._length]
        return self._retry_sum < self._policy.retries_min + int(firsts * self._policy.share)

    def attempts(self, now_ms: float) -> int:
        """Return the number of calls in the window."""
        second = int(now_ms // 1000)
        if second != self._second:
            self._move_to(second)
        return self._first_sum + self._retry_sum

    def count(self, now_ms: float, *, is_retry: bool) -> Attempt:
        """Count a call that is about to be sent; a retry only after `allows_retry` allowed it."""
        second = int(now_ms // 1000)
        if second != self._second:
            self._move_to(second)
        bucket = second % self._length
        if is_retry:
            self._retries[bucket] += 1
            self._retry_sum += 1
        else:
            self._firsts[bucket] += 1
            self._first_sum += 1
        return second, is_retry

    def undo(self, attempt: Attempt) -> None:
        """Take a counted call back, because the upstream did not take it."""
        second, is_retry = attempt
        if self._second - second >= self._length:
            # The second has left the window, and its bucket counts another one.
            return
        bucket = second % self._length
        if is_retry and self._retries[bucket]:
            self._retries[bucket] -= 1
            self._retry_sum -= 1
        elif not is_retry and self._firsts[bucket]:
            self._firsts[bucket] -= 1
            self._first_sum -= 1

    def _move_to(self, second: int) -> None:
        for passed in range(self._second + 1, min(second, self._second + self._length) + 1):
            bucket = passed % self._length
            self._first_sum -= self._firsts[bucket]
            self._retry_sum -= self._retries[bucket]
            self._firsts[bucket] = self._retries[bucket] = 0
        self._second = second


class DeploymentState:
    """The state of one deployment. With `is_alone` this is the only process and has all slots."""

    def __init__(
        self, deployment: Deployment, client: Client, control: Client, policy: DeploymentPolicy, *, is_alone: bool
    ) -> None:
        self.deployment = deployment
        self.breaker = Breaker(policy.breaker)
        self.budget = RetryBudget(policy.retry_budget if deployment.queue is None else QUEUED_RETRIES)
        self.refusals = Refusals()
        # The number of calls that went out. The quota is known once an answer reports what is left
        # of the deployment's own limits.
        self._sent = 0
        self.quota: Quota | None = None
        # Background calls (items and flex calls), and interactive ones.
        self.in_flight = 0
        self.interactive_in_flight = 0
        self.interactive_awaiting = 0
        # Interactive calls that wait for a slot here, and those in flight, by share owner.
        self.interactive_waiting: Counter[str] = Counter()
        self._interactive_owners: Counter[str] = Counter()
        self._users_until_ms = -math.inf
        self.tide: DeploymentTide | None = None
        self.waiting = 0
        self._is_alone = is_alone
        self.slots = Slots(deployment.name, 0, 0)
        self.background_slots: Slots | None = None
        self.expecting = 0
        self.tokens_in_flight = 0
        self.discovered: Limit | None = None
        self.rests_until_ms = 0.0
        self.background_rests_until_ms = 0.0
        # Calls that were answered, and all calls that ended.
        self.answered = self._ended = 0
        self.failures: Counter[str] = Counter()
        self.last_failure = ""
        # The error code of calls while the circuit is open; empty if the server was not reached.
        self.failure_code = ""
        self._probes = 0
        self._policy = policy
        self._urls: dict[str, URL] = {}
        self._totals_s: dict[str, float] = {}
        self._throttled_in_a_row = 0
        self.is_empty = False
        self._forbidden_in_a_row = 0
        self._forbidden: OrderedDict[str, int] = OrderedDict()
        self._failed_calls: OrderedDict[str, None] = OrderedDict()
        self._failed_at_ms = -math.inf
        self.update(deployment, client, control)

    def update(self, deployment: Deployment, client: Client, control: Client) -> None:
        """Take over new terms for the same server; its calls and what was learned of it stay."""
        if deployment.refresh_count != self.deployment.refresh_count:
            self._try_at_once()
        self.deployment = deployment
        if deployment.is_drained:
            # An endless rest: then the choice of a deployment need not look at `is_drained`.
            self.rests_until_ms = math.inf
        elif self.rests_until_ms == math.inf:
            self.rests_until_ms = 0.0
        self.client = client
        self.streaming_client = client if isinstance(client, StreamingClient) else None
        self.queue_client = client if isinstance(client, QueuedClient) else None
        self.control = control
        # A configured capacity limits all calls; a learned one limits only background work.
        self.counts_interactive = deployment.is_capacity_known and deployment.takes_interactive
        background_max = deployment.background_in_flight_max
        self.slots.set_cap(
            deployment.max_in_flight if self.counts_interactive else background_max, is_alone=self._is_alone
        )
        if not self.counts_interactive or (self._is_alone and background_max >= deployment.max_in_flight):
            self.background_slots = None
        else:
            if self.background_slots is None:
                self.background_slots = Slots(BACKGROUND_SLOTS + deployment.name, 0, 0)
                self.background_slots.count(self.in_flight)
            self.background_slots.set_cap(background_max, is_alone=self._is_alone)
        self.slots.count(self.slots_in_use)
        self.tokens_max = deployment.tokens_in_flight_max
        self.budgets = self._budgets()
        self.priority_hints = PriorityHints(deployment)
        self.key_redactor = KeyRedactor("" if deployment.api_key is None else deployment.api_key.reveal())
        self.is_plain = self._is_plain()
        is_anthropic = deployment.engine is EngineKind.ANTHROPIC
        self.limit_headers = ANTHROPIC_LIMIT_HEADERS if is_anthropic else LIMIT_HEADERS
        self.weight = deployment.weight
        self._urls.clear()
        self._totals_s.clear()

    def url(self, endpoint: str) -> URL:
        url = self._urls.get(endpoint)
        if url is None:
            url = self._urls[endpoint] = URL(self.deployment.url_of(endpoint))
        return url

    def total_s(self, endpoint: str) -> float:
        """Return how long a whole call may take there, for one item or several."""
        total_s = self._totals_s.get(endpoint)
        if total_s is None:
            total_s = self._totals_s[endpoint] = self.deployment.total_s(endpoint.removesuffix("/batch"))
        return total_s

    def waits_until_ms(self, call: Call) -> float:
        """Return the moment before which this call must not come here, after a Retry-After; 0 for
        any other call.
        """
        return self.refusals.waits_until_ms(call.idempotency_key) if self.refusals.waiting else 0.0

    def rest_background_until(self, until_ms: float) -> None:
        """Leave the deployment to interactive calls until this moment; a moment in the past ends
        such a rest.
        """
        self.background_rests_until_ms = until_ms

    def count_probe(self) -> int:
        """Count a probe, and return its number."""
        self._probes += 1
        return self._probes

    def ready_at_ms(self) -> float:
        """Return the moment from which a call may be sent here; a past one means now."""
        at_ms = max(self.rests_until_ms, self.breaker.ready_at_ms)
        return at_ms if self.quota is None else max(at_ms, self.quota.opens_at_ms())

    def rest_ends_ms(self, now_ms: float) -> float:
        """Return the moment until which calls that wait for this deployment should go elsewhere."""
        if self.deployment.is_drained:
            return now_ms + DRAINED_WAIT_MS
        if not self.breaker.is_open or self.breaker.state is not BreakerState.PAUSED:
            return self.ready_at_ms()
        paused_until_ms = min(self.breaker.ready_at_ms, now_ms + KEY_REST_MS_MAX)
        return max(self.rests_until_ms, paused_until_ms, self.quota_opens_at_ms())

    def ready_in_ms(self, now_ms: float) -> int:
        """Return the known wait until a call may be sent here; 0 if it may be sent now."""
        if self.deployment.is_drained:
            return DRAINED_WAIT_MS
        return max(0, math.ceil(self.ready_at_ms() - now_ms))

    def free_slots(self, now_ms: float) -> int:
        if self.rests_until_ms > now_ms or self.breaker.ready_at_ms > now_ms or self.background_rests_until_ms > now_ms:
            return 0
        if self.quota is not None and self.quota.opens_at_ms() > now_ms:
            return 0
        free = self._free_of_share(now_ms)
        if free <= 0:
            return 0
        if self.tide is not None:
            free = min(free, self.tide.calls - self.in_flight - self.expecting)
            if free <= 0:
                return 0
        if self.tokens_max and self.tokens_in_flight >= self.tokens_max:
            return 0
        return 1 if self.breaker.is_open else free

    def _free_of_share(self, now_ms: float) -> int:
        """Return how many of this process's slots are left for background calls, by slots alone."""
        free = self.slots.share - self.in_flight
        if self.counts_interactive:
            free -= self.interactive_in_flight
            # Interactive calls go first: slots that they wait for or likely need are not free.
            if self.interactive_waiting:
                free -= self.interactive_waiting.total()
            if self._users_until_ms > now_ms:
                # Even of a small share one slot is left to background work. Its own share is below
                # the cap, so that some slot stays free in one of the processes.
                free -= min(self._free_for_users, max(0, self.slots.share - 1))
            if self.background_slots is not None:
                free = min(free, self.background_slots.share - self.in_flight)
        elif self.interactive_in_flight:
            free = min(free, self.deployment.max_in_flight - self.interactive_in_flight - self.in_flight)
        return free - self.expecting

    def takes_interactive(self, owner: str) -> bool:
        """Return whether one more interactive call of this owner has a slot here now."""
        if self.counts_interactive:
            share = self.slots.share
            free = share - self.slots_in_use
        else:
            share = self.deployment.max_in_flight
            free = share - self.interactive_in_flight
        if free < 1:
            return False
        mine = self._interactive_owners[owner] if owner else 0
        if not mine:
            return True
        if share >= FREE_FOR_OTHERS_FROM and free <= max(1, int(share * FREE_FOR_OTHERS)):
            return False
        # Among waiting owners, the one with the fewest calls in flight goes first.
        return all(self._interactive_owners[other] >= mine for other in self.interactive_waiting)

    def can_take(self, tokens: int) -> bool:
        """Return whether this many more tokens fit here; a call alone always fits."""
        return not self.tokens_in_flight or self.tokens_in_flight + tokens <= self.tokens_max

    def load(self) -> float:
        return (self.in_flight + self.interactive_in_flight + 1) / self.weight

    # Slots and tokens of calls in flight. `Slots` counts those shared with other processes.

    @property
    def slots_in_use(self) -> int:
        """Return how many slots calls of this process have here."""
        return self.in_flight + (self.interactive_in_flight if self.counts_interactive else 0)

    def begin_background(self) -> None:
        self.in_flight += 1
        if not self._is_alone:
            self.slots.take_slot()
            if self.background_slots is not None:
                self.background_slots.take_slot()

    def end_background(self) -> None:
        self.in_flight -= 1
        if not self._is_alone:
            self.slots.release_slot()
            if self.background_slots is not None:
                self.background_slots.release_slot()

    def begin_interactive(self, owner: str, now_ms: float) -> None:
        self.interactive_in_flight += 1
        self.interactive_awaiting += 1
        self._users_until_ms = now_ms + USERS_COME_MS
        if owner:
            self._interactive_owners[owner] += 1
        if self.counts_interactive and not self._is_alone:
            self.slots.take_slot()

    def end_interactive(self, owner: str) -> None:
        self.interactive_in_flight -= 1
        if owner:
            self._interactive_owners[owner] -= 1
            if not self._interactive_owners[owner]:
                del self._interactive_owners[owner]
        if self.counts_interactive and not self._is_alone:
            self.slots.release_slot()

    def first_token_came(self) -> None:
        """Note that one interactive call here has its first token."""
        self.interactive_awaiting -= 1

    @property
    def users(self) -> Users:
        # A call that waits for a slot also waits for its first token, so background work yields to
        # it.
        waiting = self.interactive_waiting.total()
        return Users(self.interactive_in_flight + waiting, self.interactive_awaiting + waiting)

    def begin_wait(self, owner: str | None) -> None:
        """Note that a call waits for a slot: an interactive one, or with None a background one."""
        if owner is None:
            self.waiting += 1
        else:
            self.interactive_waiting[owner] += 1

    def end_wait(self, owner: str | None) -> None:
        if owner is None:
            self.waiting -= 1
            return
        self.interactive_waiting[owner] -= 1
        if not self.interactive_waiting[owner]:
            del self.interactive_waiting[owner]

    def begin_expecting(self) -> None:
        """Keep a slot for a call that waits briefly for its budget and then comes back here."""
        self.expecting += 1

    def end_expecting(self) -> None:
        self.expecting -= 1

    def add_tokens(self, tokens: int) -> None:
        """Add these tokens to those in flight here; a negative number removes them."""
        self.tokens_in_flight += tokens

    # This process's share of the deployment.

    @property
    def _free_for_users(self) -> int:
        cap = self.slots.cap
        return min(max(1, int(cap * FREE_FOR_USERS)), cap - 1)

    def note_demand(self, now_ms: float) -> None:
        """Note, for the next sharing of slots, whether background calls find one here."""
        for slots in (self.slots, self.background_slots):
            if slots is None:
                continue
            if self.free_slots(now_ms):
                slots.note_seen()
            elif self._free_of_share(now_ms) <= 0 and self.ready_at_ms() <= now_ms >= self.background_rests_until_ms:
                slots.note_short()

    def note_interactive_demand(self, owner: str) -> None:
        """Note, for the next sharing of slots, if interactive calls of this owner find none
        here."""
        if not self.takes_interactive(owner):
            self.slots.note_short()

    def ask_for_slots(self) -> None:
        """Note that background calls would go here if there were slots."""
        self.slots.note_asked()
        if self.background_slots is not None:
            self.background_slots.note_asked()

    def own_slots(self, now_ms: float) -> list[Slots]:
        """Return the kinds of slots that this process needs a share of."""
        kept = self._free_for_users if self.counts_interactive and self._users_until_ms > now_ms else 0
        self.slots.keep_spare(kept)
        if self.background_slots is None:
            return [self.slots]
        background_max = min(self.deployment.background_in_flight_max, self.slots.cap - kept)
        self.background_slots.set_cap(background_max, is_alone=self._is_alone)
        return [self.slots, self.background_slots]

    def has_share(self) -> None:
        """Set this process's part of the deployment's tokens in flight, by its share of slots."""
        deployment = self.deployment
        if deployment.tokens_in_flight_max:
            slots = self.slots if self.background_slots is None else self.background_slots
            self.tokens_max = max(1, deployment.tokens_in_flight_max * slots.share // slots.cap)

    # What the deployment reports about itself.

    def count_sent(self, tokens: int) -> int:
        """Count a call that goes out; return its number.

        Its answer's quota covers calls up to it.
        """
        self._sent += 1
        if self.quota is not None:
            self.quota.count(tokens)
        return self._sent

    def note_quota(self, left: QuotaLeft, number: int, tokens: int, now_ms: float) -> None:
        """Note the quota in the answer to the call of this number, which takes about `tokens`."""
        if left.requests is None and left.tokens is None:
            return
        if self.quota is None:
            self.quota = Quota()
        self.quota.note(left, self._sent - number, tokens, now_ms)

    def quota_opens_at_ms(self, tokens: int = 1) -> float:
        """Return the moment from which the known quota allows a call with these tokens, or 0."""
        return 0.0 if self.quota is None else self.quota.opens_at_ms(tokens)

    def note_empty(self, *, is_empty: bool) -> None:
        """Note whether the last answer reported that nothing is left."""
        self.is_empty = is_empty

    def note_limits(self, note_limits: RateLimitHeaders, now_ms: float) -> bool:
        """Note the limits that the deployment reported; return True if they are new."""
        if note_limits.empty_for_ms:
            self._rest(note_limits.empty_for_ms, now_ms)
        if note_limits.requests is None and note_limits.tokens is None:
            return False
        return self.discover(Limit(Period.MINUTE, note_limits.requests, note_limits.tokens))

    def discover(self, limit: Limit) -> bool:
        if limit == self.discovered:
            return False
        self.discovered = limit
        self.budgets = self._budgets()
        self.is_plain = self._is_plain()
        return True

    def _budgets(self) -> tuple[Budget, ...]:
        name = self.deployment.name
        found = []
        limits = tuple(limit for limit in self.deployment.limits if limit.enabled)
        if limits:
            found.append(Budget(LimitBound.DEPLOYMENT, name, limits))
        if self.discovered is not None:
            found.append(Budget(LimitBound.DEPLOYMENT, f"{name}/discovered", (self.discovered,)))
        return tuple(found)

    def _is_plain(self) -> bool:
        is_as_sent = self.deployment.engine is not EngineKind.ANTHROPIC and not self.deployment.upstream_model
        return is_as_sent and not self.budgets and self.priority_hints.is_silent and not self.tokens_max

    # Lessons from calls.

    def succeeded(self) -> bool:
        """Note an answer. Return True if it closed the circuit."""
        self.answered += 1
        self._ended += 1
        self._throttled_in_a_row = 0
        self._forbidden_in_a_row = 0
        return not self.breaker.is_calm and self.breaker.succeeded()

    def failed(self, error: UpstreamError, idempotency_key: str, now_ms: float, jitter: float) -> bool:
        """Learn from a failure. Return True if it opened the circuit."""
        self._ended += 1
        self.failures[error.reason] += 1
        self.last_failure = error.message
        self.failure_code = FAILING if error.status >= 400 else error.code
        if isinstance(error, Throttled) or error.retry_after_ms is not None:
            self._refused(error.retry_after_ms, idempotency_key, now_ms, jitter)
        match error:
            case Throttled():
                self._is_there()
            case KeyRejected():
                return self._key_rejected(error.status, idempotency_key, now_ms)
            case Ambiguous() | Unavailable() | BrokenAnswer():
                if error.billed:
                    self._remember(self._failed_calls, idempotency_key, None)
                    self._failed_at_ms = now_ms
                if isinstance(error, AnswerUnusable):
                    # Callers choose how long answers are and what is in them, so such an answer
                    # must not open the circuit for others.
                    self._is_there()
                    return False
                return self.breaker.failed(now_ms)
            case Refused():
                self._is_there()
        return False

    def rest_until(self, until_ms: float) -> None:
        """Rest because the deployment asked another process for it; a longer rest always wins."""
        self.rests_until_ms = max(self.rests_until_ms, until_ms)

    def has_failed(self, idempotency_key: str) -> bool:
        """Return whether this same call failed here, where it may have been billed."""
        return idempotency_key in self._failed_calls

    def has_failed_lately(self, now_ms: float) -> bool:
        """Return whether any call failed here within the window of the retry budget."""
        return now_ms - self._failed_at_ms < self._policy.retry_budget.window_s * 1000

    def blames_the_request(self, idempotency_key: str) -> bool:
        """Return whether our key worked since this call's first 403: the call is to blame."""
        answered_then = self._forbidden.get(idempotency_key)
        return answered_then is not None and answered_then < self.answered

    def status(self, now_ms: float, spent_until_ms: float = 0.0) -> DeploymentStatus:
        return DeploymentStatus(
            name=self.deployment.name,
            url=self.deployment.url,
            models=self.deployment.models,
            state=self._word(now_ms),
            is_drained=self.deployment.is_drained,
            serves=self.deployment.serves,
            capacity=self.deployment.max_in_flight,
            in_flight=self.in_flight,
            interactive_in_flight=self.interactive_in_flight,
            max_in_flight=self.slots.share,
            rests_for_ms=0 if self.deployment.is_drained else self.ready_in_ms(now_ms),
            answered=self.answered,
            failures=dict(self.failures),
            last_failure=self.last_failure,
            spent_for_ms=max(0, math.ceil(spent_until_ms - now_ms)),
            discovered=self.discovered,
            limits=tuple(limit for budget in self.budgets for limit in budget.limits),
            upstream_model=self.deployment.upstream_model,
            is_key_rejected=self.breaker.is_paused,
            open_for_ms=max(0, int(now_ms - self.breaker.opened_at_ms)) if self.breaker.is_open else None,
        )

    def _word(self, now_ms: float) -> str:
        """Return the deployment's state in one word."""
        if self.deployment.is_drained:
            return "draining" if self.in_flight or self.interactive_in_flight else "drained"
        if not self.breaker.is_open and max(self.rests_until_ms, self.quota_opens_at_ms()) > now_ms:
            return "resting"
        return self.breaker.state

    def _try_at_once(self) -> None:
        """Forget rests, and let the next call try a deployment whose circuit is open."""
        self.rests_until_ms = self.background_rests_until_ms = 0.0
        self.breaker.try_at_once()

    def _is_there(self) -> None:
        # Any answer about the request or the moment closes the circuit: it shows that the
        # deployment is there.
        if self.breaker.is_open:
            self.breaker.succeeded()

    def _refused(self, retry_after_ms: int | None, idempotency_key: str, now_ms: float, jitter: float) -> None:
        """Put this call off for as long as the deployment asked.

        The whole deployment rests if it refuses many calls, or reports that no quota is left.
        """
        if retry_after_ms is None:
            doubled = self._policy.throttle_backoff_ms * 2 ** min(self._throttled_in_a_row, 20)
            bound = min(doubled, self._policy.throttle_backoff_ms_max)
            retry_after_ms = int(bound / 2 + bound / 2 * jitter)
        if self.rests_until_ms <= now_ms:
            # Calls that were in flight together are refused together, which counts as one refusal.
            self._throttled_in_a_row += 1
        until_ms = now_ms + min(retry_after_ms, self._policy.retry_after_ms_max)
        self.rest_until(self.refusals.refused(idempotency_key, until_ms, self._ended))
        # The refused call itself still counts as in flight.
        if self.is_empty or self.refusals.are_heavy(self._ended, self.in_flight + self.interactive_in_flight - 1):
            self._rest(retry_after_ms, now_ms)

    def _rest(self, wait_ms: int, now_ms: float) -> None:
        until_ms = now_ms + min(wait_ms, self._policy.retry_after_ms_max)
        if until_ms > self.rests_until_ms:
            self.rests_until_ms = until_ms

    def _key_rejected(self, status: int, idempotency_key: str, now_ms: float) -> bool:
        if status == 403:
            self._remember(self._forbidden, idempotency_key, self.answered)
            self._forbidden_in_a_row += 1
            if self._forbidden_in_a_row < FORBIDDEN_IN_A_ROW_MAX:
                return False
        return self.breaker.key_rejected(now_ms)

    def _remember(self, calls: OrderedDict[str, _T], idempotency_key: str, what: _T) -> None:
        calls[idempotency_key] = what
        calls.move_to_end(idempotency_key)
        if len(calls) > CALLS_REMEMBERED_MAX:
            calls.popitem(last=False)
