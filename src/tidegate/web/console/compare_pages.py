"""The page that compares two runs of one file: outcomes, time and cost."""

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tidegate.core import ids
from tidegate.core.errors import ApiProblem
from tidegate.core.nouns import Job
from tidegate.core.problems import no_batch_of_anyone
from tidegate.core.states import JOB_ENDED
from tidegate.core.usage.prices import units_text
from tidegate.web.admin.batches import job_named
from tidegate.web.console.guard import ConsoleGuard
from tidegate.web.console.session import Visitor
from tidegate.web.context import WebContext
from tidegate.web.http.pages import duration, number, page
from tidegate.web.jobs.error_groups import ErrorGroups, error_groups
from tidegate.web.requests import requests


class ComparePages:
    def __init__(self, context: WebContext, guard: ConsoleGuard) -> None:
        self._store = context.store
        self._blobs = context.blobs
        self._guard = guard

    def routes(self) -> list[Route]:
        return self._guard.routes({"/batches/{batch_id}/compare": self.compare}, {})

    async def compare(self, request: Request, visitor: Visitor) -> Response:
        requests.refuse_unknown(request.query_params, ("with",))
        first, org = await job_named(self._store, request)
        other_id = requests.one(request.query_params, "with") or ""
        found = await self._store.job_of_anyone(other_id) if ids.is_valid("batch", other_id) else None
        if found is None:
            raise no_batch_of_anyone(other_id, "with")
        second = found[0]
        if (second.tenant_id, second.input_file_id) != (first.tenant_id, first.input_file_id) or first.id == second.id:
            raise ApiProblem(400, "invalid_parameter", "These are not two runs of one file.", param="with")
        jobs = sorted((first, second), key=lambda one: (one.created_at, one.id))
        groups = [await error_groups(self._store, self._blobs, job) for job in jobs]
        return page(
            "console/compare.html",
            visitor=visitor,
            here="batches",
            org=org,
            jobs=jobs,
            rows=[_row(name, jobs, value, words) for name, value, words in _FIGURES],
            errors=_errors(groups),
            is_partial=any(one.is_partial for one in groups),
        )


def _took_s(job: Job) -> int | None:
    ended = job.completed_at or job.failed_at or job.expired_at or job.cancelled_at
    return (ended - job.created_at) // 1000 if ended and job.state in JOB_ENDED else None


# The figures: a name, the value (None: not known yet), and the function that writes it.
_FIGURES: tuple[tuple[str, Callable[[Job], int | None], Callable[[int], str]], ...] = (
    ("took", _took_s, duration),
    ("requests", lambda job: job.item_count, number),
    ("answered", lambda job: job.answered_count, number),
    ("failed", lambda job: job.failed_count, number),
    ("expired or cancelled", lambda job: job.expired_count + job.cancelled_count, number),
    ("input tokens", lambda job: job.usage.input_tokens, number),
    ("of them cached", lambda job: job.usage.cached_tokens, number),
    ("output tokens", lambda job: job.usage.output_tokens, number),
    ("cost", lambda job: job.cost_nano, units_text),
)


def _row(
    name: str, jobs: list[Job], value: Callable[[Job], int | None], words: Callable[[int], str]
) -> tuple[str, str, str, str]:
    """Return one figure of both runs as text, with the change from the first to the second."""
    first, second = (value(job) for job in jobs)
    shown = ["still running" if one is None else words(one) for one in (first, second)]
    change = ""
    # Only ended runs have a difference.
    if first is not None and second is not None and first != second and all(job.state in JOB_ENDED for job in jobs):
        change = f"{'-' if second < first else '+'}{words(abs(second - first))}"
        change += f" ({100 * (second - first) / first:+.0f} %)" if first else ""
    return name, shown[0], shown[1], change


def _errors(groups: list[ErrorGroups]) -> list[tuple[str, str, int, int]]:
    """Return each kind of error of either run with its count in both, most frequent first."""
    kinds = {kind for one in groups for kind in one.counts}
    rows = [(kind.code, kind.text, groups[0].counts[kind], groups[1].counts[kind]) for kind in kinds]
    return sorted(rows, key=lambda row: (-row[2] - row[3], row))
