"""The check of the body of a retry."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tidegate.core.job_controls import RetryChoice

CODES_MAX = 100
CODE_CHARS_MAX = 128
OUTCOMES = ("failed", "expired", "cancelled")

Code = Annotated[str, Meta(min_length=1, max_length=CODE_CHARS_MAX)]
ErrorKindId = Annotated[str, Meta(pattern="^[0-9a-f]{16}$")]
RETRY_ALLOWED = {
    "kinds": f"a list of at most {CODES_MAX} ids of kinds of errors",
    "codes": f"a list of at most {CODES_MAX} error codes",
    "outcomes": f"a list of some of {', '.join(OUTCOMES)}",
}


class RetryRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of POST /v1/batches/{batch_id}/retry.

    Without outcomes it takes failed requests, or all requests with one of the codes.
    """

    codes: Annotated[list[Code], Meta(max_length=CODES_MAX)] | None = None
    outcomes: Annotated[list[Literal["failed", "expired", "cancelled"]], Meta(min_length=1, max_length=3)] | None = None


class OperatorRetryRequest(RetryRequest, forbid_unknown_fields=True):
    """The body of POST /admin/v1/batches/{batch_id}/retry: the owner's fields, and kinds of errors
    as their list names them.
    """

    kinds: Annotated[list[ErrorKindId], Meta(max_length=CODES_MAX)] | None = None


def retry_choice(asked: RetryRequest) -> RetryChoice:
    """Return the items to run again. Equal requests in other words give the same choice."""
    kinds = tuple(sorted(set(asked.kinds or ()))) if isinstance(asked, OperatorRetryRequest) else ()
    codes = tuple(sorted(set(asked.codes or ())))
    outcomes: tuple[str, ...] = tuple(asked.outcomes or (OUTCOMES if codes or kinds else OUTCOMES[:1]))
    return RetryChoice(tuple(one for one in OUTCOMES if one in outcomes), codes, kinds)
