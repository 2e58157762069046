"""The check of a batch's shape: its input and result files, parameters of its requests, retries."""

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from tidegate.core import ids
from tidegate.core.errors import ApiProblem
from tidegate.core.input.line_faults import LineFault
from tidegate.core.input.parameters import check_parameters
from tidegate.core.job_shape import JobRetry
from tidegate.core.problems import no_such_batch, no_such_file

INPUTS_MAX = 100
ATTEMPTS_MAX = 100
BACKOFF_MS_MAX = 3_600_000
CODES_MAX = 64
OUTPUT_BYTES_MIN = 1_024
OUTPUT_BYTES_MAX = 1 << 40

FileIds = Annotated[list[str], Meta(min_length=1, max_length=INPUTS_MAX)]
BackoffMs = Annotated[int, Meta(ge=1, le=BACKOFF_MS_MAX)]
OutputBytes = Annotated[int, Meta(ge=OUTPUT_BYTES_MIN, le=OUTPUT_BYTES_MAX)]
SHAPE_ALLOWED = {
    "dedupe": "true or false",
    "reuse_from": "the id of a batch",
    "defaults": "an object with parameters of a request's body",
    "overrides": "an object with parameters of a request's body",
    "input_file_ids": f"a list of 1 to {INPUTS_MAX} ids of files",
    "output_file_bytes_max": f"a whole number from {OUTPUT_BYTES_MIN:,} to {OUTPUT_BYTES_MAX:,}",
    "retry": "an object with some of `attempts_max`, `backoff_ms`, `backoff_ms_max` and `codes`",
    "retry.attempts_max": f"a whole number from 1 to {ATTEMPTS_MAX}",
    "retry.backoff_ms": f"a whole number from 1 to {BACKOFF_MS_MAX:,}",
    "retry.backoff_ms_max": f"a whole number from 1 to {BACKOFF_MS_MAX:,}",
    "retry.codes": f"a list of at most {CODES_MAX} error codes or HTTP statuses, as texts",
}


class RetryFields(msgspec.Struct, forbid_unknown_fields=True):
    """The retry rules for one batch's failed requests.

    An absent field stands for the operator's rule.
    """

    attempts_max: Annotated[int, Meta(ge=1, le=ATTEMPTS_MAX)] | None = None
    backoff_ms: BackoffMs | None = None
    backoff_ms_max: BackoffMs | None = None
    codes: (
        Annotated[list[Annotated[str, Meta(pattern="^[a-z0-9_]{1,64}$")]], Meta(min_length=0, max_length=CODES_MAX)]
        | None
    ) = None


def input_files(one: str | UnsetType, several: list[str] | None) -> list[str]:
    """Return the input files of a batch; refuse ids that cannot exist or come twice."""
    if several is None:
        if one is UNSET:
            raise ApiProblem(400, "missing_required_parameter", "`input_file_id` is missing.", param="input_file_id")
        if not one:
            message = "`input_file_id` is empty; name the file that you uploaded with purpose=batch."
            raise ApiProblem(400, "invalid_parameter", message, param="input_file_id")
        if not ids.is_valid("file", one):
            raise no_such_file(one, "input_file_id")
        return [one]
    if one is not UNSET:
        message = "Give `input_file_id` or `input_file_ids`, one of them."
        raise ApiProblem(400, "invalid_parameter", message, param="input_file_ids")
    for file_id in several:
        if not ids.is_valid("file", file_id):
            raise no_such_file(file_id, "input_file_ids")
        if several.count(file_id) > 1:
            message = f"`input_file_ids` names {file_id} more than once."
            raise ApiProblem(400, "invalid_parameter", message, param="input_file_ids")
    return several


def earlier_batch(batch_id: str | None) -> str:
    """Return the batch whose answers are reused; empty without one."""
    if batch_id is not None and not ids.is_valid("batch", batch_id):
        raise no_such_batch(batch_id, "reuse_from")
    return batch_id or ""


def job_retry(asked: RetryFields | None) -> JobRetry | None:
    """Return the retry rules of a batch; None if it has none of its own."""
    if asked is None or asked == RetryFields():
        return None
    if asked.backoff_ms is not None and asked.backoff_ms_max is not None and asked.backoff_ms > asked.backoff_ms_max:
        message = "`retry.backoff_ms` may not be more than `retry.backoff_ms_max`."
        raise ApiProblem(400, "invalid_parameter", message, param="retry.backoff_ms")
    codes = None if asked.codes is None else tuple(asked.codes)
    return JobRetry(asked.attempts_max, asked.backoff_ms, asked.backoff_ms_max, codes)


def checked_parameters(name: str, values: dict[str, Any] | None, endpoint: str) -> dict[str, Any]:
    """Return the parameters for every request of a batch; refuse those that cannot be set."""
    if not values:
        return {}
    try:
        check_parameters(values, endpoint)
    except LineFault as fault:
        param = f"{name}.{fault.param}" if fault.param else name
        raise ApiProblem(400, "invalid_parameter", f"`{name}` {fault.message}", param=param) from None
    return values
