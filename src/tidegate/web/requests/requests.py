"""The check of requests.

Query parameters, headers and bodies become values that can be trusted, or a 400 that names the
fault.
"""

import difflib
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType
from starlette.datastructures import QueryParams
from starlette.requests import Request

from tidegate.core import ids, window
from tidegate.core.errors import ApiProblem
from tidegate.core.job_controls import JobChange
from tidegate.core.job_shape import JobShape
from tidegate.core.nouns import JobRequest
from tidegate.settings import Settings
from tidegate.settings.rules import DEFAULT_QUEUE
from tidegate.web.http.intake import Intake
from tidegate.web.requests.answer_requests import ANSWERS_ALLOWED, AnswersFields, job_answers
from tidegate.web.requests.control_requests import (
    CONTROLS_ALLOWED,
    BatchChange,
    CanaryFields,
    MaxErrorsFields,
    NotBefore,
    Priority,
    changed_controls,
    job_canary,
    job_controls,
)
from tidegate.web.requests.limit_requests import LIMITS_MAX, RequestLimits, job_limits
from tidegate.web.requests.retry_requests import RETRY_ALLOWED
from tidegate.web.requests.shape_requests import (
    SHAPE_ALLOWED,
    FileIds,
    OutputBytes,
    RetryFields,
    checked_parameters,
    earlier_batch,
    input_files,
    job_retry,
)
from tidegate.web.requests.webhook_requests import WebhookFields, job_webhook

T = TypeVar("T")

_BETAS = re.compile(r"[A-Za-z0-9_.,\- ]{1,512}", re.ASCII)

ENDPOINTS = (
    "/v1/chat/completions",
    "/v1/embeddings",
    "/v1/completions",
    "/v1/responses",
    "/v1/moderations",
    "/v1/score",
    "/v1/rerank",
    "/v1/classify",
    "/v1/pooling",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
)
PURPOSES = ("assistants", "batch", "fine-tune", "vision", "user_data", "evals")
LISTED_PURPOSES = (*PURPOSES, "batch_output")
EXPIRES_AFTER_S_MIN = 3_600
EXPIRES_AFTER_S_MAX = 2_592_000
METADATA_PAIRS_MAX = 16
METADATA_KEY_CHARS_MAX = 64
METADATA_VALUE_CHARS_MAX = 512
IDEMPOTENCY_KEY = re.compile(r"[\x21-\x7e]{1,255}", re.ASCII)
_NUMBER = re.compile(r"[0-9]{1,9}", re.ASCII)
_ELEMENT = re.compile(r"\[[0-9]+\]$")
_MISSING = re.compile(r"Object missing required field `(?P<field>[^`]*)`")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<field>.*)`", re.DOTALL)
_AT = re.compile(r"(?P<what>.*?) - at `(?:key in )?\$\.?(?P<path>.*)`", re.DOTALL)
_SHOWN_CHARS_MAX = 64
_DURATION = "a duration with a unit, such as 24h, 90m, 7d or 1h30m"
_ALLOWED = {
    "completion_window": _DURATION,
    "begin_within": _DURATION,
    "invalid_lines": "`fail` or `error_file`",
    "output_expires_after.anchor": "`created_at`",
    "output_expires_after.seconds": f"a whole number from {EXPIRES_AFTER_S_MIN:,} to {EXPIRES_AFTER_S_MAX:,}",
    "metadata": "an object whose values are all strings",
    "ordered": "true or false",
    "prefix_order": "true or false",
    "validate_only": "true or false",
    "webhook": "an object with `url` and, if you like, `events`",
    "limits": f"a list of at most {LIMITS_MAX} objects",
    **CONTROLS_ALLOWED,
    **SHAPE_ALLOWED,
    **ANSWERS_ALLOWED,
    **RETRY_ALLOWED,
}


class ExpiresAfter(msgspec.Struct, forbid_unknown_fields=True):
    anchor: Literal["created_at"]
    seconds: Annotated[int, Meta(ge=EXPIRES_AFTER_S_MIN, le=EXPIRES_AFTER_S_MAX)]


class BatchCreate(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/batches.

    The last twenty-one fields are not OpenAI's. LiteLLM's SDK sends the last one, which is ignored.
    """

    input_file_id: str | UnsetType = UNSET
    endpoint: str
    completion_window: str | None = None
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None
    ordered: bool = False
    prefix_order: bool = True
    invalid_lines: Literal["fail", "error_file"] = "fail"
    begin_within: str | None = None
    queue: str | None = None
    limits: RequestLimits | None = None
    webhook: WebhookFields | None = None
    priority: Priority = 0
    not_before: NotBefore | None = None
    max_cost: str | float | None = None
    max_errors: MaxErrorsFields | None = None
    canary: CanaryFields | None = None
    defaults: dict[str, Any] | None = None
    overrides: dict[str, Any] | None = None
    answers: AnswersFields | None = None
    input_file_ids: FileIds | None = None
    retry: RetryFields | None = None
    output_file_bytes_max: OutputBytes | None = None
    dedupe: bool = False
    reuse_from: str | None = None
    validate_only: bool = False
    custom_llm_provider: object = None


async def json_body(request: Request, kind: type[T], bytes_max: int) -> T:
    """Return the body as this type."""
    require_json(request)
    intake: Intake = request.scope["tidegate.intake"]
    body = await intake.whole(bytes_max)
    return decoded(body, kind)


async def optional_json_body(request: Request, kind: type[T], bytes_max: int) -> T:
    """Return the body as this type; without a body, the type's default value."""
    has_body = request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers
    return await json_body(request, kind, bytes_max) if has_body else kind()


def decoded(body: bytes, kind: type[T]) -> T:
    """Decode these bytes as this type; a 400 names what is wrong with them."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _mismatch(str(error), kind) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise ApiProblem(400, "invalid_json", "The body is not valid JSON.") from None


def require_json(request: Request) -> None:
    """Refuse a body that is not declared as JSON."""
    word = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if word != "application/json":
        raise ApiProblem(
            415,
            "unsupported_media_type",
            "Send the body as JSON, with the header `Content-Type: application/json`.",
            param="Content-Type",
        )


def job_request(body: BatchCreate, settings: Settings) -> JobRequest:
    """Check the body of a create against everything that can be known without the file, and return
    the request.
    """
    _check_endpoint(body.endpoint, settings)
    _check_metadata(body.metadata)
    window_text = window.DEFAULT_TEXT if body.completion_window is None else body.completion_window
    window_ms = _window_ms(window_text, settings)
    begin_within_ms = None
    if body.begin_within is not None:
        begin_within_ms = _duration_ms(body.begin_within, "begin_within")
        if begin_within_ms > window_ms:
            raise _bad("begin_within", "`begin_within` may not be longer than `completion_window`.")
    queue = _queue(body.queue, settings)
    first, *more = input_files(body.input_file_id, body.input_file_ids)
    return JobRequest(
        endpoint=body.endpoint,
        input_file_id=first,
        window_ms=window_ms,
        window_text=window_text,
        begin_within_ms=begin_within_ms,
        metadata=body.metadata,
        output_expires_after_s=body.output_expires_after.seconds if body.output_expires_after else None,
        ordered=body.ordered,
        prefix_order=body.prefix_order,
        invalid_lines=body.invalid_lines,
        queue=queue,
        limits=job_limits(body.limits),
        webhook=job_webhook(body.webhook, settings.callbacks.rules()),
        canary=job_canary(body.canary),
        controls=job_controls(body.priority, body.not_before, body.max_cost, body.max_errors),
        answers=job_answers(body.answers, body.endpoint),
        shape=job_shape(body, tuple(more)),
    )


def job_shape(body: BatchCreate, more_inputs: tuple[str, ...]) -> JobShape:
    """Check what a new batch asks of all its lines and files, and return it.

    `more_inputs` are the files after the first.
    """
    return JobShape(
        defaults=checked_parameters("defaults", body.defaults, body.endpoint),
        overrides=checked_parameters("overrides", body.overrides, body.endpoint),
        retry=job_retry(body.retry),
        more_inputs=more_inputs,
        output_file_bytes_max=body.output_file_bytes_max or 0,
        dedupe=body.dedupe,
        reuse_from=earlier_batch(body.reuse_from),
    )


def job_change(body: BatchChange, settings: Settings) -> JobChange:
    """Check the change of a running job against everything that can be known without the job, and
    return it.
    """
    controls = changed_controls(body)
    if body.completion_window is not msgspec.UNSET:
        return JobChange(controls, _window_ms(body.completion_window, settings), body.completion_window)
    if not controls:
        raise _bad(None, f"The body changes nothing. Give some of: {', '.join(BatchChange.__struct_fields__)}.")
    return JobChange(controls)


def idempotency_key(request: Request) -> str | None:
    key = request.headers.get("idempotency-key")
    if key is not None and not IDEMPOTENCY_KEY.fullmatch(key):
        raise _bad("Idempotency-Key", "An Idempotency-Key has 1 to 255 visible ASCII characters.")
    return key


def anthropic_betas(request: Request) -> str:
    """Return the betas that an Anthropic client asks for; empty if the header is not
    well-formed."""
    value = ",".join(request.headers.getlist("anthropic-beta"))
    return value if _BETAS.fullmatch(value) else ""


def refuse_unknown(query: QueryParams, known: tuple[str, ...]) -> None:
    """Refuse a query parameter that would be ignored, because its sender expects an effect."""
    for name in query:
        if name not in known:
            raise _unknown(name[:_SHOWN_CHARS_MAX], list(known))


def one(query: QueryParams, name: str) -> str | None:
    """Return a query parameter that may be given once."""
    values = query.getlist(name)
    if len(values) > 1:
        raise _bad(name, f"`{name}` was given {len(values)} times; give it once.")
    if values and "\0" in values[0]:
        # PostgreSQL cannot store it in a text, so nothing could match it.
        raise _bad(name, f"`{name}` may not contain U+0000.")
    return values[0] if values else None


def limit(query: QueryParams, default: int, count_max: int) -> int:
    text = one(query, "limit")
    if text is None:
        return default
    if not _NUMBER.fullmatch(text) or not 1 <= int(text) <= count_max:
        raise _bad("limit", f"`limit` must be a whole number from 1 to {count_max:,}.")
    return int(text)


def offset(query: QueryParams) -> int:
    """Return the number of lines of a result file that the caller already has."""
    text = one(query, "offset")
    if text is not None and not _NUMBER.fullmatch(text):
        raise _bad("offset", "`offset` must be a whole number: how many lines you have already.")
    return int(text or 0)


def offset_of_other_file() -> ApiProblem:
    return _bad("offset", "`offset` counts the lines of a batch's output or error file; read other files with `Range`.")


def preferences(request: Request) -> list[str]:
    """Return the caller's preferences (RFC 7240), one by one."""
    return [one.strip() for one in ",".join(request.headers.getlist("prefer")).split(",")]


def choice(query: QueryParams, name: str, allowed: tuple[str, ...]) -> str | None:
    text = one(query, name)
    if text is not None and text not in allowed:
        raise _bad(name, f"`{name}` must be one of: {', '.join(allowed)}.")
    return text


def after(query: QueryParams, kind: str) -> str | None:
    text = one(query, "after")
    if text is not None and not ids.is_valid(kind, text):
        raise unknown_cursor()
    return text


def unknown_cursor() -> ApiProblem:
    return _bad("after", "`after` must be the id of one of yours, from the page before. Begin again without it.")


def purpose(fields: dict[str, str]) -> str:
    given = fields.get("purpose")
    if given is None:
        raise ApiProblem(
            400, "missing_required_parameter", "The field `purpose` is missing; send purpose=batch.", param="purpose"
        )
    if given not in PURPOSES:
        raise _bad("purpose", f"`purpose` must be one of: {', '.join(PURPOSES)}.")
    return given


def upload_expires_after_s(fields: dict[str, str], default_s: int) -> int:
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return default_s
    if anchor != "created_at":
        raise _bad("expires_after[anchor]", "`expires_after[anchor]` must be created_at.")
    if (
        seconds is None
        or not _NUMBER.fullmatch(seconds)
        or not EXPIRES_AFTER_S_MIN <= int(seconds) <= EXPIRES_AFTER_S_MAX
    ):
        raise _bad(
            "expires_after[seconds]",
            f"`expires_after[seconds]` must be a whole number from {EXPIRES_AFTER_S_MIN:,} to {EXPIRES_AFTER_S_MAX:,}.",
        )
    return int(seconds)


def _check_endpoint(endpoint: str, settings: Settings) -> None:
    known = (*ENDPOINTS, *settings.endpoints)
    if endpoint not in known:
        raise _bad("endpoint", f"`endpoint` must be one of: {', '.join(known)}.")


def _queue(asked: str | None, settings: Settings) -> str:
    known = settings.scheduler.queues
    if asked is not None and asked not in known:
        raise _bad("queue", f"`queue` must be one of: {', '.join(known)}.")
    return asked or DEFAULT_QUEUE


def _check_metadata(metadata: dict[str, str] | None) -> None:
    if metadata is None:
        return
    if len(metadata) > METADATA_PAIRS_MAX:
        raise _bad("metadata", f"`metadata` has {len(metadata)} pairs; {METADATA_PAIRS_MAX} are allowed.")
    for key, value in metadata.items():
        if "\0" in key or "\0" in value:
            raise _bad("metadata", "`metadata` may not contain the character U+0000.")
        if not 1 <= len(key) <= METADATA_KEY_CHARS_MAX:
            raise _bad("metadata", f"A key in `metadata` must have 1 to {METADATA_KEY_CHARS_MAX} characters.")
        if len(value) > METADATA_VALUE_CHARS_MAX:
            raise _bad("metadata", f"A value in `metadata` may have {METADATA_VALUE_CHARS_MAX} characters.")


def _window_ms(text: str, settings: Settings) -> int:
    limits = settings.limits
    if limits.windows == "24h":
        if window.parse(text) != window.DAY_MS:
            raise _bad("completion_window", "This server allows only the completion_window `24h`.")
        return window.DAY_MS
    duration_ms = _duration_ms(text, "completion_window")
    if not limits.window_min_s * 1000 <= duration_ms <= limits.window_max_s * 1000:
        low, high = window.spoken(limits.window_min_s * 1000), window.spoken(limits.window_max_s * 1000)
        raise _bad("completion_window", f"`completion_window` must lie between {low} and {high}.")
    return duration_ms


def _duration_ms(text: str, param: str) -> int:
    duration_ms = window.parse(text)
    if duration_ms is None:
        raise _bad(param, f"`{param}` must be {_DURATION}.")
    return duration_ms


def _mismatch(message: str, kind: Any) -> ApiProblem:
    """Return the decoder's error in our words: the field at fault, and what it should be."""
    at = _AT.fullmatch(message)
    path, what = (at["path"], at["what"]) if at else ("", message)
    if missing := _MISSING.match(what):
        param = _joined(path, missing["field"])
        return ApiProblem(400, "missing_required_parameter", f"`{param}` is missing.", param=param)
    if unknown := _UNKNOWN.match(what):
        known = [one.name for one in msgspec.structs.fields(kind) if one.name != "custom_llm_provider"]
        return _unknown(unknown["field"][:_SHOWN_CHARS_MAX], known, path)
    if not path:
        return _bad(None, "The body must be a JSON object.")
    param = path.removesuffix("[...]")[:_SHOWN_CHARS_MAX]
    # For a wrong element, name what its whole list may contain.
    name = _ELEMENT.sub("", param)
    if name in _ALLOWED:
        return _bad(param, f"`{name}` must be {_ALLOWED[name]}.")
    return _bad(param, f"`{param}`: {what[0].lower()}{what[1:200]}.")


def _unknown(name: str, known: Sequence[str], path: str = "") -> ApiProblem:
    """Return the refusal of an unknown parameter, with the most similar known one."""
    shown = "".join(letter if letter.isprintable() else "?" for letter in _joined(path, name))
    message = f"Unknown parameter `{shown}`."
    if not path:
        # `known` has the names of the body alone, not those of an inner object.
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
        hint = f"Known are: {', '.join(known)}." if known else "There are none here."
        message += f" Did you mean `{close[0]}`?" if close else f" {hint}"
    return ApiProblem(400, "unknown_parameter", message, param=_joined(path, name))


def _joined(path: str, field: str) -> str:
    return f"{path}.{field}" if path else field


def _bad(param: str | None, message: str) -> ApiProblem:
    return ApiProblem(400, "invalid_parameter", message, param=param)
