"""Hooks and guardrails of an operator's own: their arguments, their refusals and their results.

    def before(body, about): ...      the request as a dict: return another dict to send that instead, None to leave it as it is
    def after(body, about): ...       likewise for an answer
    raise Refuse("why")               the call is refused for good, with these words
    raise Later(30, "why")            not now: a batch item is tried again after so many seconds and loses no attempt

Running such code, and keeping it from blocking others, is the duty of `guards`.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import Any

import msgspec

from tidegate.core.policy.guardrails import Guardrail
from tidegate.core.policy.guardrails import GuardrailCode as GuardrailCode

MESSAGE_CHARS_MAX = 1_000
BODY_BYTES_MAX = 32 << 20
WAIT_MS_MAX = 86_400_000
# Fields that decide where a request goes, how it is answered and who pays: they were judged before,
# and may not change.
FIXED = ("model", "stream")


class Refuse(Exception):
    """Raised by a hook: this call is refused, and the caller reads this message."""


class Later(Exception):
    """Raised by a hook before a call is sent: try again after so many seconds."""

    def __init__(self, wait_s: float, message: str = "") -> None:
        super().__init__(message)
        self.wait_s = wait_s


class Misunderstood(Exception):
    """A hook returned what cannot be sent or recorded."""


class About(msgspec.Struct, frozen=True, gc=False):
    """The call's owner and target.

    `batch_id` and `custom_id` are empty for an interactive call, `key_id` and `user` where there is
    none.
    """

    endpoint: str
    model: str
    tenant: str
    key_id: str = ""
    user: str = ""
    batch_id: str = ""
    custom_id: str = ""


class HookCode(StrEnum):
    """The reasons why a hook let nothing pass, for the item's error line and the metrics."""

    REFUSED = "hook_refused"
    FAILED = "hook_failed"
    UNAVAILABLE = "hook_unavailable"
    DEFERRED = "hook_deferred"


RETRYABLE = frozenset({HookCode.UNAVAILABLE, HookCode.DEFERRED})
# The status of a front door's answer to an interactive call.
_STATUSES = {HookCode.FAILED: 500, HookCode.UNAVAILABLE: 503, HookCode.DEFERRED: 429}
CODES = frozenset(str(code) for code in (*GuardrailCode, *HookCode))


class Stop(msgspec.Struct, frozen=True, gc=False):
    """A refusal of the call. A retryable one rests for `wait_ms`, and never uses up an attempt."""

    code: str
    message: str
    wait_ms: int = 0

    @property
    def retryable(self) -> bool:
        return self.code in RETRYABLE

    @property
    def status(self) -> int:
        return _STATUSES.get(self.code, 400)  # type: ignore[call-overload, no-any-return]


Own = Callable[[dict[str, Any], About], Any]


class RuleBounds(msgspec.Struct, frozen=True):
    """The calls that a rule binds: names of tenants, ids of keys, names of models.

    An empty set binds all.
    """

    tenants: frozenset[str] = frozenset()
    keys: frozenset[str] = frozenset()
    models: frozenset[str] = frozenset()

    def bind(self, tenant: str, key_id: str, names: tuple[str, ...]) -> bool:
        return (
            (not self.tenants or tenant in self.tenants)
            and (not self.keys or key_id in self.keys)
            and (not self.models or not self.models.isdisjoint(names))
        )


class Streams(StrEnum):
    """What to do with a streaming call whose answer must be judged: refuse it, pass it unjudged, or
    hold it until it is judged.
    """

    REFUSE = "refuse"
    PASS = "pass"
    HOLD = "hold"


class PolicyRule(msgspec.Struct, frozen=True):
    """One hook or guardrail as the operator wrote it: built in (`guardrail`), or own code before
    the call, after it, or both.
    """

    name: str
    bounds: RuleBounds = RuleBounds()
    guardrail: Guardrail | None = None
    before: Own | None = None
    after: Own | None = None
    on_requests: bool = True
    on_answers: bool = True
    refusal: str = HookCode.REFUSED
    timeout_ms: int = 1_000
    retry_ms: int = 5_000
    streams: Streams = Streams.REFUSE


def message_of(error: Exception, otherwise: str) -> str:
    """Return an author's message, short enough for an error line and without what could break
    it."""
    text = str(error).strip()[:MESSAGE_CHARS_MAX]
    return "".join(letter if letter.isprintable() else " " for letter in text) or otherwise


def changed_request(given: dict[str, Any], body: bytes, returned: Any) -> bytes:
    """Return the request as a hook changed it; raise Misunderstood for a field that may not
    change."""
    if returned is None:
        return body
    _need_object(returned)
    for name in FIXED:
        if returned.get(name) != given.get(name):
            raise Misunderstood(f"it changed `{name}`, which stays as the caller wrote it")
    return _encoded(returned)


def changed_answer(body: bytes, returned: Any) -> bytes:
    """Return the answer as a hook changed it, with the usage that the upstream reported."""
    if returned is None:
        return body
    _need_object(returned)
    paid = msgspec.json.decode(body).get("usage", msgspec.UNSET)
    kept = {name: value for name, value in returned.items() if name != "usage"}
    return _encoded(kept if paid is msgspec.UNSET else {**kept, "usage": paid})


def _need_object(returned: Any) -> None:
    if not isinstance(returned, dict):
        raise Misunderstood(f"it returned a {type(returned).__name__}; return the body as a dict, or None to leave it")


def _encoded(body: dict[str, Any]) -> bytes:
    try:
        encoded = msgspec.json.encode(body)
    except (TypeError, ValueError, OverflowError, RecursionError) as wrong:
        raise Misunderstood(f"what it returned is not JSON ({type(wrong).__name__})") from None
    if len(encoded) > BODY_BYTES_MAX:
        raise Misunderstood(f"what it returned has {len(encoded):,} bytes, more than {BODY_BYTES_MAX:,}")
    return encoded
