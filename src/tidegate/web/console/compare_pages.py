"""A page that compares two runs of one file: what became of each, how long it took and what it cost."""

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tidegate.core import ids
from tidegate.core.errors import ApiProblem
from tidegate.core.nouns import Job
from tidegate.core.problems import no_such_batch
from tidegate.core.states import JOB_ENDED
from tidegate.core.usage.prices import units_text
from tidegate.web.admin.batches import job_named
from tidegate.web.admin.error_groups import ErrorGroups, error_groups
from tidegate.web.console.guard import ConsoleGuard
from tidegate.web.console.session import Visitor
from tidegate.web.context import WebContext
from tidegate.web.http import requests
from tidegate.web.http.pages import duration, moment, number, page


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
            raise no_such_batch(other_id)
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
            rows=[(name, *(value(job) for job in jobs)) for name, value in _FIGURES],
            errors=_errors(groups),
            is_partial=any(one.is_partial for one in groups),
        )


def _took(job: Job) -> str:
    ended = job.completed_at or job.failed_at or job.expired_at or job.cancelled_at
    return duration((ended - job.created_at) // 1000) if ended and job.state in JOB_ENDED else "runs"


_FIGURES: tuple[tuple[str, Callable[[Job], str]], ...] = (
    ("status", lambda job: job.state.value),
    ("created", lambda job: moment(job.created_at // 1000)),
    ("took", _took),
    ("requests", lambda job: number(job.item_count)),
    ("answered", lambda job: number(job.done_count - job.failed_count)),
    ("failed", lambda job: number(job.failed_count)),
    ("input tokens", lambda job: number(job.usage.input_tokens)),
    ("of them cached", lambda job: number(job.usage.cached_tokens)),
    ("output tokens", lambda job: number(job.usage.output_tokens)),
    ("cost", lambda job: units_text(job.cost_nano)),
)


def _errors(groups: list[ErrorGroups]) -> list[tuple[str, str, int, int]]:
    """Return each kind of error of either run, with how many each had, most first."""
    kinds = {kind for one in groups for kind in one.counts}
    rows = [(kind.code, kind.text, groups[0].counts[kind], groups[1].counts[kind]) for kind in kinds]
    return sorted(rows, key=lambda row: (-row[2] - row[3], row))
