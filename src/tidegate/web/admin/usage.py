"""The export of usage and cost, for all organizations or for one."""

from datetime import UTC, date, datetime, timedelta

from starlette.requests import Request
from starlette.responses import Response

from tidegate.core.errors import ApiProblem
from tidegate.core.nouns import Caller
from tidegate.core.usage import spending
from tidegate.web.admin.audit import READ, text
from tidegate.web.context import WebContext
from tidegate.web.http.routes import Guarded
from tidegate.web.requests import requests

FORMATS = {"json": "application/jsonl", "csv": "text/csv; charset=utf-8"}
BY = "day,organization,model"
DAYS_SHOWN = 31
_EPOCH = date(1970, 1, 1)


class UsageRoutes:
    def __init__(self, context: WebContext) -> None:
        self._store = context.store
        self._clock = context.clock

    def routes(self) -> list[Guarded]:
        return [Guarded("GET", "/admin/v1/usage", READ, self.usage)]

    async def usage(self, request: Request, caller: Caller) -> Response:
        """Export usage.

        The query has `by`, `from` and `to` (UTC days, both included), `org` and `format`, as in
        `tidegate usage`.
        """
        query = request.query_params
        requests.refuse_unknown(query, ("by", "format", "from", "org", "to"))
        by = [name for name in (requests.one(query, "by") or BY).split(",") if name]
        if not by or any(name not in spending.DIMENSIONS for name in by):
            raise _bad("by", f"`by` may name: {', '.join(spending.DIMENSIONS)}.")
        form = requests.choice(query, "format", tuple(FORMATS)) or "json"
        today = datetime.fromtimestamp(self._clock.now_ms() / 1000, UTC).date()
        to_day = _day("to", requests.one(query, "to")) or today
        from_day = _day("from", requests.one(query, "from")) or to_day - timedelta(days=DAYS_SHOWN - 1)
        org = text(query, "org")
        tenant_id = "" if org is None else await self._store.tenant_by_name(org)
        if tenant_id is None:
            raise ApiProblem(404, "tenant_not_found", "There is no organization of this name.", param="org")
        entries = await self._store.usage(
            (from_day - _EPOCH).days,
            (to_day - _EPOCH).days + 1,
            tenant_id=tenant_id,
            by_job="job" in by,
        )
        lines = spending.csv_lines if form == "csv" else spending.json_lines
        return Response(b"".join(lines(spending.sum_by(entries, by), by)), media_type=FORMATS[form])


def _day(name: str, text: str | None) -> date | None:
    try:
        day = None if text is None else date.fromisoformat(text)
    except ValueError:
        raise _bad(name, f"`{name}` must be a day, as 2026-11-01.") from None
    if day is not None and day < _EPOCH:
        raise _bad(name, f"`{name}` must be a day since {_EPOCH}: there was nothing to use before.")
    return day


def _bad(param: str, message: str) -> ApiProblem:
    return ApiProblem(400, "invalid_parameter", message, param=param)
