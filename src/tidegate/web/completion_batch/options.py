"""The check of a create's options: the type, the capacity of the batch, and its callback."""

import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Raw

from tidegate.core.budgets.budget import Limit
from tidegate.core.callback_targets import TargetRules
from tidegate.core.errors import ApiProblem
from tidegate.core.nouns import JobWebhook
from tidegate.core.webhooks import EVENT_TYPES
from tidegate.web.completion_batch.paths import DOOR
from tidegate.web.requests.limit_requests import LIMITS_MAX, LimitCount, LimitFields, job_limits
from tidegate.web.requests.webhook_requests import check_url

T = TypeVar("T")

SYNC, ASYNC, CALLBACK = "SYNC", "ASYNC", "CALLBACK"
HEADERS_MAX = 16
_HEADER_NAME = re.compile(r"[Xx]-[A-Za-z0-9-]{1,64}|[Aa]uthorization", re.ASCII)
_HEADER_VALUE = re.compile(r"[\x20-\x7e]{1,1024}", re.ASCII)
ITEM_EVENTS = ("item.running", "item.completed", "item.failed", "item.cancelled")
_EVENTS = {"item_update": ITEM_EVENTS, "batch_update": EVENT_TYPES, "all": (*ITEM_EVENTS, *EVENT_TYPES)}


class CapacityFields(msgspec.Struct, forbid_unknown_fields=True):
    """A capacity that a create asks for: at most so many requests and tokens in one period."""

    period: str
    requests: LimitCount | None = None
    tokens: LimitCount | None = None
    enabled: bool = True
    dimension: object = None


class CallbackFields(msgspec.Struct, forbid_unknown_fields=True):
    url: str
    events: list[str]
    headers: dict[str, str] = {}


class CreateOptions(msgspec.Struct):
    """The options of a create. `shown_capacity` is the capacity as reads show it."""

    type: str
    limits: tuple[Limit, ...]
    shown_capacity: list[dict[str, Any]] | None
    webhook: JobWebhook | None
    callback_events: list[str]


def read_options(fields: dict[str, Raw], rules: TargetRules) -> CreateOptions:
    """Return the options in the fields beside `items`; a 400 names the field that is wrong."""
    if "type" not in fields:
        raise _bad("type", "`type` is missing: say SYNC, ASYNC or CALLBACK.")
    kind = _read(fields["type"], Literal["SYNC", "ASYNC", "CALLBACK"], "type", "SYNC, ASYNC or CALLBACK")
    capacity = None
    if "capacity" in fields:
        asked = f"a list of at most {LIMITS_MAX} objects with a period, and requests, tokens or both"
        capacity = _read(
            fields["capacity"], Annotated[list[CapacityFields], Meta(max_length=LIMITS_MAX)] | None, "capacity", asked
        )
    if capacity and any(one.dimension is not None for one in capacity):
        raise _bad("capacity", "`capacity` may have no `dimension`: a batch comes from one place.")
    limits = [LimitFields(one.period, one.requests, one.tokens, one.enabled) for one in capacity or ()]
    callback = _callback(fields, kind, rules)
    shown = None
    if capacity is not None:
        shown = [
            {"period": one.period.lower(), "requests": one.requests, "tokens": one.tokens, "enabled": one.enabled}
            for one in capacity
        ]
    webhook = None
    if callback is not None:
        wanted = {event for one in callback.events for event in _EVENTS[one]}
        events = tuple(event for event in _EVENTS["all"] if event in wanted)
        webhook = JobWebhook(callback.url, events, door=DOOR, headers=callback.headers)
    return CreateOptions(kind, job_limits(limits, "capacity"), shown, webhook, callback.events if callback else [])


def _callback(fields: dict[str, Raw], kind: str, rules: TargetRules) -> CallbackFields | None:
    raw = fields.get("callbackOptions", Raw(b"null"))
    if kind != CALLBACK:
        if bytes(raw) != b"null":
            raise _bad("callbackOptions", "`callbackOptions` needs the type CALLBACK.")
        return None
    ask: CallbackFields = _read(
        raw, CallbackFields, "callbackOptions", "an object with `url` and `events`, and `headers` if you like"
    )
    check_url(ask.url, rules, "callbackOptions.url")
    if not ask.events or any(one not in _EVENTS for one in ask.events):
        raise _bad("callbackOptions.events", f"`callbackOptions.events` must name some of: {', '.join(_EVENTS)}.")
    if len(ask.headers) > HEADERS_MAX:
        raise _bad("callbackOptions.headers", f"`callbackOptions.headers` may have {HEADERS_MAX} headers.")
    for name, value in ask.headers.items():
        if not _HEADER_NAME.fullmatch(name):
            message = "A name in `callbackOptions.headers` must be Authorization or begin with X-."
            raise _bad("callbackOptions.headers", message)
        if not _HEADER_VALUE.fullmatch(value) or value != value.strip():
            message = "A value in `callbackOptions.headers` must have 1 to 1,024 visible ASCII characters."
            raise _bad("callbackOptions.headers", message)
    if len({name.lower() for name in ask.headers}) < len(ask.headers):
        raise _bad("callbackOptions.headers", "`callbackOptions.headers` names a header twice.")
    return ask


def _read(raw: Raw, kind: Any, param: str, words: str) -> Any:
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError:
        raise _bad(param, f"`{param}` must be {words}.") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise ApiProblem(400, "invalid_json", "The body is not valid JSON.") from None


def _bad(param: str, message: str) -> ApiProblem:
    return ApiProblem(400, "invalid_parameter", message, param=param)
