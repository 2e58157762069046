"""The check of an interactive call's body, which keeps the caller's bytes."""

import asyncio
import json
import re
from typing import Annotated, Any, NamedTuple

import msgspec
from starlette.requests import Request

from tidegate.core.body_rules.plain_body import read_plain
from tidegate.core.errors import ApiProblem
from tidegate.core.input.lines import DEFAULT_MODELS, MODEL_BYTES_MAX
from tidegate.core.json_limits import TOO_MANY, has_too_many_values, is_deeper_than, is_utf8
from tidegate.web.gateway.dialects import RESPONSES
from tidegate.web.http.intake import Intake

FLEX = "flex"
# The tiers of OpenAI's clients. In the background all are served alike, and the answer names the
# tier that served.
TIERS = ("auto", "default", FLEX, "priority", "scale")
READ_HERE_BYTES_MAX = 1 << 20

# Fields that may occur only once: readers differ in which one counts, and here it decides which
# call is paid for.
INTERACTIVE_AFTER = "interactive_after_seconds"
INTERACTIVE_AFTER_S_MAX = 86_400
_READ_ONCE = ("model", "stream", "service_tier", "background", INTERACTIVE_AFTER)
_QUOTED = tuple(f'"{name}"'.encode() for name in _READ_ONCE)
# Honest clients do not escape plain letters; a body with such an escape may hide a name, and is
# read with care.
_ESCAPED_LETTER = re.compile(rb"\\u00[4-7]")


class _InteractiveBody(msgspec.Struct):
    model: str | msgspec.UnsetType = msgspec.UNSET
    stream: bool | None = None
    service_tier: object = None
    background: object = None


class InteractiveRequest(NamedTuple):
    """An interactive call's request.

    `is_plain` is set if the body has no field that its caller may not set. `is_background` is set
    if it runs as a job; after `interactive_after_s` it is sent like an interactive call.
    """

    model: str
    is_stream: bool
    is_flex: bool
    body: bytes
    names_model: bool = True
    is_plain: bool = False
    is_background: bool = False
    interactive_after_s: int | None = None


_decode = msgspec.json.Decoder(_InteractiveBody).decode
_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_Seconds = Annotated[int, msgspec.Meta(ge=0, le=INTERACTIVE_AFTER_S_MAX)]


async def interactive_request_of(request: Request, endpoint: str, bytes_max: int, depth_max: int) -> InteractiveRequest:
    """Read and check this request; raise a 4xx ApiProblem that names what is wrong."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiProblem(
            415,
            "unsupported_media_type",
            "Send the body as JSON, with the header `Content-Type: application/json`.",
            param="Content-Type",
        )
    intake: Intake = request.scope["tidegate.intake"]
    body = await intake.whole(bytes_max)
    if len(body) > READ_HERE_BYTES_MAX:
        # In a thread, so that other calls do not wait while a large body is read.
        return await asyncio.to_thread(read_interactive_request, body, endpoint, depth_max)
    return read_interactive_request(body, endpoint, depth_max)


def read_interactive_request(body: bytes, endpoint: str, depth_max: int) -> InteractiveRequest:
    if not is_utf8(body):
        raise _not_json("it is not UTF-8")
    if is_deeper_than(body, depth_max):
        raise _not_json(f"it is nested deeper than {depth_max} levels")
    if has_too_many_values(body):
        raise _too_many(body)
    plain = read_plain(body)
    try:
        read = plain or _decode(body)
    except msgspec.ValidationError as wrong:
        raise _mismatch(str(wrong)) from None
    except (msgspec.DecodeError, RecursionError) as wrong:
        raise _not_json(str(wrong)[:200]) from None
    if any(body.count(name) > 1 for name in _QUOTED) or _ESCAPED_LETTER.search(body):
        _refuse_twice(body)
    model = read.model
    if model is msgspec.UNSET:
        if endpoint not in DEFAULT_MODELS:
            raise ApiProblem(400, "missing_required_parameter", "`model` is missing: name a model.", param="model")
        model = DEFAULT_MODELS[endpoint]
    if not model or len(model.encode("utf-8", "replace")) > MODEL_BYTES_MAX or not model.isprintable():
        message = f"`model` must be 1 to {MODEL_BYTES_MAX} bytes of printable text: name a model of this server."
        raise ApiProblem(400, "invalid_parameter", message, param="model")
    is_flex, is_background = read.service_tier == FLEX, _is_background(read.background, endpoint)
    if is_background:
        _check_background(body, read.service_tier, is_stream=bool(read.stream))
    after_s = None
    ours: tuple[str, ...] = ("service_tier", "background") if is_flex or is_background else ()
    if plain is None and endpoint == RESPONSES and (given := _members(body).get(INTERACTIVE_AFTER)) is not None:
        after_s = _interactive_after_s(given, is_background=is_background)
        ours += (INTERACTIVE_AFTER,)
    names_model = read.model is not msgspec.UNSET
    sent = _without(body, ours) if ours else body
    return InteractiveRequest(
        model, bool(read.stream), is_flex, sent, names_model, plain is not None, is_background, after_s
    )


def _is_background(value: object, endpoint: str) -> bool:
    """Return whether a response is to run in the background.

    Elsewhere the field belongs to the model server.
    """
    if endpoint != RESPONSES or value is None:
        return False
    if not isinstance(value, bool):
        raise ApiProblem(400, "invalid_parameter", "`background` must be true or false.", param="background")
    return value


def _interactive_after_s(given: msgspec.Raw, *, is_background: bool) -> int | None:
    """Return after how long a background response is sent like an interactive call; None for
    never."""
    if bytes(given).strip() == b"null":
        return None
    if not is_background:
        message = f"`{INTERACTIVE_AFTER}` needs `background: true`: any other call is interactive at once."
        raise ApiProblem(400, "invalid_parameter", message, param=INTERACTIVE_AFTER)
    try:
        return msgspec.json.decode(given, type=_Seconds)
    except msgspec.MsgspecError:
        message = f"`{INTERACTIVE_AFTER}` must be a whole number of seconds, 0 to {INTERACTIVE_AFTER_S_MAX:,}."
        raise ApiProblem(400, "invalid_parameter", message, param=INTERACTIVE_AFTER) from None


def _check_background(body: bytes, tier: object, *, is_stream: bool) -> None:
    if tier is not None and tier not in TIERS:
        # The field is not passed on, so no model server would refuse it.
        message = f"`service_tier` must be one of {', '.join(TIERS)}; in the background it may also be left out."
        raise ApiProblem(400, "invalid_parameter", message, param="service_tier")
    if is_stream:
        message = (
            "A background response has no stream: leave `stream` out, and read the answer with GET /v1/responses/{id}."
        )
        raise ApiProblem(400, "unsupported_parameter", message, param="stream")
    if bytes(_members(body).get("store", b"")).strip() == b"false":
        message = "A background response is kept until it is read: `store` must not be false."
        raise ApiProblem(400, "invalid_parameter", message, param="store")


def _without(body: bytes, names: tuple[str, ...]) -> bytes:
    """Return the request without these members; the bytes of all other values stay."""
    members = _members(body)
    for name in names:
        members.pop(name, None)
    return msgspec.json.encode(members)


def _refuse_twice(body: bytes) -> None:
    def names(pairs: list[tuple[str, Any]]) -> list[str]:
        return [name for name, _ in pairs]

    try:
        found = json.loads(body, object_pairs_hook=names)
    except (ValueError, RecursionError):
        raise _not_json("it cannot be read") from None
    for name in _READ_ONCE:
        if found.count(name) > 1:
            message = (
                f"`{name}` is named {found.count(name)} times, and readers differ in which one counts: name it once."
            )
            raise ApiProblem(400, "duplicate_parameter", message, param=name)


def _mismatch(read: str) -> ApiProblem:
    for name, kind in (("model", "text"), ("stream", "true or false")):
        if f"`$.{name}`" in read:
            return ApiProblem(400, "invalid_parameter", f"`{name}` must be {kind}.", param=name)
    return ApiProblem(400, "invalid_parameter", "The body must be a JSON object.")


def _too_many(body: bytes) -> ApiProblem:
    """Return the refusal of a body with too many values.

    The body is parsed to its end, so that invalid JSON is reported as such.
    """
    if not body.lstrip().startswith(b"{"):
        return _mismatch("")
    try:
        msgspec.json.decode(body, type=msgspec.Raw)
    except (msgspec.DecodeError, RecursionError) as wrong:
        return _not_json(str(wrong)[:200])
    return ApiProblem(400, "invalid_request", TOO_MANY)


def _not_json(why: str) -> ApiProblem:
    return ApiProblem(400, "invalid_json", f"The body is not valid JSON: {why}.")
