"""The check of a list's filters: query parameters become a filter for the store."""

import re

from starlette.datastructures import QueryParams

from tidegate.core.errors import ApiProblem
from tidegate.core.job_lists import FILTER_PAIRS_MAX, JobFilter, JobSort
from tidegate.core.nouns import FOREVER_MS
from tidegate.core.states import JobState
from tidegate.web.requests import requests

CHARS_MAX = 512
FILTERS = ("status", "model", "created_after", "created_before", "error_code", "q")
_PAIR = re.compile(r"metadata\[(?P<key>[^\0]{1,64})\]")
_SECONDS = re.compile(r"[0-9]{1,12}", re.ASCII)
_STATUSES = tuple(state.value for state in JobState)


def job_filter(query: QueryParams, others: tuple[str, ...]) -> JobFilter | None:
    """Return the filter of a list's query; None without any filter.

    `others` are the list's own parameters.
    """
    pairs = {match["key"]: name for name in query if (match := _PAIR.fullmatch(name))}
    requests.refuse_unknown(query, (*others, *FILTERS, "metadata[KEY]", *pairs.values()))
    if not pairs and not any(name in query for name in FILTERS):
        return None
    if len(pairs) > FILTER_PAIRS_MAX:
        raise _bad("metadata", f"A list takes at most {FILTER_PAIRS_MAX} filters by metadata.")
    return JobFilter(
        status=requests.choice(query, "status", _STATUSES),
        model=_text(query, "model"),
        metadata={key: _text(query, name, chars_min=0) or "" for key, name in pairs.items()},
        from_ms=1000 * (_seconds(query, "created_after") or 0),
        to_ms=FOREVER_MS if (end := _seconds(query, "created_before")) is None else 1000 * end,
        error_code=_text(query, "error_code"),
        words=_text(query, "q"),
    )


def job_sort(query: QueryParams) -> JobSort:
    """Return the order of a list."""
    return JobSort(requests.choice(query, "sort", tuple(JobSort)) or JobSort.CREATED)


def _text(query: QueryParams, name: str, chars_min: int = 1) -> str | None:
    text = requests.one(query, name)
    if text is not None and not chars_min <= len(text) <= CHARS_MAX:
        raise _bad(name, f"`{name}` must have {chars_min} to {CHARS_MAX} characters.")
    return text


def _seconds(query: QueryParams, name: str) -> int | None:
    text = requests.one(query, name)
    if text is not None and not _SECONDS.fullmatch(text):
        raise _bad(name, f"`{name}` must be a moment in unix seconds.")
    return None if text is None else int(text)


def _bad(param: str, message: str) -> ApiProblem:
    return ApiProblem(400, "invalid_parameter", message, param=param)
